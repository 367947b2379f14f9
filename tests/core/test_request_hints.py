"""Who sends a request: read from whatever the engine carries of it. ``tests/fuzz`` has any other bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sojourn.dialects import DIALECTS
from sojourn.hints import AgenticContext, SojournContext
from sojourn.wire_codec import MAX_CONTEXT_BYTES, Outcome
from sojourn_server.core.request_hints import CONTEXT_KEY, NO_IDENTITY, read_identity


def hint(**fields: Any) -> dict[str, Any]:
    return {CONTEXT_KEY: json.dumps(fields)}


@pytest.mark.parametrize("session", [None, "", "x" * 257, "é" * 129, 5, b"p"])
@pytest.mark.parametrize("xargs", [None, {}, {"other": "x"}])
def test_nobody(session: Any, xargs: dict[str, Any] | None) -> None:
    assert read_identity(session, xargs) == NO_IDENTITY


def test_the_hint_comes_before_the_header_which_alone_names_the_program_too() -> None:
    header = read_identity("é" * 128, None)
    assert (header.program_id, header.outcome) == ("é" * 128, None)
    identity = read_identity("header", hint(program_id="hint", expected_resume=False))
    assert (identity.program_id, identity.outcome) == ("hint", Outcome.APPLIED)
    assert identity.context.expected_resume is False


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"program_id": "p"}, "not a JSON string"),
        ("{", "not an agentic_context"),
        ('{"program_id": ""}', "program_id has 0 bytes"),
        ('{"program_id": 5, "priority": "high"}', "program_id: Expected `str`, got `int`"),
        ('{"program_id": "p", "priority": "high", "sojourn": [', "not an agentic_context"),
        (json.dumps({"program_id": "p", "sojourn": {"v": "one"}}), "sojourn.v: Expected `int`"),
        (json.dumps({"program_id": "p", "sojourn": {"v": 9}}), "version 9"),
        (json.dumps({"program_id": "p" * MAX_CONTEXT_BYTES}), "bytes"),
        ("[" * 10_000, "not an agentic_context"),
    ],
)
def test_a_malformed_hint_is_reported_and_the_header_counts(value: Any, reason: str) -> None:
    identity = read_identity("p", {CONTEXT_KEY: value})
    assert (identity.program_id, identity.context, identity.outcome) == ("p", None, Outcome.REJECTED)
    assert reason in identity.reason


@pytest.mark.parametrize(
    ("field", "raw", "problem"),
    [
        ("priority", "3.5", "priority: Expected `int | null`, got `float`"),
        ("request_id", "5", "request_id: Expected `str"),
        ("step_id", "[1]", "step_id: Expected `str"),
        ("step_id", "1.5", "step_id: Expected `int`, got `float`"),
        ("step_id", "9" * 5000, "step_id: Integer value out of range"),
        ("kv_retention_ttl_seconds", "1e999", "kv_retention_ttl_seconds: Number out of range"),
        ("parent_program_id", '""', "parent_program_id has 0 bytes"),
        ("root_program_id", '"a\\nb"', "root_program_id has the control character"),
        ("sojourn", '"us"', "sojourn: Expected `object`"),
    ],
)
def test_a_bad_optional_field_drops_that_field_alone(field: str, raw: str, problem: str) -> None:
    """vLLM Router's numeric step_id once took the program's identity with it."""
    hint = f'{{"program_id":"p","blocks_parent":true,"{field}":{raw}}}'
    identity = read_identity("header", {CONTEXT_KEY: hint})
    assert (identity.program_id, identity.outcome) == ("p", Outcome.CLIPPED)
    assert identity.reason.startswith(problem)
    assert identity.context == AgenticContext(program_id="p", blocks_parent=True)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ('"step_id":12', {"step_id": "12"}),
        ('"priority":3.0,"expected_output_length":200.0', {"priority": 3, "expected_output_length": 200}),
        ('"priority":null,"request_id":null,"sojourn":null', {}),
        ('"sojourn":{"final":null,"node":"act"}', {"sojourn": SojournContext(node="act")}),
    ],
)
def test_equal_values_of_another_type_are_converted(fields: str, expected: dict[str, Any]) -> None:
    identity = read_identity(None, {CONTEXT_KEY: f'{{"program_id":"p",{fields}}}'})
    assert (identity.context, identity.outcome) == (
        AgenticContext(program_id="p", **expected),
        Outcome.APPLIED,
    )


def test_a_bad_field_of_our_part_leaves_the_rest() -> None:
    event = b'{"type":"heartbeat","program_id":"p","seq":1}'
    own = f'{{"emitter":"e","final":"soon","node":7,"tenant":"t","events":[{event.decode()}]}}'
    identity = read_identity(None, {CONTEXT_KEY: f'{{"program_id":"p","sojourn":{own}}}'})
    assert identity.outcome is Outcome.CLIPPED
    assert "sojourn.final: " in identity.reason
    assert "sojourn.node: " in identity.reason
    sojourn = identity.context.sojourn
    assert (sojourn.emitter, sojourn.tenant, sojourn.final, sojourn.node) == ("e", "t", False, None)
    assert [bytes(raw) for raw in sojourn.events] == [event]


def test_our_own_dialect_of_vllm_router_is_understood() -> None:
    body, headers = DIALECTS["vllm_router"].fields(AgenticContext(program_id="p", step_id="12", priority=3))
    identity = read_identity(headers["X-Session-ID"], body["vllm_xargs"])
    assert (identity.program_id, identity.outcome) == ("p", Outcome.APPLIED)
    assert identity.context == AgenticContext(program_id="p", step_id="12", priority=3)
