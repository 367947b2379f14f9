"""One tenant's events do not fill an engine's queue, and delay no other tenant's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from fake_engine import FakeEngine, running
from gateway_harness import until, world
from sojourn_server.gateway.http import event_forwarder, tenant_event_queue
from sojourn_server.gateway.http.tenant_event_queue import (
    MAX_DELAYED_WEIGHT,
    MAX_SENT_WEIGHT,
    MAX_WAITING_WEIGHT,
    EventsRefusedError,
    TenantEventQueue,
    batch_weight,
)
from starlette.requests import Request
from starlette.responses import Response

TENANTS = {"ka": "alice", "kb": "bob"}
START = {"type": "program_start", "seq": 0}
BEAT = {"type": "heartbeat", "program_id": "p"}


class SlowEngine(FakeEngine):
    """An engine that does not answer events of alice's programs before ``go_on`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()
        self.held = 0
        """Number of POSTs that wait for ``go_on``."""

    async def _take_events(self, request: Request) -> Response:
        first = (await request.json())["events"][0]
        if not first["program_id"].startswith("bob/") and not self.go_on.is_set():
            self.held += 1
            await self.go_on.wait()
        return await super()._take_events(request)


@asynccontextmanager
async def slow_world(
    monkeypatch: pytest.MonkeyPatch, tenants: dict[str, str] | None
) -> AsyncIterator[tuple[SlowEngine, Any]]:
    """A gateway that waits for its engine's answers as long as the test does."""
    monkeypatch.setattr(event_forwarder, "ANSWER_TIMEOUT_S", 600.0)
    monkeypatch.setattr(event_forwarder, "REPLAY_WAIT_S", 600.0)
    monkeypatch.setattr(tenant_event_queue, "ANSWER_TIMEOUT_S", 600.0)
    engine = SlowEngine()
    async with running(engine) as fakes, world(fakes, tenants=tenants) as it:
        try:
            yield engine, it
        finally:
            engine.go_on.set()


def flood(it: Any, posts: int, per_post: int, key: str | None) -> list[asyncio.Task[list[Any]]]:
    """Tasks that each post heartbeats."""
    return [
        asyncio.ensure_future(
            it.events(*({**BEAT, "seq": n * per_post + i} for i in range(per_post)), key=key, emitter=f"e{n}")
        )
        for n in range(posts)
    ]


async def test_a_flood_waits_at_the_gateway_and_other_tenants_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async with slow_world(monkeypatch, TENANTS) as (engine, it):
        for key in ("ka", "kb"):
            await it.chat("p", key=key)
        posts = flood(it, 80, 11, "ka")
        most = MAX_SENT_WEIGHT // 12

        def waiting() -> int:
            queue = it.gateway.forwarder._queues.get((engine.url, "alice"))
            return len(queue._waiting) if queue is not None else 0

        await until(lambda: waiting() == 80 - most)
        await until(lambda: engine.held == most)
        assert [one["outcome"] for one in await it.events({**BEAT, "seq": 0}, key="kb")] == ["applied"]
        assert engine.held == most
        engine.go_on.set()
        outcomes = [one["outcome"] for answer in await asyncio.gather(*posts) for one in answer]
        assert outcomes == ["applied"] * 80 * 11


async def test_the_only_tenants_events_do_not_wait_at_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    async with slow_world(monkeypatch, None) as (engine, it):
        await it.chat("p")
        posts = flood(it, 80, 11, None)
        await until(lambda: engine.held == 80)
        engine.go_on.set()
        await asyncio.gather(*posts)


async def test_a_tenants_replay_does_not_wait_for_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with slow_world(monkeypatch, TENANTS) as (engine, it):
        for key in ("ka", "kb"):
            await it.events({**START, "program_id": "p"}, key=key)
        slow = asyncio.ensure_future(it.chat("p", key="ka"))
        await until(lambda: engine.held == 1)
        assert (await it.chat("p", key="kb")).status == 200
        assert engine.of("bob/p") == ["program_start"]
        assert not slow.done()
        engine.go_on.set()
        assert (await slow).status == 200


