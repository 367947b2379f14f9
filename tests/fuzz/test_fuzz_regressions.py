"""Inputs that once ended in another error, in a text as long as the input, or not in bounded time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from file_decoders import (
    CHECKPOINT,
    HISTORY,
    MANIFEST_EXAMPLE,
    SDK_SPAN,
    SPANS,
    TRACE_TEXT,
    cached_run,
    compressed,
    profile_example,
)
from hostile_input import json_bytes, msgpack_bytes
from sojourn.errors import MAX_ERROR_CHARS, InputError
from sojourn_server.policies.toml_document import MAX_TOML_CHARS, TomlError, load_toml
from test_fuzz_decoders import DECODERS, Trial
from wire_decoders import PARAMS

LONG = "x" * 5000
HUGE = 10**400
DIGITS = b"9" * 5000
DEEP = b"[" * 5000
DEEP_CLOSED = DEEP + b"]" * 5000
DEEP_MAP = b"\x81\xa1a" + b"\x91" * 5000 + b"\x00"
"""msgpack of an object with lists in lists."""


def history(**parts: Any) -> bytes:
    """A server's histories with other values in their parts."""
    document = json.loads(HISTORY)
    for name, changed in parts.items():
        document[name] |= changed
    return json_bytes(document)


def span(**changed: Any) -> bytes:
    return json_bytes({"resourceSpans": [{"scopeSpans": [{"spans": [SPANS[1] | changed]}]}]})


def usage(tokens: Any) -> bytes:
    told = SDK_SPAN["attributes"] | {"gen_ai.usage.input_tokens": tokens}
    return json_bytes(SDK_SPAN | {"attributes": told})


REGRESSIONS: dict[str, tuple[str, bytes]] = {
    "a long type of an event is not repeated": ("event", json_bytes({"type": LONG})),
    "a long outcome": ("outcomes", json_bytes({"outcomes": [{"outcome": LONG}]})),
    "a long type of a peer's message": ("peer message", msgspec.msgpack.encode([LONG])),
    "a long address": ("peer address", b"[" * 5000 + b":x"),
    "half a head": ("peer frame head", b"SJ\x01"),
    "an operation as long as a batch": ("engine call", json_bytes([LONG])),
    "batches that are no list": ("engine call", b"event_batches\n{"),
    "a share beyond floats": ("KV transfer parameters", json_bytes(PARAMS[0] | {"decode_share": HUGE})),
    "a long number of blocks": ("KV transfer parameters", json_bytes(PARAMS[1] | {"stored": LONG})),
    "a deep status": ("KV transfer status", DEEP_CLOSED),
    "a deep stream": ("stream of completions", b"data: " + DEEP + b"\n\n"),
    "an answer of infinite tokens": (
        "stream of completions",
        b'data: {"choices":[{}],"usage":{"completion_tokens":1e999}}\n\n',
    ),
    "a deep error event": ("engine answer", b'data: {"error":' + DEEP_CLOSED + b"}\n\n"),
    "an error event of bytes": ("engine answer", b'data: {"error": "\xff"}\n\n'),
    "a count of 5,000 digits": ("engine answer", b'{"usage":{"prompt_tokens": ' + DIGITS + b"}}"),
    "a deep report": ("engine report", DEEP_CLOSED),
    "seconds beyond floats": ("engine report", b'{"paths":{"links":{"a":{"queued_s":' + b"9" * 400 + b"}}}}"),
    "deep arguments of a tool": ("tool arguments", b'{"command":' + DEEP_CLOSED + b"}"),
    "a deep preset": ("preset", b"name = " + DEEP),
    "an integer of 5,000 digits in a preset": ("preset", b"name = " + DIGITS),
    "an integer beyond floats in a preset": (
        "preset",
        b'extends = "continuum"\nretention = {policy = "fixed", ttl_s = ' + b"9" * 400 + b"}",
    ),
    "a long key of a preset": ("preset", LONG.encode() + b" = 1"),
    "a preset that is not UTF-8": ("preset", b'name = "\xff"'),
    "a deep profile": ("engine profile", b"model = " + DEEP),
    "deep tenants": ("tenants", b"tenants = " + DEEP),
    "patience beyond floats": ("plugin settings", json_bytes({"sojourn": {"queue_patience_s": HUGE}})),
    "deep settings": ("plugin settings", DEEP),
    "a YAML integer of 5,000 digits": ("Ray configuration", b"port: " + DIGITS),
    "a YAML date that is none": ("Ray configuration", b"model: 2025-02-31"),
    "a deep configuration": ("Ray configuration", b"model: " + b"[" * 2000),
    "a deep model configuration": ("model folder", DEEP),
    "a tool's duration beyond floats": ("server history", history(tools={"newest": [HUGE]})),
    "turns beyond floats": ("server history", history(turns={"turns": [10**300, 3, 5]})),
    "a mean beyond floats": ("server history", history(hints_off={"coder": [1e308] * 64})),
    "a span that starts at infinity": ("OpenTelemetry spans", span(startTimeUnixNano=float("inf"))),
    "a span that ends beyond floats": ("OpenTelemetry spans", span(endTimeUnixNano=10**330)),
    "infinite tokens": ("OpenTelemetry spans", usage(float("inf"))),
    "a record of 5,000 digits": ("ledgers", DIGITS),
    "a record that is half a surrogate pair": ("ledgers", b'"\\ud800"'),
    "a long field of a manifest": ("manifest", json_bytes(json.loads(MANIFEST_EXAMPLE) | {LONG: 1})),
    "tokens beyond floats": (
        "OpenTelemetry spans",
        json_bytes(SPANS).replace(b'"1000"', b'"1' + b"0" * 400 + b'"'),
    ),
    "a checkpoint of bytes": (
        "coordinator checkpoint",
        msgspec.msgpack.encode(CHECKPOINT).replace(b"coder", b"\xff" * 5),
    ),
    "a deep checkpoint": ("coordinator checkpoint", DEEP_MAP),
    "a deep cached run": ("cached run", compressed(DEEP_MAP)),
    "a deep routing state": ("routing state", b'{"a":' + DEEP_CLOSED + b"}"),
    "a cached run of bytes": (
        "cached run",
        compressed(msgpack_bytes(cached_run()).replace(b"stock", b"\xff" * 5)),
    ),
}  # fmt: skip

