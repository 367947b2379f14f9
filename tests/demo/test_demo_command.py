"""``sojourn demo`` as a command, against an echo engine."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
from click.testing import Result
from echo_engine import ByteTokenizer, EchoEngine
from sojourn_server.cli import build_app
from sojourn_server.demo.demo_run import BLOCK_TOKENS
from sojourn_server.demo.demo_tasks import load_tasks
from sojourn_server.launch.engine_server import EngineServer
from typer.testing import CliRunner

TASKS = {task.name: task for task in load_tasks()}


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Parent of the command's temporary directories."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("sojourn_server.cli.demo.Tokenizer", lambda model: ByteTokenizer())
    monkeypatch.setattr("sojourn_server.cli.serve.resolve_model", lambda model: model)
    return tmp_path


def run(*options: str) -> Result:
    return CliRunner().invoke(build_app(), ["demo", *options])


@pytest.fixture
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first task is one whose tests do not sleep."""
    monkeypatch.setattr("sojourn_server.cli.demo.load_tasks", lambda count: [TASKS["ledger"]])


@pytest.mark.slow
def test_directory_of_a_failed_program_is_kept_and_printed(places: Path, no_sleep: None) -> None:
    with EchoEngine(lambda number, command: "true" if number == 3 else command) as engine:
        answer = run("--programs", "1", "--arms", "sojourn", "--url", engine.url)
    (kept,) = places.glob("sojourn-demo-*")
    assert answer.exit_code == 1
    assert f"repositories and logs: {kept}" in answer.output


def test_the_servers_of_a_demo_require_the_users_api_key_and_every_request_has_it(
    places: Path, no_sleep: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    keys: list[str | None] = []
    with EchoEngine(api_key="s3cret") as engine:
        monkeypatch.setattr(EngineServer, "start", lambda server: keys.append(server.api_key))
        monkeypatch.setattr(EngineServer, "url", engine.url)
        answer = run("--json", str(places / "out.json"))
    assert answer.exit_code == 0, answer.output
    assert keys == ["s3cret", "s3cret"]
    assert "s3cret" not in answer.output + (places / "out.json").read_text()
    assert engine.events, "the SDK's requests have the key too"
    assert Path(os.environ["MSWEA_GLOBAL_CONFIG_DIR"]).match(f"{places}/sojourn-demo-*")


def test_quick_is_four_short_programs_and_says_that_it_measures_nothing(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = [TASKS[name] for name in ("ledger", "waypoint", "gridtext", "ledger")]  # no test of these sleeps
    monkeypatch.setattr("sojourn_server.cli.demo.load_tasks", lambda count: fast[:count])
    started: list[EngineServer] = []
    with EchoEngine() as engine:
        monkeypatch.setattr(EngineServer, "start", lambda server: started.append(server))
        monkeypatch.setattr(EngineServer, "url", engine.url)
        answer = run("--quick", "--arms", "stock", "--json", str(places / "out.json"))
    assert answer.exit_code == 0, answer.output
    caption = "a smoke run, not a measurement: sojourn may be slower here"
    assert caption in " ".join(answer.output.split())
    document = json.loads((places / "out.json").read_text())
    assert document["smoke"] is True
    assert document["model"] == "tiny"
    assert (document["arms"]["stock"]["programs"], document["arms"]["stock"]["turns"]) == (4, 4 * 6)
    (flags,) = (server.serve_args for server in started)
    pool_blocks, longest = (
        int(flags[flags.index(name) + 1]) for name in ("--num-gpu-blocks-override", "--max-model-len")
    )
    assert (pool_blocks - 1) * BLOCK_TOKENS >= longest, "else vLLM does not start"
