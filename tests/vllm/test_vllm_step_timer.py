"""How long steps take where the next ones are planned before their results are there."""

from __future__ import annotations

from typing import Any

import pytest
from sojourn_server.core.events_and_actions import StepCompleted


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_step_is_timed_from_the_end_of_the_one_before(
    make_engine: Any, clock: Any, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_num_batched_tokens=64, max_num_seqs=8, asynchronous=asynchronous)
    adapter = engine.scheduler.sojourn
    told: list[tuple[int, float]] = []
    handle = adapter.program_scheduler.handle

    def listening(event: Any, now: float) -> Any:
        if isinstance(event, StepCompleted):
            assert now == clock.now
            told.append((event.tokens, round(event.seconds, 6)))
        return handle(event, now)

    monkeypatch.setattr(adapter.program_scheduler, "handle", listening)
    engine.add("long", range(150), max_tokens=4, program_id="B")
    first, second = engine.plan(), engine.plan()
    clock.now += 1.0
    engine.update_from_output(first, sampled=())
    clock.now += 0.25  # planning
    last = engine.plan()
    clock.now += 0.5
    engine.update_from_output(second, sampled=())
    clock.now += 3.0
    engine.update_from_output(last, sampled=())
    assert told == [(64, 1.0), (64, 0.75), (22, 3.0)]
    # A step without results, as one that plans nothing, does not shift the times of those after it.
    engine.plan()
    clock.now += 10.0
    later = engine.plan()
    clock.now += 0.125
    engine.update_from_output(later, sampled=())
    assert told[3:] == [(later.total_num_scheduled_tokens, 0.125)]


def test_a_turns_seconds_are_divided_at_its_admission_and_its_first_token(
    make_engine: Any, clock: Any
) -> None:
    engine = make_engine(max_num_batched_tokens=64, max_num_seqs=8)
    engine.add("r", range(100), max_tokens=3, program_id="A")
    clock.now += 1.0
    for _ in range(4):  # two for the prompt
        engine.step()
        clock.now += 2.0
    seconds = engine.ask("program", program_id="A")["ledger"][-1]["seconds"]
    assert seconds == {"wall": 7.0, "queued": 1.0, "prefilling": 2.0, "decoding": 4.0}
