"""``python pairs_on_cluster.py CONFIG PAIRS up|down`` starts or ends a second application on the cluster, of
pairs.

``CONFIG`` is the config file of the first application, which already runs. ``PAIRS`` is the config file of
the second one. Its address behind Serve's proxy is ``/pairs``, which is not used.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sojourn_server.gateway.ray.ray_config import read_config, set_ray_environment


def main(_first: str, path: str, what: str) -> None:
    """Return when the application is up, or gone."""
    config = read_config(Path(path))
    set_ray_environment(config)
    import ray
    from ray import serve
    from sojourn_server.gateway.ray.coordinator_settings import ACTOR_NAME
    from sojourn_server.gateway.ray.deployments import application

    ray.init(address="auto", namespace=config.namespace, log_to_driver=False, logging_level="ERROR")
    if what == "up":
        serve.run(application(config), name=config.name, route_prefix="/pairs")
    else:
        serve.delete(config.name)
        ray.kill(ray.get_actor(ACTOR_NAME, namespace=config.namespace))
    print(what, flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
