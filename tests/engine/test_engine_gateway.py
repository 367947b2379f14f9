"""The gateway before two real engines: programs stay where their KV is, a killed engine fails no request."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from gateway_process import GatewayProcess
from sojourn_server.launch.server import EngineServer

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAMS = 20
TURNS = 6
KILL_AFTER = 40
"""Answers after which an engine is killed."""
FLAGS = (
    "--max-model-len", "2048", "--max-num-seqs", "16", "--num-gpu-blocks-override", "1024",
    "--enable-prompt-tokens-details",
)  # fmt: skip
ENGINE_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1"}


@dataclass
class Run:
    """What the programs met."""

    failed: list[str] = field(default_factory=list)
    """Requests that were no stream and did not get their answer."""
    broken: list[str] = field(default_factory=list)
    """Streams that ended with an error inside them."""
    silent: list[str] = field(default_factory=list)
    """Streams that ended without one and without their end."""
    replicas: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    cached: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    finished: int = 0
    answers: int = 0


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineServer]]:
    logs, disk = tmp_path_factory.mktemp("log"), tmp_path_factory.mktemp("disk")
    tiers = ("--kv-host-gib", "0.05", "--kv-disk", str(disk), "--kv-disk-gib", "0.2", "--kv-disk-name")
    with ExitStack() as stack:
        made = []
        for name in ("a", "b"):
            server = EngineServer(
                "tiny",
                policy="saga",
                serve_args=(*FLAGS, *tiers, name),
                env=ENGINE_ENV,
                log_path=logs / f"{name}.log",
            )
            made.append(stack.enter_context(server))
        yield made


def prompt_of(number: int, turn: int) -> list[int]:
    """Grows with each turn, and begins differently in each program."""
    return [1000 + number * 7 + place % 50 for place in range(160 + 64 * turn)]


async def turn(
    http: aiohttp.ClientSession, url: str, model: str, number: int, at: int, run: Run, *, stream: bool
) -> bool:
    """One turn; False: it has to be asked again."""
    name = f"p{number}"
    body: dict[str, Any] = {
        "model": model, "prompt": prompt_of(number, at), "max_tokens": 12, "ignore_eos": True,
        "stream": stream,
    }  # fmt: skip
    if stream:
        body["stream_options"] = {"include_usage": True}
    async with http.post(f"{url}/v1/completions", json=body, headers={"X-Session-ID": name}) as answer:
        text = await answer.text()
        if answer.status != 200:
            run.failed.append(f"{name}/{at}: {answer.status} {text[:200]}")
            return False
        data = [line[6:] for line in text.splitlines() if line.startswith("data: ")] if stream else [text]
        documents = [json.loads(line) for line in data if line != "[DONE]"]
        if any("error" in document for document in documents):
            run.broken.append(name)
            return False
        if stream and data[-1] != "[DONE]":
            run.silent.append(name)
            return False
        run.replicas[name].append(answer.headers["X-Sojourn-Replica"])
        usage = documents[-1]["usage"]
        run.cached[name].append((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        run.answers += 1
        return True


async def play(url: str, model: str, run: Run, kill: Any) -> None:
    """All programs at once; every third turn is a stream."""
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:

        async def program(number: int) -> None:
            for at in range(TURNS):
                for _ in range(5):
                    if await turn(http, url, model, number, at, run, stream=(at + number) % 3 == 0):
                        break
                else:
                    return
                await asyncio.sleep(0.05 + 0.01 * number)
            run.finished += 1

        async def killer() -> None:
            while run.answers < KILL_AFTER:
                await asyncio.sleep(0.01)
            kill()

        await asyncio.gather(killer(), *(program(number) for number in range(PROGRAMS)))


def served(url: str) -> str:
    answer = httpx.get(f"{url}/v1/models", timeout=30, trust_env=False)
    return str(answer.json()["data"][0]["id"])


async def take_turns(url: str, run: Run, turns: range) -> None:
    """A few programs, one after the other."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
        for number in range(4):
            for at in turns:
                assert await turn(http, url, "tiny", number, at, run, stream=False)


def test_programs_of_a_drained_engine_take_their_kv_along(
    servers: list[EngineServer], tmp_path: Path
) -> None:
    run = Run()
    flags = ("--admin-key", "root")
    with GatewayProcess([server.url for server in servers], tmp_path / "gateway.log", *flags) as gateway:
        asyncio.run(take_turns(gateway.url, run, range(2)))
        assert len({replicas[0] for replicas in run.replicas.values()}) == 2, (
            "idle engines share new programs"
        )
        drained = run.replicas["p0"][0]
        as_root = {"headers": {"Authorization": "Bearer root"}, "timeout": 30, "trust_env": False}
        answer = httpx.post(f"{gateway.url}/sojourn/v1/replicas/{drained}/drain", **as_root)  # type: ignore[arg-type]
        assert answer.status_code == 200
        asyncio.run(take_turns(gateway.url, run, range(2, 3)))
        moves = httpx.get(f"{gateway.url}/sojourn/v1/moves", **as_root).json()["moves"]  # type: ignore[arg-type]
    left = [name for name, replicas in run.replicas.items() if replicas[0] == drained]
    assert left, "somebody was at home there"
    assert sorted(move["program_id"] for move in moves) == sorted(left)
    assert {move["kv"] for move in moves} == {"shared"}
    for name in left:
        assert run.replicas[name][-1] != drained
        # The context after its second turn: that turn's prompt, and what was answered but for the last token.
        moved = len(prompt_of(int(name[1:]), 1))
        assert run.cached[name][2] >= 0.95 * moved // 16 * 16, "its KV came from the disk"


def test_an_engine_killed_in_the_middle_fails_nobody(servers: list[EngineServer], tmp_path: Path) -> None:
    run = Run()
    with GatewayProcess([server.url for server in servers], tmp_path / "gateway.log") as gateway:
        # Engines have a name each, by which they know themselves; "tiny" is both's.
        assert served(gateway.url)
        victim = servers[0]
        assert victim.pid is not None
        group = os.getpgid(victim.pid)
        asyncio.run(play(gateway.url, "tiny", run, lambda: os.killpg(group, signal.SIGKILL)))
        log = (tmp_path / "gateway.log").read_text()
        states = httpx.get(f"{gateway.url}/sojourn/v1/replicas", timeout=30, trust_env=False).json()
    dead, other = (server.url.removeprefix("http://") for server in servers)
    assert run.failed == []
    assert run.silent == []
    assert run.finished == PROGRAMS, log[-3000:]
    at_first = Counter(replicas[0] for replicas in run.replicas.values())
    assert min(at_first[dead], at_first[other]) >= PROGRAMS // 4, "both had programs"
    untouched = [replicas for replicas in run.replicas.values() if replicas[0] == other]
    kept = sum(set(replicas) == {other} for replicas in untouched)
    assert kept >= 0.95 * len(untouched)
    moved = [replicas for replicas in run.replicas.values() if replicas[0] == dead]
    assert all(replicas[-1] == other for replicas in moved)
    assert [state["replica"] for state in states["replicas"]] == [other]
    assert states["missing"] == [victim.url]
    # Who stayed found what its last turn had left, all but its last block.
    found = [
        tokens >= 160 + 64 * (at - 1) - 32
        for name, replicas in run.replicas.items()
        if set(replicas) == {other}
        for at, tokens in enumerate(run.cached[name])
        if at
    ]
    assert sum(found) >= 0.9 * len(found), "their KV was there"
