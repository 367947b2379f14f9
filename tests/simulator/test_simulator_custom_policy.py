"""The example of docs/simulator.md: a policy of one's own, judged by the lab without touching sojourn."""

from __future__ import annotations

from pathlib import Path

import pytest
from sojourn.ids import ProgramId
from sojourn_server.policies.policy_protocols import DecisionReason, RetentionDecision
from sojourn_server.policies.policy_views import FinishedTurnView
from sojourn_server.policies.preset import load_preset, read_preset
from sojourn_server.programs.windowed_history import ToolHistory

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_policy" / "break_even.toml"


def turn(reload_s: float, wait_s: float, tool: str | None = "bash") -> FinishedTurnView:
    return FinishedTurnView(
        program_id=ProgramId("p"),
        tool=tool,
        context_tokens=1000,
        reload_s=reload_s,
        mean_evicted_wait_s=wait_s,
        memoryfulness=1.0,
        history=ToolHistory(),
    )


def test_it_is_short_and_differs_from_its_base_in_one_answer() -> None:
    files = (EXAMPLE, EXAMPLE.with_suffix(".py"))
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) < 100
    mine, base = read_preset(EXAMPLE), load_preset("continuum-paper")
    for question in ("admission", "order", "lease_reclaim", "victim", "eviction"):
        assert getattr(mine, question) == getattr(base, question)
    assert type(mine.retention).__name__ == "BreakEven"


def test_it_keeps_for_as_long_as_the_loss_would_cost() -> None:
    retention = read_preset(EXAMPLE).retention
    assert retention.keep(turn(2.0, 3.0), 0.0) == RetentionDecision(5.0, DecisionReason.LEAST_WASTE)
    assert retention.keep(turn(2.0, 3.0, tool=None), 0.0) == RetentionDecision(
        0.0, DecisionReason.NO_TOOL_CALL
    )


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
def test_it_runs_in_vllms_scheduler_and_does_what_it_says() -> None:
    pytest.importorskip("vllm")
    from simulator_small_runs import SmallRun
    from simulator_small_workload import assert_played, small_workload

    def reasons(policy: str) -> list[str]:
        loop = small_workload(seed=3)
        run = SmallRun(policy, loop)
        assert_played(run.log, loop.programs)
        return [what["reason"] for _, (kind, what) in run.decisions if kind == "decision"]

    assert reasons(str(EXAMPLE)).count(DecisionReason.LEAST_WASTE.value) > 10
    assert DecisionReason.LEAST_WASTE.value not in reasons("program-fcfs")
