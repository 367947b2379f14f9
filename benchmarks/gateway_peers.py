"""CPU time a request of several gateways with peers, beside that of one gateway, in front of the same
engines.

    python benchmarks/gateway_peers.py --out benchmarks/results

The engines are processes that answer every request at once with the same bytes. Each client keeps one
connection to one gateway, as behind a load balancer, so most requests of several gateways reach another than
their program's and are passed on once. CPU time is that of all threads of all gateways; the engines and this
process do not count. Runs take turns, so that other work on the machine affects both. Linux only."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import aiohttp
from gateway_processes import child, free_port, process
from result_pages import made_by, marked, write_result
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sojourn_server.simulator.report.results_file import Provenance, made_with

ENGINES, PROGRAMS, CLIENTS = 2, 64, 16
HEAD = ("gateways", "CPU µs a request, median", "slowest round", "requests/s")


def cpu_s(process_id: int) -> float:
    """Return the CPU seconds of all threads of a process."""
    threads = Path(f"/proc/{process_id}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


@contextmanager
def gateways(count: int, engines: list[int]) -> Iterator[tuple[list[str], list[int]]]:
    """Run gateways that know each other. Yield their URLs and process ids."""
    ports = [free_port() for _ in range(count)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    named = ",".join(f"http://127.0.0.1:{port}" for port in engines)
    with ExitStack() as stack:
        running = []
        for port, url in zip(ports, urls, strict=True):
            flags = ["--engines", named, "--port", str(port), "--log-level", "error"]
            flags += ["--peers", ",".join(urls)] if count > 1 else []
            running.append(stack.enter_context(process(flags, url, len(engines))))
        time.sleep(2.0)  # until the first have found the last
        yield urls, [one.pid for one in running]


async def load(urls: list[str], requests: int) -> None:
    """Send this number of requests, from ``CLIENTS`` clients at once."""

    async def client(number: int) -> None:
        url = f"{urls[number % len(urls)]}/v1/completions"
        async with aiohttp.ClientSession() as http:
            for turn in range(requests // CLIENTS):
                program = (number * 31 + turn) % PROGRAMS
                body = json.dumps({"model": "tiny", "prompt": [100 + program] * 64, "max_tokens": 1})
                headers = {"X-Session-ID": f"p{program}", "Content-Type": "application/json"}
                async with http.post(url, data=body, headers=headers) as answer:
                    text = await answer.text()
                    if answer.status != 200:
                        sys.exit(f"{url}: {answer.status} {text}")

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))


def measure(counts: tuple[int, ...], rounds: int, requests: int) -> dict[int, list[tuple[float, float]]]:
    """Return (CPU seconds of all gateways, seconds) of each round, by the number of gateways."""
    found: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    with ExitStack() as stack:
        ports = [free_port() for _ in range(ENGINES)]
        for port in ports:
            stack.enter_context(child("--engine", str(port), port=port))
        fleets = {count: stack.enter_context(gateways(count, ports)) for count in counts}
        for urls, _ in fleets.values():
            asyncio.run(load(urls, 10 * CLIENTS))
        for _ in track(range(rounds), description="rounds", transient=True):
            for count, (urls, pids) in fleets.items():
                before, began = sum(map(cpu_s, pids)), time.perf_counter()
                asyncio.run(load(urls, requests))
                found[count].append((sum(map(cpu_s, pids)) - before, time.perf_counter() - began))
    return found


def lines(found: dict[int, list[tuple[float, float]]], requests: int) -> list[list[str]]:
    """Return the rows of the table."""
    rows = []
    for count, rounds in found.items():
        each = [cpu / requests * 1e6 for cpu, _ in rounds]
        rate = median(requests / seconds for _, seconds in rounds)
        rows.append([str(count), f"{median(each):,.0f}", f"{max(each):,.0f}", f"{rate:,.0f}"])
    return rows


def page(rows: list[list[str]], made: Provenance, wall_s: float) -> str:
    """Return the result page in Markdown."""
    return f"""# Several gateways that share nothing

{made_by(made, wall_s)}

{ENGINES} engines, {PROGRAMS} programs, {CLIENTS} clients with one connection each.

{marked(HEAD, rows)}

{{by hand}}
"""


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gateways", type=int, default=4, help="number of gateways beside one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=8000, help="of each round")
    parser.add_argument("--out", type=Path, help="folder to write gateway_peers.json and .md into")
    options = parser.parse_args()
    began = time.monotonic()
    requests = options.requests // CLIENTS * CLIENTS
    found = measure((1, options.gateways), options.rounds, requests)
    rows, table = lines(found, requests), Table(*HEAD)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if options.out is not None:
        made = made_with(sys.argv)
        document = {"requests": requests, "rounds": {str(count): each for count, each in found.items()}}
        write_result(options.out, "gateway_peers", made, document, page(rows, made, time.monotonic() - began))


if __name__ == "__main__":
    main()
