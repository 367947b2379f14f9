"""Admission in vLLM's own scheduler: programs wait for it, other requests pass, and no request starves."""

from __future__ import annotations

import math

import pytest
from sojourn_server.core.events_and_actions import AdmissionRequested, RequestChosen, answer_of
from turns import prompt, running


@pytest.fixture
def make_engine(make_engine):
    """Engines in which programs lose KV all the time: admission reserves nothing before that."""

    def make(*args, **options):
        engine = make_engine(*args, **options)
        engine.scheduler.sojourn.program_scheduler.state.last_shortage_s = math.inf
        return engine

    return make


def status(engine, program: str) -> str:
    return engine.ask("program", program_id=program)["status"]


def crowd(make_engine, policy: str = "continuum", last_tokens: int = 320):
    """Three programs of 20 blocks each in a pool of 100; each is expected to grow by 66 blocks.
    ``last_tokens``: length of the last one's prompt."""
    engine = make_engine(policy, blocks=101, max_model_len=2048)
    for number, tokens in enumerate((320, 320, last_tokens)):
        engine.add(f"r{number}", prompt(1 + number, tokens), program_id=f"P{number}", max_tokens=64)
    engine.step()
    return engine


def test_a_program_waits_until_those_before_it_can_still_grow(make_engine):
    engine = crowd(make_engine)
    assert running(engine) == {"r0", "r1"}
    assert status(engine, "P2") == "gated"
    assert len(engine.scheduler.waiting) == 1
    assert not engine.scheduler.waiting
    engine.add("branch", [*prompt(2, 320), *prompt(30, 16)], program_id="P1", max_tokens=8)
    engine.step()
    assert running(engine) == {"r0", "r1", "branch"}, "a second request of a program inside passes"
    assert status(engine, "P2") == "gated"
    assert running(crowd(make_engine, "continuum-paper")) == {"r0", "r1", "r2"}


def test_a_leased_program_is_not_asked_again(make_engine):
    """Also where the room would not do for it any more: it is the third to have come."""
    engine = make_engine("continuum", blocks=101, max_model_len=2048)
    context = {"kv_retention_ttl_seconds": 60}
    for number in range(2):
        engine.add(f"q{number}", prompt(20 + number, 16), program_id=f"P{number}")
        engine.run()
    engine.add("a1", prompt(1, 320), program_id="A", context=context)
    engine.run()
    for number in range(2):
        engine.add(f"r{number}", prompt(5 + number, 320), program_id=f"P{number}", max_tokens=64)
    engine.step()
    engine.add("a2", [*prompt(1, 320), 7, *prompt(2, 40)], program_id="A", max_tokens=5)
    engine.step()
    assert "a2" in running(engine)


@pytest.mark.parametrize(("shared", "inside"), [(True, {"r0", "r1"}), (False, {"r0"})])
def test_what_a_program_shares_with_those_inside_needs_no_room(make_engine, shared, inside):
    """Agents with one long system prompt: the second's prompt is mostly the first's blocks."""
    engine = make_engine("continuum", blocks=151, max_model_len=2048)
    for number in range(2):
        system = prompt(70 if shared else 70 + number, 960)
        engine.add(f"r{number}", [*system, *prompt(number, 16)], program_id=f"P{number}", max_tokens=64)
        for _ in range(20):
            engine.step()
    assert running(engine) == inside


def test_leases_of_later_programs_are_room_for_an_earlier_one(make_engine):
    engine = make_engine("continuum", blocks=101, max_model_len=2048, settings={"lease_budget_fraction": 1.0})
    hint = {"kv_retention_ttl_seconds": 300}
    engine.add("a1", prompt(1, 32), program_id="A")
    engine.run()
    engine.add("b1", prompt(2, 32), program_id="B")
    engine.run()
    for number in range(3, 6):
        engine.add(f"c{number}", prompt(number, 400), program_id=f"C{number}", context=hint)
        engine.run()
    assert engine.ask("stats")["leases"] == 3
    engine.add("a2", prompt(10, 64), program_id="A", max_tokens=60)
    engine.step()
    engine.add("b2", prompt(11, 640), program_id="B", max_tokens=30)
    engine.step()
    assert running(engine) == {"a2", "b2"}
    assert engine.ask("stats")["leases"] < 3


@pytest.mark.parametrize(
    ("policy", "last_tokens"),
    [("continuum", 320), ("saga", 320), ("continuum", 1120)],
    ids=["continuum", "saga", "too large"],
)
def test_a_program_that_waits_long_is_admitted_if_it_fits_and_else_blocks_later_requests(
    make_engine, clock, policy, last_tokens
):
    """Strangers pass it for a while. To stop them then would cost more than the reserve is worth, unless it
    does not fit: it then stands in their way, as the head of stock vLLM's queue would."""
    engine = crowd(make_engine, policy, last_tokens)
    engine.add("early", prompt(9, 32), max_tokens=5)
    engine.step()
    assert "early" in running(engine)
    assert status(engine, "P2") == "gated"
    clock.now += 31.0
    engine.add("late", prompt(10, 32), max_tokens=5)
    engine.step()
    if last_tokens == 1120:
        assert not {"r2", "late"} & running(engine)
        assert status(engine, "P2") == "gated"
        engine.abort("r0")
        engine.step()
    assert {"r2", "late"} <= running(engine)
    assert status(engine, "P2") == "reasoning"
    engine.run()
    assert engine.ask("stats")["requests"] == 0


def test_a_pass_that_came_to_nothing_does_not_begin_the_waiting_anew(make_engine, clock):
    """The policy lets it in, the engine finds no blocks for it, and then the policy thinks better of it."""
    engine = crowd(make_engine)
    engine.step()
    program_scheduler = engine.scheduler.sojourn.program_scheduler
    request_state = program_scheduler.state.requests.states["r2"]
    since = request_state.admission_blocked_since_s
    assert since is not None
    for after_s, free_blocks, passes in ((20.0, 100_000, True), (1.0, 0, False)):
        clock.now += after_s
        event = AdmissionRequested("r2", 10, free_blocks, anything_running=True)
        chosen = answer_of(program_scheduler.handle(event, clock.now), RequestChosen)
        assert (chosen is not None) is passes
    assert request_state.admission_blocked_since_s == since
    clock.now += 10.0
    assert program_scheduler.blocks_later_requests("r2", clock.now)
    engine.run()
    assert request_state.admission_blocked_since_s is None, "it was admitted"
