"""``python on_cluster.py CONFIG state|second`` inspects the coordinator, or starts a second one beside it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from sojourn_server.gateway.ray.ray_config import read_config, set_ray_environment


def main(path: str, what: str) -> None:
    """Print the state of a coordinator as JSON."""
    config = read_config(Path(path))
    set_ray_environment(config)
    import ray
    from sojourn_server.gateway.ray.coordinator_actor import CoordinatorActor, CoordinatorActorClient
    from sojourn_server.gateway.ray.coordinator_messages import CoordinatorState, decode_message
    from sojourn_server.routing.routing_status import ProgramRouteStatus

    ray.init(address="auto", namespace=config.namespace, log_to_driver=False, logging_level="ERROR")
    if what == "second":
        second = ray.remote(CoordinatorActor).options(num_cpus=0, max_concurrency=100).remote(config)
        answers = [ray.get(second.call.remote(method, b"")) for method in ("state", "programs")]
        state = decode_message(answers[0], CoordinatorState)
        programs = decode_message(answers[1], list[ProgramRouteStatus])
    else:
        client = CoordinatorActorClient(config)

        async def ask() -> tuple[Any, Any]:
            return await client.state(), await client.programs()

        state, programs = asyncio.run(ask())
    homes = {place.program_id: place.replica for place in programs}
    told = {"epoch": state.epoch, "restored": state.restored, "gateways": state.gateways, "homes": homes}
    print(json.dumps(told), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
