"""``python pairs_on_cluster.py CONFIG PAIRS up|down`` starts or ends an application of pairs on a cluster
that runs another one. ``CONFIG``: that one's file, not read. ``PAIRS``: the file of the pairs."""

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
    from sojourn_server.gateway.ray.deployments import application

    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    if what == "up":
        serve.run(application(config), name=config.name, route_prefix="/pairs")
    else:
        serve.delete(config.name)
    print(what, flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
