"""Every example as a user runs it: in its own process, with and without sojourn, and what it reported."""

from __future__ import annotations

import ast
import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from scenario_modules import Model
from scripted_engine import Engine, ScriptedEngine, get
from sojourn.testing import Answer, FakeServer, LlmRequest, Reply, ToolUse
from sojourn.wire_events import AegReport, ProgramEnd, ProgramStart, ToolStart, ToolStop

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MARK = "# <── sojourn"
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class Case(NamedTuple):
    """One example: what the model says, and what must have been told."""

    needs: tuple[str, ...]
    script: Sequence[Reply]
    programs: int
    tools: tuple[str, ...]
    """By name, sorted."""
    nodes: frozenset[str | None]
    """Of the requests."""
    graph: bool = False
    """A graph is declared."""
    arguments: Callable[[Path], list[str]] = lambda folder: []
    held: str | None = None
    """The tool that a live test holds up, to look at it on the server."""
    held_under: str | None = None
    """The tool of the parent in which it runs, for a sub-agent."""
    children: int = 0
    """How many of the programs are sub-agents."""
    at_once: bool = False
    """All programs run at the same time, and the model gives each of them the whole script."""

    @property
    def requests(self) -> int:
        return len(self.script) * (self.programs if self.at_once else 1)


def repository(folder: Path) -> list[str]:
    (folder / "stats.py").write_text("def mean(values):\n    return sum(values) / (len(values) - 1)\n")
    return [str(folder)]


def instances(folder: Path) -> list[str]:
    for name in ("left", "right"):
        (folder / "instances" / name / "repo").mkdir(parents=True)
        repository(folder / "instances" / name / "repo")
        (folder / "instances" / name / "problem.md").write_text("mean([2, 4]) is not 3. Mend stats.py.")
        (folder / "instances" / name / "test.sh").write_text(f"{CHECK}\n")
    return [str(folder / "instances"), "--workers", "2"]


CHECK = 'python -c "import stats; assert stats.mean([2, 4]) == 3"'
CASES = {
    "openai_loop.py": Case(
        ("openai",),
        [ToolUse("clock"), [ToolUse("whoami"), ToolUse("clock")], "noon"],
        programs=1,
        tools=(),  # read by the server from the answers
        nodes=frozenset({None}),
        held="clock",
    ),
    "mini_swe_agent.py": Case(
        ("minisweagent",),
        [
            Answer("look", (ToolUse("bash", {"command": "cat stats.py"}),)),
            Answer("fix", (ToolUse("bash", {"command": "sed -i 's/ - 1//' stats.py && python check.py"}),)),
            Answer("done", (ToolUse("bash", {"command": DONE}),)),
        ],
        programs=1,
        tools=("bash", "bash", "bash"),
        nodes=frozenset({None}),
        held="bash:cat",
    ),
    "langchain_coding_agent.py": Case(
        ("langchain", "langchain_openai"),
        [
            ToolUse("read_file", {"path": "not_there.py"}),
            ToolUse("read_file", {"path": "stats.py"}),
            ToolUse("write_file", {"path": "stats.py", "text": "def mean(v):\n    return sum(v) / len(v)\n"}),
            ToolUse("shell", {"command": "python -c 'import stats; print(stats.mean([2, 4]))'"}),
            "mended",
        ],
        programs=1,
        tools=("read_file", "read_file", "shell", "write_file"),
        nodes=frozenset({"model"}),
        graph=True,
        arguments=repository,
        held="shell",
    ),
    "langgraph_coding_agent.py": Case(
        ("langgraph", "langchain_openai"),
        [
            "read stats.py, then mend it",
            "it may be right as it is",  # so the tests run, and fail
            ToolUse("read_file", {"path": "stats.py"}),
            ToolUse("write_file", {"path": "stats.py", "text": "def mean(v):\n    return sum(v) / len(v)\n"}),
            "mended",
        ],
        programs=1,
        tools=("read_file", "run_tests", "run_tests", "write_file"),
        nodes=frozenset({"plan", "code"}),
        graph=True,
        arguments=lambda folder: [*repository(folder), "--check", CHECK],
    ),
    "mini_swe_bench.py": Case(
        ("minisweagent",),
        [
            Answer("fix", (ToolUse("bash", {"command": "sed -i 's/ - 1//' stats.py"}),)),
            Answer("done", (ToolUse("bash", {"command": DONE}),)),
        ],
        programs=2,
        tools=("bash",) * 4,
        nodes=frozenset({None}),
        arguments=instances,
        at_once=True,
    ),
    "rl_rollouts.py": Case(
        ("openai",),
        ["1", "2", "I give up"],
        programs=6,
        tools=("step",) * 18,
        nodes=frozenset({None}),
        arguments=lambda folder: ["--tasks=2", "--group=3", "--turns=3", "--concurrency=6", "--latency-s=0"],
        at_once=True,
    ),
    "autogen_team.py": Case(
        ("autogen_agentchat", "autogen_ext"),
        [ToolUse("read_file", {"path": "README.md"}), "a draft", "too long", "shorter", "APPROVED"],
        programs=1,
        tools=("read_file",),
        nodes=frozenset({"writer", "critic"}),
        graph=True,
        held="read_file",
    ),
    "openai_agents_handoff.py": Case(
        ("agents",),
        [
            ToolUse("transfer_to_coder"),
            ToolUse("ask_searcher", {"input": "version"}),
            ToolUse("grep", {"pattern": "version"}),
            "README.md line 1",
            "It is set in README.md.",
        ],
        programs=2,
        tools=("ask_searcher", "grep"),
        nodes=frozenset({"triage", "coder", "searcher"}),
        graph=True,
        held="grep",
        held_under="ask_searcher",
        children=1,
    ),
}


