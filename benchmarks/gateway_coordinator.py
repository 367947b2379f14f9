"""How much the coordinator of a gateway on Ray does: decisions and facts a second, through Ray's own calls.

    python benchmarks/gateway_coordinator.py --out benchmarks/results

A coordinator runs as an actor on a Ray cluster on this machine, with 64 replicas that are only told of. One
gateway's decider in this process asks it where new programs go, so many at once, and is told as gateways are.
Facts are told in batches, as gateways gather them for 15 ms: beginnings and ends of answers. Run it while
nothing else runs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from lab_pages import made_by, marked, write_result
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sojourn_server.gateway.core import facts
from sojourn_server.gateway.http.replicas import Replicas
from sojourn_server.gateway.http.watch import Description
from sojourn_server.gateway.ray import messages as m
from sojourn_server.gateway.ray.config import parse_config
from sojourn_server.gateway.ray.decider import RayDecider
from sojourn_server.gateway.ray.environment import set_environment
from sojourn_server.lab.report.results import MadeWith, made_with

REPLICAS = 64
AT_ONCE = (1, 16, 64)
BATCHES = (24, 120, 480)
HEAD = ("what", "at once, or a batch", "a second, median", "slowest round")


async def decisions(decider: RayDecider, at_once: int, seconds: float, first: int) -> tuple[float, int]:
    """New programs placed in a second; and how many there were."""
    done, number = 0, first
    end = time.perf_counter() + seconds

    async def one(name: str) -> None:
        asked = facts.Asked(name, "t", 100, program_id=name)
        ticket = decider.open(asked)
        sent = await ticket.next()
        assert isinstance(sent, facts.Send)
        decider.tell(facts.Ended(name, 1, replica_id=sent.replica_id))
        decider.close(ticket)
        decider.tell(facts.ProgramEnded(name, "t"))

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
    """Facts taken in a second, from a gateway of its own; four batches on their way at once."""
    name = f"facts-{batch}-{time.perf_counter_ns()}"
    joined = await calls.join(m.Join(name, 0))
    sent = facts.Sent("never", "h:0", "t", 10)
    words = tuple(facts.Began("nobody", "h:0") if at % 2 else sent for at in range(batch))
    number, count = 0, 0
    end = time.perf_counter() + seconds

    async def say() -> None:
        nonlocal number, count
        while time.perf_counter() < end:
            tell = m.Tell(name, joined.epoch, number, words)
            number += 1
            answer = await calls.tell(tell)
            assert answer.status is m.Status.OK, answer.status
            count += batch

    began = time.perf_counter()
    await asyncio.gather(*(say() for _ in range(4)))
    return count / (time.perf_counter() - began)


async def measure(config: Any, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Rates of each round, by what was done."""
    from sojourn_server.gateway.ray.actor import ActorCalls

    calls = ActorCalls(config)
    await register(calls)
    living = asyncio.ensure_future(live(calls))
    decider = RayDecider(calls, Replicas())
    running = asyncio.ensure_future(decider.run())
    while not decider.joined or decider.place("h:1") is None:
        await asyncio.sleep(0.05)
    found: dict[str, list[float]] = {}
    number = 0
    for _ in track(range(rounds), description="rounds", transient=True):
        for at_once in AT_ONCE:
            rate, number = await decisions(decider, at_once, seconds, number)
            found.setdefault(f"decisions/{at_once}", []).append(round(rate))
        for batch in BATCHES:
            found.setdefault(f"facts/{batch}", []).append(round(await told(calls, batch, seconds)))
    running.cancel()
    living.cancel()
    return found


async def register(calls: Any) -> None:
    """All replicas say that they are there."""
    description = Description(1, "1", 100_000, 0, 64, 32_000, False, True)
    for number in range(REPLICAS):
        await calls.register(m.Registration(f"e{number}", f"http://h:{number + 1}", description))


async def live(calls: Any) -> None:
    """And say it again: one that is silent for ten seconds is looked for."""
    while True:
        await asyncio.sleep(3.0)
        await register(calls)


def lines(found: dict[str, list[float]]) -> list[list[str]]:
    """The table."""
    return [
        [*name.split("/"), f"{median(rates):,.0f}", f"{min(rates):,.0f}"] for name, rates in found.items()
    ]


def page(found: dict[str, list[float]], made: MadeWith, rounds: int, seconds: float, wall_s: float) -> str:
    """The page in benchmarks/results."""
    return f"""# The coordinator on Ray

{made_by(made, wall_s)}

{REPLICAS} replicas; {rounds} rounds of {seconds:g} s of each. A decision is a new program's request, asked
for and answered through Ray. Decisions at once: programs that one gateway asks for at the same time. Facts:
in batches, four of them on their way.

{marked(HEAD, lines(found))}

{{by hand}}
"""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each round and thing")
    parser.add_argument("--out", type=Path, help="folder to write gateway_coordinator.json and .md into")
    options = parser.parse_args()
    began, console = time.monotonic(), Console()
    config = parse_config({"model": "tiny"}, source="benchmark")
    set_environment(config)
    import ray
    from sojourn_server.gateway.ray.serving import connect

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
