"""Latency that the gateway's own code adds, compared with the same libraries without routing.

    python benchmarks/gateway_own_cost.py --out benchmarks/results

The engine is a process that answers every request at once with the same bytes. Requests go to the engine
directly, to a uvicorn that answers by itself, through uvicorn and aiohttp that only relay, and through
``sojourn gateway``. Requests are sent one at a time, either back to back (*hot*) or after pauses in which
this process reads memory as an engine's step does (*cold*: the CPU caches hold other data). Reports medians,
and CPU time per request of the process in front. Linux only. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from array import array
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from gateway_processes import child, content_length, free_port, process
from result_pages import made_by, marked, write_result
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sojourn_server.simulator.report.results_file import Provenance, made_with

PAUSE_S = 0.008
WARM_UP = 200
PATHS = ("uvicorn answers", "uvicorn and aiohttp pass on", "sojourn gateway")
HEAD = ("before the engine", "hot: added p50 ms", "hot: CPU ms", "cold: added p50 ms", "cold: CPU ms")


# -- the client -----------------------------------------------------------------------


class Connection:
    """A keep-alive connection with as little Python code as possible around each request."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, program: int) -> float:
        """Send a request and read the whole answer. Return the seconds from the first to the last byte."""
        body = json.dumps({"model": "tiny", "prompt": [100 + program] * 64, "max_tokens": 1}).encode()
        asked = (
            b"POST /v1/completions HTTP/1.1\r\nHost: engine\r\nX-Session-ID: p%d\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (program, len(body), body)
        )
        began = time.perf_counter()
        self._socket.sendall(asked)
        got = b""
        while True:
            part = self._socket.recv(1 << 16)
            if not part:
                sys.exit("the connection was closed")
            got += part
            head, found, rest = got.partition(b"\r\n\r\n")
            if found and len(rest) >= content_length(head):
                break
        took_s = time.perf_counter() - began
        if b" 200 " not in head.split(b"\r\n")[0]:
            sys.exit(f"answered with {got[:300]!r}")
        return took_s


def cpu_s(process_id: int) -> float:
    """Return the CPU seconds of a process's first thread."""
    return int(Path(f"/proc/{process_id}/schedstat").read_text().split()[0]) / 1e9


def pause(memory: array[float]) -> None:
    """Read more memory than the CPU caches hold, for as long as a small engine step takes."""
    end = time.perf_counter() + PAUSE_S
    while time.perf_counter() < end:
        sum(memory[:: os.sysconf("SC_PAGESIZE") // 64])


def measure(engine: int, ways: dict[str, tuple[int, int]], rounds: int, cold: bool) -> dict[str, Any]:
    """Return medians for each path to the engine. Each round sends one request on every path, in rotating
    order. ``cold``: with pauses that overwrite the CPU caches. ``ways`` gives each path's port and process
    id."""
    direct = Connection(engine)
    to = {name: Connection(port) for name, (port, _) in ways.items()}
    memory = array("d", bytes(64 << 20)) if cold else array("d")
    for number in range(WARM_UP):
        for connection in to.values():
            connection.ask(number % 8)
    took: dict[str, list[float]] = {name: [] for name in ("direct", *to)}
    used: dict[str, list[float]] = {name: [] for name in to}
    names = list(took)
    for number in track(range(rounds), description="cold" if cold else "hot", transient=True):
        names.append(names.pop(0))
        for name in names:
            if cold:
                pause(memory)
            if name == "direct":
                took[name].append(direct.ask(number % 8))
                continue
            before_s = cpu_s(ways[name][1])
            took[name].append(to[name].ask(number % 8))
            used[name].append(cpu_s(ways[name][1]) - before_s)
    base_s = median(took["direct"])
    return {
        "direct_p50_ms": round(1000 * base_s, 3),
        **{
            name: {
                "added_p50_ms": round(1000 * (median(took[name]) - base_s), 3),
                "cpu_ms": round(1000 * median(used[name]), 3),
            }
            for name in to
        },
    }


# -- the page -------------------------------------------------------------------------


def lines(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table."""
    cells = [(way, key) for way in ("hot", "cold") for key in ("added_p50_ms", "cpu_ms")]
    return [[name, *(f"{found[way][name][key]:.2f}" for way, key in cells)] for name in PATHS]


def page(found: dict[str, dict[str, Any]], made: Provenance, rounds: int, wall_s: float) -> str:
    """Return the result page in Markdown."""
    return f"""# The gateway's own share of its latency

{made_by(made, wall_s)}

{rounds} rounds, requests of 64 tokens of prompt, one at a time, over an engine that answers at once: directly
in {found["hot"]["direct_p50_ms"]:.2f} ms hot, {found["cold"]["direct_p50_ms"]:.2f} ms cold. "Added" is
against that.

{marked(HEAD, lines(found))}

{{by hand}}
"""


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--out", type=Path, help="folder to write gateway_own_cost.json and .md into")
    options = parser.parse_args()
    began, console = time.monotonic(), Console()
    with ExitStack() as stack:
        engine, answers, passes, ours = (free_port() for _ in range(4))
        stack.enter_context(child("--engine", str(engine), port=engine))
        ways = {
            PATHS[0]: (answers, stack.enter_context(child("--floor", str(answers), port=answers))),
            PATHS[1]: (passes, stack.enter_context(child("--floor", str(passes), str(engine), port=passes))),
        }
        flags = ["--engines", f"http://127.0.0.1:{engine}", "--port", str(ours), "--log-level", "warning"]
        running = stack.enter_context(process(flags, f"http://127.0.0.1:{ours}", 1))
        ways[PATHS[2]] = ours, running.pid
        found = {way: measure(engine, ways, options.rounds, way == "cold") for way in ("hot", "cold")}
    table = Table(*HEAD)
    for line in lines(found):
        table.add_row(*line)
    console.print(table)
    if options.out is not None:
        made = made_with(sys.argv)
        text = page(found, made, options.rounds, time.monotonic() - began)
        write_result(options.out, "gateway_own_cost", made, {"rounds": options.rounds, **found}, text)


if __name__ == "__main__":
    main()
