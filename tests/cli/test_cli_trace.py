"""``sojourn trace``: files in, a trace or a picture out, or one error and no file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer.testing
from cli_process import invoke, refused
from sojourn_server.cli import build_app
from sojourn_server.cli import trace as trace_command
from sojourn_server.cli.console import CliError
from sojourn_server.cli.live_client import LiveClient
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


@pytest.mark.parametrize(("source", "document"), [("sojourn", LEDGER), ("otel", SPAN)])
@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_a_file_becomes_a_trace(tmp_path: Path, source: str, document: object, name: str) -> None:
    given, made = tmp_path / "in.json", tmp_path / name
    given.write_text(json.dumps(document))
    result = invoke("trace", "import", str(given), "--from", source, "-o", str(made))
    assert result.exit_code == 0, result.output
    (program,) = read_trace(made)
    assert (program.turns[0].prompt_tokens, program.turns[0].output_tokens) == (90, 7)


@pytest.mark.parametrize(
    ("content", "source", "output", "message", "step"),
    [
        ("{}", "otle", "o.jsonl", "--from otle is unknown; did you mean 'otel'?", "use one of"),
        (
            "{}",
            "aider",
            "o.jsonl",
            "--from aider is unknown",
            "use one of claude-code, codex, opencode, pi, ",
        ),
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


def export(
    tmp_path: Path,
    handle: Callable[[httpx.Request], httpx.Response],
    *arguments: str,
    url: str = "http://h",
) -> dict[str, Any]:
    """Run the command against a server; return the file."""
    target = tmp_path / "run.json"
    made = LiveClient(url, transport=httpx.MockTransport(handle))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_command, "LiveClient", lambda url, key: made)
        line = ["trace", "export", "--perfetto", str(target), *arguments]
        done = typer.testing.CliRunner().invoke(build_app(), line, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = json.loads(target.read_text("utf-8"))
    return document


def test_an_engines_programs_and_decisions_are_exported(tmp_path: Path) -> None:
    seconds = {"wall": 1.0, "queued": 0.25, "prefilling": 0.25, "decoding": 0.5}
    ledger = [{**LEDGER["ledger"][0], "seconds": seconds, "leased": False, "lease_ttl_s": None}]
    decisions = [
        {"seq": 0, "at_s": 5.5, "kind": "keep", "program_id": "p", "reason": "this_tool", "ttl_s": 3.0},
        {"seq": 1, "at_s": 5.6, "kind": "policy", "program_id": None, "reason": "on"},
    ]

    def handle(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/sojourn/v1/programs":
            return httpx.Response(
                200, json={"programs": [{"program_id": "p"}, {"program_id": "gone"}], "total": 2}
            )
        if path == "/sojourn/v1/programs/p":
            return httpx.Response(200, json={"program_id": "p", "tenant": "t", "ledger": ledger})
        if path == "/sojourn/v1/decisions":
            return httpx.Response(200, json={"decisions": decisions, "next": 2})
        return httpx.Response(404, json={"error": {"message": "no program has this id"}})

    document = export(tmp_path, handle)
    events = {event["name"]: event for event in document["traceEvents"] if event["ph"] != "M"}
    assert {"turn 1", "queued", "prefill", "decode", "keep", "policy"} <= {*events}
    assert events["keep"]["pid"] == events["turn 1"]["pid"]
    assert events["keep"]["tid"] == events["turn 1"]["tid"]
    assert events["policy"]["pid"] != events["keep"]["pid"]
    assert (document["otherData"]["programs"], document["otherData"]["programs_known"]) == (1, 2)

    def gateway(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/sojourn/v1/programs":
            return httpx.Response(200, json={"programs": [{"program_id": "p"}]})
        return httpx.Response(200, json={"program_id": "p"})

    with pytest.raises(CliError, match="is a gateway"):
        export(tmp_path, gateway)
