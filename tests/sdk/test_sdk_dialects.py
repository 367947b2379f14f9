"""What each dialect says, byte for byte, and which way its priority points.

The bytes are in ``tests/golden/dialects/<name>.json``: a body as its JSON text, and the headers. After a
change that is meant, write them anew, look at the difference, and commit it:

    python tests/sdk/test_sdk_dialects.py

Which way a priority points is *not* taken from there, but from the table in docs/dialects.md.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import sojourn
from hypothesis import given
from hypothesis import strategies as st
from sojourn.dialects import DIALECTS
from sojourn.hints import AgenticContext, SojournContext
from sojourn.testing import FakeServer
from sojourn.wire_codec import MAX_CONTEXT_BYTES, encode

GOLDEN = Path(__file__).parent.parent / "golden" / "dialects"


def context(program_id="p-7f3a", sojourn=None, **hints):
    return AgenticContext(program_id=program_id, sojourn=SojournContext(**(sojourn or {})), **hints)


CASES = {
    "minimal": context(),
    "full": context(
        parent_program_id="p-01c2",
        root_program_id="p-0001",
        blocks_parent=True,
        expected_resume=True,
        request_id="r-52c1",
        step_id="12",
        priority=3,
        deadline_seconds=42.5,
        expected_output_length=200,
        kv_retention_ttl_seconds=30.0,
        sojourn={"agent_type": "coder", "node": "edit", "heartbeat": True, "tenant": "blue"},
    ),
    "priority 0": context(priority=0),
    "priority 7": context(priority=7),
    "priority 2**40": context(priority=2**40),
    "priority -2**40": context(priority=-(2**40)),
    "ids beyond ASCII": context(
        "агент:7", parent_program_id="Ärger & 50%", root_program_id="根", request_id="r 1", step_id="plan"
    ),
    "ids of 256 bytes": context("x" * 256, parent_program_id="é" * 128, root_program_id="r" * 256),
    "256 bytes beyond ASCII": context("é" * 128),
    "deadline passed": context(deadline_seconds=0.0, step_id="-1"),
    "final": context(expected_resume=False, sojourn={"final": True}),
    "implicit": context(priority=1, sojourn={"implicit": True}),
}


def said(name):
    """Of one dialect: case → exact body and headers."""
    result = {}
    for case, hints in CASES.items():
        body, headers = DIALECTS[name].fields(hints)
        result[case] = {"body": encode(body).decode(), "headers": headers}
    return result


@pytest.mark.parametrize("name", DIALECTS)
def test_every_byte_is_as_pinned(name):
    assert said(name) == json.loads((GOLDEN / f"{name}.json").read_text())


def test_the_page_names_every_dialect_and_its_direction():
    page = (GOLDEN.parent.parent.parent / "docs" / "dialects.md").read_text(encoding="utf-8")
    overview = page.partition("## Direction of priorities")[0]
    assert {line.split("`")[1] for line in overview.splitlines() if line.startswith("| `")} == set(DIALECTS)
    directions = page.partition("## Direction of priorities")[2].partition("##")[0]
    for line in directions.splitlines():
        if line.startswith("| `"):
            names, _, becomes = [cell.strip() for cell in line.strip("|").split("|")][:3]
            for name in names.replace("`", "").split(", "):
                found = re.findall(
                    r"priority[^\w-]+(-?\d+)", str(DIALECTS[name].fields(context(priority=7))[0])
                )
                assert (found or ["not sent"]) == [becomes.strip("`")], name


# ---- what a strict server would refuse


names = st.text(min_size=1, max_size=256).filter(lambda text: len(text.encode("utf-8", "replace")) <= 256)
contexts = st.builds(
    AgenticContext,
    program_id=names,
    parent_program_id=st.none() | names,
    root_program_id=st.none() | names,
    blocks_parent=st.none() | st.booleans(),
    expected_resume=st.none() | st.booleans(),
    request_id=st.none() | names,
    step_id=st.none() | names | st.integers(-5, 2**70).map(str),
    priority=st.none() | st.integers(-(2**70), 2**70),
    deadline_seconds=st.none() | st.floats(min_value=0, allow_nan=False),
    expected_output_length=st.none() | st.integers(0, 2**70),
    kv_retention_ttl_seconds=st.none() | st.floats(min_value=0, allow_nan=False),
    sojourn=st.none() | st.builds(SojournContext, final=st.booleans(), tenant=st.none() | names),
)


@given(contexts)
def test_headers_can_be_sent_whatever_the_ids(hints):
    for dialect in DIALECTS.values():
        if dialect.name == "sojourn" and not _sayable(hints):
            continue
        for name, value in dialect.fields(hints)[1].items():
            assert value
            assert (name + value).isascii()
            assert (name + value).isprintable()
            assert " " not in value


@given(contexts)
def test_vllm_router_gets_only_what_its_parser_takes(hints):
    """The rules of ``canonical_identity`` in src/program_scheduling/identity.rs, written down again."""
    body, headers = DIALECTS["vllm_router"].fields(hints)
    text = body["vllm_xargs"]["agentic_context"]
    assert len(text.encode()) <= MAX_CONTEXT_BYTES
    told = json.loads(text)
    assert set(told) <= {
        "program_id", "parent_program_id", "root_program_id", "blocks_parent", "expected_resume",
        "request_id", "step_id", "priority", "deadline_seconds", "expected_output_length",
        "kv_retention_ttl_seconds",
    }  # fmt: skip
    ids = [told[name] for name in told if name.endswith("_id") and name != "step_id"]
    assert all(0 < len(id.strip().encode()) <= 256 for id in ids)
    assert told["program_id"].strip() != told.get("parent_program_id", "").strip()
    assert "parent_program_id" in told or "blocks_parent" not in told
    assert 0 <= told.get("step_id", 0) < 2**64
    assert -(2**63) <= told.get("priority", 0) < 2**63
    assert 0 <= told.get("expected_output_length", 0) < 2**63
    assert 0 <= told.get("deadline_seconds", 0) < 1e9
    assert 0 <= told.get("kv_retention_ttl_seconds", 0) <= 300  # it blocks a place for so long
    assert len(headers["X-Session-ID"].encode()) <= 256  # it becomes the router's placement key


def _sayable(hints):
    """JSON has no lone surrogates: such ids are refused where a program is made."""
    try:
        encode(hints)
    except sojourn.wire_codec.WireError:
        return False
    return True


# ---- choosing one


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_can_be_chosen_and_asks_nothing(name):
    with FakeServer() as server:
        sojourn.init(server.url, dialect=name)
        with sojourn.program("p", id="p-1", priority=0):
            _, headers = sojourn.request_parts()
        assert headers
        assert server.probes == 0
        assert (sojourn.stats().dialect, sojourn.stats().dialect_known) == (name, True)
        if name != "sojourn":
            assert server.batches == []


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name in DIALECTS:
        text = json.dumps(said(name), indent=1, ensure_ascii=False)
        (GOLDEN / f"{name}.json").write_text(text + "\n")
