"""What engines answer other than an answer, and what clients do not wait for, over HTTP."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import aiohttp
import pytest
from fake_engine import FakeEngine, engines, running
from gateway_harness import World, lines, until, world
from sojourn_server.gateway.http import proxy_request
from sojourn_server.routing import routing_events
from starlette.requests import Request
from starlette.responses import Response


class Deadly(FakeEngine):
    """Dies of a request that says so."""

    died_of_it = False

    async def _generate(self, request: Request) -> Response:
        if b"poison" in await request.body():
            self.died_of_it = True
            asyncio.ensure_future(self.kill())  # noqa: RUF006
            await asyncio.sleep(3600)
        return await super()._generate(request)


async def test_a_request_that_kills_engines_kills_two() -> None:
    fakes = [Deadly() for _ in range(4)]
    async with running(*fakes), world(fakes, preset='routing = "random"', poll_s=3600) as it:
        await asyncio.gather(*(it.chat(text="warm") for _ in range(24)))
        assert (await it.chat(text="poison")).status == 502
        assert sum(fake.died_of_it for fake in fakes) == 2


async def test_a_last_turn_that_was_cut_ends_no_program() -> None:
    hint: dict[str, Any] = {"program_id": "p", "sojourn": {"v": 1, "final": True}}
    last: dict[str, Any] = {"vllm_xargs": {"agentic_context": json.dumps(hint)}}
    async with engines(1) as [fake], world([fake]) as it:
        await it.chat("p")
        fake.cut_after = 2
        told = await lines(await it.chat(stream=True, **last))
        assert "replica_lost" in told[-2]
        await until(lambda: not it.core.requests)
        assert [*it.core.programs] == [("default", "p")]
        fake.cut_after = None
        await lines(await it.chat(stream=True, **last))
        await until(lambda: not it.core.programs)


async def test_an_engine_that_is_lost_before_its_first_event_is_passed_on_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proxy_request, "SILENT_ENGINE_S", 0.05)
    async with engines(1) as [fake], world([fake], poll_s=3600) as it:
        fake.hang_after, tell = 1, it.gateway.routing_backend.tell

        def lost_at_the_first_byte(event: routing_events.AnyRoutingEvent) -> None:
            tell(event)
            if isinstance(event, routing_events.FirstByteSent):
                tell(routing_events.ReplicaGone(fake.name, "1.0"))

        monkeypatch.setattr(it.gateway.routing_backend, "tell", lost_at_the_first_byte)
        assert "replica_lost" in (await lines(await it.chat(stream=True)))[-2]


# -- Requests through a gateway while its engines fail in any way: each has one whole answer or one error,
# and nothing of it is left.


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


FAULTS = ["well", "well", "cut", "break", "hold", "dead core", "restart"]


async def fail(draw: random.Random, fake: FakeEngine, kind: str) -> None:
    """Let an engine fail in some way, or be well again."""
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
                await fail(draw, draw.choice(fakes), draw.choice(FAULTS))
            program = draw.choice(["p0", "p1", "p2", "p3", None])
            task = asyncio.create_task(check_turn(it, program, stream=draw.random() < 0.5))
            asked.append(task)
            await asyncio.sleep(draw.choice([0.0, 0.0, 0.01, 0.05]))
            if draw.random() < 0.15:
                left.append(asked.pop())
                left[-1].cancel()
        for fake in fakes:
            await fail(draw, fake, "well")
        await asyncio.wait_for(asyncio.gather(*asked), 60)
        for outcome in await asyncio.gather(*left, return_exceptions=True):
            assert outcome is None or isinstance(outcome, (asyncio.CancelledError, aiohttp.ClientError))

        await until(lambda: [len(one.in_flight) for one in it.core.fleet.values()] == [0] * 3)
        await until(lambda: it.gateway.generation.open_requests == 0)
        assert it.gateway.generation.bodies.held_bytes == len(it.core.waiting) == 0
        for program in ("p0", "p1", "p2", "p3"):
            assert (await it.chat(program)).status == 200
