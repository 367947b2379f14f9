"""``sojourn trace``: files in, a trace or a picture out, or one error and no file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_process import invoke, refused
from sojourn_server.traces.trace_file import read_trace

LEDGER = {
    "program_id": "p",
    "ledger": [
        {
            "turn": 1,
            "outcome": "stopped",
            "arrived_s": 5.0,
            "output_tokens": 7,
            "seconds": {"wall": 1.0},
            "tokens": {"prompt": 90, "device": 0, "new": 90, "tail": 0, "lost": {}},
        }
    ],
}


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_a_file_becomes_a_trace(tmp_path: Path, name: str) -> None:
    given, made = tmp_path / "in.json", tmp_path / name
    given.write_text(json.dumps(LEDGER))
    result = invoke("trace", "import", str(given), "--from", "sojourn", "-o", str(made))
    assert result.exit_code == 0, result.output
    (program,) = read_trace(made)
    assert (program.turns[0].prompt_tokens, program.turns[0].output_tokens) == (90, 7)


@pytest.mark.parametrize(
    ("content", "source", "output", "message", "step"),
    [
        ("{}", "otle", "o.jsonl", "--from otle is unknown; did you mean 'otel'?", "use one of claude-code, "),
        ("{}", "otel", "o.csv", "o.csv: expected a name ending in .jsonl or .jsonl.gz", "change the name"),
        ("{}", "otel", "o.jsonl", "line 1: no span", "docs/traces.md"),
        ("{}", "sojourn", "o.jsonl", "Object missing required field `program_id`", "docs/traces.md"),
    ],
)
def test_a_failure_is_one_line_and_writes_nothing(
    tmp_path: Path, content: str, source: str, output: str, message: str, step: str
) -> None:
    given = tmp_path / "in.json"
    given.write_text(content)
    error = refused("trace", "import", str(given), "--from", source, "-o", str(tmp_path / output))
    assert message in error.message
    assert step in error.next_step
    assert "synthetic:" not in error.next_step
    assert [path.name for path in tmp_path.iterdir()] == ["in.json"]


# -- sojourn trace export ------------------------------------------------------------------


def test_an_engines_programs_and_decisions_are_exported(tmp_path: Path, serve: Any) -> None:
    seconds = {"wall": 1.0, "queued": 0.25, "prefilling": 0.25, "decoding": 0.5}
    ledger = [{**LEDGER["ledger"][0], "seconds": seconds, "leased": False, "lease_ttl_s": None}]
    decisions = [
        {"seq": 0, "at_s": 5.5, "kind": "keep", "program_id": "p", "reason": "this_tool", "ttl_s": 3.0},
        {"seq": 1, "at_s": 5.6, "kind": "policy", "program_id": None, "reason": "on"},
    ]
    listed = {"programs": [{"program_id": "p"}, {"program_id": "gone"}], "total": 2}
    server = serve(
        {
            "/sojourn/v1/programs": listed,
            "/sojourn/v1/programs/p": {"program_id": "p", "tenant": "t", "ledger": ledger},
            "/sojourn/v1/decisions": {"decisions": decisions, "next": 2},
        }
    )
    export = ("trace", "export", "--perfetto", str(tmp_path / "run.json"))
    result = invoke(*export)
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "run.json").read_text("utf-8"))
    events = {event["name"]: event for event in document["traceEvents"] if event["ph"] != "M"}
    assert {"turn 1", "queued", "prefill", "decode", "keep", "policy"} <= {*events}
    assert events["keep"]["pid"] == events["turn 1"]["pid"]
    assert events["keep"]["tid"] == events["turn 1"]["tid"]
    assert events["policy"]["pid"] != events["keep"]["pid"]
    assert (document["otherData"]["programs"], document["otherData"]["programs_known"]) == (1, 2)
    server.answers["/sojourn/v1/programs/p"] = {"program_id": "p"}  # as a gateway answers
    assert "is a gateway" in refused(*export).message
