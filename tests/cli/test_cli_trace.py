"""``sojourn trace``: files in, a trace or a picture out, or one error and no file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_process import invoke, refused
from sojourn_server.traces.trace_file import read_trace
from virtual_engine import VirtualEngine, prompt


def engine_with_a_turn() -> VirtualEngine:
    engine = VirtualEngine()
    request = engine.arrive("p", prompt(90))
    engine.wait(0.25)
    engine.admit(request)
    engine.wait(0.25)
    engine.program_scheduler.first_token(request, engine.now)
    engine.wait(0.5)
    engine.finish(request)
    return engine


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_a_file_becomes_a_trace(tmp_path: Path, name: str) -> None:
    given, made = tmp_path / "in.json", tmp_path / name
    given.write_text(json.dumps(engine_with_a_turn().ask("program", program_id="p")))
    result = invoke("trace", "import", str(given), "--from", "sojourn", "-o", str(made))
    assert result.exit_code == 0, result.output
    (program,) = read_trace(made)
    assert (program.turns[0].prompt_tokens, program.turns[0].output_tokens) == (90, 2)


@pytest.mark.parametrize(
    ("content", "source", "output", "message", "step"),
    [
        ("{}", "otle", "o.jsonl", "--from otle is unknown; did you mean 'otel'?", "use one of claude-code, "),
        ("{}", "otel", "o.csv", "o.csv: expected a name ending in .jsonl or .jsonl.gz", "change the name"),
        ("{}", "otel", "o.jsonl", "line 1: no span", "docs/traces.md"),
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
    engine = engine_with_a_turn()
    engine.ask("policy", on=False)
    server = serve(
        {
            "/sojourn/v1/programs": {"programs": [{"program_id": "p"}, {"program_id": "gone"}], "total": 2},
            "/sojourn/v1/programs/p": engine.ask("program", program_id="p"),
            "/sojourn/v1/decisions": engine.ask("decisions", since=0, limit=100),
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
