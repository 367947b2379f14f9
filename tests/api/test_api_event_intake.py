"""Client events take a bounded part of the engine's time, whatever a client sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from typing import Any

import msgspec
import pytest
from api_test_engines import HungEngine, ScriptedEngine, engine_answers, outcomes
from hypothesis import given, settings
from hypothesis import strategies as st
from sojourn.wire_codec import EventBatch, OutcomeBatch, decode_batch
from sojourn_server.api import event_intake
from sojourn_server.api.engine_rpc import EngineError, EngineUnavailableError
from sojourn_server.api.event_intake import MAX_EVENTS_PER_CALL, EventIntake
from sojourn_server.core.event_limits import EVENT_BURST_S, EVENT_SHARE, EventTimeBudget

EVENT_COST_S = 26e-6


class VirtualTime:
    """A clock that only sleepers move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, duration_s: float) -> None:
        self.now += duration_s
        await asyncio.sleep(0)


class CountingEngine(ScriptedEngine):
    """Answers each event with its own ``seq`` and takes ``EVENT_COST_S`` of virtual time for it."""

    def __init__(self, time: VirtualTime, engines: int = 1) -> None:
        super().__init__(*[{"events": _echo}] * engines)
        self.time = time
        self.sizes: list[int] = []
        self.spent_s = 0.0
        self.budget = EventTimeBudget(time.now)

    async def call(self, op: str, payload: str) -> list[str]:
        events = [len(msgspec.json.encode(e)) for batch in json.loads(payload) for e in batch["events"]]
        assert len(events) <= MAX_EVENTS_PER_CALL
        assert len(events) == 1 or sum(events) <= event_intake.MAX_BYTES_PER_CALL
        self.sizes.append(len(events))
        busy_s = EVENT_COST_S * self.sizes[-1]
        self.spent_s += busy_s
        self.time.now += busy_s
        self.wait_s = self.budget.spend(busy_s, self.time.now)
        await asyncio.sleep(0)
        return await super().call(op, payload)


def _echo(batch: dict[str, Any]) -> dict[str, Any]:
    emitter = batch["emitter"]
    found = [{"outcome": "applied", "program_id": emitter, "seq": e["seq"]} for e in batch["events"]]
    return {"v": 1, "outcomes": found}


def batch_of(emitter: str, count: int, *, first: int = 0, size: int = 0) -> EventBatch:
    events = [
        {"type": "heartbeat", "program_id": "p", "seq": n, **({"pad": "x" * size} if size else {})}
        for n in range(first, first + count)
    ]
    return decode_batch(json.dumps({"v": 1, "emitter": emitter, "events": events}).encode())


def seqs(answer: OutcomeBatch) -> list[int | None]:
    return [outcome.seq for outcome in answer.outcomes]


def intake_of(engine: ScriptedEngine, time: VirtualTime) -> EventIntake:
    return EventIntake(engine, clock=time, sleep=time.sleep)


async def settled(*submissions: Awaitable[Any]) -> list[Any]:
    return await asyncio.gather(*submissions, return_exceptions=True)


def assert_empty(intake: EventIntake) -> None:
    assert (intake._waiting, len(intake._queue)) == (0, 0)


async def test_a_flood_gets_its_share_of_the_engines_time_and_no_more() -> None:
    time = VirtualTime()
    engine = CountingEngine(time)
    intake = intake_of(engine, time)
    flood = [intake.submit(batch_of(f"e{n}", 1000), 60) for n in range(8)]
    started = time.now
    answers = await settled(*flood)
    assert all(seqs(answer) == list(range(1000)) for answer in answers)
    assert max(engine.sizes) == MAX_EVENTS_PER_CALL
    allowed_s = EVENT_SHARE * (time.now - started) + EVENT_BURST_S + MAX_EVENTS_PER_CALL * EVENT_COST_S
    assert engine.spent_s <= allowed_s
    assert engine.spent_s >= 0.5 * allowed_s  # the share is used, too
    assert_empty(intake)


async def test_an_event_that_grows_beyond_the_limit_costs_itself_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_intake, "MAX_ENGINE_EVENT_BYTES", 80)
    time = VirtualTime()
    intake = intake_of(
        ScriptedEngine({"events": lambda batch: outcomes(*["applied"] * len(batch["events"]))}), time
    )
    good = {"type": "heartbeat", "program_id": "p", "seq": 1}
    long = {"type": "tool_start", "program_id": "p", "seq": 0, "call_id": "c", "tool": "b", "age_s": 9e15}
    text = json.dumps({"v": 1, "emitter": "e", "events": [long, good]}).replace("9000000000000000.0", "9e15")
    answer = await intake.submit(decode_batch(text.encode()), 5)
    assert [outcome.outcome.value for outcome in answer.outcomes] == ["rejected", "applied"]
    assert "longer than 80 bytes" in answer.outcomes[0].reason


async def test_an_empty_batch_is_answered_and_tells_a_stock_engine() -> None:
    time = VirtualTime()
    intake = intake_of(CountingEngine(time), time)
    assert await intake.submit(batch_of("e", 0), 5) == OutcomeBatch(outcomes=[])
    failing = intake_of(ScriptedEngine(engine_answers(events=EngineError("stock"))), time)
    with pytest.raises(EngineError, match="stock"):
        await failing.submit(batch_of("e", 0), 5)
    assert_empty(failing)


async def test_a_batch_that_waits_too_long_leaves_the_queue() -> None:
    engine = HungEngine(events=_echo)
    intake = EventIntake(engine)
    answers = await settled(*(intake.submit(batch_of("e", 500), 0.05) for n in range(4)))
    assert all(isinstance(answer, EngineUnavailableError) for answer in answers)
    assert_empty(intake)
    engine.released.set()
    assert seqs(await intake.submit(batch_of("e", 2), 5)) == [0, 1]


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 200), st.sampled_from([0, 0, 1000])), max_size=30),
    st.integers(512, 2000),
    st.sampled_from([50, 1000, 32 * 1024]),  # 50: one heartbeat
)
def test_each_batch_gets_its_outcomes_in_order_or_a_refusal(
    batches: list[tuple[int, int]], capacity: int, bytes_per_call: int
) -> None:
    async def run() -> None:
        time = VirtualTime()
        engine = CountingEngine(time, engines=2)
        intake = intake_of(engine, time)
        answers = await settled(
            *(
                intake.submit(batch_of(f"{n}", count, size=size), 60)
                for n, (count, size) in enumerate(batches)
            )
        )
        for n, answer in enumerate(answers):
            if not isinstance(answer, EngineUnavailableError):
                expected = [(f"{n}", seq) for seq in range(batches[n][0])]
                assert [(o.program_id, o.seq) for o in answer.outcomes] == expected
        assert_empty(intake)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_intake, "MAX_WAITING", capacity)
        patch.setattr(event_intake, "MAX_BYTES_PER_CALL", bytes_per_call)
        asyncio.run(run())
