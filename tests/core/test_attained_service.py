"""What a program's requests ran and waited, as in Autellix's process table (arXiv 2502.13965, Alg. 1)."""

from __future__ import annotations

import math

import pytest
from sojourn.ids import ProgramId
from sojourn.wire_events import ProgramEnd, ProgramStart
from sojourn_server.core.events_and_actions import TurnFinishReason
from sojourn_server.policies.costs.engine_profile import PrefillCurve
from sojourn_server.policies.policy_views import RunningRequestView, WaitingRequestView
from sojourn_server.policies.preset import parse_preset
from sojourn_server.programs.program_status import ProgramStatus
from virtual_engine import VirtualEngine, chain, prompt


def engine() -> VirtualEngine:
    return VirtualEngine("autellix")


def turn(engine: VirtualEngine, program: str, waits_s: float, runs_s: float) -> None:
    request = engine.arrive(program, prompt(40))
    engine.wait(waits_s)
    engine.admit(request)
    engine.wait(runs_s)
    engine.finish(request)


def seen(engine: VirtualEngine, request: str) -> WaitingRequestView:
    return engine.program_scheduler.waiting_view(request)


def test_service_and_waiting_add_up_over_turns_and_tools_count_for_neither() -> None:
    e = engine()
    turn(e, "p", 0.5, 1.0)
    e.wait(100.0)
    turn(e, "p", 0.25, 0.5)
    view = seen(e, e.arrive("p", prompt(40)))
    assert (view.attained_s, view.waited_s, view.ran_s) == (1.5, 0.75, 0.0)
    assert view.since_s == view.arrived_s == view.now_s == e.now


def test_a_preempted_request_has_run_and_waits_anew() -> None:
    e = engine()
    request = e.arrive("p", prompt(40))
    e.wait(1.0)
    e.admit(request)
    e.wait(2.0)
    e.program_scheduler.preempted(request, e.now)
    e.wait(4.0)
    view = seen(e, request)
    assert (view.ran_s, view.waited_s, view.now_s - view.since_s) == (2.0, 1.0, 4.0)
    assert view.attained_s == 0.0, "a call's own service counts for its program when it is over"
    e.admit(request, resumed=True)
    e.wait(8.0)
    e.finish(request)
    program = e.program("p")
    assert (program.attained_s, program.waited_s) == (10.0, 5.0)


def test_a_request_that_is_admitted_again_while_it_runs_has_not_waited() -> None:
    """vLLM admits each further part of a prompt that a client streams."""
    e = engine()
    request = e.arrive("p", prompt(40))
    e.wait(1.0)
    for _ in range(3):
        e.admit(request)
        e.wait(2.0)
    view = seen(e, request)
    assert (view.ran_s, view.waited_s) == (4.0, 1.0)
    e.finish(request)
    program = e.program("p")
    assert (program.attained_s, program.waited_s) == (6.0, 1.0)


def test_a_program_that_ends_without_a_turn_teaches_no_service() -> None:
    e = engine()
    for number in range(10):
        program = ProgramId(f"x{number}")
        e.send(ProgramStart(program_id=program, seq=1, agent_type="coder"))
        e.send(ProgramEnd(program_id=program, seq=2))
    assert e.program_scheduler.histories.service.count("coder") == 0


def test_of_parallel_requests_the_longest_chain_counts() -> None:
    """ATLAS's scalar: max of what there is and the call's own start plus run."""
    e = engine()
    turn(e, "p", 0.0, 1.0)
    long, short = e.arrive("p", prompt(40)), e.arrive("p", prompt(44))
    e.admit(long)
    e.admit(short)
    e.wait(2.0)
    e.finish(short)
    e.wait(3.0)
    e.finish(long)
    assert e.program("p").attained_s == 1.0 + 5.0


def test_an_aborted_request_has_run_and_waited_too() -> None:
    e = engine()
    running, waiting = e.arrive("p", prompt(40)), e.arrive("p", prompt(44))
    e.admit(running)
    e.wait(3.0)
    e.finish(running, outcome=TurnFinishReason.ABORTED)
    e.finish(waiting, outcome=TurnFinishReason.ABORTED)
    assert (e.program("p").attained_s, e.program("p").waited_s) == (3.0, 3.0)


@pytest.mark.parametrize("ends_first", [True, False])
def test_a_request_that_outlives_its_programs_end_counts_for_no_later_program_of_that_id(
    ends_first: bool,
) -> None:
    e = engine()
    outlives = e.arrive("p", prompt(80, 1))
    e.admit(outlives)
    e.wait(100.0)
    e.send(ProgramEnd(program_id="p", seq=-1))
    turn_of_the_next = e.arrive("p", prompt(40))
    if ends_first:
        e.finish(outlives)
    e.admit(turn_of_the_next)
    e.wait(2.0)
    e.finish(turn_of_the_next)
    if not ends_first:
        e.finish(outlives, outcome=TurnFinishReason.ABORTED)
    program = e.program("p")
    assert (program.turns, program.attained_s, program.waited_s) == (1, 2.0, 0.0)
    assert (program.context_tokens, program.disconnected) == (42, False)
    assert e.program_scheduler.context(program.id) == chain([*prompt(40), 7, 7])
    assert program.status is ProgramStatus.ACTING