REFUSED: dict[str, tuple[str, bytes]] = {
    "a measurement that is not a number": (
        "engine profile",
        profile_example().to_toml().replace("0.04", "nan").encode(),
    ),
    "tokens that no memory holds": (
        "trace",
        TRACE_TEXT.replace(b'"prompt_tokens":64', b'"prompt_tokens":1' + b"0" * 18),
    ),
    "a dotted key of 32,000 parts": ("cluster preset", b"a." * 32_000 + b"a = 1"),
}
"""Inputs that were once taken."""


@pytest.mark.parametrize("name", REGRESSIONS)
def test_it_ends_as_documented(name: str, tmp_path: Path) -> None:
    decoder, data = REGRESSIONS[name]
    Trial(DECODERS[decoder], tmp_path)(data)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str, tmp_path: Path) -> None:
    decoder, data = REFUSED[name]
    with pytest.raises(DECODERS[decoder].errors):
        Trial(DECODERS[decoder], tmp_path)(data, valid=True)


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    text = str(InputError(f"f.toml: name is {LONG!r}; expected a name"))
    assert len(text) == MAX_ERROR_CHARS
    assert text.startswith("f.toml: name is 'xxx")
    assert text.endswith("; expected a name")
    assert str(InputError("short")) == "short"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a = " + "[" * 3000, "nested too deeply"),
        ("a = " + "9" * 5000, "not TOML"),
        (f"a = {2**63}", "expected at most 64"),
        (f"a = [[{{b = {-(2**64)}}}]]", "expected at most 64"),
        ("a." * 2000 + "a = 1", "too many dots"),
        ("a = 2025-02-31", "not TOML"),
        ("#" * (MAX_TOML_CHARS + 1), "expected at most"),
    ],
)
def test_toml_has_bounds(text: str, says: str) -> None:
    with pytest.raises(TomlError, match=says) as failure:
        load_toml(text)
    assert len(str(failure.value)) < 300


def test_toml_within_the_bounds_is_read() -> None:
    rows = ",".join(["[1.5, 2.5]"] * 2000)
    assert load_toml(f"a = {2**63 - 1}\nb = {-(2**63)}\nrows = [{rows}]")["b"] == -(2**63)
