"""Twenty programs that play their turns through a gateway, and what they met while engines were killed."""

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
"""Of a turn that is streamed: long enough that a kill finds some on their way."""
OTHER_TOKENS = 12
BLOCK = 32
"""Tokens of a KV block of the engines; of the last one, which is not full, nothing is kept."""
MOST_TRIES = 5
"""Of one turn; only a stream that ended with an error is asked for again."""
TIMEOUT = aiohttp.ClientTimeout(total=300)


@dataclass
class Run:
    """What the programs met."""

    prefix: str = "p"
    """Of the programs' names."""
    first_token: int = 1000
    """Of the programs' prompts; two runs with 500 between have nothing in common."""
    failed: list[str] = field(default_factory=list)
    """Requests that were not answered with 200, or whose connection broke."""
    broken: dict[str, str] = field(default_factory=dict)
    """Programs whose stream ended with an error inside it, and who had sent it."""
    silent: list[str] = field(default_factory=list)
    """Programs whose stream ended without one and without its end."""
    replicas: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """By program, who answered its turns."""
    cached: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """By program, tokens of each turn's prompt that were found."""
    streaming: dict[str, str] = field(default_factory=dict)
    """Programs that have a first part of a stream and not yet its end, and who sends it."""
    finished: int = 0
    answers: int = 0

    @property
    def over(self) -> bool:
        """All programs have finished."""
        return self.finished == PROGRAMS

    def at_home(self) -> Counter[str]:
        """Programs by the replica of their first turn."""
        return Counter(replicas[0] for replicas in self.replicas.values())


def prompt_of(number: int, turn: int, first_token: int = 1000) -> list[int]:
    """Grows with each turn, and begins differently in each program."""
    return [first_token + number * 7 + place % 50 for place in range(160 + 64 * turn)]


async def take_turn(
    http: aiohttp.ClientSession, url: str, number: int, at: int, run: Run, *, stream: bool
) -> bool:
    """One turn; False: it has to be asked again."""
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
    """All programs at once, every third turn a stream; ``harm`` runs beside them.

    Each program waits for the first answers of all: else those of a fast engine may be over before
    a slow one, on which programs are at home as well, has answered at all.
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
    """Until the programs have so many answers and one each, or have finished. (Who has no answer yet is at
    home nowhere.)"""
    while (run.answers < answers or len(run.replicas) < PROGRAMS) and not run.over:
        await asyncio.sleep(0.01)


async def streams_from(run: Run, replica: str) -> None:
    """Until a stream of this replica is on its way, or the programs have finished."""
    while replica not in run.streaming.values() and not run.over:
        await asyncio.sleep(0.01)


def share_that_stayed(run: Run, replica: str) -> float:
    """Of the programs whose first turn this replica answered, those that it answered all turns of."""
    theirs = [set(replicas) for replicas in run.replicas.values() if replicas[0] == replica]
    return sum(replicas == {replica} for replicas in theirs) / len(theirs)


def share_that_found(run: Run, replica: str) -> float:
    """Of the later turns of who stayed there, those that found what was left but for a block."""
    found = [
        tokens >= len(prompt_of(0, at - 1)) - BLOCK
        for name, replicas in run.replicas.items()
        if set(replicas) == {replica}
        for at, tokens in enumerate(run.cached[name])
        if at
    ]
    return sum(found) / len(found)
