"""Client events take a bounded part of the engine's time, whatever a client sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from api_test_engines import HungEngine, ScriptedEngine, engine_answers, outcomes
from hypothesis import given
from hypothesis import strategies as st
from sojourn.wire_codec import EventBatch, OutcomeBatch, decode_batch
from sojourn_server.api import event_intake
from sojourn_server.api.engine_rpc import EngineError, EngineUnavailableError
from sojourn_server.api.event_intake import (
    MAX_EVENTS_PER_CALL,
    MAX_LATE_CALLS,
    EventIntake,
)
from sojourn_server.core.event_time_budget import EVENT_BURST_S, EVENT_SHARE, EventTimeBudget

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
        self.sizes.append(sum(len(batch["events"]) for batch in json.loads(payload)))
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
    assert (intake._waiting, len(intake._hosts)) == (0, 0)


async def until(condition: Callable[[], object]) -> None:
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never held")


async def test_a_flood_gets_its_share_of_the_engines_time_and_no_more() -> None:
    time = VirtualTime()
    engine = CountingEngine(time)
    intake = intake_of(engine, time)
    flood = [intake.submit(("h", str(n)), batch_of(f"e{n}", 1000), 60) for n in range(8)]
    started = time.now
    answers = await settled(*flood)
    assert all(seqs(answer) == list(range(1000)) for answer in answers)
    assert max(engine.sizes) == MAX_EVENTS_PER_CALL
    allowed_s = EVENT_SHARE * (time.now - started) + EVENT_BURST_S + MAX_EVENTS_PER_CALL * EVENT_COST_S
    assert engine.spent_s <= allowed_s
    assert engine.spent_s >= 0.5 * allowed_s  # the share is used, too
    assert_empty(intake)


async def test_a_small_client_does_not_wait_for_the_flood() -> None:
    time = VirtualTime()
    engine = CountingEngine(time)
    intake = intake_of(engine, time)
    flood = [asyncio.ensure_future(intake.submit(("h", str(n)), batch_of("f", 1000), 600)) for n in range(8)]
    await until(lambda: len(engine.sizes) > 5)
    calls = len(engine.sizes)
    assert seqs(await intake.submit(("h", "small"), batch_of("small", 10), 60)) == list(range(10))
    assert len(engine.sizes) - calls <= 8  # of 125
    assert all(len(answer.outcomes) == 1000 for answer in await settled(*flood))


async def test_connections_of_one_host_share_the_part_of_one_host() -> None:
    time = VirtualTime()
    engine = CountingEngine(time)
    intake = intake_of(engine, time)
    flood = [
        asyncio.ensure_future(intake.submit(("bad", str(n)), batch_of("f", 50), 600)) for n in range(300)
    ]
    await until(lambda: engine.sizes)
    calls = len(engine.sizes)
    await intake.submit(("good", "1"), batch_of("g", 64), 60)
    assert len(engine.sizes) - calls <= 8  # of 235
    await settled(*flood)
    assert_empty(intake)


async def test_many_small_batches_go_to_the_engine_together() -> None:
    time = VirtualTime()
    engine = CountingEngine(time)
    intake = intake_of(engine, time)
    answers = await settled(*(intake.submit((f"h{n}", "1"), batch_of(f"e{n}", 2), 5) for n in range(32)))
    assert [answer.outcomes[0].program_id for answer in answers] == [f"e{n}" for n in range(32)]
    assert engine.sizes == [64]


async def test_large_events_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_intake, "MAX_BYTES_PER_CALL", 50)  # one heartbeat
    time = VirtualTime()
    engine = CountingEngine(time)
    intake = intake_of(engine, time)
    answer = await intake.submit(("h", "1"), batch_of("e", 3), 5)
    assert seqs(answer) == [0, 1, 2]
    assert engine.sizes == [1, 1, 1]


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
    answer = await intake.submit(("h", "1"), decode_batch(text.encode()), 5)
    assert [outcome.outcome.value for outcome in answer.outcomes] == ["rejected", "applied"]
    assert "longer than 80 bytes" in answer.outcomes[0].reason


async def test_empty_batches_fill_the_queue_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_intake, "MAX_WAITING", 10)
    engine = HungEngine(events=_echo)
    intake = intake_of(engine, VirtualTime())
    tasks = [asyncio.ensure_future(intake.submit(("h", str(n)), batch_of("e", 0), 60)) for n in range(100)]
    await until(lambda: sum(task.done() for task in tasks) > 50)
    assert intake._waiting <= 10
    engine.released.set()
    refused = [answer for answer in await settled(*tasks) if isinstance(answer, EngineUnavailableError)]
    assert len(refused) < 100
    assert_empty(intake)


async def test_a_lost_answer_does_not_stop_later_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_intake, "CALL_TIMEOUT_S", 0.01)
    engine = HungEngine(events=_echo)
    intake = EventIntake(engine)
    for _ in range(MAX_LATE_CALLS):
        with pytest.raises(EngineUnavailableError, match="no answer within"):
            await intake.submit(("h", "1"), batch_of("e", 1), 60)
    with pytest.raises(EngineUnavailableError, match="without an answer"):
        await intake.submit(("h", "1"), batch_of("e", 1), 60)
    assert len(engine.calls) == MAX_LATE_CALLS
    engine.released.set()
    await until(lambda: not intake._late)
    monkeypatch.setattr(event_intake, "CALL_TIMEOUT_S", 5)
    assert seqs(await intake.submit(("h", "1"), batch_of("e", 1), 60)) == [0]


async def test_an_empty_batch_is_answered_and_tells_a_stock_engine() -> None:
    time = VirtualTime()
    intake = intake_of(CountingEngine(time), time)
    assert await intake.submit(("h", "1"), batch_of("e", 0), 5) == OutcomeBatch(outcomes=[])
    failing = intake_of(ScriptedEngine(engine_answers(events=EngineError("stock"))), time)
    with pytest.raises(EngineError, match="stock"):
        await failing.submit(("h", "1"), batch_of("e", 0), 5)
    assert_empty(failing)


async def test_a_full_queue_refuses_the_heaviest_client_and_serves_the_others() -> None:
    time = VirtualTime()
    engine = HungEngine(events=_echo)
    intake = intake_of(engine, time)
    heavy = [
        asyncio.ensure_future(intake.submit(("bad", str(n)), batch_of("f", 1024), 600)) for n in range(15)
    ]
    await until(lambda: engine.calls)
    small = asyncio.ensure_future(intake.submit(("good", "1"), batch_of("g", 100), 600))
    (refused,) = await settled(intake.submit(("bad", "one more"), batch_of("f", 1024), 600))
    assert isinstance(refused, EngineUnavailableError)
    await asyncio.sleep(0)
    assert len(engine.calls) == 1  # one at a time
    engine.released.set()
    assert len((await small).outcomes) == 100
    answers = await settled(*heavy)
    shed = [answer for answer in answers if isinstance(answer, EngineUnavailableError)]
    assert len(shed) <= 1
    assert all(len(answer.outcomes) == 1024 for answer in answers if answer not in shed)
    assert_empty(intake)


async def test_a_batch_that_waits_too_long_leaves_the_queue() -> None:
    engine = HungEngine(events=_echo)
    intake = EventIntake(engine)
    answers = await settled(*(intake.submit(("h", str(n)), batch_of("e", 500), 0.05) for n in range(4)))
    assert all(isinstance(answer, EngineUnavailableError) for answer in answers)
    assert_empty(intake)
    engine.released.set()
    assert seqs(await intake.submit(("h", "1"), batch_of("e", 2), 5)) == [0, 1]


async def test_a_failing_call_fails_its_own_batches_alone() -> None:
    time = VirtualTime()
    failing = True

    def answer(batch: dict[str, Any]) -> Any:
        if failing and batch["emitter"] == "bad":
            raise EngineError("no such thing")
        return _echo(batch)

    intake = intake_of(ScriptedEngine({"events": answer}), time)
    bad = asyncio.ensure_future(intake.submit(("h", "1"), batch_of("bad", MAX_EVENTS_PER_CALL), 5))
    with pytest.raises(EngineError, match="no such thing"):
        await bad
    failing = False
    assert len((await intake.submit(("h", "2"), batch_of("good", 3), 5)).outcomes) == 3
    assert_empty(intake)


async def test_each_event_gets_the_answer_of_the_engine_that_knows_its_program() -> None:
    def knows(emitter: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
        def answer(batch: dict[str, Any]) -> dict[str, Any]:
            outcome = "applied" if batch["emitter"] == emitter else "missing"
            return {"v": 1, "outcomes": [{"outcome": outcome}] * len(batch["events"])}

        return answer

    time = VirtualTime()
    intake = intake_of(ScriptedEngine({"events": knows("a")}, {"events": knows("b")}), time)
    names = ("a", "b", "c")
    answers = await settled(*(intake.submit(("h", name), batch_of(name, 1), 5) for name in names))
    assert [answer.outcomes[0].outcome.value for answer in answers] == ["applied", "applied", "missing"]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 200), st.sampled_from([0, 0, 1000])),
        max_size=30,
    ),
    st.integers(512, 2000),
)
def test_each_batch_gets_its_outcomes_in_order_or_a_refusal(
    batches: list[tuple[int, int, int, int]], capacity: int
) -> None:
    async def run() -> None:
        time = VirtualTime()
        engine = CountingEngine(time, engines=2)
        intake = intake_of(engine, time)
        answers = await settled(
            *(
                intake.submit((f"h{host}", f"c{connection}"), batch_of(f"{n}", count, size=size), 60)
                for n, (host, connection, count, size) in enumerate(batches)
            )
        )
        for n, answer in enumerate(answers):
            if not isinstance(answer, EngineUnavailableError):
                expected = [(f"{n}", seq) for seq in range(batches[n][2])]
                assert [(o.program_id, o.seq) for o in answer.outcomes] == expected
        assert_empty(intake)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_intake, "MAX_WAITING", capacity)
        asyncio.run(run())
