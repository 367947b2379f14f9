"""Throughput of the coordinator of a gateway on Ray: decisions and facts per second through Ray calls.

    python benchmarks/gateway_coordinator.py --out benchmarks/results

A coordinator runs as an actor on a Ray cluster on this machine, with 64 replicas that exist only in its
state. The routing backend of one gateway runs in this process. It asks the coordinator where new programs go,
many at once, and receives updates. Facts (starts and ends of responses) are sent in batches, because gateways
collect them for 15 ms. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from result_pages import made_by, marked, write_result
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sojourn_server.gateway.http.engine_descriptions import EngineDescription
from sojourn_server.gateway.http.replica_addresses import ReplicaAddresses
from sojourn_server.gateway.ray import coordinator_messages as m
from sojourn_server.gateway.ray.coordinated_routing_backend import CoordinatedRoutingBackend
from sojourn_server.gateway.ray.ray_config import parse_config, set_ray_environment
from sojourn_server.routing import routing_events
from sojourn_server.simulator.report.results_file import Provenance, made_with

REPLICAS = 64
AT_ONCE = (1, 16, 64)
BATCHES = (24, 120, 480)
HEAD = ("what", "at once, or a batch", "a second, median", "slowest round")


async def decisions(
    routing_backend: CoordinatedRoutingBackend, at_once: int, seconds: float, first: int
) -> tuple[float, int]:
    """Place new programs, ``at_once`` concurrently, for ``seconds``. Programs are numbered from ``first`` +
    1. Returns the programs per second and the last number, which is ``first`` of the next call."""
    done, number = 0, first
    end = time.perf_counter() + seconds

    async def one(name: str) -> None:
        asked = routing_events.RequestReceived(name, "t", 100, program_id=name)
        request_state = routing_backend.open(asked)
        sent = await request_state.next()
        assert isinstance(sent, routing_events.SendRequest)
        routing_backend.tell(routing_events.RequestFinished(name, 1, replica_id=sent.replica_id))
        routing_backend.close(request_state)
        routing_backend.tell(routing_events.ProgramEnded(name, "t"))

    async def ask() -> None:
        nonlocal done, number
        while time.perf_counter() < end:
            number += 1
            await one(f"r{number}")
            done += 1

    began = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(at_once)))
    return done / (time.perf_counter() - began), number


async def told(calls: Any, batch: int, seconds: float) -> float:
    """Return the facts per second that the coordinator accepts from one gateway, with four batches in
    flight."""
    name = f"facts-{batch}-{time.perf_counter_ns()}"
    joined = await calls.join(m.JoinRequest(name, 0))
    sent = routing_events.RequestSent("never", "h:0", "t", 10)
    words = tuple(routing_events.FirstByteSent("unknown", "h:0") if at % 2 else sent for at in range(batch))
    number, count = 0, 0
    end = time.perf_counter() + seconds

    async def say() -> None:
        nonlocal number, count
        while time.perf_counter() < end:
            tell = m.ReportRequest(name, joined.epoch, number, words)
            number += 1
            answer = await calls.report(tell)
            assert answer.status is m.ResponseStatus.OK, answer.status
            count += batch

    began = time.perf_counter()
    await asyncio.gather(*(say() for _ in range(4)))
    return count / (time.perf_counter() - began)


async def measure(config: Any, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return the rates of each kind of call, in decisions or facts per second, with one value per round."""
    from sojourn_server.gateway.ray.coordinator_actor import CoordinatorActorClient

    calls = CoordinatorActorClient(config)
    await register(calls)
    living = asyncio.ensure_future(live(calls))
    routing_backend = CoordinatedRoutingBackend(calls, ReplicaAddresses())
    running = asyncio.ensure_future(routing_backend.run())
    while not routing_backend.joined or "h:1" not in routing_backend.places:
        await asyncio.sleep(0.05)
    found: dict[str, list[float]] = {}
    number = 0
    for _ in track(range(rounds), description="rounds", transient=True):
        for at_once in AT_ONCE:
            rate, number = await decisions(routing_backend, at_once, seconds, number)
            found.setdefault(f"decisions/{at_once}", []).append(round(rate))
        for batch in BATCHES:
            found.setdefault(f"facts/{batch}", []).append(round(await told(calls, batch, seconds)))
    running.cancel()
    living.cancel()
    return found


async def register(calls: Any) -> None:
    """Register all replicas."""
    description = EngineDescription(1, "1", 100_000, 0, 64, 32_000, False, True)
    for number in range(REPLICAS):
        await calls.register(m.EngineRegistration(f"e{number}", f"http://h:{number + 1}", description))


async def live(calls: Any) -> None:
    """Report all replicas as alive every three seconds. The coordinator checks replicas that are silent for
    ten seconds."""
    while True:
        await asyncio.sleep(3.0)
        await register(calls)


def lines(found: dict[str, list[float]]) -> list[list[str]]:
    """Return the rows of the table."""
    return [
        [*name.split("/"), f"{median(rates):,.0f}", f"{min(rates):,.0f}"] for name, rates in found.items()
    ]


def page(found: dict[str, list[float]], made: Provenance, rounds: int, seconds: float, wall_s: float) -> str:
    """Return the result page in Markdown."""
    return f"""# The coordinator on Ray

{made_by(made, wall_s)}

{REPLICAS} replicas; {rounds} rounds of {seconds:g} s of each. A decision is a new program's request, asked
for and answered through Ray. Decisions at once: programs that one gateway asks for at the same time. Facts:
in batches, four of them on their way.

{marked(HEAD, lines(found))}

{{by hand}}
"""


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each round and thing")
    parser.add_argument("--out", type=Path, help="folder to write gateway_coordinator.json and .md into")
    options = parser.parse_args()
    began, console = time.monotonic(), Console()
    config = parse_config({"model": "tiny"}, source="benchmark")
    set_ray_environment(config)
    import ray
    from sojourn_server.gateway.ray.ray_application import connect

    connect(config, log_to_driver=False, namespace=config.namespace)
    try:
        found = asyncio.run(measure(config, options.rounds, options.seconds))
    finally:
        ray.shutdown()
    table = Table(*HEAD)
    for line in lines(found):
        table.add_row(*line)
    console.print(table)
    if options.out is not None:
        made = made_with(sys.argv)
        text = page(found, made, options.rounds, options.seconds, time.monotonic() - began)
        write_result(options.out, "gateway_coordinator", made, {"rounds": options.rounds, **found}, text)


if __name__ == "__main__":
    main()