async def test_refused_events_say_so_and_are_sent_before_the_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tenant_event_queue, "MAX_WAITING_WEIGHT", 0)
    monkeypatch.setattr(tenant_event_queue, "REFUSAL_DELAY_S", 0.0)
    async with slow_world(monkeypatch, TENANTS) as (engine, it):
        await it.chat("p", key="ka")
        posts = flood(it, 1, MAX_SENT_WEIGHT, "ka")
        await until(lambda: engine.held == 1)
        tool = {"type": "tool_start", "program_id": "p", "seq": 1000, "call_id": "c", "tool": "bash"}
        stop = {"type": "tool_stop", "program_id": "p", "seq": 1001, "call_id": "c", "duration_s": 1.0}
        end = {"type": "program_end", "program_id": "p", "seq": 1002, "status": "completed"}
        refused = await it.events(tool, stop, end, key="ka")
        assert [(one["outcome"], one["seq"]) for one in refused] == [
            ("rejected", seq) for seq in range(1000, 1003)
        ]
        assert "would be more than 0; send fewer at a time" in refused[0]["reason"]
        assert await it.home("p") == engine.name
        engine.go_on.set()
        await asyncio.gather(*posts)
        await it.chat("p", key="ka")
        assert engine.of("alice/p")[MAX_SENT_WEIGHT:] == ["tool_start", "tool_stop"]


# -- the queue itself ----------------------------------------------------------------


def test_a_batch_weighs_its_events_and_its_bytes() -> None:
    assert batch_weight([]) == 1
    assert batch_weight([msgspec.Raw(b"{}")] * 3) == 4
    assert batch_weight([msgspec.Raw(b"x" * 2048)]) == 4


async def test_batches_are_sent_in_order_of_arrival_and_few_at_a_time() -> None:
    queue = TenantEventQueue()
    sent: list[int] = []
    at_once = most = 0

    async def send(number: int, weight: int) -> None:
        nonlocal at_once, most
        async with queue.turn(weight):
            sent.append(number)
            at_once += weight
            most = max(most, at_once)
            await asyncio.sleep(0)
            at_once -= weight

    weights = [12, 1000, 2, 257, 256, 100, 100, 100] * 5
    await asyncio.gather(*(send(number, weight) for number, weight in enumerate(weights)))
    assert sent == list(range(len(weights)))
    assert most == 1000  # alone
    assert queue.idle


async def test_a_full_queue_refuses_and_delays_a_bounded_number_of_refusals() -> None:
    delays: list[float] = []
    wake = asyncio.Event()

    async def sleep(seconds: float) -> None:
        delays.append(seconds)
        await wake.wait()

    queue = TenantEventQueue(sleep)

    async def send(weight: int) -> None:
        async with queue.turn(weight):
            await wake.wait()

    heavy = [asyncio.ensure_future(send(weight)) for weight in (1, MAX_WAITING_WEIGHT)]
    delayed = [asyncio.ensure_future(send(MAX_DELAYED_WEIGHT // 2)) for _ in range(2)]
    await until(lambda: len(delays) == 2)
    with pytest.raises(EventsRefusedError, match=rf"would be more than {MAX_WAITING_WEIGHT}; send fewer"):
        await asyncio.wait_for(send(1), 60)  # at once
    assert len(delays) == 2
    assert not any(one.done() for one in delayed)
    wake.set()
    answers = await asyncio.gather(*heavy, *delayed, return_exceptions=True)
    assert [type(one) for one in answers] == [type(None)] * 2 + [EventsRefusedError] * 2
    assert queue.idle


async def test_a_batch_that_waits_too_long_or_is_cancelled_leaves_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = TenantEventQueue()
    wake = asyncio.Event()
    sent: list[int] = []

    async def send(number: int) -> None:
        async with queue.turn(MAX_SENT_WEIGHT):
            sent.append(number)
            await wake.wait()

    first = asyncio.ensure_future(send(0))
    await until(lambda: sent == [0])
    monkeypatch.setattr(tenant_event_queue, "ANSWER_TIMEOUT_S", 0.01)
    with pytest.raises(EventsRefusedError, match=r"earlier events within 0\.01 s"):
        await send(1)
    monkeypatch.setattr(tenant_event_queue, "ANSWER_TIMEOUT_S", 600.0)
    waiting = [asyncio.ensure_future(send(number)) for number in (2, 3, 4)]
    await until(lambda: len(queue._waiting) == 3)
    waiting[0].cancel()  # while it waits
    await until(lambda: len(queue._waiting) == 2)
    first.cancel()
    await until(first.done)
    waiting[1].cancel()  # after it was admitted, or while it sends
    await until(lambda: 4 in sent)
    wake.set()
    await asyncio.gather(first, *waiting, return_exceptions=True)
    assert queue.idle
