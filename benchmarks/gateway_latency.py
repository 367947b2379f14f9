"""Latency that a gateway adds to a request: direct, standalone gateway, and gateway on Ray.

    python benchmarks/gateway_latency.py --ray --out benchmarks/results

Two engines with the model ``tiny`` answer requests of one token. The gateway sends all requests of a program
to one engine, its home. Each round sends three requests to a home: directly; through a relay of uvicorn and
aiohttp, the lower bound for a gateway built on these libraries; and through the gateway. The order rotates
and one request is in flight at a time, so that other load affects all paths. Reports medians, 95th
percentiles, and the median difference to the direct request of the same round. ``--ray`` does the same with a
Ray cluster on this machine and two gateways that know the homes. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import aiohttp
from gateway_processes import child, free_port, process
from result_pages import made_by, write_result
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table
from sojourn_server.launch.engine_server import EngineServer
from sojourn_server.simulator.report.results_file import Provenance, made_with

PROGRAMS = 8
ARGS = ("--max-model-len", "2048")
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Two engines share few cores, so threads that spin while they wait would slow the other engine.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
WARM_UP = 50
DIRECT, BARE, GATEWAY = "direct", "uvicorn and aiohttp pass on", "gateway"
HEAD = ("path", "p50 ms", "p95 ms", "added p50 ms", "added p95 ms")


async def measure(
    gateway: str, rounds: int, label: str, bare: Mapping[str, str] | None = None
) -> dict[str, list[float]]:
    """Return, for each path, the seconds of its requests in the order of rounds. ``bare`` maps an engine's
    address to the address of the relay in front of it."""
    took: dict[str, list[float]] = {name: [] for name in (DIRECT, *([BARE] if bare else []), GATEWAY)}
    async with aiohttp.ClientSession() as http:

        async def ask(url: str, program: int) -> tuple[float, str]:
            body = {"model": "tiny", "prompt": [100 + program] * 64, "max_tokens": 1}
            headers = {"X-Session-ID": f"p{program}"}
            began = time.perf_counter()
            async with http.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
                await answer.read()
                took_s = time.perf_counter() - began
                if answer.status != 200:
                    raise SystemExit(f"{url}: {answer.status} {await answer.text()}")
                return took_s, answer.headers.get("X-Sojourn-Replica", "")

        homes = {program: (await ask(gateway, program))[1] for program in range(PROGRAMS)}
        with Progress(transient=True) as shown:
            task = shown.add_task(label, total=WARM_UP + rounds)
            for number in range(WARM_UP + rounds):
                program = number % PROGRAMS
                direct = f"http://{homes[program]}"
                urls = {DIRECT: direct, GATEWAY: gateway, **({BARE: bare[direct]} if bare else {})}
                turn = number // PROGRAMS % len(urls)
                for name in [*urls, *urls][turn : turn + len(urls)]:
                    seconds, _ = await ask(urls[name], program)
                    if number >= WARM_UP:
                        took[name].append(seconds)
                shown.advance(task)
    return took


def figures(took: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return the figures of each path, in milliseconds."""

    def at(values: list[float], share: float) -> float:
        return round(1000 * sorted(values)[min(len(values) - 1, int(share * len(values)))], 3)

    def added(values: list[float]) -> list[float]:
        return [through - direct for through, direct in zip(values, took[DIRECT], strict=True)]

    return {
        name: {
            "p50_ms": round(1000 * median(values), 3),
            "p95_ms": at(values, 0.95),
            "added_p50_ms": round(1000 * median(added(values)), 3),
            "added_p95_ms": at(added(values), 0.95),
        }
        for name, values in took.items()
    }


def lines(result: dict[str, dict[str, dict[str, float]]]) -> list[list[str]]:
    """Return the rows of the table."""
    keys = ("p50_ms", "p95_ms", "added_p50_ms", "added_p95_ms")
    return [
        [f"{where}: {name}", *(f"{found[key]:.2f}" for key in keys)]
        for where, paths in result.items()
        for name, found in paths.items()
    ]


def page(result: dict[str, dict[str, dict[str, float]]], made: Provenance, rounds: int, wall_s: float) -> str:
    """Return the result page in Markdown."""
    rows = "\n".join(f"| {' | '.join(row)} |" for row in lines(result))
    return f"""# What a gateway adds to a request

{made_by(made, wall_s)}

Two engines with `tiny`, requests of 64 tokens of prompt and one of output, one at a time, {rounds} rounds; in
each the direct request, one through the same libraries doing nothing else, and those through gateways take
turns. "Added" is against the direct one of the same round.

| {" | ".join(HEAD)} |
|---|--:|--:|--:|--:|
{rows}

{{by hand}}
"""


def standalone(rounds: int, console: Console) -> dict[str, list[float]]:
    """Measure two engines behind ``sojourn gateway --engines``."""
    with ExitStack() as stack:
        servers = []
        for _ in track(range(2), description="engines", console=console, transient=True):
            server = EngineServer("tiny", policy="saga", serve_args=ARGS, env=ENVIRONMENT)
            servers.append(stack.enter_context(server))
        port = free_port()
        urls = ",".join(server.url for server in servers)
        flags = ["--engines", urls, "--port", str(port), "--log-level", "warning"]
        url = f"http://127.0.0.1:{port}"
        stack.enter_context(process(flags, url, 2))
        bare = {}
        for server in servers:
            passes, engine = free_port(), int(server.url.rpartition(":")[2])
            stack.enter_context(child("--floor", str(passes), str(engine), port=passes))
            bare[server.url] = f"http://127.0.0.1:{passes}"
        return asyncio.run(measure(url, rounds, "standalone", bare))


def on_ray(rounds: int) -> dict[str, list[float]]:
    """Measure two engines behind ``sojourn gateway --ray``. Its two gateways accept requests directly, not
    through Ray's proxy."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        engines = {"min": 2, "num_cpus": 0.1, "args": list(ARGS), "environment": ENVIRONMENT}
        told = {"model": "tiny", "direct_port": port, "port": free_port(), "engines": engines}
        config.write_text(json.dumps(told))  # JSON is YAML
        url = f"http://127.0.0.1:{port}"
        with process(["--ray", str(config)], url, 2):
            return asyncio.run(measure(url, rounds, "Ray"))


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--ray", action="store_true", help="also measure a gateway on Ray, on this machine")
    parser.add_argument("--out", type=Path, help="folder to write gateway_latency.json and .md into")
    options = parser.parse_args()
    began, console = time.monotonic(), Console()
    result = {"standalone": figures(standalone(options.rounds, console))}
    if options.ray:
        result["Ray"] = figures(on_ray(options.rounds))
    table = Table(*HEAD, title=f"{options.rounds} rounds")
    for line in lines(result):
        table.add_row(*line)
    console.print(table)
    if options.out is not None:
        made = made_with(sys.argv)
        text = page(result, made, options.rounds, time.monotonic() - began)
        write_result(options.out, "gateway_latency", made, {"rounds": options.rounds, **result}, text)


if __name__ == "__main__":
    main()
