"""The policy in CONTRIBUTING works. The examples are run by tests/frameworks."""

from __future__ import annotations

import re
import sys
import types

import pytest
from docs_tools import ROOT, SERVER, block
from sojourn.ids import ProgramId
from sojourn_server.policies.policy_protocols import DecisionReason, RetentionDecision
from sojourn_server.policies.policy_views import FinishedTurnView
from sojourn_server.policies.preset import POLICY_CLASSES, parse_preset
from sojourn_server.programs.windowed_history import ToolHistory

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def code(name: str, language: str) -> str:
    return block(CONTRIBUTING, name).removeprefix(f"```{language}\n").removesuffix("```\n")


def turn(history: ToolHistory, tool: str | None) -> FinishedTurnView:
    return FinishedTurnView(
        program_id=ProgramId("p"),
        tool=tool,
        context_tokens=1000,
        reload_s=1.0,
        mean_evicted_wait_s=0.0,
        memoryfulness=1.0,
        history=history,
    )


def test_the_policy_of_the_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    source = code("example-policy", "python")
    assert len(source.splitlines()) <= 22
    module = types.ModuleType("sojourn_server.policies.retention_median")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, "CONTRIBUTING.md", "exec"), module.__dict__)
    assert '`POLICY_CLASSES["retention"]`' in CONTRIBUTING
    assert '`"median": retention_median.MedianRetention`' in CONTRIBUTING
    monkeypatch.setitem(POLICY_CLASSES["retention"], "median", module.MedianRetention)

    preset = parse_preset(code("example-preset", "toml"), source="CONTRIBUTING.md")
    history = ToolHistory()
    for duration_s in (1.0, 2.0, 30.0):
        history.observe("bash:pytest", duration_s)
    assert preset.name == "median"
    assert preset.retention.keep(turn(history, "bash:pytest"), 0.0) == RetentionDecision(
        6.0, DecisionReason.THIS_TOOL
    )
    assert preset.retention.keep(turn(history, "never"), 0.0) == RetentionDecision(
        0.0, DecisionReason.NOT_WORTH_IT
    )
    assert preset.retention.keep(turn(history, None), 0.0) == RetentionDecision(
        0.0, DecisionReason.NO_TOOL_CALL
    )


def test_the_files_on_the_map_exist() -> None:
    named = set(re.findall(r"`([\w/]+(?:\.py|\.md|\.toml|/))`", CONTRIBUTING)) - {"my.toml"}
    assert len(named) > 20
    for name in named - {"policies/retention_median.py", "vllm/compat.py"}:
        assert (ROOT / name).exists() or (SERVER / name).exists(), name