def test_a_program_lasts_from_its_own_first_request_although_its_id_was_used_before() -> None:
    e = engine()
    for _ in range(2):
        turn(e, "p", 0.0, 5.0)
        assert e.now - e.program("p").arrived_s == 5.0
        e.send(ProgramEnd(program_id="p", seq=-1))
        e.wait(1000.0)
    durations = e.program_scheduler.recorder.drain()["histograms"]["sojourn_program_duration_seconds"]
    assert sum(row["sum"] for _, row in durations) == 10.0


def test_what_was_before_a_promotion_is_forgotten() -> None:
    e = engine()
    turn(e, "p", 0.0, 3.0)  # 3 s of service: the second queue; promoted after 8 * 3 s
    request = e.arrive("p", prompt(40))
    assert e.program_scheduler.queue_place(request).changes_s == e.now + 24.0
    e.wait(26.0)
    e.admit(request)
    e.wait(1.0)
    e.finish(request)
    assert (e.program("p").attained_s, e.program("p").waited_s) == (4.0, 2.0)


def test_the_victim_policy_sees_what_running_requests_have_run() -> None:
    e = engine()
    turn(e, "old", 0.0, 3.0)
    old, new = e.arrive("old", prompt(40)), e.arrive("new", prompt(44))
    e.admit(old)
    e.admit(new)
    views = [RunningRequestView(old, 1, 0, 10), RunningRequestView(new, 2, 1, 11)]
    assert e.program_scheduler.victim(views, e.now) == old
    # 7 s in, the new one has used up the quanta of 1, 2 and 4 s; the old one entered a queue further down
    # and has used up 2 and 4 there, so both stand in the fourth: the last admitted goes.
    e.wait(7.0)
    assert e.program_scheduler.victim(views, e.now) == new


def test_a_turns_waste_is_weighed_against_the_others_that_run() -> None:
    """InferCept: half its own recompute, and the whole of it for the tokens beside it."""
    e = VirtualEngine("infercept", curve=PrefillCurve(0.0, 0.1, 0.0))
    mine, other = e.arrive("p", prompt(40)), e.arrive("q", prompt(80))
    stranger = e.arrive(None, prompt(20))
    for request in (mine, other, stranger):
        e.admit(request)
    lease = e.finish(mine)
    context = e.program("p").context_tokens
    assert lease.ttl_s == pytest.approx(context * 0.1 / 2 + context * 0.1 * (80 + 20) / context)
    e.finish(other)
    e.finish(stranger)
    lease = e.leases.get("q")  # type: ignore[arg-type]
    assert lease.ttl_s == pytest.approx(e.program("q").context_tokens * 0.1 / 2 + 0.1 * 20)


def test_a_long_recompute_goes_in_pieces_of_a_step() -> None:
    e = VirtualEngine("infercept", curve=PrefillCurve(0.0, 0.0, 0.01))
    e.program_scheduler.pool.step_tokens = 20
    mine, other = e.arrive("p", prompt(40)), e.arrive("q", prompt(80))
    e.admit(mine)
    e.admit(other)
    lease = e.finish(mine)
    context = e.program("p").context_tokens
    pieces = math.ceil(context / 20)
    chunked_s = pieces * 0.01 * math.ceil(context / pieces) ** 2
    assert lease.ttl_s == pytest.approx(0.01 * context**2 / 2 + chunked_s * 80 / context)


def test_an_engine_that_stands_idle_is_counted_from_the_first_who_asks() -> None:
    preset = parse_preset(
        'extends = "admit"\nadmission = { policy = "whole-program", patience_s = 5.0 }', source="x"
    )
    e = VirtualEngine(preset, blocks=12)
    first = e.arrive("a", prompt(40))
    e.admit(first)
    assert e.finish(first) is not None
    late = e.arrive("b", prompt(40))
    request_state = e.request_state(late)

    def enters(running: bool = False) -> bool:
        return e.program_scheduler.may_admit(request_state, 10, 2, e.now, anything_running=running)

    e.wait(100.0)
    assert not enters(), "nobody had asked before"
    e.wait(4.9)
    assert not enters()
    assert not enters(running=True)
    e.wait(4.0)
    assert not enters(), "it ran in between"
    e.wait(5.0)
    assert enters()
