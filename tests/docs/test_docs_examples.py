"""The examples run as they are, and the policy in CONTRIBUTING does what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from docs_tools import ROOT, block
from sojourn.events import ProgramEnd, ProgramStart, ToolStart
from sojourn.ids import ProgramId
from sojourn.testing import FakeServer
from sojourn_server.policy.base import Keep, Reason
from sojourn_server.policy.preset import REGISTRY, parse_preset
from sojourn_server.policy.views import TurnView
from sojourn_server.program.history import ToolHistory

sys.path.insert(0, str(ROOT / "tests" / "integrations"))
from mini_server import MiniServer, calls

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def run(example: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SOJOURN_")}
    environment |= {
        "MSWEA_GLOBAL_CONFIG_DIR": str(cwd / "mini"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
    }
    line = [sys.executable, str(ROOT / "examples" / example), *arguments]
    return subprocess.run(line, env=environment, cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_marked_and_explains_itself(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 60
    assert source.count("# <── sojourn: once a") == 2
    result = run(path.name, "--help", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "sojourn serve" in result.stdout


def test_the_openai_loop(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    with FakeServer() as server:
        result = run("openai_loop.py", "--url", server.url, "--rehearse", "2", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        events = server.events() + server.events(piggybacked=True)
        contexts = [request.context for request in server.requests]
    transcript = json.loads(result.stdout)
    assert [message["role"] for message in transcript] == ["user", *["assistant", "tool"] * 2, "assistant"]
    assert "UTC" in transcript[2]["content"]
    assert len(contexts) == 3
    assert len({context.program_id for context in contexts if context}) == 1
    starts = {event.call_id: event.tool for event in events if isinstance(event, ToolStart)}
    assert starts == {"r0": "clock", "r1": "whoami"}
    assert sum(isinstance(event, ProgramStart) for event in events) == 1
    assert sum(isinstance(event, ProgramEnd) for event in events) == 1


def test_the_mini_agent(tmp_path: Path) -> None:
    pytest.importorskip("minisweagent")
    script = [calls("echo hi"), calls("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")]
    with MiniServer(script) as server:
        result = run("mini_swe_agent.py", "--url", server.url, cwd=tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr
        assert result.stdout.strip().endswith("Submitted")
        assert [event["tool"] for event in server.told("tool_start")] == ["bash", "bash"]
        assert len(server.told("program_start")) == len(server.told("program_end")) == 1


def code(name: str, language: str) -> str:
    return block(CONTRIBUTING, name).removeprefix(f"```{language}\n").removesuffix("```\n")


def turn(history: ToolHistory, tool: str | None) -> TurnView:
    return TurnView(
        program_id=ProgramId("p"),
        tool=tool,
        context_tokens=1000,
        kv_blocks=60,
        reload_s=1.0,
        mean_evicted_wait_s=0.0,
        memoryfulness=1.0,
        history=history,
    )


def test_the_policy_of_the_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    source = code("example-policy", "python")
    assert len(source.splitlines()) <= 22
    module = types.ModuleType("sojourn_server.policy.retention_median")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, "CONTRIBUTING.md", "exec"), module.__dict__)
    assert '`REGISTRY["retention"]`' in CONTRIBUTING
    assert '`"median": "retention_median:MedianRetention"`' in CONTRIBUTING
    monkeypatch.setitem(REGISTRY["retention"], "median", "retention_median:MedianRetention")

    preset = parse_preset(code("example-preset", "toml"), source="CONTRIBUTING.md")
    history = ToolHistory()
    for duration_s in (1.0, 2.0, 30.0):
        history.observe("bash:pytest", duration_s)
    assert preset.name == "median"
    assert preset.retention.keep(turn(history, "bash:pytest"), 0.0) == Keep(6.0, Reason.THIS_TOOL)
    assert preset.retention.keep(turn(history, "never"), 0.0) == Keep(0.0, Reason.NOT_WORTH_IT)
    assert preset.retention.keep(turn(history, None), 0.0) == Keep(0.0, Reason.NO_TOOL_CALL)
