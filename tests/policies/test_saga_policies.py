"""SAGA's policies on views made by hand: WA-LRU, three tiers, tool-type TTL, prefetch (paper §3.3, §4)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from finished_turns import finished_turn, tool_history
from hypothesis import given
from hypothesis import strategies as st
from sojourn.aeg import END
from sojourn.ids import ProgramId
from sojourn_server.policies.eviction_policies import WorkflowAwareLruEviction
from sojourn_server.policies.policy_protocols import (
    DecisionReason,
    NextStepPrediction,
    PredictionSource,
    RetentionDecision,
)
from sojourn_server.policies.policy_views import (
    EvictionCandidateView,
    EvictionScoreScale,
    LeaseView,
    LoadAheadView,
    PrefetchView,
    WorkflowStepView,
)
from sojourn_server.policies.prefetch_policies import LikeliestSuccessorPrefetch
from sojourn_server.policies.retention_policies import ToolTypeRetention
from sojourn_server.policies.workflow_prediction import (
    NO_NEXT_STEP_PREDICTION,
    ThreeTierPrediction,
    hinted_continuation_probability,
)
from sojourn_server.programs.windowed_history import ToolHistory

# -- WA-LRU (S3) -----------------------------------------------------------------------


SCALE = EvictionScoreScale(longest_gap_s=10.0, most_blocks=100.0)


def owner(**changes: Any) -> EvictionCandidateView:
    return EvictionCandidateView(1, False, 100.0, blocks=50, p_reuse=0.8)._replace(**changes)


def score(view: EvictionCandidateView, scale: EvictionScoreScale = SCALE) -> tuple[float, ...]:
    rule = WorkflowAwareLruEviction()
    return rule.score(rule.score_inputs(view), scale)


def p_evict(view: EvictionCandidateView, now: float) -> float:
    """Equation 1 with the paper's weights, as it stands there."""
    recency = (now - view.last_turn_s) / SCALE.longest_gap_s
    return 0.3 * recency + 0.5 * (1 - (view.p_reuse or 0.0)) + 0.2 * view.blocks / SCALE.most_blocks


owners = st.builds(owner, last_turn_s=st.floats(90, 100), blocks=st.integers(0, 100), p_reuse=st.floats(0, 1))


@given(owners, owners, st.floats(100, 200))
def test_the_order_is_that_of_equation_1_at_any_time(
    one: EvictionCandidateView, other: EvictionCandidateView, now: float
):
    by_paper = p_evict(one, now) - p_evict(other, now)
    by_score = score(other)[1] - score(one)[1]  # the lowest is reused first
    assert by_score == pytest.approx(by_paper, abs=1e-9)


def test_what_equation_1_does_not_say():
    assert score(owner(over=True)) < score(owner()), "over"
    assert score(owner(has_request=True)) > score(owner()), "its request waits"
    assert score(owner(p_reuse=None)) < score(owner()), "cold"
    left = owner(in_abandoned_branch=True)
    seldom, often = (SCALE._replace(branch_reuse=share) for share in (0.1, 0.9))
    assert score(left, seldom) < score(left, often) < score(owner(), often), "another branch"


# -- three tiers (S2) --------------------------------------------------------------------

BRANCH = (("test", 0.6), ("edit", 0.3), (END, 0.1))
SEEN = (("edit", 0.75), (END, 0.25))


def test_hints_come_first_then_what_was_seen_then_nothing():
    rule = ThreeTierPrediction()
    step = WorkflowStepView(declared=BRANCH, inferred=SEEN, tasks=30)
    hinted = rule.expect(step, 0.0)
    assert hinted == NextStepPrediction(PredictionSource.HINTS, pytest.approx(0.9), "test", BRANCH[:2])
    inferred = rule.expect(step._replace(declared=()), 0.0)
    assert inferred == NextStepPrediction(PredictionSource.INFERRED, 0.75, "edit", SEEN[:1])
    assert rule.expect(step._replace(declared=(), tasks=29), 0.0) == NO_NEXT_STEP_PREDICTION


def test_hints_that_were_worth_nothing_are_not_looked_at_but_an_announced_end_is():
    step = WorkflowStepView(declared=((END, 1.0),), hints_reliable=False, inferred=SEEN, tasks=30)
    assert ThreeTierPrediction().expect(step, 0.0).source is PredictionSource.INFERRED
    assert ThreeTierPrediction().expect(step._replace(tasks=0), 0.0) == NO_NEXT_STEP_PREDICTION
    assert ThreeTierPrediction().expect(step._replace(final=True), 0.0) == NextStepPrediction(
        PredictionSource.HINTS, 0.0
    )


