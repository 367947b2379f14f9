"""The examples of docs/wire.md are the encoder's output. ``tests/fuzz`` reads them."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from sojourn.aeg import END, START, Aeg
from sojourn.hints import AgenticContext, SojournContext
from sojourn.wire_codec import EventBatch, EventOutcome, Outcome, OutcomeBatch, encode
from sojourn.wire_events import AegReport, Heartbeat, ProgramEnd, ProgramStart, ToolStart, ToolStop

DOCUMENT = Path(__file__).parents[2] / "docs" / "wire.md"
ME = "p-7f3a"
TOP = "p-01c2"

BEGUN = ProgramStart(
    program_id=ME,
    seq=0,
    age_s=0.0051,
    name="fix-issue",
    agent_type="coder",
    parent_program_id=TOP,
    root_program_id=TOP,
    call_id="call_3",
    heartbeat=True,
    tenant="team-a",
)
GRAPH = Aeg(
    {"plan": (), "act": ("bash", "edit")},
    [(START, "plan"), ("plan", "act"), ("act", "act", 0.7), ("act", END, 0.3)],
)
TOOL_START = ToolStart(
    program_id=ME,
    seq=4,
    age_s=0.0052,
    call_id="call_9",
    tool="bash",
    tool_class="pytest",
    expected_s=12.0,
    expected_p95_s=40.5,
)
TOOL_STOP = ToolStop(program_id=ME, seq=5, age_s=0.0003, call_id="call_9", duration_s=11.73, status="nonzero")
EXAMPLES = {
    "context": AgenticContext(
        program_id=ME,
        parent_program_id=TOP,
        root_program_id=TOP,
        blocks_parent=True,
        request_id="r-9a4e",
        step_id="12",
        priority=3,
        deadline_seconds=42.5,
        expected_output_length=200,
        kv_retention_ttl_seconds=30.0,
        sojourn=SojournContext(
            agent_type="coder", node="edit", heartbeat=True, tenant="team-a", expected_steps_left=3.5
        ),
    ),
    "program_start": BEGUN,
    "aeg": AegReport(
        program_id=ME, seq=1, age_s=0.0049, graph_hash=GRAPH.hash, agent_type="coder", graph=GRAPH.wire()
    ),
    "aeg_again": AegReport(program_id=TOP, seq=31, graph_hash=GRAPH.hash, agent_type="coder"),
    "tool_start": TOOL_START,
    "tool_stop": TOOL_STOP,
    "heartbeat": Heartbeat(program_id=ME, seq=6, age_s=0.0001),
    "program_end": ProgramEnd(program_id=ME, seq=7, age_s=0.0002, status="error"),
    "batch": EventBatch(
        v=1,
        emitter="e-52c1",
        events=[msgspec.Raw(encode(TOOL_START)), msgspec.Raw(encode(Heartbeat(program_id=TOP, seq=9)))],
        dropped=2,
    ),
    "riding": AgenticContext(
        program_id=ME,
        sojourn=SojournContext(emitter="e-52c1", heartbeat=True, events=[msgspec.Raw(encode(TOOL_STOP))]),
    ),
    "outcomes": OutcomeBatch(
        outcomes=[
            EventOutcome(
                outcome=Outcome.APPLIED, program_id=ME, seq=4, unsupported=("expected_s", "expected_p95_s")
            ),
            EventOutcome(outcome=Outcome.MISSING, reason="unknown program", program_id=TOP, seq=9),
        ]
    ),
}
SHOWN = dict(re.findall(r"<!-- example: (\w+) -->\n```json\n(.*?)\n```", DOCUMENT.read_text(), re.DOTALL))


def test_every_example_is_shown_and_every_shown_one_is_known():
    assert set(SHOWN) == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_what_the_encoder_says(name):
    assert SHOWN[name].encode() == encode(EXAMPLES[name])


def test_every_outcome_is_explained():
    table = DOCUMENT.read_text().split("## Outcomes")[1].split("## Capabilities")[0]
    for outcome in Outcome:
        assert f"| `{outcome.value}` |" in table
