"""Clients of ``soak.py``, one kind for each process. A process may be killed at any time.

    python benchmarks/soak_clients.py agents URL --key KEY --seed 1 --seconds 60

Clients print one line per occurrence, for example ``turns``. ``+tool`` and ``-tool`` mark the beginning and
end of a tool call, ``+stream`` and ``-stream`` those of a streamed answer, so ``soak.py`` knows what a killed
client was doing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import sojourn

SILENCE_S = 120.0
"""Maximum seconds without a byte of an answer. A client that waits longer reports a failure."""
AGENTS = 6
"""Number of concurrent programs of one process."""
MOST_CONTEXT_TOKENS = 1400
MOST_TRIES = 4
"""Maximum number of attempts of one turn."""
TOOL_MEAN_S = {"bash": 0.4, "search": 0.15, "pytest": 2.0}
MOST_TOOL_S = 8.0
FLOOD_CONNECTIONS = 4
FLOOD_EVENTS = 1000
FLOOD_PROGRAMS = 4000
"""Number of programs in a flood. All floods use the same programs, so that tables fill up only once and
memory can be compared over hours."""


def tell(word: str) -> None:
    """Print ``word``, a report to ``soak.py``."""
    print(word, flush=True)


@contextmanager
def told(what: str) -> Iterator[None]:
    """Report the beginning and the end of the ``with`` block, as ``+what`` and ``-what``."""
    tell(f"+{what}")
    try:
        yield
    finally:
        tell(f"-{what}")


# -- agents ---------------------------------------------------------------------------------


async def run_agents(url: str, key: str, draw: random.Random, until: float) -> None:
    """Run programs one after another, ``AGENTS`` at once, reported by the SDK, until the time ``until``."""
    sojourn.init(url, api_key=key, probe_timeout_s=5.0, instrument=False)
    timeout = httpx.Timeout(SILENCE_S, connect=10.0)
    async with httpx.AsyncClient(
        base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=timeout, trust_env=False
    ) as http:

        async def agent(number: int) -> None:
            own = random.Random(draw.random())
            while time.monotonic() < until:
                await run_program(http, own, until)

        await asyncio.gather(*(agent(number) for number in range(AGENTS)))
    sojourn.shutdown()


async def run_program(http: httpx.AsyncClient, draw: random.Random, until: float) -> None:
    """Run one program: turns with tool calls between them."""
    hints = {
        "kv_retention_ttl_s": draw.choice((None, None, 2.0, 30.0)),
        "priority": draw.choice((None, None, 0, 7)),
        "deadline_s": draw.choice((None, None, 60.0)),
        "expected_output_length": draw.choice((None, 32)),
    }
    kind = draw.choice(("coder", "planner", "reviewer"))
    first = draw.randrange(1000, 3000)
    context = [first + n % 97 for n in range(draw.randint(40, 700))]
    with sojourn.program(kind, agent_type=kind, **{k: v for k, v in hints.items() if v is not None}):
        for _ in range(draw.randint(2, 6)):
            for _ in range(MOST_TRIES):
                if await take_turn(http, draw, context):
                    break
                await asyncio.sleep(draw.uniform(0.1, 1.0))
            else:
                tell("programs given up")
                return
            if time.monotonic() >= until:
                break
            context += [first + draw.randrange(97) for _ in range(draw.randint(10, 120))]
            del context[MOST_CONTEXT_TOKENS:]
            tool = draw.choice(tuple(TOOL_MEAN_S))
            with told("tool"), sojourn.tool_call(tool, tool_class=tool):
                await asyncio.sleep(min(draw.expovariate(1 / TOOL_MEAN_S[tool]), MOST_TOOL_S))
            tell("tool calls")
    tell("programs finished")


async def take_turn(http: httpx.AsyncClient, draw: random.Random, context: list[int]) -> bool:
    """Send one request, streamed or not; leave some streams early. Return False if the request failed and
    must be repeated."""
    fields, headers = sojourn.request_parts()
    streams = draw.random() < 0.6
    body = {
        "model": "tiny", "prompt": context, "max_tokens": draw.choice((4, 16, 48, 200)), "ignore_eos": True,
        "stream": streams, **fields,
    }  # fmt: skip
    leave_after = draw.randint(1, 20) if draw.random() < 0.15 else None
    try:
        if not streams:
            (await http.post("/v1/completions", json=body, headers=headers)).raise_for_status()
            tell("turns")
            return True
        with told("stream"):
            async with http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                answer.raise_for_status()
                end = await read_stream(answer, leave_after)
        tell(end)
        return end in ("turns", "streams left by their client")
    except httpx.ReadTimeout:
        tell("clients silent for two minutes")
    except httpx.HTTPStatusError as error:
        tell(f"turns refused with {error.response.status_code}")
    except httpx.HTTPError:
        tell("turns that lost their connection")
    return False


async def read_stream(answer: httpx.Response, leave_after: int | None) -> str:
    """Read a stream, and return the word that reports how the stream ended."""
    parts = 0
    async for line in answer.aiter_lines():
        if line == "data: [DONE]":
            return "turns"
        if line.startswith("data: {"):
            if "error" in json.loads(line[6:]):
                return "streams ended by an error inside"
            parts += 1
            if parts == leave_after:
                return "streams left by their client"
    return "streams without an end"


# -- floods ------------------------------------------------------------------------------------


async def run_flood(url: str, key: str, draw: random.Random, until: float) -> None:
    """Post batches of events as fast as they are answered, until the time ``until``."""
    batches = [json.dumps(flood_batch(first)).encode() for first in range(0, FLOOD_PROGRAMS, FLOOD_EVENTS)]
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60.0, trust_env=False) as http:

        async def connection() -> None:
            while time.monotonic() < until:
                try:
                    answer = await http.post("/sojourn/v1/events", content=draw.choice(batches))
                except httpx.HTTPError:
                    await asyncio.sleep(0.2)
                    continue
                tell("batches of 1,000 events" if answer.status_code == 200 else "batches refused")
                if answer.status_code != 200:
                    await asyncio.sleep(0.05)

        await asyncio.gather(*(connection() for _ in range(FLOOD_CONNECTIONS)))


def flood_batch(first: int) -> dict[str, Any]:
    """Return a batch with a tool call of each of ``FLOOD_EVENTS`` invented programs."""
    events = [
        {"type": "tool_start", "program_id": f"flood-{n}", "seq": n, "call_id": f"c{n}", "tool": "bash"}
        for n in range(first, first + FLOOD_EVENTS)
    ]
    return {"v": 1, "emitter": f"flood-{first}", "events": events}


KINDS = {"agents": run_agents, "flood": run_flood}


def main() -> None:
    """Run the kind of client that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("url")
    parser.add_argument("--key", required=True)
    parser.add_argument("--seed", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    asyncio.run(KINDS[options.kind](options.url, options.key, random.Random(options.seed), until))


if __name__ == "__main__":
    main()
