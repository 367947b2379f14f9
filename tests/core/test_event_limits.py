"""Every event gets an outcome, whatever it is; a bad one changes nothing and says why. Events take 4 % of an
engine's time, however many API servers send them. ``tests/fuzz`` has bytes that are no batch."""

from __future__ import annotations

import heapq
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sojourn.aeg import Aeg
from sojourn.config import Config
from sojourn.request import MAX_PIGGYBACK_EVENTS
from sojourn.wire_codec import WIRE_VERSION, EventOutcome
from sojourn.wire_events import ProgramEnd, ToolStart
from sojourn_server.api.routes import EVENTS_TIMEOUT_S
from sojourn_server.core.event_limits import (
    EVENT_SHARE,
    EVENT_TYPES,
    MAX_ATTACHED_EVENTS,
    MAX_WAIT_S,
    EventTimeBudget,
)
from sojourn_server.core.program_scheduler import MAX_TOOLS_PER_PROGRAM
from sojourn_server.programs.program_status import ProgramStatus
from virtual_engine import TOOL, VirtualEngine, prompt

BEAT: dict[str, Any] = {"type": "heartbeat", "program_id": "p", "seq": 0}
START: dict[str, Any] = {"type": "tool_start", "program_id": "p", "seq": 0, "call_id": "c", "tool": "bash"}
STOP: dict[str, Any] = {"type": "tool_stop", "program_id": "p", "seq": 0, "call_id": "c", "duration_s": 1.0}

AEG = Aeg({"plan": (), "act": ("bash",)}, [("plan", "act"), ("act", "plan", 0.9)])
GRAPH: dict[str, Any] = {
    "type": "aeg", "program_id": "p", "seq": 0, "graph_hash": AEG.hash, "agent_type": "fixer",
    "graph": msgspec.to_builtins(AEG.wire()),
}  # fmt: skip


def known() -> VirtualEngine:
    """An engine that knows program ``p``, which is between two turns and leased."""
    engine = VirtualEngine()
    engine.turn("p", prompt(40))
    return engine


def post(
    engine: VirtualEngine, *events: Any, v: Any = WIRE_VERSION, emitter: str = "e"
) -> list[EventOutcome]:
    return engine.post({"v": v, "emitter": emitter, "events": list(events)})


def state_of(engine: VirtualEngine) -> Any:
    """All that an event could have changed."""
    program_scheduler = engine.program_scheduler
    programs = {
        p.id: (p.status, p.turns, dict(p.tools), p.pending_tool, p.heartbeats, p.agent_type, p.graph_hash)
        for p in program_scheduler.state.programs
    }
    leases = {
        held.program.id: (held.expires_s, held.silent_s, held.blocks) for held in engine.leases.values()
    }
    return programs, leases, program_scheduler.histories.tools.snapshot(), len(engine.done)


BAD_ROWS = {
    "not an object": (5, "rejected", "not an event"),
    "type is a number": ({**BEAT, "type": 5}, "rejected", "not an event"),
    "unknown type": ({**BEAT, "type": "tool_pause"}, "unsupported", "unknown event type 'tool_pause'"),
    "a graph nobody told": ({**BEAT, "type": "aeg", "graph_hash": "h"}, "missing", "send it with its nodes"),
    "a graph of another hash": ({**GRAPH, "graph_hash": "h"}, "rejected", "hash of this graph"),
    "a graph that dangles": (
        {**GRAPH, "graph": {"nodes": [{"id": "a"}], "edges": [{"source": "a", "target": "b"}]}},
        "rejected",
        "'b' is not a node",
    ),
    "a graph of an unknown program": ({**GRAPH, "program_id": "q"}, "missing", "unknown program"),
    "program_id missing": ({"type": "heartbeat", "seq": 0}, "rejected", "program_id"),
    "seq negative": ({**BEAT, "seq": -1}, "rejected", "seq is -1"),
    "unknown program": ({**BEAT, "program_id": "q"}, "missing", "unknown program"),
    "unknown program ends": ({**BEAT, "program_id": "q", "type": "program_end"}, "missing", "unknown"),
    "tool name too long": ({**START, "tool": "x" * 257}, "rejected", "tool is longer"),
    "stop without start": (STOP, "missing", "no such tool call"),
}  # fmt: skip


