"""``python on_cluster.py CONFIG state|second`` inspects the coordinator, or starts a second one beside it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from sojourn_server.gateway.ray.ray_config import read_config, set_ray_environment


def main(path: str, what: str) -> None:
    """Print the state of a coordinator as JSON."""
    config = read_config(Path(path))
    set_ray_environment(config)
    import ray
    from sojourn_server.gateway.ray.coordinator_actor import CoordinatorActor, CoordinatorActorClient
    from sojourn_server.gateway.ray.coordinator_messages import CoordinatorState, decode_message

    ray.init(address="auto", namespace=config.namespace, log_to_driver=False, logging_level="ERROR")
    if what == "second":
        second = ray.remote(CoordinatorActor).options(num_cpus=0, max_concurrency=100).remote(config)
        state = decode_message(ray.get(second.call.remote("state", b"")), CoordinatorState)
    else:
        state = asyncio.run(CoordinatorActorClient(config).state())
    homes = {place.program_id: place.replica for place in state.programs}
    told = {"epoch": state.epoch, "restored": state.restored, "gateways": state.gateways, "homes": homes}
    print(json.dumps(told), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