SERVICE = "tenant_service.py"
"""Needs a gateway, so ``tests/gateway/test_gateway_tenant_service.py`` runs it."""


def test_every_example_has_a_case() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*CASES, SERVICE}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[str, Case]:
    case = CASES[request.param]
    missing = [package for package in case.needs if find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is in another environment")
    return request.param, case


@pytest.mark.parametrize("name", [*CASES, SERVICE])
def test_an_example_is_short_and_marked(name: str) -> None:
    source = (EXAMPLES / name).read_text(encoding="utf-8")
    assert len(source.splitlines()) < 110
    assert 2 <= sum(MARK in line for line in source.splitlines()) <= 4
    assert "sojourn serve" in (ast.get_docstring(ast.parse(source)) or "")
    rest = ast.parse(plain(name))
    assert not [node for node in ast.walk(rest) if isinstance(node, ast.Name) and node.id == "sojourn"]


def plain(name: str) -> str:
    """The example as it would be without us."""
    lines = (EXAMPLES / name).read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if MARK not in line)


def environment_of(folder: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SOJOURN_")}
    environment |= {
        "MSWEA_GLOBAL_CONFIG_DIR": str(folder / "mini"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]]),
    }
    return environment


def run(path: Path, server: FakeServer, folder: Path, arguments: list[str]) -> str:
    line = [sys.executable, str(path), "--url", server.url, *arguments]
    done = subprocess.run(
        line, env=environment_of(folder), cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def numbered(script: Sequence[Reply]) -> list[Answer]:
    """The same call ids in every play, since some examples print them."""
    ids = itertools.count(1)
    answers = [Answer.of(reply) for reply in script]
    return [Answer(a.text, tuple(use._replace(id=f"call_{next(ids)}") for use in a.tools)) for a in answers]


def played(case: Case, path: Path, folder: Path) -> tuple[str, FakeServer]:
    folder.mkdir()
    (folder / "README.md").write_text("version 1\n")
    answers = numbered(case.script)
    all_there = threading.Barrier(case.programs)

    def in_turn(request: LlmRequest) -> Reply:
        turn = sum(message["role"] == "assistant" for message in request.body["messages"])
        if turn == 0:  # no program goes on before all have begun
            all_there.wait(60)
        return answers[turn]

    with FakeServer(in_turn if case.at_once else answers) as server:
        return run(path, server, folder, case.arguments(folder)), server


@pytest.mark.slow
def test_an_example_reports_its_run(case: tuple[str, Case], tmp_path: Path) -> None:
    name, expected = case
    bare = tmp_path / name
    bare.write_text(plain(name))
    without, silent = played(expected, bare, tmp_path / "plain")
    assert not silent.batches
    output, server = played(expected, EXAMPLES / name, tmp_path / "told")
    if name != "openai_loop.py":  # whose tools tell the time
        # Threads print at once, a line and its end apart: lines may run into each other.
        assert sorted("".join(output.splitlines())) == sorted("".join(without.splitlines()))
    assert len(server.requests) == len(silent.requests) == expected.requests

    events = server.program_events()
    starts = [event for event in events if isinstance(event, ProgramStart)]
    assert len(starts) == expected.programs
    assert sorted(event.program_id for event in events if isinstance(event, ProgramEnd)) == sorted(
        event.program_id for event in starts
    )
    tools = [event for event in events if isinstance(event, ToolStart)]
    assert tuple(sorted(event.tool for event in tools)) == expected.tools
    assert sum(isinstance(event, ToolStop) for event in events) == len(tools)
    # Until the server's dialect is known, a request carries its program in a header alone.
    early = [request for request in server.requests if request.context is None]
    assert all(request.batches_before == 0 for request in early)
    contexts = [request.context for request in server.requests if request.context is not None]
    named = {context.program_id for context in contexts} | {one.headers["x-session-id"] for one in early}
    assert named == {event.program_id for event in starts}
    nodes = {context.sojourn.node for context in contexts}
    assert nodes <= expected.nodes if early else nodes == expected.nodes
    assert any(isinstance(event, AegReport) and event.graph for event in events) == expected.graph
    children = [event for event in starts if event.parent_program_id]
    assert len(children) == expected.children
    assert all(event.call_id for event in children)
    if expected.at_once:
        assert {type(event) for event in events[: expected.programs]} == {ProgramStart}


def held_up(folder: Path) -> dict[str, str]:
    """An environment in which the examples' tools wait until there is a file ``go``."""
    commands = folder / "held"
    commands.mkdir()
    path = os.environ["PATH"]
    for name in ("date", "grep", "cat", "python"):
        real = sys.executable if name == "python" else shutil.which(name)
        script = commands / name
        script.write_text(f'#!/bin/sh\nwhile [ ! -e "{folder}/go" ]; do sleep 0.02; done\nexec {real} "$@"\n')
        script.chmod(0o755)
    environment = environment_of(folder)
    return {**environment, "PATH": os.pathsep.join([str(commands), path])}


class Deliberate(Model):
    """A model that takes a while before each answer."""

    thinks_s = 0.0

    def __call__(self, request: LlmRequest) -> Answer:
        time.sleep(self.thinks_s)
        return super().__call__(request)


@pytest.mark.engine
@pytest.mark.timeout(500)
@pytest.mark.parametrize("case", [name for name in CASES if not CASES[name].at_once], indirect=True)
def test_the_engine_shows_an_example_while_it_runs(
    case: tuple[str, Case], tmp_path: Path, engine: Engine
) -> None:
    """Its tool, node and parent, in ``/programs``, at the moment they are what they are."""
    name, expected = case
    environment = held_up(tmp_path)
    script = numbered(expected.script)
    if name == "autogen_team.py":
        os.mkfifo(tmp_path / "README.md")  # reading it waits for a writer
    else:
        (tmp_path / "README.md").write_text("version 1\n")
    before = {program["program_id"] for program in programs(engine)}
    seen: list[dict[str, Any]] = []
    model = Deliberate(SimpleNamespace(script=lambda: script))
    model.thinks_s = 0.0 if expected.held else 1.5  # the list of programs may be half a second old
    with ScriptedEngine(engine.url, model) as proxy:
        line = [sys.executable, str(EXAMPLES / name), "--url", proxy.url, "--model", "tiny"]
        line += expected.arguments(tmp_path)
        with subprocess.Popen(
            line, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            deadline_s = time.monotonic() + 90
            while process.poll() is None and time.monotonic() < deadline_s:
                now = [program for program in programs(engine) if program["program_id"] not in before]
                seen += now
                if any(there_is(program, expected) for program in now):
                    break
                time.sleep(0.05)
            (tmp_path / "go").touch()
            if name == "autogen_team.py":
                (tmp_path / "README.md").write_text("version 1\n")
            output, _ = process.communicate(timeout=90)
        assert process.returncode == 0, output
    if expected.held is None:
        nodes = {node for program in seen for node in [program["node"]]}
        assert expected.nodes & nodes, f"none of the nodes was seen: {nodes}"
        return
    (holding,) = [program for program in now if program["tool"] == expected.held]
    assert holding["status"] == "acting"
    assert holding["node"] in expected.nodes
    if expected.tools:
        assert holding["tools_running"] == 1
    if expected.held_under is None:
        assert holding["parent_program_id"] is None
        return
    (parent,) = [program for program in now if program["program_id"] == holding["parent_program_id"]]
    assert parent["tool"] == expected.held_under
    assert parent["node"] in expected.nodes - {holding["node"]}


def there_is(program: dict[str, Any], expected: Case) -> bool:
    """What the test looks for. Begun but without a turn yet, a program has no node."""
    if expected.held is None:
        return program["node"] in expected.nodes
    # Read from the answer, the tool is known a moment before it is reported to run.
    return program["tool"] == expected.held and program["tools_running"] >= bool(expected.tools)


def programs(engine: Engine) -> list[dict[str, Any]]:
    """As ``GET /sojourn/v1/programs`` lists them."""
    found: list[dict[str, Any]] = get(engine.url, "/sojourn/v1/programs?limit=1000")["programs"]
    return found
