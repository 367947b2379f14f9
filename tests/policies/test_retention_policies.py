"""What surrounds the TTL rule: no tool, hints, bounds and the reason that is given."""

from __future__ import annotations

import math
from typing import Any

import pytest
from sojourn.ids import ProgramId
from sojourn_server.policies.policy_protocols import DecisionReason, RetentionDecision
from sojourn_server.policies.policy_views import FinishedTurnView
from sojourn_server.policies.retention_policies import ContinuumRetention, FixedRetention, RetentionPolicy
from sojourn_server.programs.windowed_history import ToolHistory

NOT_WORTH_IT = RetentionDecision(0.0, DecisionReason.NOT_WORTH_IT)


def history(n: int, duration_s: float, tool: str = "bash") -> ToolHistory:
    made = ToolHistory()
    for _ in range(n):
        made.observe(tool, duration_s)
    return made


def turn(**changes: Any) -> FinishedTurnView:
    fields: dict[str, Any] = {
        "program_id": ProgramId("p"),
        "tool": "bash",
        "context_tokens": 1000,
        "reload_s": 20.0,
        "mean_evicted_wait_s": 0.0,
        "memoryfulness": 1.0,
        "history": ToolHistory(),
    }
    return FinishedTurnView(**{**fields, **changes})


LONG = history(101, 30.0)


@pytest.mark.parametrize(
    ("view", "keep"),
    [
        (turn(), RetentionDecision(math.log(20.0), DecisionReason.COLD_START)),
        (turn(history=history(100, 3.0)), RetentionDecision(math.log(20.0), DecisionReason.COLD_START)),
        (turn(history=history(101, 3.0)), RetentionDecision(3.0, DecisionReason.THIS_TOOL)),
        (turn(history=history(101, 3.0), tool="web"), RetentionDecision(3.0, DecisionReason.ALL_TOOLS)),
        (turn(history=LONG), NOT_WORTH_IT),
        (turn(history=LONG, mean_evicted_wait_s=40.0), RetentionDecision(30.0, DecisionReason.THIS_TOOL)),
        (turn(history=LONG, mean_evicted_wait_s=40.0, memoryfulness=0.2), NOT_WORTH_IT),
        (turn(history=LONG, mean_evicted_wait_s=99.0, memoryfulness=-1.0), NOT_WORTH_IT),
        (turn(reload_s=0.0), NOT_WORTH_IT),
        (turn(tool=None), RetentionDecision(0.0, DecisionReason.NO_TOOL_CALL)),
        (turn(tool=None, hinted_ttl_s=40.0), RetentionDecision(40.0, DecisionReason.HINTED)),
        (turn(hinted_ttl_s=0.0, history=history(101, 3.0)), RetentionDecision(0.0, DecisionReason.HINTED)),
        (turn(hinted_ttl_s=9000.0), RetentionDecision(300.0, DecisionReason.HINTED)),
    ],
)  # fmt: skip
def test_continuum(view: FinishedTurnView, keep: RetentionDecision) -> None:
    assert ContinuumRetention().keep(view, 5.0) == keep


def test_fixed_and_none() -> None:
    assert FixedRetention(ttl_s=7.0).keep(turn(), 0.0) == RetentionDecision(7.0, DecisionReason.FIXED)
    assert FixedRetention(ttl_s=7.0).keep(turn(tool=None), 0.0) == RetentionDecision(
        0.0, DecisionReason.NO_TOOL_CALL
    )
    assert RetentionPolicy().keep(turn(hinted_ttl_s=40.0), 0.0) == RetentionDecision(
        0.0, DecisionReason.POLICY_OFF
    )