def test_an_inferred_edge_is_acted_on_from_the_papers_confidence_on():
    step = WorkflowStepView(inferred=(("edit", 0.69), ("test", 0.31)), tasks=30)
    found = ThreeTierPrediction().expect(step, 0.0)
    assert found == NextStepPrediction(PredictionSource.INFERRED, 1.0, None, step.inferred)
    likelier = step._replace(inferred=(("edit", 0.7), ("test", 0.3)))
    assert ThreeTierPrediction().expect(likelier, 0.0).successor == "edit"


def test_a_tool_call_means_that_the_program_continues():
    step = WorkflowStepView(calls_tool=True)
    rule = ThreeTierPrediction(calls_tell=True)
    assert rule.expect(step, 0.0) == NextStepPrediction(PredictionSource.HINTS, 1.0)
    assert rule.expect(step._replace(declared=BRANCH), 0.0).continuation_probability == pytest.approx(0.9)
    assert rule.expect(step._replace(inferred=SEEN, tasks=30), 0.0).source is PredictionSource.INFERRED
    assert rule.expect(step._replace(final=True), 0.0).continuation_probability == 0.0
    assert rule.expect(WorkflowStepView(), 0.0) == NO_NEXT_STEP_PREDICTION
    assert replace(rule, hints=False).expect(step, 0.0) == NO_NEXT_STEP_PREDICTION
    assert rule.expect(step._replace(hints_reliable=False), 0.0) == NO_NEXT_STEP_PREDICTION
    assert ThreeTierPrediction().expect(step, 0.0) == NO_NEXT_STEP_PREDICTION, "as the paper has it"


def test_ablations_look_at_less():
    step = WorkflowStepView(declared=BRANCH, inferred=SEEN, tasks=30)
    assert ThreeTierPrediction(hints=False).expect(step, 0.0).source is PredictionSource.INFERRED
    assert ThreeTierPrediction(hints=False, inference=False).expect(step, 0.0) == NO_NEXT_STEP_PREDICTION
    unhinted = step._replace(declared=())
    assert ThreeTierPrediction(inference=False).expect(unhinted, 0.0) == NO_NEXT_STEP_PREDICTION


def test_steps_left_say_more_than_the_graph():
    assert hinted_continuation_probability(
        WorkflowStepView(steps_left=9.0, declared=((END, 1.0),))
    ) == pytest.approx(0.9)
    assert hinted_continuation_probability(WorkflowStepView(steps_left=0.0)) == 0.0
    assert hinted_continuation_probability(WorkflowStepView(steps_left=1.0, resumes=True)) == 0.5
    assert hinted_continuation_probability(WorkflowStepView(declared=BRANCH, resumes=True)) == 1.0
    assert hinted_continuation_probability(WorkflowStepView(final=True, resumes=True)) == 0.0
    assert hinted_continuation_probability(WorkflowStepView()) is None


# -- tool-type TTL (S4) --------------------------------------------------------------------


TURN = finished_turn(history=tool_history(bash=map(float, range(1, 101))), continuation_probability=0.9)


def test_it_is_the_95th_percentile_of_its_tool():
    assert ToolTypeRetention().keep(TURN, 0.0) == RetentionDecision(95.0, DecisionReason.THIS_TOOL)


@pytest.mark.parametrize(
    ("changes", "ttl_s", "reason"),
    [
        ({"history": tool_history(bash=[1e6] * 50)}, 300.0, DecisionReason.THIS_TOOL),
        ({"hinted_ttl_s": 900.0}, 300.0, DecisionReason.HINTED),
        ({"tool": "new"}, 95.0, DecisionReason.ALL_TOOLS),
        ({"history": ToolHistory()}, 0.0, DecisionReason.COLD_START),
        ({"continuation_probability": 0.0}, 0.0, DecisionReason.NOT_WORTH_IT),
        ({"continuation_probability": None}, 0.0, DecisionReason.COLD_START),
        ({"tool": None}, 0.0, DecisionReason.NO_TOOL_CALL),
    ],
)
def test_it_is_capped_and_nothing_is_kept_for_programs_unknown_or_not_expected_back(
    changes: dict[str, Any], ttl_s: float, reason: DecisionReason
):
    assert ToolTypeRetention().keep(replace(TURN, **changes), 0.0) == RetentionDecision(ttl_s, reason)


