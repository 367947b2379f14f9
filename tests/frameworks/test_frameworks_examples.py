"""Every example as a user runs it: in its own process, with and without sojourn, and what it reported."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
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
    tools: tuple[str, ...]
    """By name, sorted."""
    nodes: frozenset[str | None] = frozenset({None})
    """Of the requests."""
    programs: int = 1
    graph: bool = False
    """A graph is declared."""
    arguments: Callable[[Path], list[str]] = lambda folder: []
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


def bash(text: str, command: str) -> Answer:
    return Answer(text, (ToolUse("bash", {"command": command}),))


MEND = ToolUse("write_file", {"path": "stats.py", "text": "def mean(v):\n    return sum(v) / len(v)\n"})
CHECK = 'python -c "import stats; assert stats.mean([2, 4]) == 3"'
CASES = {
    "openai_loop.py": Case(
        ("openai",),
        [ToolUse("clock"), [ToolUse("whoami"), ToolUse("clock")], "noon"],
        tools=(),  # read by the server from the answers
    ),
    "mini_swe_agent.py": Case(
        ("minisweagent",),
        [
            bash("look", "cat stats.py"),
            bash("fix", "sed -i 's/ - 1//' stats.py && python check.py"),
            bash("done", DONE),
        ],
        tools=("bash", "bash", "bash"),
    ),
    "langchain_coding_agent.py": Case(
        ("langchain", "langchain_openai"),
        [
            ToolUse("read_file", {"path": "not_there.py"}),
            ToolUse("read_file", {"path": "stats.py"}),
            MEND,
            ToolUse("shell", {"command": "python -c 'import stats; print(stats.mean([2, 4]))'"}),
            "mended",
        ],
        tools=("read_file", "read_file", "shell", "write_file"),
        nodes=frozenset({"model"}),
        graph=True,
        arguments=repository,
    ),
    "langgraph_coding_agent.py": Case(
        ("langgraph", "langchain_openai"),
        [
            "read stats.py, then mend it",
            "it may be right as it is",  # so the tests run, and fail
            ToolUse("read_file", {"path": "stats.py"}),
            MEND,
            "mended",
        ],
        tools=("read_file", "run_tests", "run_tests", "write_file"),
        nodes=frozenset({"plan", "code"}),
        graph=True,
        arguments=lambda folder: [*repository(folder), "--check", CHECK],
    ),
    "mini_swe_bench.py": Case(
        ("minisweagent",),
        [bash("fix", "sed -i 's/ - 1//' stats.py"), bash("done", DONE)],
        programs=2,
        tools=("bash",) * 4,
        arguments=instances,
        at_once=True,
    ),
    "rl_rollouts.py": Case(
        ("openai",),
        ["1", "2", "I give up"],
        programs=6,
        tools=("step",) * 18,
        arguments=lambda folder: ["--tasks=2", "--group=3", "--turns=3", "--concurrency=6", "--latency-s=0"],
        at_once=True,
    ),
    "autogen_team.py": Case(
        ("autogen_agentchat", "autogen_ext"),
        [ToolUse("read_file", {"path": "README.md"}), "a draft", "too long", "shorter", "APPROVED"],
        tools=("read_file",),
        nodes=frozenset({"writer", "critic"}),
        graph=True,
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
        done = subprocess.run(
            [sys.executable, str(path), "--url", server.url, *case.arguments(folder)],
            env=environment_of(folder), cwd=folder, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, server


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
    starts, ends, tools, stops = (
        [event for event in events if isinstance(event, kind)]
        for kind in (ProgramStart, ProgramEnd, ToolStart, ToolStop)
    )
    assert len(starts) == expected.programs
    assert sorted(event.program_id for event in ends) == sorted(event.program_id for event in starts)
    assert tuple(sorted(event.tool for event in tools)) == expected.tools
    assert len(stops) == len(tools)
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
