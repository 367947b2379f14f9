"""Turns that have ended with a call of the tool ``bash``, and histories of tools, for retention policies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sojourn.ids import ProgramId
from sojourn_server.policies.policy_views import FinishedTurnView
from sojourn_server.programs.windowed_history import ToolHistory


def tool_history(**durations_s: Iterable[float]) -> ToolHistory:
    """Tool → the seconds of its calls, oldest first."""
    made = ToolHistory()
    for tool, all_s in durations_s.items():
        for duration_s in all_s:
            made.observe(tool, duration_s)
    return made


def finished_turn(**changes: Any) -> FinishedTurnView:
    fields: dict[str, Any] = {
        "program_id": ProgramId("p"),
        "tool": "bash",
        "context_tokens": 1000,
        "reload_s": 1.0,
        "mean_evicted_wait_s": 0.0,
        "memoryfulness": 1.0,
        "history": ToolHistory(),
    }
    return FinishedTurnView(**{**fields, **changes})
