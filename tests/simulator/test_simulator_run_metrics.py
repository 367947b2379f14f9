"""Figures of a run: every definition on a log small enough to count by hand."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator_run_logs import small_run, turn_log
from sojourn_server.simulator.report.run_metrics import (
    CUT_OFF_NOTE,
    NONE_FINISHED_NOTE,
    SURVIVORS_NOTE,
    WarmUpError,
    cascades,
    censored_statistics,
    estimated_statistics,
    summarize_run,
    summary_statistics,
)
from sojourn_server.simulator.report.run_row import WALL_CLOCK_FIELDS


def test_every_figure_of_a_closed_loop_counted_by_hand() -> None:
    row = summarize_run(small_run())
    assert (row.programs_finished, row.programs_unfinished) == (1, 1)
    assert (row.completion_s.mean, row.completion_s.count, row.completion_s.at_least) == (30.0, 1, ())
    # From the client's sending: the second that turn a/0 spent at a router is in it.
    assert (row.ttft_s.mean, row.ttft_s.count) == ((3 + 7 + 20) / 3, 3)
    # b/0 has made 85 tokens by the run's end.
    assert (row.tpot_s.mean, row.tpot_s.count) == ((1.0 + 1.0 + 40 / 84) / 3, 3)
    assert row.output_tok_per_s == (11 + 4 + 85) / 100
    assert row.programs_per_hour == 36.0
    assert (row.prompt_tokens, row.computed_tokens) == (460, 432)
    assert (row.device_hit_tokens, row.host_hit_tokens) == (32, 16)
    assert row.regenerated_tokens == 68
    assert list(row.regenerated_by.items()) == [("evicted", 48), ("preempted", 20)]
    assert row.turns_finished == 2
    assert (row.preemptions, row.cascades) == (4, 2)
    assert row.device_busy_fraction == 0.5
    assert row.scheduler_ms_per_step == pytest.approx(0.5)
    assert row.trace == "t"
    assert row.notes == (SURVIVORS_NOTE,)


def test_the_estimate_counts_the_unfinished_for_as_long_as_it_was_seen() -> None:
    estimate = summarize_run(small_run()).completion_estimate_s
    # One of two had finished after 30 s; of the other 60 s are known.
    assert (estimate.p50, estimate.p90, estimate.mean) == (30.0, 60.0, 30 + 0.5 * 30)
    assert estimate.at_least == ("mean", "p90", "p95", "p99")


def test_an_open_loop_counts_the_unfinished_as_a_lower_bound() -> None:
    row = summarize_run(small_run("open"))
    assert (row.completion_s.mean, row.completion_s.count) == (45.0, 2)
    assert row.completion_s.at_least == ("mean", "p50", "p90", "p95", "p99")
    assert row.notes == (CUT_OFF_NOTE,)


def test_slowdowns_are_completion_times_over_those_alone() -> None:
    run = small_run("open")
    assert summarize_run(run).slowdown.count == 0, "logs of earlier releases have no times alone"
    run.programs[0].expected_s, run.programs[1].expected_s = 10.0, 30.0
    slowdown = summarize_run(run).slowdown
    assert (slowdown.mean, slowdown.count) == (2.5, 2)
    assert slowdown.at_least == ("mean", "p50", "p90", "p95", "p99"), "60 s so far are twice 30 s, at least"
    run.loop = "closed"
    assert (summarize_run(run).slowdown.mean, summarize_run(run).slowdown.count) == (3.0, 1)


@pytest.mark.parametrize("loop", ["closed", "open"])
def test_a_run_in_which_none_finished_says_so(loop: str) -> None:
    run = small_run(loop)
    del run.programs[0]
    row = summarize_run(run)
    assert row.programs_finished == row.programs_per_hour == 0
    assert row.output_tok_per_s == 0.85
    if loop == "closed":
        assert row.completion_s.mean is row.completion_s.p50 is row.completion_s.p95 is None
        assert row.notes == (NONE_FINISHED_NOTE,)
    else:
        assert row.completion_s.at_least == ("mean", "p50", "p90", "p95", "p99")
        assert row.notes == (NONE_FINISHED_NOTE, CUT_OFF_NOTE)


def test_a_turn_without_blocks_counts_as_waiting_only() -> None:
    run = small_run()
    run.programs[1].turns[0] = turn_log("b", 0, 40.0, prompt_tokens=200, output_tokens=9)
    row = summarize_run(run)
    assert row.prompt_tokens == 260
    # It has waited for 60 s when the run ends: who lets somebody wait for ever must not look best.
    assert (row.ttft_s.mean, row.ttft_s.count) == ((3 + 7 + 60) / 3, 3)
    assert row.ttft_s.at_least == ("mean", "p90", "p95", "p99")
    assert row.ttft_s.p50 == 7
    assert row.tpot_s.count == 2


def test_a_pool_that_was_never_short_is_noted() -> None:
    run = small_run()
    run.preemption_steps, run.pool_blocks = [], 1000
    for program in run.programs:
        for turn in program.turns:
            turn.regenerated = {}
    assert "KV pool of 16,000 tokens never ran short" in summarize_run(run).notes[-1]
    run.policy = "admit"
    assert summarize_run(run).notes == (SURVIVORS_NOTE,)


def test_a_warm_up_leaves_out_earlier_programs_and_turns_but_not_their_tokens_since() -> None:
    row = summarize_run(small_run(), since_s=8.0)
    assert (row.programs_finished, row.programs_unfinished) == (0, 1)
    assert row.completion_s.mean is None
    assert (row.ttft_s.count, row.ttft_s.mean) == (2, (7 + 20) / 2)
    # Half of turn a/0's tokens fell after 8 s, and a's end counts: it happened in the window.
    assert row.output_tok_per_s == pytest.approx((11 / 2 + 4 + 85) / 92)
    assert row.programs_per_hour == pytest.approx(3600 / 92)
    assert row.prompt_tokens == 360
    assert row.preemptions == 4
    assert "first 8 s" in row.notes[-1]


@pytest.mark.parametrize("since_s", [-1.0, 100.0])
def test_a_warm_up_that_leaves_nothing_is_refused(since_s: float) -> None:
    with pytest.raises(WarmUpError, match=r"since_s is .*less than virtual_s, 100") as refused:
        summarize_run(small_run(), since_s=since_s)
    assert "shorter warm-up" in refused.value.next_step


def test_defects_of_the_run_are_noted() -> None:
    run = small_run()
    run.hook_failures, run.refused_hints, run.notes = 2, 3, ["of the run", "of the run"]
    notes = summarize_run(run).notes
    assert notes[0] == "of the run"
    assert "2 calls of the policy or the adapter failed" in notes[-1]
    assert "refused 3 events" in notes[-2]
    assert len(notes) == 4


def test_only_wall_clock_fields_differ_between_machines() -> None:
    one, other = (small_run() for _ in range(2))
    other.wall_s, other.scheduler_s = 99.0, 9.0
    rows = [msgspec.to_builtins(summarize_run(run)) for run in (one, other)]
    assert {name for name in rows[0] if rows[0][name] != rows[1][name]} == set(WALL_CLOCK_FIELDS)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [([], 0), ([7], 0), ([7, 7], 1), ([0, 10], 1), ([0, 11], 0), ([40, 0, 5, 9], 2), ([0, 10, 20, 30], 3)],
)
def test_a_cascade_is_a_preemption_soon_after_another(steps: list[int], expected: int) -> None:
    assert cascades(steps) == expected


seconds = st.floats(0, 1e4, allow_nan=False)


@given(st.lists(seconds, max_size=12), st.lists(st.tuples(seconds, seconds), max_size=12))
def test_a_censored_figure_never_exceeds_the_truth_and_is_it_where_not_marked(
    exact: list[float], cut_off: list[tuple[float, float]]
) -> None:
    found = censored_statistics(exact, [so_far for so_far, _ in cut_off])
    truth = summary_statistics([*exact, *(so_far + more for so_far, more in cut_off)])
    for name in ("mean", "p50", "p90", "p95", "p99"):
        ours, true = getattr(found, name), getattr(truth, name)
        if ours is None:
            assert true is None
        elif name in found.at_least:
            assert ours <= true * (1 + 1e-12)
        else:
            assert ours == pytest.approx(true)


# -- the estimate of Kaplan and Meier: exact without cut-offs, unbiased with them


@given(st.lists(st.floats(0.001, 1e4), min_size=1, max_size=30))
def test_without_cut_offs_it_is_mean_and_nearest_rank(times: list[float]) -> None:
    found = estimated_statistics(times, [])
    assert found.mean == pytest.approx(math.fsum(times) / len(times))
    for percent in (50, 90, 95, 99):
        rank = math.ceil(percent * len(times) / 100)
        assert getattr(found, f"p{percent}") == sorted(times)[rank - 1]
    assert found.at_least == ()


def test_a_textbook_example_by_hand() -> None:
    # At risk: 6 at 3, 4 at 5 (one cut off at 4), 2 at 9 (one cut off at 5, the moment another ended).
    # So 17 % have finished by 3, 38 % by 5 and 69 % by 9.
    found = estimated_statistics([3, 5, 9], [4, 5, 12])
    assert (found.p50, found.p90, found.count) == (9, 12, 6)
    assert found.at_least == ("mean", "p90", "p95", "p99")


def test_what_is_never_seen_is_nothing() -> None:
    assert estimated_statistics([], []).mean is None
    only_cut = estimated_statistics([], [5.0, 7.0])
    assert (only_cut.p50, only_cut.mean) == (7.0, 7.0)
    assert set(only_cut.at_least) == {"mean", "p50", "p90", "p95", "p99"}