def held(name: str, *, ttl_s: float = 100.0, **more: Any) -> LeaseView:
    """A lease of ten blocks that was granted at 0."""
    return LeaseView(ProgramId(name), 1, ttl_s, 10, 1.0, False, **more)._replace(ttl_s=ttl_s)


def pressed(rule: ToolTypeRetention, leases: list[LeaseView], used: int, now: float) -> dict[str, str]:
    return {str(name): reason.value for name, reason in rule.pressed(leases, used, 100, now)}


@pytest.mark.parametrize(("used", "ends_s"), [(0, 100.0), (70, 100.0), (80, 75.0), (90, 50.0), (100, 50.0)])
def test_pressure_moves_the_end_of_a_lease_by_half_its_time_at_most(used: int, ends_s: float) -> None:
    rule = ToolTypeRetention()
    assert pressed(rule, [held("a")], used, ends_s - 0.01) == {}
    if ends_s < 100.0:
        assert pressed(rule, [held("a")], used, ends_s + 0.01) == {"a": "ttl"}
        kept = [held("a", hinted=True), held("b")._replace(waiting=True)]
        assert pressed(rule, kept, used, 99.0) == {}, "the client asked for it, or its request waits"


def test_above_the_threshold_leases_end_in_the_eviction_order_as_far_as_needed() -> None:
    leases = [held("a", score=(3.0,)), held("b", score=(1.0,)), held("c", score=(2.0,))]
    printed = ToolTypeRetention(evicts=True)
    assert pressed(printed, leases, 90, 0.0) == {}
    assert pressed(printed, leases, 95, 0.0) == {"b": "pressure"}
    assert pressed(printed, leases, 100, 0.0) == {"b": "pressure"}
    assert pressed(printed, [one._replace(blocks=5) for one in leases], 100, 0.0).keys() == {"b", "c"}
    assert pressed(ToolTypeRetention(), leases, 100, 0.0) == {}
    due = leases[0]._replace(expires_s=40.0, ttl_s=80.0)
    assert pressed(printed, [due, *leases[1:]], 100, 1.0) == {"a": "ttl", "b": "pressure"}


def test_a_short_history_has_a_log_normal_tail():
    # Logarithms 0, 1, 2: mean 1, spread 1; the 95th percentile is e^(1 + 1.645).
    short = replace(TURN, history=tool_history(bash=[1.0, math.e, math.e**2]))
    assert ToolTypeRetention().keep(short, 0.0).ttl_s == pytest.approx(math.exp(1 + 1.6449), rel=1e-3)
    wild = replace(TURN, history=tool_history(bash=[0.0, 1e9, 1e12]))
    assert ToolTypeRetention().keep(wild, 0.0).ttl_s == pytest.approx(300.0)


# -- prefetch (S5) -------------------------------------------------------------------------


def test_it_is_there_when_the_tool_may_end():
    view = PrefetchView(0.9, [1.0, 2.0, 3.0, 4.0], reload_s=0.5)
    assert LikeliestSuccessorPrefetch().plan(view, 100.0) == 101.5
    assert LikeliestSuccessorPrefetch().plan(view._replace(tool_durations_s=()), 100.0) == 100.0
    assert LikeliestSuccessorPrefetch().plan(view._replace(reload_s=9.0), 100.0) == 100.0
    assert LikeliestSuccessorPrefetch().plan(view._replace(continuation_probability=0.4), 100.0) is None


def test_it_is_loaded_into_spare_blocks_where_copying_is_faster_and_the_link_is_idle():
    view = LoadAheadView(
        host_blocks=80,
        spare_blocks=90,
        reserve_blocks=20,
        pool_blocks=1000,
        compute_s_per_block=0.01,
        load_s_per_block=0.001,
        queue_s=0.0,
    )
    policy = LikeliestSuccessorPrefetch()
    assert policy.load_ahead(view, 0.0) == 70, "a step's blocks are left"
    assert policy.load_ahead(view._replace(spare_blocks=1000), 0.0) == 80, "what host memory has"
    assert policy.load_ahead(view._replace(reserve_blocks=600), 0.0) == 40, "0.05 of the pool at most"
    assert policy.load_ahead(view._replace(load_s_per_block=0.0095), 0.0) == 52, "half a second's"
    assert policy.load_ahead(view._replace(load_s_per_block=None), 0.0) == 70, "until it is measured"
    for other in (
        view._replace(load_s_per_block=0.02),  # computing is faster
        view._replace(queue_s=0.001),
        view._replace(spare_blocks=20),
        view._replace(host_blocks=0),
    ):
        assert policy.load_ahead(other, 0.0) == 0
