"""What the wire refuses, and its bounds. ``tests/fuzz`` has round trips and any other bytes."""

from __future__ import annotations

import contextlib
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


@pytest.mark.parametrize("field", ["program_id", "call_id", "parent_program_id", "root_program_id"])
def test_ids_are_bounded_in_bytes_not_characters(field):
    def event(value):
        fields = {"type": "program_start", "program_id": "p", "seq": 0, field: value}
        return json.dumps(fields, ensure_ascii=False).encode()

    assert getattr(decode_event(event("é" * 128)), field) == "é" * 128
    for value in ("é" * 129, "x" * 257, ""):
        with pytest.raises(WireError, match="expected 1 to 256"):
            decode_event(event(value))


@pytest.mark.parametrize("text", ["a\u0000b", "\n", "p\u007f", "\u0085", "\u009f"])
def test_an_id_has_no_control_character(text):
    """Such an id was accepted and then not found: no URL has it."""
    with pytest.raises(WireError, match=r"program_id has the control character .*; expected none"):
        decode_context(json.dumps({"program_id": text}))
    event = {"type": "tool_start", "program_id": "p", "seq": 0, "call_id": text, "tool": "t"}
    with pytest.raises(WireError, match="call_id has the control character"):
        decode_event(json.dumps(event).encode())
    with pytest.raises(WireError, match="emitter has the control character"):
        decode_batch(json.dumps({"v": 1, "emitter": text, "events": []}).encode())


def test_lone_surrogates_do_not_get_through():
    with pytest.raises(WireError):
        encode(wire_events.Heartbeat(program_id="\ud800", seq=0))
    for text in ('{"program_id":"\\ud800"}', '{"program_id":"\ud800"}'):
        with contextlib.suppress(WireError):
            decode_context(text)


@pytest.mark.parametrize("version", [0, 2, -1, 10**30])
def test_other_versions_are_refused_by_name(version):
    with pytest.raises(WireError):
        decode_batch(json.dumps({"v": version, "emitter": "e", "events": []}).encode())
    with pytest.raises(WireError):
        decode_context(json.dumps({"program_id": "p", "sojourn": {"v": version}}))


def test_fields_of_later_minor_additions_are_ignored():
    event = {"type": "heartbeat", "program_id": "p", "seq": 1, "mood": "fine"}
    assert decode_event(json.dumps(event).encode()).seq == 1
    assert decode_context('{"program_id":"p","task_id":"t","sojourn":{"colour":"red"}}').program_id == "p"
