"""``sojourn serve --config FILE``."""

from __future__ import annotations

import json
import shlex
import socket
from pathlib import Path

import pytest
from sojourn_server.cli import build_app, console
from sojourn_server.cli import serve as serve_command
from typer.testing import CliRunner

pytest.importorskip("yaml")
pytestmark = pytest.mark.usefixtures("tested_engine")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(serve_command.os, "execve", lambda *a: pytest.fail("started"))
    return tmp_path / "engine.yaml"


def failure(*args: str) -> console.CliError:
    result = CliRunner().invoke(build_app(), ["serve", *args])
    assert isinstance(result.exception, console.CliError), result.output
    assert result.exception.next_step
    return result.exception


def dry_run(*args: str) -> list[str]:
    result = CliRunner().invoke(build_app(), ["serve", *args, "--dry-run"])
    assert result.exit_code == 0, result.exception
    return shlex.split(result.stdout)


def test_the_port_that_is_checked_is_the_files(file: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        file.write_text(f"port: {port}\nhost: 127.0.0.1\n")
        assert f"cannot listen on 127.0.0.1:{port}" in failure("org/name", "--config", str(file)).message


def test_the_file_may_name_the_model(file: Path) -> None:
    file.write_text("model: org/of-the-file\n")
    for args in (["--config", str(file)], [f"--config={file}"], ["--seed", "4", "--config", str(file)]):
        parts = dry_run("--policy", "continuum", *args)
        assert parts.count("org/of-the-file") == 1
        assert parts[-2:] == ["--config", str(file)]
    assert "org/of-the-file" not in dry_run("org/first", "--config", str(file))
    file.write_text("port: 8123\n")
    assert "expected a model" in failure("--config", str(file)).message
    assert "expected a model" in failure("--seed", "4").message


def test_a_connector_of_the_file_counts(file: Path) -> None:
    """``mori`` needs host memory, and the engine would refuse it without."""
    file.write_text("seed: 1\n")
    assert "--kv-host-gib" in str(failure("org/name", "--policy", "mori", "--config", str(file)))
    file.write_text("kv-transfer-config: {kv_connector: SojournConnector}\n")
    assert "--config" in dry_run("org/name", "--policy", "mori", "--config", str(file))


def test_a_policy_of_the_file_counts(file: Path) -> None:
    file.write_text("additional-config: {sojourn: {policy: mori, max_programs: 5}}\n")
    assert "policy mori places programs" in str(failure("org/name", "--config", str(file)))
    parts = dry_run("org/name", "--kv-host-gib", "0.001", "--config", str(file))
    settings = json.loads(parts[parts.index("--additional-config") + 1])["sojourn"]
    assert (settings["policy"], settings["max_programs"]) == ("mori", 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kv-host-gib: 1", "--kv-host-gib is a flag of sojourn"),
        ("kv_host_gib: 1", "--kv-host-gib is a flag of sojourn"),
        ("port: [", "is not YAML"),
    ],
)
def test_a_file_that_is_not_vllms_is_refused(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    assert message in failure("org/name", "--config", str(file)).message


def test_a_missing_file_is_named(file: Path) -> None:
    assert f"{file}: cannot read the file" in failure("org/name", "--config", str(file)).message
