"""The policy in CONTRIBUTING does what it says. The examples are run by tests/frameworks."""

from __future__ import annotations

import sys
import types

import pytest
from docs_tools import ROOT, block
from sojourn.ids import ProgramId
from sojourn_server.policy.base import Keep, Reason
from sojourn_server.policy.preset import REGISTRY, parse_preset
from sojourn_server.policy.views import TurnView
from sojourn_server.program.history import ToolHistory

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


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
