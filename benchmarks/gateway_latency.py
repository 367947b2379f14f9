"""What a request takes longer through a gateway: direct beside the standalone gateway, and beside Ray's.

    python benchmarks/gateway_latency.py --out benchmarks/results

Two engines with the model ``tiny`` answer requests of one token, whose programs have a home. Each round asks
the same engine once directly and once through each gateway, in an order that turns, one request at a time, so
that whatever else the machine does hits all of them. Told are medians and 95th percentiles, and the median of
what a gateway's request took longer than the direct one of its round. ``--ray`` also starts a Ray cluster on
this machine with two gateways; its homes are cached. Run it while nothing else runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import httpx
from lab_pages import FIRST_WORDS, made_by, write_page
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table
from sojourn_server.cli.console import write_json
from sojourn_server.lab.report.results import MadeWith, made_with
from sojourn_server.launch.server import EngineServer

PROGRAMS = 8
WARM_UP = 50
READY_S = 180.0
HEAD = ("path", "p50 ms", "p95 ms", "added p50 ms", "added p95 ms")


def free_port() -> int:
    """One that nobody has at the moment."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@contextmanager
def process(flags: list[str], url: str, replicas: int) -> Iterator[str]:
    """``sojourn gateway`` until it knows its replicas."""
    command = [sys.executable, "-m", "sojourn_server.cli", "gateway", *flags]
    with tempfile.TemporaryFile() as log:
        running = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + READY_S
            while True:
                try:
                    known = httpx.get(f"{url}/health", timeout=5, trust_env=False).json()
                    if known.get("replicas", 0) >= replicas:
                        break
                except (httpx.HTTPError, ValueError):
                    pass
                if running.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise SystemExit(f"no gateway at {url}:\n{log.read().decode()[-3000:]}")
                time.sleep(0.2)
            yield url
        finally:
            running.terminate()
            running.wait(60)


async def measure(paths: dict[str, str], engines: dict[str, str], rounds: int) -> dict[str, list[float]]:
    """Seconds of each request by path, in the order of rounds. ``engines``: replica → address."""
    took: dict[str, list[float]] = {name: [] for name in ("direct", *paths)}
    homes: dict[tuple[str, int], str] = {}
    async with aiohttp.ClientSession() as http:

        async def ask(name: str, url: str, program: int) -> float:
            body = {"model": "tiny", "prompt": [100 + program] * 64, "max_tokens": 1}
            began = time.perf_counter()
            headers = {"X-Session-ID": f"{name}-{program}"}
            async with http.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
                await answer.read()
                took_s = time.perf_counter() - began
                if answer.status != 200:
                    raise SystemExit(f"{name}: {answer.status} {await answer.text()}")
                homes[name, program] = answer.headers.get("X-Sojourn-Replica", "")
            return took_s

        with Progress(transient=True) as shown:
            task = shown.add_task("requests", total=WARM_UP + rounds)
            for number in range(WARM_UP + rounds):
                program = number % PROGRAMS
                order = list(paths)
                order = order[number % len(order) :] + order[: number % len(order)]
                found = {}
                for name in order[: number % (len(order) + 1)]:
                    found[name] = await ask(name, paths[name], program)
                # The engine that the first gateway's program is at home at: the same one is asked.
                home = engines.get(homes.get((next(iter(paths)), program), ""), next(iter(engines.values())))
                found["direct"] = await ask("direct", home, program)
                for name in order[number % (len(order) + 1) :]:
                    found[name] = await ask(name, paths[name], program)
                if number >= WARM_UP:
                    for name, seconds in found.items():
                        took[name].append(seconds)
                shown.advance(task)
    return took


def figures(took: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Milliseconds, by path."""

    def at(values: list[float], share: float) -> float:
        return round(1000 * sorted(values)[min(len(values) - 1, int(share * len(values)))], 3)

    direct = took["direct"]
    found = {}
    for name, values in took.items():
        added = [value - plain for value, plain in zip(values, direct, strict=True)]
        found[name] = {
            "p50_ms": round(1000 * median(values), 3),
            "p95_ms": at(values, 0.95),
            "added_p50_ms": round(1000 * median(added), 3),
            "added_p95_ms": at(added, 0.95),
        }
    return found


def lines(result: dict[str, dict[str, float]]) -> list[list[str]]:
    """The table."""
    return [
        [name, *(f"{found[key]:.2f}" for key in ("p50_ms", "p95_ms", "added_p50_ms", "added_p95_ms"))]
        for name, found in result.items()
    ]


def page(result: dict[str, dict[str, float]], made: MadeWith, rounds: int, wall_s: float) -> str:
    """The page in benchmarks/results."""
    rows = "\n".join(f"| {' | '.join(row)} |" for row in lines(result))
    return f"""# What a gateway adds to a request

{made_by(made, wall_s)}

Two engines with `tiny`, requests of 64 tokens of prompt and one of output, one at a time, {rounds} rounds; in
each the direct request and those through gateways take turns. "Added" is against the direct one of the same
round.

| {" | ".join(HEAD)} |
|---|--:|--:|--:|--:|
{rows}

{{by hand}}
"""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--ray", type=Path, help="config of a gateway on Ray whose engines are two of 'tiny'")
    parser.add_argument("--out", type=Path, help="folder to write gateway_latency.json and .md into")
    options = parser.parse_args()
    began, console = time.monotonic(), Console()
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                EngineServer("tiny", policy="saga", serve_args=("--max-model-len", "2048"),
                             env={"VLLM_CPU_KVCACHE_SPACE": "1"})
            )
            for _ in track(range(2), description="engines", console=console, transient=True)
        ]  # fmt: skip
        engines = {server.url.removeprefix("http://"): server.url for server in servers}
        port = free_port()
        flags = ["--engines", ",".join(engines.values()), "--port", str(port), "--log-level", "warning"]
        paths = {"gateway": stack.enter_context(process(flags, f"http://127.0.0.1:{port}", 2))}
        if options.ray is not None:
            port = json.loads(options.ray.read_text())["port"]
            flags = ["--ray", str(options.ray)]
            paths["gateway on Ray"] = stack.enter_context(process(flags, f"http://127.0.0.1:{port}", 2))
        took = asyncio.run(measure(paths, engines, options.rounds))
    result = figures(took)
    table = Table(*HEAD, title=f"{options.rounds} rounds")
    for line in lines(result):
        table.add_row(*line)
    console.print(table)
    if options.out is not None:
        made = made_with(sys.argv)
        document: dict[str, Any] = {
            "command": f"python benchmarks/{made.command}",
            "machine": made.machine,
            "versions": made.versions,
            "rounds": options.rounds,
            **result,
        }
        write_json(document, str(options.out / "gateway_latency.json"))
        text = page(result, made, options.rounds, time.monotonic() - began)
        write_page(options.out / "gateway_latency.md", text, FIRST_WORDS)


if __name__ == "__main__":
    main()
