"""``sojourn parity``: its report on a recording that comes out the same, on one that does not, on none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import typer.testing
from simulator_parity_workload import grants, record, recording_lines, write_lines
from sojourn_server.cli import build_app
from sojourn_server.cli.console import CliError

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("command") / "a.recording"
    record(path, steps=150)
    return path


def run(*arguments: str) -> typer.testing.Result:
    return typer.testing.CliRunner().invoke(build_app(), ["parity", *arguments])


def test_a_sound_recording_comes_out_the_same(recording: Path, tmp_path: Path):
    out = tmp_path / "parity.json"
    assert run(str(recording), "--json", str(out)).exit_code == 0
    assert json.loads(out.read_text())["identical"] is True


def test_a_changed_recording_is_an_error_after_its_report(recording: Path, tmp_path: Path):
    lines = recording_lines(recording)
    actions = lines[next(iter(grants(lines)))][2][0]
    granted = next(action for action in actions if action[0] == "LeaseGranted")
    granted[2] += 1.0  # the lease's TTL in seconds
    result = run(str(write_lines(tmp_path / "changed.recording", lines)))
    assert isinstance(result.exception, CliError)
    assert result.exception.exit_code == 1


def test_a_recording_without_decisions_is_no_success(tmp_path: Path):
    """An engine that was killed before it wrote any: identical, but to nothing."""
    path = tmp_path / "short.recording"
    record(path, steps=0)
    result = run(str(path))
    assert isinstance(result.exception, CliError)
    assert "holds no decisions" in result.exception.message
    assert "--shutdown-timeout" in result.exception.next_step
