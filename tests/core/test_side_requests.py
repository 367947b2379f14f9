"""One program id, several conversations: side requests are no turns and leave the main context alone.

The requests come from clients without hints, such as command-line agents. ``virtual_engine`` has blocks of
four tokens, so a prompt of 40 tokens has ten.
"""

from __future__ import annotations

import pytest
from sojourn.ids import ProgramId
from sojourn.wire_events import ProgramStart, ToolStart, ToolStop
from sojourn_server.core.events_and_actions import TurnFinishReason
from virtual_engine import BASH, TOOL, VirtualEngine, chain, prompt

P = ProgramId("p")
SYSTEM = prompt(8, 1)
TASK = [*SYSTEM, *prompt(32, 2)]
"""First prompt of the conversation."""
NEXT = [*TASK, 7, 7, *prompt(10, 3)]
"""Second prompt: the first, its output, and the tool's result."""
TITLE = prompt(12, 9)
PAGE = prompt(100, 5)
"""A web page that a tool has summarised: longer than the conversation that waits for the tool."""
ANSWER = "All done."


def context(engine: VirtualEngine) -> list[int] | None:
    hashes = engine.program_scheduler.context(P)
    return None if hashes is None else list(hashes)


def turns(engine: VirtualEngine) -> list[tuple[int, float | None]]:
    """(number, gap) of each turn in the ledger."""
    return [(turn.turn, turn.gap_s) for turn in engine.program_scheduler.turns_of("p")]


@pytest.mark.parametrize("title_arrives_first", [False, True])
@pytest.mark.parametrize("title_ends_first", [False, True])
def test_a_title_request_beside_the_first_turn(title_arrives_first: bool, title_ends_first: bool) -> None:
    engine = VirtualEngine()
    prompts = [TITLE, TASK] if title_arrives_first else [TASK, TITLE]
    requests = [engine.arrive("p", one) for one in prompts]
    for request in requests:
        engine.admit(request)
    title, task = requests if title_arrives_first else requests[::-1]
    for request in (title, task) if title_ends_first else (task, title):
        engine.finish(request, BASH if request == task else ANSWER)
    assert context(engine) == chain([*TASK, 7, 7])
    assert engine.held[P] == chain([*TASK, 7, 7])
    assert engine.program("p").turns == 1
    assert turns(engine) == [(1, None)]
    assert engine.program_scheduler.state.requests.untracked_arrivals == 0


@pytest.mark.parametrize("side", [TITLE, SYSTEM, [*SYSTEM, *prompt(20, 5)], TASK[:16], [8], PAGE])
def test_a_side_request_leaves_tool_lease_and_gap_alone(side: list[int]) -> None:
    engine = VirtualEngine()
    engine.send(ProgramStart(seq=-1, program_id="p"))
    engine.turn("p", TASK)
    engine.send(ToolStart(seq=-1, program_id="p", call_id="c", tool="bash", tool_class="pytest"))
    engine.wait(1.0)
    for _ in range(3):
        engine.turn("p", side, ANSWER)
    assert P in engine.program_scheduler.leases
    assert engine.program("p").tools.keys() == {"c"}
    assert context(engine) == chain([*TASK, 7, 7])
    engine.wait(1.0)
    engine.send(ToolStop(seq=-1, program_id="p", call_id="c", duration_s=2.0))
    engine.wait(1.0)
    engine.turn("p", NEXT)
    assert turns(engine) == [(1, None), (2, 3.0)]
    assert engine.program("p").turns == 2
    assert [*engine.program_scheduler.histories.tools.durations(TOOL)] == [2.0]
    kinds = [decision.kind for decision in engine.program_scheduler.decisions.of_program("p")]
    assert kinds.count("side_request") == 3


def test_a_side_request_has_its_programs_place_in_the_queue() -> None:
    engine = VirtualEngine("continuum")
    engine.turn("p", TASK)
    engine.turn("q", TASK)
    of_q, of_p = engine.arrive("q", NEXT), engine.arrive("p", TITLE)
    places = {name: engine.program_scheduler.queue_place(name) for name in (of_q, of_p)}
    assert engine.program_scheduler.request(of_p).program_id is None
    assert sorted(places, key=lambda name: places[name].key) == [of_p, of_q]


