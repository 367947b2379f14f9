"""The context that is written by hand says the same as the structs of the wire format."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from sojourn.event_queue import PendingEvent
from sojourn.hint_encoder import write_context
from sojourn.hints import AgenticContext, SojournContext
from sojourn.ids import ProgramId, id_problem
from sojourn.program import Program
from sojourn.wire_codec import decode_context, decode_event, encode
from sojourn.wire_events import ToolStart, ToolStop

NOW = 1000.0
TEXTS = ("a", 'quote " and \\', "line\nbreak\ttab\x01\x7f", "агент", "\U0001f600", "x" * 256)
IDS = tuple(text for text in TEXTS if id_problem(text) is None)


def by_structs(
    program: Program,
    node: str | None,
    events: list[PendingEvent] | None,
    steps_left: float | None = None,
) -> AgenticContext:
    ours = SojournContext(
        emitter=None if events is None else "e-1",
        agent_type=program.agent_type,
        implicit=program.implicit,
        node=node,
        heartbeat=program.heartbeat,
        tenant=program.tenant,
        expected_steps_left=steps_left,
        events=[event.event(NOW) for event in events or ()],  # type: ignore[misc]
    )
    context = AgenticContext(
        program_id=program.id,
        parent_program_id=program.parent_id,
        root_program_id=program.root_id,
        request_id="r-1",
        sojourn=ours,
    )
    return decode_context(encode(context))


def decoded(context: AgenticContext) -> tuple[Any, ...]:
    """The context, with its events decoded."""
    assert context.sojourn is not None
    events = [decode_event(raw) for raw in context.sojourn.events]
    plain = json.loads(encode(context))
    plain["sojourn"].pop("events", None)
    return plain, events


def a_program(random: Random) -> Program:
    parent = Program(ProgramId(random.choice(IDS))) if random.random() < 0.5 else None
    return Program(
        ProgramId(random.choice(IDS)),
        agent_type=random.choice((None, *TEXTS)),
        parent=parent,
        tenant=random.choice((None, *TEXTS)),
        heartbeat=random.random() < 0.5,
        implicit=random.random() < 0.5,
    )


def an_event(random: Random, program_id: str, seq: int) -> PendingEvent:
    at_s = random.choice((NOW, NOW - 2e-6, NOW - 0.5, NOW - 86400.0, NOW + 1.0))
    seconds = round(random.choice((0.0, 1e-6, 0.25, 1.0, 59.999999, 12345.678901)) * random.random(), 6)
    if random.random() < 0.5:
        status = random.choice(("ok", "error", "timeout", "nonzero", "cancelled"))
        fields = {"call_id": random.choice(IDS), "duration_s": seconds, "status": status}
        return PendingEvent(program_id, ToolStop, seq, at_s, fields)
    fields = {
        "call_id": random.choice(IDS),
        "tool": random.choice(TEXTS),
        "tool_class": random.choice((None, *TEXTS)),
        "expected_s": random.choice((None, seconds)),
    }
    return PendingEvent(program_id, ToolStart, seq, at_s, fields)


def test_both_ways_say_the_same():
    random = Random(7)
    for _ in range(500):
        program = a_program(random)
        node = random.choice((None, *TEXTS))
        events = [an_event(random, program.id, seq) for seq in range(random.randrange(1, 5))]
        left = random.choice((None, 0.0, 3, 2.5, 1e300, 5e-324))
        text = write_context(program, "r-1", node, "e-1", events, NOW, left)
        assert text is not None
        assert decoded(decode_context(text)) == decoded(by_structs(program, node, events, left))


def test_without_events_there_is_no_emitter():
    program = Program(ProgramId("p"), heartbeat=False)
    text = write_context(program, "r-1", None, None, (), NOW)
    assert text == '{"program_id":"p","request_id":"r-1","sojourn":{}}'
    assert decoded(decode_context(text)) == decoded(by_structs(program, None, None))


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e300, 1, True])
def test_unusual_durations_are_left_to_the_structs(seconds):
    stop = {"call_id": "c", "duration_s": seconds, "status": "ok"}
    start = {"call_id": "c", "tool": "t", "tool_class": None, "expected_s": seconds}
    program = Program(ProgramId("p"))
    for kind, fields in ((ToolStop, stop), (ToolStart, start)):
        event = PendingEvent("p", kind, 0, NOW, fields)
        assert write_context(program, "r-1", None, "e-1", [event], NOW) is None


def test_a_text_that_utf8_cannot_express_raises_here_and_not_in_the_client():
    event = PendingEvent("p", ToolStop, 0, NOW, {"call_id": "\ud800", "duration_s": 0.0, "status": "ok"})
    with pytest.raises(UnicodeEncodeError):
        write_context(Program(ProgramId("p")), "r-1", None, "e-1", [event], NOW)


def test_no_field_of_the_structs_is_forgotten():
    """Add a new field to ``write_context``, or to those that a usual request does not have."""
    written = "program_id parent_program_id root_program_id request_id sojourn"
    hints = (
        "blocks_parent expected_resume step_id priority deadline_seconds expected_output_length "
        "kv_retention_ttl_seconds"
    )
    assert {*AgenticContext.__struct_fields__} == {*written.split(), *hints.split()}
    written = "emitter agent_type node heartbeat implicit tenant expected_steps_left events"
    assert {*SojournContext.__struct_fields__} == {*written.split(), "v", "final"}
    start = "program_id seq age_s call_id tool tool_class expected_s expected_p95_s"
    assert ToolStart.__struct_fields__ == tuple(start.split())
    assert ToolStop.__struct_fields__ == ("program_id", "seq", "age_s", "call_id", "duration_s", "status")
