"""What the wire refuses, and its bounds. ``tests/fuzz`` has round trips and any other bytes."""

from __future__ import annotations

import json

import msgspec
import pytest
from sojourn import wire_events
from sojourn.wire_codec import (
    MAX_BATCH_BYTES,
    MAX_BATCH_EVENTS,
    EventBatch,
    WireError,
    decode_batch,
    decode_context,
    decode_event,
    encode,
)


def test_batches_are_bounded_in_bytes_and_events():
    one = msgspec.Raw(encode(wire_events.Heartbeat(program_id="p", seq=1)))
    decode_batch(encode(EventBatch(v=1, emitter="e", events=[one] * MAX_BATCH_EVENTS)))
    with pytest.raises(WireError, match="at most 1024"):
        decode_batch(encode(EventBatch(v=1, emitter="e", events=[one] * (MAX_BATCH_EVENTS + 1))))
    with pytest.raises(WireError, match="at most 262144"):
        decode_batch(b" " * (MAX_BATCH_BYTES + 1))


NO_TIMES = ("NaN", "Infinity", "-Infinity", "-1", "-0.001", "1e999", '"3"', "true")


@pytest.mark.parametrize(
    ("field", "value"),
    [*((field, value) for field in ("age_s", "duration_s") for value in NO_TIMES), ("age_s", "null")],
)
def test_times_are_finite_and_not_negative(field, value):
    fields = {"age_s": "0", "duration_s": "0", field: value}
    inner = ",".join(f'"{name}":{text}' for name, text in fields.items())
    with pytest.raises(WireError):
        decode_event(f'{{"type":"tool_stop","program_id":"p","seq":1,"call_id":"c",{inner}}}'.encode())


def event(**fields):
    start = {"type": "program_start", "program_id": "p", "seq": 0, **fields}
    return decode_event(json.dumps(start, ensure_ascii=False).encode())


def context(**fields):
    return decode_context(json.dumps({"program_id": "p", **fields}))


def batch(**fields):
    return decode_batch(json.dumps({"v": 1, "emitter": "e", "events": [], **fields}).encode())


@pytest.mark.parametrize("field", ["program_id", "call_id", "parent_program_id", "root_program_id"])
def test_ids_are_bounded_in_bytes_not_characters(field):
    assert getattr(event(**{field: "é" * 128}), field) == "é" * 128
    for value in ("é" * 129, "x" * 257, ""):
        with pytest.raises(WireError, match="expected 1 to 256"):
            event(**{field: value})


@pytest.mark.parametrize("text", ["a\u0000b", "\n", "p\u007f", "\u0085", "\u009f"])
def test_an_id_has_no_control_character(text):
    """Such an id was accepted and then not found: no URL has it."""
    for decode, field in ((context, "program_id"), (event, "call_id"), (batch, "emitter")):
        with pytest.raises(WireError, match=rf"{field} has the control character .*; expected none"):
            decode(**{field: text})


def test_a_lone_surrogate_cannot_be_encoded():
    with pytest.raises(WireError):
        encode(wire_events.Heartbeat(program_id="\ud800", seq=0))


@pytest.mark.parametrize("version", [0, 2, -1, 10**30])
def test_other_versions_are_refused_by_name(version):
    with pytest.raises(WireError):
        batch(v=version)
    with pytest.raises(WireError):
        context(sojourn={"v": version})


def test_fields_of_later_minor_additions_are_ignored():
    assert event(mood="fine").seq == 0
    assert context(task_id="t", sojourn={"colour": "red"}).program_id == "p"
