"""Twenty programs that send their turns through a gateway, and a record of failures while engines are
killed."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

PROGRAMS = 20
TURNS = 6
STREAM_TOKENS = 96
"""Output tokens of a streamed turn. It is long enough that some streams are running when an engine is
killed."""
OTHER_TOKENS = 12
BLOCK = 32
"""Tokens of a KV block of the engines. The last block of a context is not cached if it is not full."""
MOST_TRIES = 5
"""Maximum number of attempts of one turn."""
TIMEOUT = aiohttp.ClientTimeout(total=300)


@dataclass
class Run:
    """Settings of the programs, and what happened to their requests."""

    prefix: str = "p"
    """Prefix of the programs' names."""
    first_token: int = 1000
    """Smallest token of the programs' prompts. Prompts of two runs whose values differ by 500 share no
    token."""
    failed: list[str] = field(default_factory=list)
    """Requests that were not answered with 200, or whose connection broke."""
    broken: dict[str, str] = field(default_factory=dict)
    """Programs whose stream ended with an error event → the replica that sent it."""
    silent: list[str] = field(default_factory=list)
    """Programs whose stream ended without an error event and without ``[DONE]``."""
    replicas: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Replicas that answered a program's turns, by program."""
    cached: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Cached prompt tokens of each turn, by program."""
    streaming: dict[str, str] = field(default_factory=dict)
    """Programs that have received a part of a stream, but not its end → the replica that sends it."""
    finished: int = 0
    answers: int = 0

    @property
    def over(self) -> bool:
        """Whether all programs have finished."""
        return self.finished == PROGRAMS

    def at_home(self) -> Counter[str]:
        """Number of programs by the replica of their first turn."""
        return Counter(replicas[0] for replicas in self.replicas.values())


def prompt_of(number: int, turn: int, first_token: int = 1000) -> list[int]:
    """Prompt of a turn. It grows with each turn, and begins differently in each program."""
    return [first_token + number * 7 + place % 50 for place in range(160 + 64 * turn)]


async def take_turn(
    http: aiohttp.ClientSession, url: str, number: int, at: int, run: Run, *, stream: bool
) -> bool:
    """Send one turn. Return False if the turn must be repeated."""
    name = f"{run.prefix}{number}"
    body: dict[str, Any] = {
        "model": "tiny", "prompt": prompt_of(number, at, run.first_token), "stream": stream,
        "max_tokens": STREAM_TOKENS if stream else OTHER_TOKENS, "ignore_eos": True,
    }  # fmt: skip
    if stream:
        body["stream_options"] = {"include_usage": True}
    text = ""
    try:
        async with http.post(f"{url}/v1/completions", json=body, headers={"X-Session-ID": name}) as answer:
            status, replica = answer.status, answer.headers.get("X-Sojourn-Replica", "")
            async for part in answer.content.iter_any():
                text += part.decode()
                if stream:
                    run.streaming[name] = replica
    except aiohttp.ClientError as error:
        run.failed.append(f"{name}/{at}: {error!r}")
        return False
    finally:
        run.streaming.pop(name, None)
    if status != 200:
        run.failed.append(f"{name}/{at}: {status} {text[:200]}")
        return False
    data = [line[6:] for line in text.splitlines() if line.startswith("data: ")] if stream else [text]
    documents = [json.loads(line) for line in data if line != "[DONE]"]
    if any("error" in document for document in documents):
        run.broken[name] = replica
        return False
    if stream and data[-1] != "[DONE]":
        run.silent.append(name)
        return False
    run.replicas[name].append(replica)
    usage = documents[-1]["usage"]
    run.cached[name].append((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    run.answers += 1
    return True


async def play(
    url: str, run: Run, harm: Callable[[], Awaitable[None]] | None = None, *, turns: range = range(TURNS)
) -> None:
    """Run all programs at once, with every third turn streamed. ``harm`` runs concurrently.

    Each program waits until all programs have a first answer. Otherwise the programs of a fast engine may end
    before a slow engine has answered any of its programs.
    """
    async with aiohttp.ClientSession(timeout=TIMEOUT, connector=aiohttp.TCPConnector(limit=0)) as http:
        without_answer = set(range(PROGRAMS))
        all_answered = asyncio.Event()

        async def program(number: int) -> None:
            for at in turns:
                for _ in range(MOST_TRIES):
                    has_answer = await take_turn(http, url, number, at, run, stream=(at + number) % 3 == 0)
                    if has_answer:
                        break
                without_answer.discard(number)
                if not without_answer:
                    all_answered.set()
                if not has_answer:
                    return
                await all_answered.wait()
                await asyncio.sleep(0.05 + 0.01 * number)
            run.finished += 1

        beside = [harm()] if harm is not None else []
        await asyncio.gather(*beside, *(program(number) for number in range(PROGRAMS)))


async def answered(run: Run, answers: int) -> None:
    """Wait until the programs have ``answers`` answers in total and at least one each, or have finished. (A
    program without an answer has no home.)"""
    while (run.answers < answers or len(run.replicas) < PROGRAMS) and not run.over:
        await asyncio.sleep(0.01)


async def streams_from(run: Run, replica: str) -> None:
    """Wait until this replica is sending a stream, or until the programs have finished."""
    while replica not in run.streaming.values() and not run.over:
        await asyncio.sleep(0.01)


def share_that_stayed(run: Run, replica: str) -> float:
    """Share of the programs with their first turn on this replica that had all their turns there."""
    theirs = [set(replicas) for replicas in run.replicas.values() if replicas[0] == replica]
    return sum(replicas == {replica} for replicas in theirs) / len(theirs)


def share_that_found(run: Run, replica: str) -> float:
    """Share of later turns that found the previous prompt's KV, except at most a block. Only programs that
    had all their turns on this replica count."""
    found = [
        tokens >= len(prompt_of(0, at - 1)) - BLOCK
        for name, replicas in run.replicas.items()
        if set(replicas) == {replica}
        for at, tokens in enumerate(run.cached[name])
        if at
    ]
    return sum(found) / len(found)
