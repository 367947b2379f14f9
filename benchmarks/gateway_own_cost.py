"""What a request costs the gateway, compared with the same libraries without routing.

    python benchmarks/gateway_own_cost.py --out benchmarks/results

The engine is a process that answers every request at once with the same bytes. Paths through uvicorn that
answers by itself, through proxies that only relay, and through ``sojourn gateway`` are compared with the
direct path. Requests are sent in three ways. *Hot* sends one at a time, back to back. *Cold* sends one at a
time at 100 requests/s. In the pauses this process reads memory as an engine's step does, so that the CPU
caches hold other data. *Busy* sends 16 at once. The paths take turns in each round.

CPU time is the user and system time of all threads of the process in front. Other work on the machine changes
it less than latency, and changes its ratios least. ``--gateways 4`` adds four gateways that know nothing of
each other, and four that do, twice: *by session*, each request reaches its program's gateway at once; *in
turn*, most reach another, which passes them on. Their CPU time is that of all four. Linux only. Latencies
need an idle machine with two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from gateway_processes import child, content_length, gateway
from result_pages import Result, marked, show
from rich.progress import track
from sojourn_server.gateway.http.peers import owner_of
from sojourn_server.gateway.http.tenant_keys import DEFAULT_TENANT
from sojourn_server.launch.engine_server import free_port

HOST = "127.0.0.1"
PERIOD_S = 0.010
"""Seconds from one request to the next in the cold rounds."""
WARM_UP = 300
HOT_BLOCK = 100
"""Requests of one path in a hot round."""
AT_ONCE = 16
BUSY_BLOCK = 25
"""Groups of ``AT_ONCE`` requests of one path in a busy round."""
AIOHTTP, OURS = "uvicorn and aiohttp pass on", "sojourn gateway"
ALONE, PEERS, PASSED_ON = "{} gateways apart", "{} gateways, by session", "{} gateways, in turn"
PROGRAMS = 8
HEAD = (
    "before the engine", "CPU µs, hot", "CPU µs, cold", "CPU µs, busy", "requests/s of a core",
    "CPU ÷ aiohttp's (hot, cold, busy)", "added p50 ms, hot", "added p50 ms, cold",
)  # fmt: skip


# -- the client -----------------------------------------------------------------------


class Connection:
    """A keep-alive connection with as little Python code as possible around each request."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((HOST, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, program: int) -> None:
        """Send a request."""
        body = json.dumps({"model": "tiny", "prompt": [100 + program] * 64, "max_tokens": 1}).encode()
        self._socket.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: engine\r\nX-Session-ID: p%d\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (program, len(body), body)
        )

    def receive(self) -> None:
        """Read the whole answer."""
        got = b""
        while True:
            part = self._socket.recv(1 << 16)
            if not part:
                sys.exit("the connection was closed")
            got += part
            head, found, rest = got.partition(b"\r\n\r\n")
            if found and len(rest) >= content_length(head):
                break
        if b" 200 " not in head.split(b"\r\n")[0]:
            sys.exit(f"answered with {got[:300]!r}")

    def ask(self, program: int) -> float:
        """Send a request and read the answer. Return the seconds from the first to the last byte."""
        began = time.perf_counter()
        self.send(program)
        self.receive()
        return time.perf_counter() - began


