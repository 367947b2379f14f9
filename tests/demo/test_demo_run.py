"""A whole arm with real agents and shells against an echo engine, and the variables that it sets for them."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed")

from echo_engine import ByteTokenizer, EchoEngine
from sojourn_server.demo.demo_agent import prepare_environment
from sojourn_server.demo.demo_report import arm_figures, succeeded
from sojourn_server.demo.demo_run import ArmRecord, run_arm, warm_up
from sojourn_server.demo.demo_tasks import DemoTask, load_tasks

# Two tasks whose tests do not wait.
TASKS = [task for task in load_tasks() if task.name in ("ledger", "waypoint")]


@pytest.fixture(autouse=True)
def agent_environment(tmp_path: Path) -> None:
    prepare_environment(tmp_path)


def run(
    name: str, engine: EchoEngine, directory: Path, tasks: list[DemoTask] = TASKS
) -> tuple[ArmRecord, list[Any]]:
    seen: list[Any] = []
    record = run_arm(
        name,
        tasks,
        engine.url,
        "m",
        ByteTokenizer(),  # type: ignore[arg-type]
        seed=1,
        directory=directory,
        watch=lambda *update: seen.append(update),
    )
    return record, seen


def test_a_stock_arm_fixes_all_repositories_and_sends_no_events(tmp_path: Path) -> None:
    with EchoEngine() as engine:
        record, seen = run("stock", engine, tmp_path)
    assert succeeded([record])
    turns = sum(len(task.turns) for task in TASKS)
    assert len(engine.forced) == turns
    assert all(set(body["vllm_xargs"]) == {"replay_ids"} for body in engine.forced)
    # As mini-swe-agent sends it: nothing tells the server how long an answer will be.
    assert not any(key.startswith("max_") for body in engine.forced for key in body)
    assert engine.events == []
    figures = arm_figures(record)
    assert (figures["repositories_fixed"], figures["programs_failed"]) == (2, 0)
    # The warm-up request does not count.
    assert len(engine.bodies) == turns + 1
    assert figures["ttft_mean_s"] == 0.5
    assert figures["preemptions"] == 2 * turns
    assert figures["hit_rate"] == pytest.approx(0.5, abs=0.01)
    for index in range(2):
        states = [(state, turn) for program, state, turn, _ in seen if program == index]
        expected = [(state, turn) for turn in range(1, 11) for state in ("thinking", "tool")]
        assert states == [*expected, ("done", 10)]


def test_the_sojourn_arm_sends_context_next_to_the_forced_tokens(tmp_path: Path) -> None:
    with EchoEngine() as engine:
        record, _ = run("sojourn", engine, tmp_path)
    assert succeeded([record])
    assert record.decisions == {"keep: cold_start": 3}
    assert all(set(body["vllm_xargs"]) == {"replay_ids", "agentic_context"} for body in engine.forced)
    contexts = [json.loads(body["vllm_xargs"]["agentic_context"]) for body in engine.forced]
    assert len({context["program_id"] for context in contexts}) == len(TASKS)
    carried = [event for context in contexts for event in context["sojourn"].get("events", [])]
    events = {(event["program_id"], event["seq"]): event["type"] for event in carried + engine.events}
    assert list(events.values()).count("program_end") == len(TASKS)
    assert list(events.values()).count("tool_start") == sum(len(task.turns) for task in TASKS)


def test_the_sojourn_arm_rejects_a_server_without_the_plugin(tmp_path: Path) -> None:
    with EchoEngine(capabilities=b"{}") as engine, pytest.raises(RuntimeError, match="sojourn plugin"):
        run("sojourn", engine, tmp_path)
    assert engine.forced == []


def test_an_answer_off_the_script_fails_the_program(tmp_path: Path) -> None:
    with EchoEngine(lambda number, command: "true" if number == 3 else command) as engine:
        record, seen = run("stock", engine, tmp_path, TASKS[:1])
    (program,) = record.programs
    assert program.error is not None
    assert "forced" in program.error
    assert "'true'" in program.error
    assert not program.fixed
    assert not succeeded([record])
    assert seen[-1][1] == "failed"


def test_a_script_that_fixes_nothing_is_no_success(tmp_path: Path) -> None:
    idle = replace(TASKS[0], turns=(TASKS[0].turns[0], TASKS[0].turns[-1]))
    with EchoEngine() as engine:
        record, _ = run("stock", engine, tmp_path, [idle])
    assert record.programs[0].error is None
    assert not record.programs[0].fixed
    assert not succeeded([record])


@pytest.fixture
def dead_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A proxy for all hosts at a port that refuses connections."""
    for name in ("HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as bound:  # not listening, and taken
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{bound.getsockname()[1]}")
        yield


@pytest.mark.usefixtures("dead_proxy")
@pytest.mark.parametrize("is_named", [False, True])
def test_the_agents_client_reaches_a_server_on_this_machine_past_the_proxy(
    tmp_path: Path, is_named: bool
) -> None:
    with EchoEngine() as engine:
        prepare_environment(tmp_path, engine.url if is_named else None)
        warm_up(engine.url, "m")
    assert len(engine.bodies) == 1


@pytest.mark.usefixtures("dead_proxy")
def test_an_error_of_the_agents_client_names_the_server(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with EchoEngine() as engine:
        prepare_environment(tmp_path, "http://engine.example:8000")
        # The proxy stays in force, and this server is behind it.
        expected = rf"first request to {re.escape(engine.url)} failed: .*Error"
        with pytest.raises(RuntimeError, match=expected):
            warm_up(engine.url, "m")
    assert engine.bodies == []
    assert capfd.readouterr().out == ""  # stdout may carry the JSON