def test_a_sub_agent_without_an_id_does_not_displace_the_parent_that_waits_for_it() -> None:
    engine = VirtualEngine()
    engine.turn("p", TASK)
    agent = [*SYSTEM, *prompt(12, 6)]
    for turn in range(4):
        engine.wait(0.1)
        engine.turn("p", [*agent, *prompt(2 * turn, 7)])
    assert context(engine) == chain([*TASK, 7, 7])
    assert P in engine.program_scheduler.leases
    engine.turn("p", NEXT)
    assert engine.program("p").turns == 2


def test_a_conversation_moves_on_after_a_compaction() -> None:
    engine = VirtualEngine()
    engine.turn("p", TASK)
    engine.turn("p", NEXT, ANSWER)  # the summary: no tool follows
    short = [*SYSTEM, *prompt(8, 8)]
    engine.turn("p", short)
    assert context(engine) == chain([*NEXT, 7, 7])
    longer = [*short, 7, 7, *prompt(6, 9)]
    engine.turn("p", longer)
    assert context(engine) == chain([*longer, 7, 7])
    assert engine.held[P] == chain([*longer, 7, 7])
    assert engine.program("p").turns == 3
    engine.turn("p", [*longer, 7, 7, *prompt(6, 10)])
    assert engine.program("p").turns == 4


def test_a_branch_takes_over_once_the_main_context_has_lost_its_lease() -> None:
    engine = VirtualEngine()
    engine.turn("p", TASK)
    branch = [*TASK[:12], *prompt(6, 8)]
    engine.turn("p", branch)
    engine.wait(1000.0)
    assert P not in engine.program_scheduler.leases
    continued = [*branch, 7, 7, *prompt(1, 9), 7]
    engine.turn("p", continued)
    assert context(engine) == chain([*continued, 7, 7])


@pytest.mark.parametrize(("text", "kept"), [(BASH, 32), (ANSWER, 20)])
def test_a_rewind_is_the_next_turn_at_once(text: str, kept: int) -> None:
    engine = VirtualEngine()
    engine.turn("p", NEXT, text)
    rewound = [*NEXT[:kept], *prompt(8, 8)]
    engine.turn("p", rewound)
    assert context(engine) == chain([*rewound, 7, 7])
    assert engine.program("p").turns == 2


def test_a_turn_may_leave_out_what_the_last_output_had() -> None:
    engine = VirtualEngine()
    first = engine.arrive("p", TASK)
    engine.admit(first)
    engine.finish(first, output=prompt(60, 4))  # a long chain of thought, which the client leaves out
    engine.turn("p", NEXT)
    assert engine.program("p").turns == 2
    assert context(engine) == chain([*NEXT, 7, 7])


def test_of_parallel_requests_the_longest_is_the_turn() -> None:
    engine = VirtualEngine()
    engine.turn("p", TASK)
    turn, suggestion = engine.arrive("p", NEXT), engine.arrive("p", [*TASK, 7, 7, *prompt(4, 5)])
    again = engine.arrive("p", NEXT)  # a client that repeats a request
    for request in (turn, suggestion, again):
        engine.admit(request)
    for request in (turn, again, suggestion):
        engine.finish(request)
    assert context(engine) == chain([*NEXT, 7, 7])
    assert P in engine.program_scheduler.leases


def test_the_id_of_an_ended_program_begins_a_new_conversation() -> None:
    engine = VirtualEngine("continuum")
    engine.turn("p", TASK)
    program = engine.program("p")
    engine.wait(100_000.0)
    assert program.outcome is not None
    engine.turn("p", TITLE)
    assert context(engine) == chain([*TITLE, 7, 7])


def test_a_request_with_hints_is_a_turn_unless_it_repeats_a_request_id() -> None:
    engine = VirtualEngine()
    for request_id, text in (("r1", TASK), ("r1", TASK), ("r2", TITLE)):
        engine.turn("p", text, request_id=request_id)
        engine.wait(1.0)
    assert engine.program("p").turns == 2
    assert context(engine) == chain([*TITLE, 7, 7])
    assert turns(engine) == [(1, None), (1, None), (2, 1.0)]
    assert [*engine.program_scheduler.histories.tools.durations(TOOL)] == [1.0]
    failed = engine.arrive("p", NEXT, request_id="r3")
    engine.admit(failed)
    engine.finish(failed, outcome=TurnFinishReason.ABORTED)
    engine.turn("p", NEXT, request_id="r3")
    assert engine.program("p").turns == 3
