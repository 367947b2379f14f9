"""Python calls of sojourn's own code on the paths that every request takes.

    python benchmarks/call_paths.py

Counts with ``sys.setprofile``: calls of functions in this repository's packages, the different functions and
files, and how often the path changes from one file to another. A resumed coroutine is no new call. A reader
of the code follows these calls, and an interpreter pays for each of them. Each path runs several times in one
process, without sockets between client and server, and the run with the fewest calls is shown: others may
include a timer's calls. The engine is vLLM's scheduler without a model; what drives it does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from gateway_processes import PAGES, Answers
from result_pages import show
from sojourn_server.gateway.http.gateway_app import GatewayApplication, GatewayOptions, build_gateway
from sojourn_server.gateway.http.tenant_keys import TenantKeys
from sojourn_server.policies.cluster_preset import parse_cluster_preset

ROUNDS = 5
"""Number of runs of a path. The one with the fewest calls counts."""
ROOT = Path(__file__).resolve().parents[1]
OURS = tuple(f"{ROOT / name}/" for name in ("sdk/sojourn", "server_ext/sojourn_server"))
DRIVER = f"{ROOT}/server_ext/sojourn_server/simulator/"
POLICIES = ("fixed-ttl", "sojourn")
"""The policy with the fewest parts, and the default."""
AIMS = {
    "second turn of a program": "120 calls, 15 files",
    "a request arrives": "30 calls, 8 files",
    "schedule() evicts 31 blocks": "120 calls",
    "schedule() with nothing to do": "15 calls",
}
"""Path, without its engine or gateway → most calls and files that it should have."""
PAGES |= {
    b"/v1/chat/completions": PAGES[b"/v1/completions"],
    b"/sojourn/v1/info": b'{"name":"sojourn","wire":[1],"policy":"x","engines":1,"tiers":null}',
}
POLL_S = 3600.0
"""Seconds between two polls of an engine, so that no poll falls into a path."""


@dataclass
class Calls:
    """The calls of one run of a path. Use as a context manager around the run."""

    names: list[tuple[str, str]] = field(default_factory=list)
    """(file, function) of each call, in order."""
    _frames: list[FrameType] = field(default_factory=list)
    """Frames that were called, kept so that a resumed one is recognised."""
    _seen: set[int] = field(default_factory=set)

    def __enter__(self) -> Calls:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        self._frames.clear()

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or id(frame) in self._seen:
            return
        file = frame.f_code.co_filename
        if not file.startswith(OURS) or file.startswith(DRIVER):
            return
        self._frames.append(frame)
        self._seen.add(id(frame))
        self.names.append((file, frame.f_code.co_qualname))

    @property
    def row(self) -> list[int]:
        """Numbers of calls, functions, files and changes of file."""
        files = [file for file, _ in self.names]
        changes = sum(one != other for one, other in pairwise(files))
        return [len(self.names), len(set(self.names)), len(set(files)), changes]


def fewest(runs: list[Calls]) -> Calls:
    """Return the run with the fewest calls."""
    return min(runs, key=lambda one: len(one.names))


# -- the gateway ------------------------------------------------------------------------


@asynccontextmanager
async def gateway(engines: int = 2) -> AsyncIterator[GatewayApplication]:
    """Run a gateway in front of engines in this process."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Answers, "127.0.0.1", 0) for _ in range(engines)]
    urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    preset = parse_cluster_preset('routing = "session-affinity"', source="call_paths")
    options = GatewayOptions()
    _, app = build_gateway(urls, preset, TenantKeys(), options, poll_s=POLL_S)
    async with app.router.lifespan_context(app):
        yield app
    for server in servers:
        server.close()


async def ask(app: GatewayApplication, program: str) -> None:
    """Send a turn of a program as uvicorn does, and take the answer."""
    context = {"program_id": program, "sojourn": {"v": 1, "agent_type": "coder"}}
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "x" * 4000}],
        "vllm_xargs": {"agentic_context": json.dumps(context)},
    }
    path = "/v1/chat/completions"
    message = {"type": "http.request", "body": msgspec.json.encode(body), "more_body": False}
    asked, status = [message], 0

    async def receive() -> Any:
        return asked.pop() if asked else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)

    headers = [(b"host", b"gateway"), (b"content-type", b"application/json"), (b"user-agent", b"openai")]
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": headers, "root_path": "", "state": {},
    }  # fmt: skip
    await app(scope, receive, send)
    if status != 200:
        sys.exit(f"the gateway answered with status {status}")