def cpu_s(process_id: int) -> float:
    """Return the CPU seconds of all threads of a process."""
    threads = Path(f"/proc/{process_id}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def pause(memory: array[float], until_s: float) -> None:
    """Read more memory than the CPU caches hold, at least once, until ``time.perf_counter()`` reaches
    ``until_s``."""
    while True:
        sum(memory[:: os.sysconf("SC_PAGESIZE") // 64])
        if time.perf_counter() >= until_s:
            return


class Way:
    """One path to the engine, with its ports, its processes and its measurements."""

    def __init__(
        self,
        ports: Sequence[int],
        process_ids: Sequence[int],
        programs: Sequence[Sequence[int]] = (range(PROGRAMS),),
    ) -> None:
        """``programs``: the programs of the requests to each port; if there is one list, those of all."""
        self.process_ids = process_ids
        self._ports = ports
        self._programs = [programs[n % len(programs)] for n in range(AT_ONCE)]  # by connection
        self.connections: list[Connection] = []
        self.took_s: dict[str, list[float]] = {"hot": [], "cold": []}
        self.used_s: dict[str, list[float]] = {"hot": [], "cold": [], "busy": []}

    def connect(self) -> None:
        """Open new connections, since servers close idle ones, and warm them up."""
        self.connections = [Connection(self._ports[n % len(self._ports)]) for n in range(AT_ONCE)]
        for number in range(WARM_UP):
            self._ask(number % AT_ONCE, number)

    def _ask(self, place: int, turn: int) -> float:
        return self.connections[place].ask(self._programs[place][turn % len(self._programs[place])])

    def round(self, way: str, number: int) -> None:
        """Send one block of requests, or in the cold rounds one request. Each program meets each port."""
        before_s = sum(map(cpu_s, self.process_ids))
        count = {"hot": HOT_BLOCK, "cold": 1, "busy": BUSY_BLOCK * AT_ONCE}[way]
        if way == "busy":
            for turn in range(BUSY_BLOCK):
                for place, connection in enumerate(self.connections):
                    programs = self._programs[place]
                    connection.send(programs[(place + turn) % len(programs)])
                for connection in self.connections:
                    connection.receive()
        else:
            for turn in range(number, number + count):
                self.took_s[way].append(self._ask(turn // PROGRAMS % len(self._ports), turn))
        self.used_s[way].append((sum(map(cpu_s, self.process_ids)) - before_s) / count)


def measure(paths: dict[str, Way], rounds: int) -> None:
    """Send requests on every path, in rotating order. Each path gets ``rounds`` cold requests, and a tenth as
    many hot and busy blocks."""
    names = list(paths)
    for way, count in (("hot", rounds // 10), ("busy", rounds // 10), ("cold", rounds)):
        for path in paths.values():
            path.connect()
        memory = array("d", bytes(64 << 20)) if way == "cold" else array("d")
        next_s = time.perf_counter()
        for number in track(range(count), description=way, transient=True):
            names.append(names.pop(0))
            for name in names:
                if way == "cold":
                    next_s = max(next_s + PERIOD_S, time.perf_counter())
                    pause(memory, next_s)
                paths[name].round(way, number)


def summary(paths: dict[str, Way]) -> dict[str, dict[str, float]]:
    """Return medians for each path. "Added" values are relative to the direct path."""
    direct = {way: median(took) for way, took in paths["direct"].took_s.items()}
    found = {"direct": {f"p50_ms_{way}": round(1000 * took, 4) for way, took in direct.items()}}
    for name, path in paths.items():
        if name == "direct":
            continue
        cpu_us = {way: 1e6 * median(used) for way, used in path.used_s.items()}
        found[name] = {
            **{f"cpu_us_{way}": round(value, 1) for way, value in cpu_us.items()},
            **{
                f"added_p50_ms_{way}": round(1000 * (median(took) - direct[way]), 4)
                for way, took in path.took_s.items()
            },
        }
    return found


# -- the result -----------------------------------------------------------------------


def lines(found: dict[str, dict[str, float]]) -> list[list[str]]:
    """Return the rows of the table."""
    rows = []
    for name, cells in found.items():
        if name == "direct":
            continue
        cpu = [cells[f"cpu_us_{way}"] for way in ("hot", "cold", "busy")]
        added = [f"{cells[f'added_p50_ms_{way}']:.2f}" for way in ("hot", "cold")]
        of = [found[AIOHTTP][f"cpu_us_{way}"] for way in ("hot", "cold", "busy")]
        ratios = ", ".join(f"{mine / theirs:.2f}" for mine, theirs in zip(cpu, of, strict=True))
        rows.append([name, *(f"{value:.0f}" for value in cpu), f"{1e6 / cpu[2]:,.0f}", ratios, *added])
    return rows


def about(found: dict[str, dict[str, float]], rounds: int) -> str:
    """Return what the page says of its table."""
    direct = found["direct"]
    return (
        f"Requests of 64 tokens of prompt over an engine that answers at once. *Hot*: {rounds // 10} blocks "
        f"of {HOT_BLOCK} requests, one after the other. *Cold*: {rounds} requests, one every "
        f"{1000 * PERIOD_S:.0f} ms, the CPU caches full of other data. *Busy*: {rounds // 10} blocks of "
        f"{BUSY_BLOCK} times {AT_ONCE} requests at once; a core's requests/s are one second ÷ its CPU time. "
        'CPU time is that of the processes in front, user and system, in µs a request; medians. "Added" is '
        f"the median latency less that of direct requests, {direct['p50_ms_hot']:.2f} ms hot and "
        f"{direct['p50_ms_cold']:.2f} ms cold."
    )


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--gateways", type=int, help="a number of gateways with peers, measured as well")
    parser.add_argument("--out", type=Path, help="folder to write gateway_own_cost.json and .md into")
    options = parser.parse_args()
    result = Result("gateway_own_cost", "What a request costs the gateway")
    with ExitStack() as stack:
        engine = free_port(HOST)
        stack.enter_context(child("--engine", str(engine), port=engine))
        paths = {"direct": Way([engine], [])}

        def floor(name: str, *words: str) -> None:
            port = free_port(HOST)
            process_id = stack.enter_context(child("--floor", str(port), *words, port=port))
            paths[name] = Way([port], [process_id])

        def gateways(name: str, count: int = 1, peers: bool = False) -> None:
            ports = [free_port(HOST) for _ in range(count)]
            urls = [f"http://127.0.0.1:{port}" for port in ports]
            pids = []
            for port in ports:
                flags = ["--engines", f"http://127.0.0.1:{engine}"]
                flags += ["--log-level", "warning" if count == 1 else "error"]
                flags += ["--peers", ",".join(urls)] if peers else []
                pids.append(stack.enter_context(gateway(flags, port, 1)))
            if not peers:
                paths[name] = Way(ports, pids)
                return
            time.sleep(2.0)  # until the first have found the last
            owners = {number: owner_of(urls, DEFAULT_TENANT, f"p{number}") for number in range(20 * count)}
            own = [[number for number, owner in owners.items() if owner == url][:2] for url in urls]
            paths[name] = Way(ports, pids, own)
            paths[PASSED_ON.format(count)] = Way(ports, pids)

        floor("uvicorn answers")
        floor(AIOHTTP, str(engine))
        gateways(OURS)
        if options.gateways:
            gateways(ALONE.format(options.gateways), options.gateways)
            gateways(PEERS.format(options.gateways), options.gateways, peers=True)
        measure(paths, options.rounds)
        found = summary(paths)
    show(HEAD, lines(found))
    if options.out is not None:
        document = {"rounds": options.rounds, **found}
        words = about(found, options.rounds)
        result.write(options.out, document, words, marked(HEAD, lines(found)), "{by hand}")


if __name__ == "__main__":
    main()
