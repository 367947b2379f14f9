"""What surrounds the TTL rule: no tool, hints, bounds and the reason that is given."""

from __future__ import annotations

import math
from typing import Any

import pytest
from sojourn.ids import ProgramId
from sojourn_server.policy.base import Keep, Reason
from sojourn_server.policy.retention import ContinuumRetention, FixedRetention, NoRetention
from sojourn_server.policy.views import TurnView
from sojourn_server.program.history import ToolHistory


def history(n: int, duration_s: float, tool: str = "bash") -> ToolHistory:
    made = ToolHistory()
    for _ in range(n):
        made.observe(tool, duration_s)
    return made


def turn(**changes: Any) -> TurnView:
    fields: dict[str, Any] = {
        "program_id": ProgramId("p"),
        "tool": "bash",
        "context_tokens": 1000,
        "kv_blocks": 60,
        "reload_s": 20.0,
        "mean_evicted_wait_s": 0.0,
        "memoryfulness": 1.0,
        "history": ToolHistory(),
    }
    return TurnView(**{**fields, **changes})


LONG = history(101, 30.0)


@pytest.mark.parametrize(
    ("view", "keep"),
    [
        (turn(), Keep(math.log(20.0), Reason.COLD_START)),
        (turn(history=history(100, 3.0)), Keep(math.log(20.0), Reason.COLD_START)),
        (turn(history=history(101, 3.0)), Keep(3.0, Reason.THIS_TOOL)),
        (turn(history=history(101, 3.0), tool="web"), Keep(3.0, Reason.ALL_TOOLS)),
        (turn(history=LONG), Keep(0.0, Reason.NOT_WORTH_IT)),
        (turn(history=LONG, mean_evicted_wait_s=40.0), Keep(30.0, Reason.THIS_TOOL)),
        (turn(history=LONG, mean_evicted_wait_s=40.0, memoryfulness=0.2), Keep(0.0, Reason.NOT_WORTH_IT)),
        (turn(history=LONG, mean_evicted_wait_s=99.0, memoryfulness=-1.0), Keep(0.0, Reason.NOT_WORTH_IT)),
        (turn(reload_s=0.0), Keep(0.0, Reason.NOT_WORTH_IT)),
        (turn(tool=None), Keep(0.0, Reason.NO_TOOL_CALL)),
        (turn(tool=None, hinted_ttl_s=40.0), Keep(40.0, Reason.HINTED)),
        (turn(hinted_ttl_s=0.0, history=history(101, 3.0)), Keep(0.0, Reason.HINTED)),
        (turn(hinted_ttl_s=9000.0), Keep(300.0, Reason.HINTED)),
    ],
)  # fmt: skip
def test_continuum(view: TurnView, keep: Keep) -> None:
    assert ContinuumRetention().keep(view, 5.0) == keep


def test_a_shorter_bound_bounds_hints_too() -> None:
    policy = ContinuumRetention(max_ttl_s=2.0)
    assert policy.keep(turn(hinted_ttl_s=40.0), 0.0).ttl_s == 2.0
    assert policy.keep(turn(reload_s=1e6), 0.0).ttl_s == 2.0


def test_fixed_and_none() -> None:
    assert FixedRetention(ttl_s=7.0).keep(turn(), 0.0) == Keep(7.0, Reason.FIXED)
    assert FixedRetention(ttl_s=7.0).keep(turn(tool=None), 0.0) == Keep(0.0, Reason.NO_TOOL_CALL)
    assert NoRetention().keep(turn(hinted_ttl_s=40.0), 0.0) == Keep(0.0, Reason.POLICY_OFF)
