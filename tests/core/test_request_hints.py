"""Who sends a request: read from whatever the engine carries of it, and never an error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn.wire_codec import MAX_CONTEXT_BYTES, Outcome
from sojourn_server.core.request_hints import CONTEXT_KEY, NO_IDENTITY, read_identity


def hint(**fields: Any) -> dict[str, Any]:
    return {CONTEXT_KEY: json.dumps(fields)}


@pytest.mark.parametrize("session", [None, "", "x" * 257, "é" * 129, 5, b"p"])
@pytest.mark.parametrize("xargs", [None, {}, {"other": "x"}])
def test_nobody(session: Any, xargs: dict[str, Any] | None) -> None:
    assert read_identity(session, xargs) == NO_IDENTITY


def test_the_session_header_alone_names_the_program() -> None:
    identity = read_identity("é" * 128, None)
    assert (identity.program_id, identity.outcome) == ("é" * 128, None)


def test_the_hint_comes_before_the_header() -> None:
    identity = read_identity("header", hint(program_id="hint", expected_resume=False))
    assert (identity.program_id, identity.outcome) == ("hint", Outcome.APPLIED)
    assert identity.context is not None
    assert identity.context.expected_resume is False


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"program_id": "p"}, "not a JSON string"),
        ("{", "not an agentic_context"),
        ("{}", "program_id"),
        ('{"program_id": ""}', "program_id has 0 bytes"),
        (json.dumps({"program_id": "p", "kv_retention_ttl_seconds": "long"}), "kv_retention_ttl_seconds"),
        ('{"program_id": "p", "kv_retention_ttl_seconds": 1e999}', "out of range"),
        (json.dumps({"program_id": "p", "sojourn": {"v": 9}}), "version 9"),
        (json.dumps({"program_id": "p" * MAX_CONTEXT_BYTES}), "bytes"),
        ("[" * 10_000, "not an agentic_context"),
    ],
)
def test_a_malformed_hint_is_reported_and_the_header_counts(value: Any, reason: str) -> None:
    identity = read_identity("p", {CONTEXT_KEY: value})
    assert (identity.program_id, identity.context, identity.outcome) == ("p", None, Outcome.REJECTED)
    assert reason in identity.reason


@given(st.none() | st.text(), st.none() | st.text() | st.integers() | st.binary() | st.lists(st.text()))
def test_never_an_error(session: str | None, value: Any) -> None:
    identity = read_identity(session, {CONTEXT_KEY: value})
    assert identity.outcome in (None, Outcome.REJECTED, Outcome.APPLIED)
