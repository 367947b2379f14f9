"""Tetris in the lab: what prediction is worth, who may know the future, and that copies are made ahead."""

from __future__ import annotations

from functools import cache
from math import log
from statistics import fmean

import pytest
from sojourn_server.policies.forecasting.output_length_prediction import NoLengthPrediction, OutputLengthView
from sojourn_server.simulator.oracle_policies import NoisyPredictor, OraclePredictor
from sojourn_server.simulator.report.run_metrics import cascades, summarize_run
from sojourn_server.simulator.simulation_run import RunSpec, run_simulation
from sojourn_server.simulator.simulator_policies import PolicyError, find_policy


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
    return run_simulation(spec).log


def test_stock_preempts_in_cascades_and_tetris_seldom_at_its_speed() -> None:
    stock, ours = played("stock"), played("tetris")
    assert len(stock.preemption_steps) > 15
    assert len(ours.preemption_steps) < 0.6 * len(stock.preemption_steps)
    assert cascades(ours.preemption_steps) <= cascades(stock.preemption_steps)
    assert summarize_run(ours).output_tok_per_s > 0.9 * summarize_run(stock).output_tok_per_s
    assert ours.hook_failures == 0


def test_one_that_knows_the_future_hardly_preempts_at_all() -> None:
    assert len(played("tetris+oracle").preemption_steps) < 0.1 * len(played("stock").preemption_steps)


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


def test_only_presets_can_be_told_the_future() -> None:
    assert find_policy("tetris+oracle").oracle
    assert find_policy("tetris+host+oracle").own_tiers
    with pytest.raises(PolicyError, match="unknown policy 'stock\\+oracle'"):
        find_policy("stock+oracle")


def view(output_tokens: int) -> OutputLengthView:
    return OutputLengthView("r", output_tokens, 10_000)


def test_the_oracle_knows() -> None:
    oracle = OraclePredictor(length=lambda request_id: 100)
    assert oracle.remaining(view(30), 0.0) == (70.0,)
    assert oracle.remaining(view(100), 0.0) == (1.0,), "its last token is on its way"


def test_only_presets_can_be_told_with_an_error() -> None:
    assert find_policy("tetris+host+erring=0.6").prediction_error == 0.6
    assert find_policy("tetris+host+erring=0.6").own_tiers
    assert find_policy("tetris+erring=0.6+host").prediction_error == 0.6, "in any order"
    assert find_policy("tetris+erring=0.6+host").own_tiers
    for name in ("stock+erring=0.6", "tetris+erring", "tetris+erring=x"):
        with pytest.raises(PolicyError, match="unknown policy"):
            find_policy(name)


def prediction_error(error: float, seed: int = 0) -> NoisyPredictor:
    return NoisyPredictor(
        length=lambda request_id: 5_000, error=error, unseen=NoLengthPrediction(), seed=seed
    )


def test_who_errs_errs_the_same_again_and_knows_nothing_of_whom_it_has_not_seen() -> None:
    first = prediction_error(0.5).remaining(view(10), 0.0)
    assert prediction_error(0.5).remaining(view(10), 0.0) == first
    assert first is not None
    assert list(first) == sorted(first)
    assert len(first) == 8
    assert prediction_error(0.0).remaining(view(10), 0.0) == pytest.approx((4_990.0,) * 8)
    assert prediction_error(0.0).remaining(view(0), 0.0) is None


def test_who_errs_is_off_by_as_much_as_told_and_says_so() -> None:
    allowed = 1_000_000_000
    said = [
        prediction_error(0.5, seed).remaining(OutputLengthView("r", 10, allowed), 0.0)
        for seed in range(2_000)
    ]
    answers = [left for left in said if left is not None]
    assert fmean(abs(log(left[4] / 4_990)) for left in answers) == pytest.approx(0.5, rel=0.1)
    for point in range(8):
        below = sum(left[point] > 4_990 for left in answers) / len(answers)
        assert below == pytest.approx((point + 0.5) / 8, abs=0.05)
