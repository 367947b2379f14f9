"""``sojourn demo`` as a command, against a server that only echoes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from echo_engine import ByteTokenizer, EchoEngine
from sojourn_server.cli import build_app
from typer.testing import CliRunner


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the command makes its directories."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("sojourn_server.demo.script.Tokenizer", lambda model: ByteTokenizer())
    monkeypatch.setattr("sojourn_server.models.resolve_model", lambda model: model)
    return tmp_path


def test_what_a_failed_program_left_is_kept_and_named(places: Path) -> None:
    with EchoEngine(lambda number, command: "true" if number == 3 else command) as engine:
        answer = CliRunner().invoke(
            build_app(), ["demo", "--programs", "1", "--arms", "sojourn", "--url", engine.url]
        )
    (kept,) = places.glob("sojourn-demo-*")
    assert answer.exit_code == 1
    assert f"repositories and logs: {kept}" in answer.output


def test_host_memory_for_somebody_elses_server_is_refused(places: Path) -> None:
    from sojourn_server.cli.console import CliError

    line = ["demo", "--arms", "sojourn", "--url", "http://127.0.0.1:1", "--kv-host-gib", "1"]
    answer = CliRunner().invoke(build_app(), line)
    assert isinstance(answer.exception, CliError), answer.output
    assert "--kv-host-gib 1.0 is for a server of our own" in str(answer.exception)


def test_nothing_is_left_of_a_demo_that_went_well(places: Path) -> None:
    with EchoEngine() as engine:
        answer = CliRunner().invoke(
            build_app(), ["demo", "--programs", "1", "--arms", "sojourn", "--url", engine.url]
        )
    assert answer.exit_code == 0, answer.output
    assert not list(places.glob("sojourn-demo-*"))
    assert "repositories and logs" not in answer.output
