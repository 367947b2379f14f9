"""Running tool calls of all programs together are bounded, and every way in which one ends counts."""

from __future__ import annotations

import pytest
from sojourn.wire_codec import EventOutcome
from sojourn.wire_events import ProgramEnd, ProgramStart, ToolStart, ToolStop
from sojourn_server.core import client_event_handler
from sojourn_server.core.program_lifecycle import OWN_TOOLS_PER_PROGRAM
from sojourn_server.core.scheduler_limits import SchedulerLimits
from sojourn_server.programs.program_status import ProgramStatus
from virtual_engine import VirtualEngine, prompt

BOUND = 40


@pytest.fixture(autouse=True)
def low_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_event_handler, "MAX_RUNNING_TOOLS", BOUND)


def starts(program: str, calls: range) -> list[ToolStart]:
    return [ToolStart(program_id=program, seq=-1, call_id=f"c{call}", tool="bash") for call in calls]


def words(outcomes: list[EventOutcome]) -> list[str]:
    return [outcome.outcome.value for outcome in outcomes]


def full(limits: SchedulerLimits | None = None) -> VirtualEngine:
    """An engine where ``flood`` has all the tool calls that may run."""
    engine = VirtualEngine(limits=limits)
    engine.turn("p", prompt(40))
    engine.turn("flood", prompt(40, seed=1))
    assert words(engine.send(*starts("flood", range(BOUND)))) == ["applied"] * BOUND
    return engine


def has_room(engine: VirtualEngine) -> bool:
    """Whether a program that has its own few tool calls may start one more."""
    engine.send(*starts("p", range(OWN_TOOLS_PER_PROGRAM)))
    [outcome] = engine.send(*starts("p", range(99, 100)))
    assert (outcome.outcome.value, outcome.reason) in (
        ("applied", ""),
        ("rejected", f"{BOUND} tool calls of all programs already run"),
    )
    return outcome.outcome.value == "applied"


def test_beyond_the_bound_of_all_programs_a_tool_start_is_rejected() -> None:
    engine = full()
    assert words(engine.send(*starts("flood", range(BOUND, 2 * BOUND)))) == ["rejected"] * BOUND
    assert not has_room(engine)
    assert len(engine.program("flood").tools) == BOUND


def test_a_flood_of_tools_leaves_each_program_a_few() -> None:
    engine = full()
    assert words(engine.send(*starts("p", range(OWN_TOOLS_PER_PROGRAM + 1)))) == [
        *["applied"] * OWN_TOOLS_PER_PROGRAM,
        "rejected",
    ]


@pytest.mark.parametrize("way", ["stop", "end", "request", "silence", "dropped"])
def test_a_tool_call_that_ends_makes_room(way: str) -> None:
    engine = full(SchedulerLimits(max_programs=3))
    assert not has_room(engine)
    if way == "stop":
        stops = [ToolStop(program_id="flood", seq=-1, call_id=f"c{i}", duration_s=1.0) for i in range(5)]
        assert words(engine.send(*stops)) == ["applied"] * 5
    elif way == "end":
        engine.send(ProgramEnd(program_id="flood", seq=-1, status="ok"))
    elif way == "request":
        engine.arrive("flood", prompt(44, seed=1))
    elif way == "silence":
        engine.wait(1801.0)
        assert engine.program("flood").status is ProgramStatus.EXPIRED
    else:
        engine.send(ProgramStart(program_id="x", seq=-1))
        engine.turn("x", prompt(40, seed=2))
        engine.now += 1.0
        engine.send(*starts("p", range(OWN_TOOLS_PER_PROGRAM)))  # so that flood is the longest silent
        engine.send(ProgramStart(program_id="y", seq=-1))
        engine.turn("y", prompt(40, seed=3))
        assert engine.program_scheduler.state.programs.forgotten == 1
    assert has_room(engine)


def test_silence_keeps_a_few_tools_and_no_flood() -> None:
    """The few may still run, and their ends are worth learning; see
    ``test_a_tool_may_run_for_longer_than_its_program_may_be_silent``."""
    engine = full()
    engine.send(*starts("p", range(OWN_TOOLS_PER_PROGRAM)))
    engine.wait(1801.0)
    assert engine.program("flood").tools == {}
    assert len(engine.program("p").tools) == OWN_TOOLS_PER_PROGRAM