async def counted(path: Callable[[int], Awaitable[None]]) -> Calls:
    """Run a path ``ROUNDS`` times. Return the calls of the shortest run."""
    runs = []
    for number in range(ROUNDS):
        with Calls() as run:
            await path(number)
        runs.append(run)
        await asyncio.sleep(0.05)
    return fewest(runs)


def gateway_paths() -> Iterator[tuple[str, Calls]]:
    """Turns through the gateway: of a known program, and of a new one."""

    async def run() -> list[tuple[str, Calls]]:
        async with gateway() as app:
            await ask(app, "known")
            return [
                ("gateway: second turn of a program", await counted(lambda number: ask(app, "known"))),
                ("gateway: new program", await counted(lambda number: ask(app, f"new-{number}"))),
            ]

    yield from asyncio.run(run())


# -- the engine -------------------------------------------------------------------------

BLOCK_TOKENS, BLOCKS = 16, 64


def run_engine(policy: str) -> Iterator[tuple[str, Calls]]:
    """Yield the paths of one engine, whose pool is full of the KV of idle programs.

    A turn does not tell that it calls a tool, so a policy with leases grants one (on 18 blocks) when the
    event of the tool arrives."""
    from sojourn_server.simulator.simulated_engine import SimulatedEngine, SimulatedEngineOptions

    now_s = 0.0
    settings = {"policy": policy, "strict": True}
    options = SimulatedEngineOptions(blocks=BLOCKS + 1, block_size=BLOCK_TOKENS, sojourn=settings)
    engine = SimulatedEngine(options, lambda: now_s)

    def tell(kind: str, number: int) -> None:
        facts = {"program_id": f"p{number}", "seq": 1, "call_id": "c", "tool": "bash"}
        engine.tell({"type": kind, **facts})

    def add(number: int, blocks: int, turn: int = 0) -> None:
        prompt = range(1000 * number, 1000 * number + blocks * BLOCK_TOKENS)
        engine.add(f"p{number}/{turn}", prompt, program_id=f"p{number}")

    for number, blocks in enumerate((4, 18, 14, 14, 14)):
        add(number, blocks)
        engine.run()
    for number in (0, 1):  # the first calls of a kind may do more
        with Calls() as run:
            tell("tool_start", number)
    yield "a tool starts after its turn", run
    now_s += 1.0
    for number in (0, 1):
        tell("tool_stop", number)
    with Calls() as run:
        add(1, 19, turn=1)
    yield "a request arrives", run
    with Calls() as run:
        planned = engine.plan()
    assert planned.num_scheduled_tokens
    yield "schedule() admits it", run
    engine.update_from_output(planned)
    now_s += 1000.0  # all leases are over
    engine.plan()
    with Calls() as run:
        engine.plan()
    yield "schedule() with nothing to do", run
    add(9, 31)
    assert all(block.block_hash is not None for block in engine.pool.blocks[1:]), "the pool is not full"
    with Calls() as run:
        planned = engine.plan()
    assert planned.num_scheduled_tokens == {"p9/0": 31 * BLOCK_TOKENS}
    yield "schedule() evicts 31 blocks", run


def engine_paths() -> Iterator[tuple[str, Calls]]:
    """The engine's paths under each of ``POLICIES``."""
    for policy in POLICIES:
        runs = [list(run_engine(policy)) for _ in range(ROUNDS)]
        for same in zip(*runs, strict=True):
            yield f"engine, {policy}: {same[0][0]}", fewest([calls for _, calls in same])


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print each call of each path too")
    options = parser.parse_args()
    lines = []
    for title, calls in (*gateway_paths(), *engine_paths()):
        lines.append((title, *map(str, calls.row), AIMS.get(title.partition(": ")[2], "")))
        for file, function in calls.names if options.list else ():
            print(Path(file).relative_to(ROOT), function)
    show(("path", "calls", "functions", "files", "changes of file", "at most"), lines)


if __name__ == "__main__":
    main()
