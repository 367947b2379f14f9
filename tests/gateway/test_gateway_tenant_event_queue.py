"""One tenant's events do not fill an engine's queue, and delay no other tenant's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from fake_engine import FakeEngine, running
from gateway_harness import until, world
from sojourn.wire_codec import EventBatch, EventOutcome, Outcome
from sojourn.wire_events import AnyEvent, ToolStart, ToolStop
from sojourn_server.gateway.http import event_forwarder, tenant_event_queue
from sojourn_server.gateway.http.ordered_sender import OrderedSender
from sojourn_server.gateway.http.program_event_records import (
    MAX_UNDELIVERED_EVENTS,
    ProgramEventRecords,
    RecordedEvent,
)
from sojourn_server.gateway.http.tenant_event_queue import (
    MAX_DELAYED_WEIGHT,
    MAX_SENT_WEIGHT,
    MAX_WAITING_WEIGHT,
    EngineSilentError,
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
        refused = await it.events(tool, stop, key="ka")
        assert [(one["outcome"], one["seq"]) for one in refused] == [("rejected", 1000), ("rejected", 1001)]
        assert "would be more than 0; send fewer at a time" in refused[0]["reason"]
        engine.go_on.set()
        await asyncio.gather(*posts)
        await it.chat("p", key="ka")
        assert engine.of("alice/p")[MAX_SENT_WEIGHT:] == ["tool_start", "tool_stop"]


async def test_the_end_of_a_program_is_never_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_event_queue, "MAX_WAITING_WEIGHT", 0)
    monkeypatch.setattr(tenant_event_queue, "REFUSAL_DELAY_S", 0.0)
    async with slow_world(monkeypatch, TENANTS) as (engine, it):
        await it.chat("p", key="ka")
        posts = flood(it, 1, MAX_SENT_WEIGHT, "ka")
        await until(lambda: engine.held == 1)
        tool = {"type": "tool_start", "program_id": "p", "seq": 1000, "call_id": "c", "tool": "bash"}
        end = {"type": "program_end", "program_id": "p", "seq": 1001, "status": "x" * 10_000}
        assert [one["outcome"] for one in await it.events(tool, end, key="ka")] == ["rejected", "deferred"]
        assert await it.home("p") is None
        assert it.gateway.forwarder.known.get(("alice", "p")) is None
        engine.go_on.set()
        await asyncio.gather(*posts)
        await until(lambda: "program_end" in engine.of("alice/p"))
        assert engine.of("alice/p")[MAX_SENT_WEIGHT:] == ["program_end"]
        assert engine.events[-1]["status"] == "error"


async def test_a_late_refusal_undoes_nothing_that_was_reported_since(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = asyncio.Event()
    delayed: list[float] = []

    async def sleep(seconds: float) -> None:
        delayed.append(seconds)
        await refuse.wait()

    monkeypatch.setattr(tenant_event_queue, "MAX_WAITING_WEIGHT", 0)
    async with slow_world(monkeypatch, TENANTS) as (engine, it):
        await it.chat("p", key="ka")
        it.gateway.forwarder._queues[(engine.url, "alice")] = TenantEventQueue(sleep)
        posts = flood(it, 1, MAX_SENT_WEIGHT, "ka")
        await until(lambda: engine.held == 1)
        tool = {"type": "tool_start", "program_id": "p", "seq": 1, "call_id": "c", "tool": "bash"}
        stop = {"type": "tool_stop", "program_id": "p", "seq": 3, "call_id": "c", "duration_s": 1.0}
        graph = {"nodes": [{"id": "a"}], "edges": []}
        old, new = (
            {"type": "aeg", "program_id": "p", "seq": seq, "graph_hash": name, "graph": graph}
            for seq, name in ((2, "old"), (4, "new"))
        )
        late = asyncio.ensure_future(it.events(tool, old, key="ka"))
        await until(lambda: delayed)
        riding = {"v": 1, "emitter": "em", "events": [stop, new]}
        context = json.dumps({"program_id": "p", "sojourn": riding})
        assert (await it.chat(key="ka", vllm_xargs={"agentic_context": context})).status == 200
        refuse.set()
        assert [one["outcome"] for one in await late] == ["rejected", "rejected"]
        engine.go_on.set()
        await asyncio.gather(*posts)
        sent = len(engine.events)
        await it.chat("p", key="ka")
        assert [(one["type"], one.get("graph_hash")) for one in engine.events[sent:]] == [("aeg", "new")]


async def test_batches_that_wait_for_the_gateways_own_events_are_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began = 0
    go_on = asyncio.Event()

    async def wait_until_sent(self: OrderedSender) -> None:
        nonlocal began
        began += 1
        await go_on.wait()

    monkeypatch.setattr(OrderedSender, "wait_until_sent", wait_until_sent)
    async with slow_world(monkeypatch, TENANTS) as (engine, it):
        await it.chat("p", key="ka")
        it.gateway.forwarder._sender_for(engine.url, "alice")
        posts = flood(it, 60, 10, "ka")
        await until(lambda: began == 60)
        assert not it.gateway.forwarder._queues  # none holds the place of a batch that could be sent
        engine.go_on.set()
        go_on.set()
        outcomes = [one["outcome"] for answer in await asyncio.gather(*posts) for one in answer]
        assert outcomes == ["applied"] * 600


async def test_batches_for_a_silent_engine_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with slow_world(monkeypatch, TENANTS) as (engine, it):
        await it.chat("p", key="ka")
        posts = flood(it, 1, MAX_SENT_WEIGHT, "ka")
        await until(lambda: engine.held == 1)
        monkeypatch.setattr(tenant_event_queue, "ANSWER_TIMEOUT_S", 0.01)
        tool = {"type": "tool_start", "program_id": "p", "seq": 1000, "call_id": "c", "tool": "bash"}
        assert [one["outcome"] for one in await it.events(tool, key="ka")] == ["missing"]
        engine.go_on.set()
        await asyncio.gather(*posts)
        await it.chat("p", key="ka")
        assert engine.of("alice/p")[MAX_SENT_WEIGHT:] == ["tool_start"]


# -- records of lost events ----------------------------------------------------------


def test_a_lost_event_is_recorded_again_unless_a_newer_one_replaces_it() -> None:
    key = ("alice", "p")

    def recorded(known: ProgramEventRecords, *events: AnyEvent) -> list[RecordedEvent | None]:
        return [known.record_event(key, event, None, event.seq, delivered=True) for event in events]

    def to_send(known: ProgramEventRecords) -> list[AnyEvent]:
        record = known.get(key)
        assert record is not None
        assert record.place is None
        return [one.event for one in record.events_to_send()]

    start = ToolStart(program_id="p", seq=0, call_id="c", tool="bash")
    stop = ToolStop(program_id="p", seq=1, call_id="c", duration_s=1.0)
    again = ToolStart(program_id="p", seq=2, call_id="c", tool="bash")
    for is_sent in (False, True):
        known = ProgramEventRecords()
        for kept in reversed(recorded(known, start, stop)):
            known.record_lost(key, kept, is_sent=is_sent)
        assert to_send(known) == ([stop] if is_sent else [start, stop])

        known = ProgramEventRecords()
        old = recorded(known, start, stop, again)
        for kept in reversed(old[:2]):
            known.record_lost(key, kept, is_sent=is_sent)
        assert to_send(known) == [again]

        known = ProgramEventRecords()
        first, *_ = recorded(known, start, stop)
        known.record_lost(key, first, is_sent=is_sent)
        assert to_send(known) == []

        known = ProgramEventRecords()
        for _ in range(2):  # a client that waits no longer sends its events again
            for kept in recorded(known, stop):
                known.record_lost(key, kept, is_sent=is_sent)
        assert to_send(known) == [stop]

        known = ProgramEventRecords()
        recorded(known, start)
        for number in range(2 * MAX_UNDELIVERED_EVENTS):
            lost = ToolStop(program_id="p", seq=number, call_id=f"c{number}", duration_s=1.0)
            known.record_lost(key, *recorded(known, lost), is_sent=is_sent)
        newest = range(MAX_UNDELIVERED_EVENTS, 2 * MAX_UNDELIVERED_EVENTS)
        assert [event.seq for event in to_send(known)] == [start.seq, *newest]


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


async def test_a_batch_waits_as_long_as_the_engine_answers_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_event_queue, "ANSWER_TIMEOUT_S", 0.01)
    now = 0.0
    looks = 0
    answers: list[asyncio.Future[list[EventOutcome] | None]] = []

    def clock() -> float:
        nonlocal looks
        looks += 1
        return now

    async def post(url: str, part: EventBatch, authorization: str | None) -> list[EventOutcome] | None:
        answers.append(asyncio.get_running_loop().create_future())
        return await answers[-1]

    queue = TenantEventQueue(clock=clock)
    half = EventBatch(v=1, emitter="e", events=[msgspec.Raw(b"{}")] * (MAX_SENT_WEIGHT // 2 - 1))
    applied = [EventOutcome(outcome=Outcome.APPLIED)] * len(half.events)
    tasks = [asyncio.ensure_future(queue.post_all(post, "u", half, None)) for _ in range(4)]
    await until(lambda: len(answers) == 2)
    now = 0.009
    answers[0].set_result(applied)
    await until(lambda: len(answers) == 3)
    now = 0.018  # longer than the timeout after its arrival, but not after the last answer
    seen = looks
    await until(lambda: looks >= seen + 4)
    assert not tasks[3].done()
    now = 0.02
    with pytest.raises(EngineSilentError):
        await tasks[3]
    answers[1].set_result(applied)
    answers[2].set_result(None)  # a batch without an answer is none
    assert await asyncio.gather(*tasks[:3]) == [applied, applied, [None] * len(applied)]
    assert queue._answered_s == now
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
    with pytest.raises(EngineSilentError):
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
