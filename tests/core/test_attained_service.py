"""What a program's requests ran and waited, as in Autellix's process table (arXiv 2502.13965, Alg. 1)."""

from __future__ import annotations

import math

import pytest
from sojourn.ids import ProgramId
from sojourn.wire_events import ProgramEnd, ProgramStart
from sojourn_server.core.events_and_actions import TurnFinishReason
from sojourn_server.policies.costs.engine_profile import PrefillCurve
from sojourn_server.policies.policy_views import RunningRequestView
from sojourn_server.policies.preset import parse_preset
from sojourn_server.programs.program_status import ProgramStatus
from virtual_engine import VirtualEngine, chain, prompt


def engine() -> VirtualEngine:
    return VirtualEngine("autellix")


def turn(engine: VirtualEngine, program: str, runs_s: float) -> None:
    request = engine.arrive(program, prompt(40))
    engine.admit(request)
    engine.wait(runs_s)
    engine.finish(request)


PREEMPTED = "arrive a, wait 1, admit a, wait 2, preempt a, wait 4"
STREAMED = "arrive a, wait 1, admit a, wait 2, admit a, wait 2, admit a, wait 2"
"""vLLM admits each further part of a prompt that a client streams. The request runs on."""
LIVES = {
    "turns add up, and tools count for neither": (
        "arrive a, wait 0.5, admit a, wait 1, finish a, wait 100, "
        "arrive b, wait 0.25, admit b, wait 0.5, finish b, arrive c",
        (1.5, 0.75, 0.0, 0.0),
    ),
    "a call's service counts for its program when it is over": (PREEMPTED, (0.0, 1.0, 2.0, 4.0)),
    "preempted and resumed": (f"{PREEMPTED}, resume a, wait 8, finish a, arrive b", (10.0, 5.0, 0.0, 0.0)),
    "in parts": (STREAMED, (0.0, 1.0, 4.0, 2.0)),
    "in parts, to the end": (f"{STREAMED}, finish a, arrive b", (6.0, 1.0, 0.0, 0.0)),
    "of parallel requests the longest chain counts, as in ATLAS": (
        "arrive a, admit a, wait 1, finish a, "
        "arrive b, arrive c, admit b, admit c, wait 2, finish c, wait 3, finish b, arrive d",
        (6.0, 0.0, 0.0, 0.0),
    ),
    "aborted requests have run and waited too": (
        "arrive a, arrive b, admit a, wait 3, abort a, abort b, arrive c",
        (3.0, 3.0, 0.0, 0.0),
    ),
    "what was before a promotion, after 8 times the 3 s of service, is forgotten": (
        "arrive a, admit a, wait 3, finish a, arrive b, wait 26, admit b, wait 1, finish b, arrive c",
        (4.0, 2.0, 0.0, 0.0),
    ),
}
"""What the requests of a program do, and what the last one's view then says: seconds of the program's
service, seconds that its requests waited, and that this one ran, before its present state, and seconds in
that."""


@pytest.mark.parametrize(("acts", "expected"), LIVES.values(), ids=LIVES)
def test_what_requests_ran_and_waited(acts: str, expected: tuple[float, ...]) -> None:
    e, requests = engine(), dict[str, str]()
    for act in acts.split(", "):
        what, _, name = act.partition(" ")
        if what == "arrive":
            requests[name] = e.arrive("p", prompt(40 + 4 * len(requests)))
        elif what == "wait":
            e.wait(float(name))
        elif what == "preempt":
            e.program_scheduler.preempted(requests[name], e.now)
        elif what in ("admit", "resume"):
            e.admit(requests[name], resumed=what == "resume")
        else:
            outcome = TurnFinishReason.STOPPED if what == "finish" else TurnFinishReason.ABORTED
            e.finish(requests[name], outcome=outcome)
    view = e.program_scheduler.waiting_view([*requests.values()][-1])
    assert (view.attained_s, view.waited_s, view.ran_s, view.now_s - view.since_s) == expected


def test_a_program_that_ends_without_a_turn_teaches_no_service() -> None:
    e = engine()
    for number in range(10):
        program = ProgramId(f"x{number}")
        e.send(ProgramStart(program_id=program, seq=1, agent_type="coder"))
        e.send(ProgramEnd(program_id=program, seq=2))
    assert e.program_scheduler.histories.service.count("coder") == 0


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
        turn(e, "p", 5.0)
        assert e.now - e.program("p").arrived_s == 5.0
        e.send(ProgramEnd(program_id="p", seq=-1))
        e.wait(1000.0)
    durations = e.program_scheduler.recorder.drain()["histograms"]["sojourn_program_duration_seconds"]
    assert sum(row["sum"] for _, row in durations) == 10.0


def test_the_victim_policy_sees_what_running_requests_have_run() -> None:
    e = engine()
    turn(e, "old", 3.0)
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
    """InferCept: half its own recompute, and all of it, in pieces of a step, for the tokens beside it."""
    e = VirtualEngine("infercept", curve=PrefillCurve(0.0, 0.0, 0.01))
    e.program_scheduler.pool.step_tokens = 20
    mine, other = e.arrive("p", prompt(40)), e.arrive("q", prompt(80))
    stranger = e.arrive(None, prompt(20))
    for request in (mine, other, stranger):
        e.admit(request)

    def ttl_s(program: str, beside: int) -> float:
        context = e.program(program).context_tokens
        pieces = math.ceil(context / 20)
        chunked_s = pieces * 0.01 * math.ceil(context / pieces) ** 2
        return 0.01 * context**2 / 2 + chunked_s * beside / context

    assert e.finish(mine).ttl_s == pytest.approx(ttl_s("p", 80 + 20))
    e.finish(other)
    e.finish(stranger)
    assert e.leases.get(ProgramId("q")).ttl_s == pytest.approx(ttl_s("q", 20))


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
