"""What a program's newest turn did without, in vLLM's own scheduler: reused before what any turn used."""

from __future__ import annotations

from typing import Any

from turns import abandoned_branches, prompt


def turn(engine: Any, clock: Any, request_id: str, tokens: list[int], program: str = "A") -> None:
    engine.add(request_id, tokens, program_id=program, max_tokens=4)
    engine.run()
    clock.now += 1.0


def queue(engine: Any) -> Any:
    return engine.scheduler.sojourn._queue


def left(engine: Any, program: str = "A") -> dict[float, int]:
    return abandoned_branches(queue(engine), program)


def test_a_context_that_begins_anew_leaves_the_old_one_behind_with_its_date(make_engine, clock):
    engine = make_engine("saga-paper", blocks=200)
    turn(engine, clock, "a1", prompt(1, 320))
    used_s = clock.now - 1.0
    turn(engine, clock, "a2", [*prompt(1, 160), *prompt(2, 100)])
    assert left(engine) == {used_s: 10}
    turn(engine, clock, "a3", [*prompt(1, 160), *prompt(3, 100)])
    assert left(engine) == {used_s: 10, used_s + 1.0: 6}, "each by its own date"
    before = queue(engine).abandoned_reused
    turn(engine, clock, "a4", prompt(1, 320))  # back to the first branch
    assert queue(engine).abandoned_reused == before + 9, "all but the block of the last token"


def test_what_was_left_behind_goes_before_a_context_that_is_older(make_engine, clock):
    """By vLLM's own order the other program's context would go, which has not been used for longer."""
    engine = make_engine("saga-paper", blocks=101)
    turn(engine, clock, "d1", prompt(9, 16), program="D")
    clock.now += 100.0  # τ_max, beside which the ages below are small
    turn(engine, clock, "d2", prompt(9, 20), program="D")
    turn(engine, clock, "b1", prompt(5, 480), program="B")
    turn(engine, clock, "a1", prompt(1, 480))
    turn(engine, clock, "a2", prompt(2, 480))
    turn(engine, clock, "c1", prompt(3, 320), program="C")
    assert queue(engine).abandoned_evicted >= 9
    turn(engine, clock, "b2", [*prompt(5, 480), *prompt(6, 20)], program="B")
    assert engine.ask("program", program_id="B")["ledger"][-1]["tokens"]["device"] == 480


def test_of_parallel_requests_none_leaves_anothers_branch_behind(make_engine):
    engine = make_engine("saga-paper", blocks=300)
    engine.add("a1", prompt(1, 300), program_id="A", max_tokens=4)
    engine.add("a2", prompt(2, 300), program_id="A", max_tokens=40)
    engine.run()
    engine.add("a3", [*prompt(1, 300), *prompt(3, 50)], program_id="A", max_tokens=4)
    engine.add("a4", [*prompt(2, 300), *prompt(4, 50)], program_id="A", max_tokens=40)
    engine.run()
    assert left(engine) == {}
