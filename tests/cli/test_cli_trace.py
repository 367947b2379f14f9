"""``sojourn trace import``: a file in, a trace out, or one error and no file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer.testing
from sojourn_server.cli import build_app
from sojourn_server.cli.console import CliError
from sojourn_server.traces.trace_reader import read_trace

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
SPAN = {
    "traceId": "aa",
    "spanId": "bb",
    "name": "chat",
    "startTimeUnixNano": "1000000000",
    "endTimeUnixNano": "2000000000",
    "attributes": [
        {"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}},
        {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "90"}},
        {"key": "gen_ai.usage.output_tokens", "value": {"intValue": "7"}},
    ],
}


def sojourn(*arguments: str) -> typer.testing.Result:
    return typer.testing.CliRunner().invoke(build_app(), ["trace", "import", *arguments])


@pytest.mark.parametrize(("source", "document"), [("sojourn", LEDGER), ("otel", SPAN)])
@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_a_file_becomes_a_trace(tmp_path: Path, source: str, document: object, name: str) -> None:
    given, made = tmp_path / "in.json", tmp_path / name
    given.write_text(json.dumps(document))
    result = sojourn(str(given), "--from", source, "-o", str(made))
    assert result.exit_code == 0, result.output
    (program,) = read_trace(made)
    assert (program.turns[0].prompt_tokens, program.turns[0].output_tokens) == (90, 7)


@pytest.mark.parametrize(
    ("content", "source", "output", "message", "step"),
    [
        ("{}", "otle", "o.jsonl", "--from otle is unknown", "did you mean otel?"),
        ("{}", "langfuse", "o.jsonl", "--from langfuse is unknown", "use one of otel, sojourn"),
        ("{}", "otel", "o.csv", "o.csv: expected a name ending in .jsonl or .jsonl.gz", "change the name"),
        ("{}", "otel", "o.jsonl", "line 1: no span", "docs/traces.md"),
        ("{}", "sojourn", "o.jsonl", "line 1: Object missing required field", "docs/traces.md"),
        (json.dumps(LEDGER), "sojourn", "no/o.jsonl", "No such file", "docs/traces.md"),
    ],
)
def test_a_failure_is_one_line_and_writes_nothing(
    tmp_path: Path, content: str, source: str, output: str, message: str, step: str
) -> None:
    given = tmp_path / "in.json"
    given.write_text(content)
    result = sojourn(str(given), "--from", source, "-o", str(tmp_path / output))
    assert isinstance(result.exception, CliError)
    assert message in result.exception.message
    assert "\n" not in result.exception.message
    assert step in result.exception.next_step
    assert [path.name for path in tmp_path.iterdir()] == ["in.json"]
