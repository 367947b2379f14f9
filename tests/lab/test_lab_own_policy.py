"""The example of docs/lab.md: a policy of one's own, judged by the lab without touching sojourn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer.testing
from sojourn.ids import ProgramId
from sojourn_server.cli import build_app
from sojourn_server.lab.policies import find_policy
from sojourn_server.lab.run import RunSpec, check
from sojourn_server.policy.base import Keep, Reason
from sojourn_server.policy.preset import load_preset, read_preset
from sojourn_server.policy.views import TurnView
from sojourn_server.program.history import ToolHistory

EXAMPLE = Path(__file__).parents[2] / "examples" / "lab_policy" / "break_even.toml"


def turn(reload_s: float, wait_s: float, tool: str | None = "bash") -> TurnView:
    return TurnView(
        program_id=ProgramId("p"),
        tool=tool,
        context_tokens=1000,
        kv_blocks=60,
        reload_s=reload_s,
        mean_evicted_wait_s=wait_s,
        memoryfulness=1.0,
        history=ToolHistory(),
    )


def test_it_is_short_and_differs_from_its_base_in_one_answer() -> None:
    files = (EXAMPLE, EXAMPLE.with_suffix(".py"))
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) < 100
    mine, base = read_preset(EXAMPLE), load_preset("continuum-paper")
    for question in ("entry", "order", "room", "victim", "eviction"):
        assert getattr(mine, question) == getattr(base, question)
    assert type(mine.retention).__name__ == "BreakEven"


def test_it_keeps_for_as_long_as_the_loss_would_cost() -> None:
    retention = read_preset(EXAMPLE).retention
    assert retention.keep(turn(2.0, 3.0), 0.0) == Keep(5.0, Reason.LEAST_WASTE)
    assert retention.keep(turn(2.0, 3.0, tool=None), 0.0) == Keep(0.0, Reason.NO_TOOL_CALL)


def test_the_lab_takes_it_by_its_file(tmp_path: Path) -> None:
    assert find_policy(str(EXAMPLE)).name == "break_even"
    assert check(
        [RunSpec(policy=str(EXAMPLE), workload="synthetic:latency-cv:1.0", max_context_tokens=60_000)]
    )
    (tmp_path / "bad.py").write_text("class Mine:\n    pass\n")
    (tmp_path / "bad.toml").write_text('extends = "continuum"\nretention = "bad:Mine"\n')
    result = typer.testing.CliRunner().invoke(
        build_app(), ["simulate", "synthetic:continuum-bfcl", "--policy", str(tmp_path / "bad.toml")]
    )
    assert "bad:Mine has no keep; RetentionPolicy in policy/base.py" in str(result.exception)


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
def test_it_runs_in_vllms_scheduler_and_does_what_it_says() -> None:
    pytest.importorskip("vllm")
    from lab_small_runs import SmallRun
    from lab_small_world import small_world

    run = SmallRun(find_policy(str(EXAMPLE)), small_world(seed=3))
    assert not run.log.notes
    assert run.log.hook_failures == 0
    assert all(program.finished_s is not None for program in run.log.programs)
    kept = [what for _, (kind, what) in run.decisions if kind == "decision" and _is_mine(what)]
    assert len(kept) > 10
    base = SmallRun("program-fcfs", small_world(seed=3))
    assert not [what for _, (kind, what) in base.decisions if kind == "decision" and _is_mine(what)]


def _is_mine(decision: dict[str, Any]) -> bool:
    return bool(decision["reason"] == Reason.LEAST_WASTE.value)