@pytest.mark.parametrize(("event", "outcome", "reason"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_event_changes_nothing_and_says_why(event: Any, outcome: str, reason: str) -> None:
    engine = known()
    before = state_of(engine)
    [answer] = post(engine, event)
    assert answer.outcome.value == outcome
    assert reason in answer.reason
    assert state_of(engine) == before
    assert engine.counter("sojourn_events_total", outcome=outcome) == 1


def test_a_stop_that_comes_before_its_start_teaches_the_gap_once() -> None:
    engine = known()
    engine.wait(2.0)
    answers = post(engine, {**STOP, "seq": 1}, {**START, "seq": 0, "tool_class": "pytest"})
    assert [a.outcome.value for a in answers] == ["missing", "applied"]
    engine.arrive("p", prompt(44))
    assert list(engine.program_scheduler.histories.tools.durations(TOOL)) == [2.0]
    assert engine.program("p").tools == {}


def test_events_of_an_ended_program_bring_nothing_back() -> None:
    engine = known()
    post(engine, {**BEAT, "type": "program_end"})
    before = state_of(engine)
    [late] = post(engine, {**START, "seq": 1})
    assert late.outcome.value == "missing"
    assert "has ended" in late.reason
    post(engine, {**BEAT, "type": "program_end", "seq": 2})
    assert state_of(engine)[:4] == before[:4]
    assert engine.program("p").status is ProgramStatus.ENDED


def test_a_tool_may_run_for_longer_than_its_program_may_be_silent() -> None:
    engine = known()
    post(engine, START)
    engine.wait(1801.0)
    assert engine.program("p").status is ProgramStatus.EXPIRED
    [late] = post(engine, {**STOP, "seq": 1, "duration_s": 1801.0})
    assert (late.outcome.value, late.reason) == ("applied", "")
    assert engine.program("p").status is ProgramStatus.ACTING
    assert engine.program("p").tools == {}
    engine.turn("p", prompt(44))
    assert list(engine.program_scheduler.histories.tools.durations("bash")) == [1801.0], (
        "told, and not guessed again"
    )
    assert engine.program_scheduler.histories.tools.count() == 1


def test_a_client_without_a_clock_leaves_the_duration_to_the_server() -> None:
    engine = known()
    engine.wait(0.5)
    post(engine, {**START, "age_s": 0.5})
    engine.wait(2.0)
    stop = {key: value for key, value in STOP.items() if key != "duration_s"}
    [outcome] = post(engine, {**stop, "seq": 1, "age_s": 0.25})
    assert outcome.outcome.value == "applied"
    assert list(engine.program_scheduler.histories.tools.durations("bash")) == pytest.approx([2.25])


@pytest.mark.parametrize("status", ["ok", "error", "cancelled", "on fire", ""])
def test_a_programs_end_is_counted_under_a_known_word(status: str) -> None:
    engine = known()
    engine.send(ProgramEnd(program_id="p", seq=-1, status=status))
    word = status if status in ("ok", "error", "cancelled") else "error"
    assert engine.counter("sojourn_programs_finished_total", outcome=word) == 1


def test_a_program_points_to_its_graph_which_the_next_one_only_names() -> None:
    engine = known()
    engine.turn("q", prompt(8, seed=1))
    engine.turn("r", prompt(8, seed=2))
    assert post(engine, GRAPH)[0].outcome.value == "applied"
    named = {"type": "aeg", "program_id": "q", "seq": 0, "graph_hash": AEG.hash}
    assert post(engine, named)[0].outcome.value == "applied"
    assert engine.program("p").graph_hash == engine.program("q").graph_hash == AEG.hash
    assert (engine.program("p").agent_type, engine.program("q").agent_type) == ("fixer", None)
    assert engine.program("r").graph_hash is None
    assert post(engine, {**GRAPH, "seq": 0})[0].outcome.value == "duplicate"


@pytest.mark.parametrize(
    ("preset", "unused"),
    [
        ("fixed-ttl", [["call_id"], ["expected_s", "expected_p95_s"], [], ["graph_hash", "graph"]]),
        ("sojourn", [["call_id"], [], [], []]),
        ("saga", [["call_id"], ["expected_s", "expected_p95_s"], [], []]),
    ],
)
def test_an_answer_names_the_fields_that_the_policy_does_not_use(
    preset: str, unused: list[list[str]]
) -> None:
    engine = VirtualEngine(preset)
    engine.turn("p", prompt(40))
    events: list[dict[str, Any]] = [
        {"type": "program_start", "program_id": "p", "call_id": "c", "agent_type": "fixer"},
        {**START, "expected_s": 3.0, "expected_p95_s": 9.0},
        {**START, "call_id": "other"},
        GRAPH,
    ]
    answers = post(engine, *({**event, "seq": number} for number, event in enumerate(events)))
    assert [answer.outcome.value for answer in answers] == ["applied"] * 4
    assert [list(answer.unsupported) for answer in answers] == unused
    told = set(engine.ask("capabilities")["unused_hints"])
    named = {f"{event['type']}.{field}" for event, of in zip(events, unused, strict=True) for field in of}
    assert named == {
        each for each in told if each.partition(".")[0] in ("program_start", "tool_start", "aeg")
    }
    # An event that changed nothing has no fields to speak of.
    [again] = post(engine, {**events[1], "seq": 1})
    assert (again.outcome.value, list(again.unsupported)) == ("duplicate", [])


def test_two_thousand_parallel_tools_are_bounded() -> None:
    engine = known()
    starts = [ToolStart(program_id="p", seq=-1, call_id=f"c{i}", tool=f"t{i}") for i in range(2000)]
    outcomes = [o.outcome.value for part in (starts[:1000], starts[1000:]) for o in engine.send(*part)]
    assert outcomes == ["applied"] * MAX_TOOLS_PER_PROGRAM + ["rejected"] * (2000 - MAX_TOOLS_PER_PROGRAM)
    assert len(engine.program("p").tools) == MAX_TOOLS_PER_PROGRAM
    engine.arrive("p", prompt(44))
    assert engine.program("p").tools == {}


def test_of_events_that_ride_along_as_many_count_as_the_client_may_attach() -> None:
    assert MAX_ATTACHED_EVENTS == MAX_PIGGYBACK_EVENTS
    engine = known()
    events = [{**BEAT, "seq": seq} for seq in range(MAX_ATTACHED_EVENTS + 36)]
    request = engine.arrive("p", prompt(44), sojourn={"v": 1, "emitter": "e", "events": events})
    assert engine.counter("sojourn_events_total", type="heartbeat", outcome="applied") == MAX_ATTACHED_EVENTS
    assert engine.program("p").live_requests == {request}, "the request itself is served"
    assert {answer.outcome.value for answer in post(engine, *events[-36:])} == {"applied"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
EVENT_LIKE = st.fixed_dictionaries(
    {"type": st.sampled_from([*EVENT_TYPES, "x"]) | JSON, "program_id": st.sampled_from(["p", "q"]) | JSON},
    optional={
        "seq": st.integers(0, 20) | JSON,
        "age_s": st.floats(0, 1e308) | JSON,
        "call_id": st.sampled_from(["c", "d"]) | JSON,
        "tool": st.sampled_from(["bash", "web"]) | JSON,
        "tool_class": st.text(max_size=8) | JSON,
        "duration_s": st.floats(0, 1e308) | JSON,
        "expected_s": st.floats(0, 10) | JSON,
        "heartbeat": st.booleans() | JSON,
        "graph_hash": st.text(min_size=1, max_size=4) | st.just(AEG.hash),
        "graph": st.just(GRAPH["graph"]) | JSON,
        "status": st.text(max_size=4) | JSON,
    },
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(EVENT_LIKE | JSON, max_size=8), max_size=4))
def test_any_json_gets_an_outcome_for_each_event(batches: list[list[Any]]) -> None:
    engine = known()
    for events in batches:
        answers = post(engine, *events)
        assert len(answers) == len(events)
        engine.wait(1.0)
        assert math.isfinite(sum(held.expires_s for held in engine.leases.values()))
        for operation in ("programs", "program", "stats"):
            engine.ask(operation, program_id="p")
    engine.turn("p", prompt(44))


@pytest.mark.parametrize("servers", [1, 2, 8, 32])
def test_servers_that_flood_share_one_engines_budget(servers: int) -> None:
    cost_s, now, busy_s = 0.0017, 0.0, 0.0
    budget = EventTimeBudget(now)
    due = [(0.0, server) for server in range(servers)]
    while now < 60.0:
        due_s, server = heapq.heappop(due)
        now = max(now, due_s) + cost_s  # the engine takes one call after the other
        busy_s += cost_s
        heapq.heappush(due, (now + budget.spend(cost_s, now), server))
    assert 0.8 * EVENT_SHARE <= busy_s / now <= 1.2 * EVENT_SHARE


def test_a_client_waits_longer_than_the_engine_pauses() -> None:
    assert MAX_WAIT_S < Config(url="http://e").send_timeout_s < EVENTS_TIMEOUT_S


def test_few_events_do_not_wait() -> None:
    budget = EventTimeBudget(0.0)
    assert all(budget.spend(0.001, now) == 0.0 for now in range(1, 100))


def test_one_slow_call_keeps_events_out_for_a_bounded_time() -> None:
    budget = EventTimeBudget(0.0)
    assert budget.spend(5.0, 5.0) == pytest.approx(MAX_WAIT_S)
    assert budget.spend(0.0, 5.0 + MAX_WAIT_S) == pytest.approx(0.0)
    assert budget.spend(0.0, 1.0) == pytest.approx(0.0)  # the clock was set back
