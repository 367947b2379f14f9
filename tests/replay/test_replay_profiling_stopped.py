"""``sojourn profile`` on the way: what it says, and where the profile goes if its file cannot be written."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from fake_completions_server import FakeServer
from profile_command import invoke, measure_little
from rich.console import Console
from sojourn_server.cli import profile as profile_module
from sojourn_server.cli.console import CliError
from sojourn_server.policies.costs.engine_profile import EngineProfile
from sojourn_server.traces import atomic_files


@pytest.fixture(autouse=True)
def _small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_little(monkeypatch)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What goes to a stderr that is no terminal."""
    text = io.StringIO()
    console = Console(file=text, width=200)
    monkeypatch.setattr(profile_module, "console", console)
    monkeypatch.setattr("sojourn_server.cli.console.console", console)
    return text


def test_it_says_at_the_start_how_long_it_may_take_and_then_about_how_long(said: io.StringIO) -> None:
    with FakeServer(max_model_len=4001) as server:
        result = invoke("--url", server.url, "--repeats", "2", "--budget-s", "300")
    assert result.exception is None, result.output
    lines = said.getvalue().splitlines()
    assert "up to 4,000 tokens" in lines[0]
    assert "at most 300 s" in lines[0]
    assert "--budget-s" in lines[0]
    assert "--max-context" in lines[0]
    assert "prefill of 1,000 tokens" in lines[1]


def test_a_profile_that_cannot_be_written_goes_to_stdout(
    tmp_path: Path, said: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic_files, "write_atomically", full)
    with FakeServer(max_model_len=4001) as server:
        result = invoke("--url", server.url, "--repeats", "2", "-o", str(tmp_path / "profile.toml"))
    assert isinstance(result.exception, CliError), result.exception
    assert "profile.toml: No space left on device" in f"{result.exception}{result.exception.next_step}"
    assert result.exception.next_step.startswith("the profile is on stdout")
    assert result.exception.exit_code == 1
    assert EngineProfile.from_toml(result.stdout).points
