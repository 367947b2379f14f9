"""Requests through a gateway while its engines fail in any way: each has one whole answer or one error, and
nothing of it is left."""

from __future__ import annotations

import asyncio
import json
import random

import aiohttp
import pytest
from fake_engine import FakeEngine, engines
from gateway_harness import World, lines, until, world


async def check_turn(it: World, program: str | None, *, stream: bool) -> None:
    """Send a turn, and check what comes back."""
    answer = await it.chat(program, stream=stream)
    assert answer.status in (200, 502, 503), await answer.text()
    if answer.status != 200:
        assert (await answer.json())["error"]["code"] in ("replicas_failed", "replica_lost", "no_room")
        assert answer.headers["X-Sojourn-Gateway"] == "1"
    elif not stream:
        assert (await answer.json())["text"] == answer.headers["X-Sojourn-Replica"]
    else:
        *told, last = await lines(answer)
        assert last == "[DONE]"
        found = [json.loads(line) for line in told]
        numbers = [one["number"] for one in found if "number" in one]
        assert numbers == list(range(len(numbers))), "in order, none twice"
        errors = [one for one in found if "error" in one]
        assert errors or len(numbers) == 5
        assert found[-1:] == errors[:1] or not errors
        assert {one["at"] for one in found if "at" in one} <= {answer.headers["X-Sojourn-Replica"]}


async def fail(draw: random.Random, fake: FakeEngine) -> None:
    """Let an engine fail in some way, or be well again."""
    kind = draw.choice(["well", "well", "cut", "break", "hold", "dead core", "restart"])
    fake.cut_after = draw.randrange(5) if kind == "cut" else None
    fake.break_before_first_byte = 1 if kind == "break" else 0
    fake.dead_core, fake.healthy = kind == "dead core", kind != "dead core"
    if fake.hold is not None:
        fake.hold.set()
    fake.hold = asyncio.Event() if kind == "hold" else None
    if kind == "restart":
        await fake.kill()
        await asyncio.sleep(draw.choice([0.0, 0.1]))
        await fake.restart()


@pytest.mark.parametrize("seed", range(8))
async def test_each_request_has_one_answer_or_one_error_and_leaves_nothing(seed: int) -> None:
    draw = random.Random(seed)
    async with engines(3) as fakes, world(fakes, poll_s=0.02) as it:
        asked: list[asyncio.Task[None]] = []
        left: list[asyncio.Task[None]] = []
        for _ in range(60):
            if draw.random() < 0.3:
                await fail(draw, draw.choice(fakes))
            program = draw.choice(["p0", "p1", "p2", "p3", None])
            task = asyncio.create_task(check_turn(it, program, stream=draw.random() < 0.5))
            asked.append(task)
            await asyncio.sleep(draw.choice([0.0, 0.0, 0.01, 0.05]))
            if draw.random() < 0.15:
                left.append(asked.pop())
                left[-1].cancel()
        for fake in fakes:
            fake.cut_after, fake.break_before_first_byte = None, 0
            fake.dead_core, fake.healthy = False, True
            if fake.hold is not None:
                fake.hold.set()
            fake.hold = None
        await asyncio.wait_for(asyncio.gather(*asked), 60)
        for outcome in await asyncio.gather(*left, return_exceptions=True):
            assert outcome is None or isinstance(outcome, (asyncio.CancelledError, aiohttp.ClientError))

        async def is_quiet() -> bool:
            states = it.gateway.routing_backend.replicas()
            return len(states) == 3 and all(one.in_flight == one.queued == 0 for one in states)

        await until(is_quiet)
        await until(lambda: it.gateway.generation.open_requests == 0)
        assert it.gateway.generation.bodies.held_bytes == len(it.gateway.routing_backend.core.waiting) == 0
        for program in ("p0", "p1", "p2", "p3"):
            assert (await it.chat(program)).status == 200
