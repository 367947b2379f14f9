"""Tetris in the simulator: what prediction is worth, and that copies are made ahead."""

from __future__ import annotations

from functools import cache

import pytest
from sojourn_server.simulator.report.run_metrics import cascades, summarize_run
from sojourn_server.simulator.simulation_run import RunSpec, run_simulation

pytestmark = pytest.mark.slow


@cache
def played(policy: str):
    """Chat and long reasoning, sixteen at once, on a pool that a few long answers fill."""
    spec = RunSpec(
        policy=policy,
        workload="synthetic:reasoning-mix",
        programs=16,
        until_s=240.0,
        pool_tokens=40_000,
        max_model_len=40_000,
    )
    return run_simulation(spec)


def test_stock_preempts_in_cascades_and_tetris_seldom_at_its_speed() -> None:
    stock, ours = played("stock"), played("tetris")
    assert len(stock.preemption_steps) > 15
    assert len(ours.preemption_steps) < 0.6 * len(stock.preemption_steps)
    assert cascades(ours.preemption_steps) <= cascades(stock.preemption_steps)
    assert summarize_run(ours).output_tok_per_s > 0.9 * summarize_run(stock).output_tok_per_s
    assert ours.hook_failures == 0


def test_with_host_memory_victims_are_copied_and_not_computed_again() -> None:
    ours = played("tetris+host")
    assert ours.preemption_steps
    assert ours.copied_to_host_bytes > 0
    assert ours.copied_to_device_bytes > 0
    again = [
        sum(turn.regenerated.get("preempted", 0) for program in log.programs for turn in program.turns)
        / max(1, len(log.preemption_steps))
        for log in (ours, played("tetris"))
    ]
    assert again[0] < 0.2 * again[1]
