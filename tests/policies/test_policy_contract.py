"""One suite for all registered policies and shipped presets, and the imports of their packages."""

from __future__ import annotations

import ast
import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sojourn_server
from finished_turns import tool_history
from hypothesis import given, settings
from hypothesis import strategies as st
from running_requests import request_sets
from sojourn.aeg import END
from sojourn.ids import ProgramId
from sojourn_server.policies.forecasting import STEP_POINTS, KvDemandView, OutputLengthView
from sojourn_server.policies.lease_reclaim_policies import LaterProgramsReclaim
from sojourn_server.policies.policy_protocols import DecisionReason, RetentionDecision
from sojourn_server.policies.policy_views import (
    BlockShortage,
    EvictionCandidateView,
    EvictionScoreScale,
    FinishedTurnView,
    LeaseView,
    LoadAheadView,
    PrefetchView,
    ReclaimRequest,
    RunningRequestView,
    WaitingRequestView,
    WorkflowStepView,
)
from sojourn_server.policies.preemption_policies import PreemptedRequestView, RecoveryMethod
from sojourn_server.policies.preset import POLICY_CLASSES, Preset, load_preset, preset_names
from sojourn_server.policies.queue_order_policies import ProgramFcfs, QueueOrderPolicy

SERVER = Path(sojourn_server.__file__).parent
PURE_PACKAGES = ("policies", "programs")
BANNED = {"time", "datetime", "os", "random", "secrets", "logging", "asyncio", "threading", "socket"}
BANNED |= {"vllm", "torch", "ray", "numpy", "open", "print", "__import__", "input"}


def registered(question: str) -> list[Any]:
    """Each policy as registered, and as a preset has it set up where that is another value: policies are
    pure, and in CI an equal one would be asked the same questions again."""
    found: dict[tuple[type, Any], str] = {}
    for name, policy_class in POLICY_CLASSES[question].items():
        policy = policy_class()
        found.setdefault((type(policy), policy), f"{question}:{name}")
    for preset in preset_names():
        policy = getattr(load_preset(preset), question)
        found.setdefault((type(policy), policy), f"{question} of {preset}")
    return [pytest.param(policy, id=name) for (_, policy), name in found.items()]


ranks = st.integers(1, 5)
times = st.floats(0, 100)
names = st.sampled_from("abcdefgh").map(ProgramId)
turns = st.builds(
    FinishedTurnView,
    program_id=names,
    tool=st.none() | st.sampled_from(["tool0", "tool1", "never"]),
    context_tokens=st.integers(0, 10**6),
    reload_s=times,
    mean_evicted_wait_s=times,
    memoryfulness=st.floats(-1, 1),
    history=st.builds(
        lambda durations_s, times: tool_history(tool0=durations_s * times, tool1=durations_s[:1] * times),
        st.lists(st.floats(0, 50), min_size=1, max_size=5),
        st.sampled_from([0, 20, 70]),
    ),
    hinted_ttl_s=st.none() | st.floats(0, 300),
    chunked_reload_s=times,
    host_reload_s=st.none() | times,
    running_tokens=st.integers(0, 10**6),
)
waiting = st.builds(
    WaitingRequestView,
    st.booleans(),
    st.booleans(),
    ranks,
    st.integers(1, 50),
    attained_s=times,
    ran_s=times,
    waited_s=times,
    arrived_s=times,
    since_s=times.map(lambda s: s + 100.0),
    now_s=times.map(lambda s: s + 200.0),
)
leases = st.lists(
    st.builds(
        LeaseView,
        names,
        ranks,
        times,
        st.integers(1, 20),
        times,
        st.booleans(),
        score=st.tuples(st.floats(allow_nan=False)),
    ),
    max_size=8,
    unique_by=lambda lease: lease.program_id,
)
needs = st.builds(
    ReclaimRequest,
    program_id=st.none() | names,
    program_rank=ranks,
    blocks=st.integers(1, 60),
    running=st.booleans(),
    anything_running=st.booleans(),
    idle_s=st.sampled_from([0.0, 3600.0]),
)
shortages = st.builds(BlockShortage, st.integers(0, 500), st.sampled_from([1, 16]), step_s=st.floats(0, 1))
written = st.builds(
    OutputLengthView, st.just("r"), st.integers(0, 10**6), st.integers(1, 10**6),
    st.lists(st.integers(1, 10**5), max_size=60).map(sorted),
    st.none() | st.integers(-5, 10**6) | st.just(10**400),
    st.none() | st.floats(0) | st.floats(0, 2),
    network_prediction=st.none() | st.lists(st.floats(1, 1e9), max_size=8).map(sorted).map(tuple),
    prediction_error=st.none() | st.floats(0, 2), baseline_error=st.none() | st.floats(0, 2),
)  # fmt: skip
preempted = st.builds(
    PreemptedRequestView, st.integers(0, 10**6), times, st.none() | st.floats(0, 1),
    st.none() | st.floats(0, 1), st.integers(0, 10**6), times,
)  # fmt: skip
owners = st.builds(
    EvictionCandidateView, ranks, st.booleans(), times,
    blocks=st.integers(0, 50), has_request=st.booleans(), p_reuse=st.none() | st.floats(0, 1),
    in_abandoned_branch=st.booleans(),
)  # fmt: skip
scales = st.builds(EvictionScoreScale, times, times, st.floats(0, 1))
edges = st.lists(st.tuples(st.sampled_from(["a", "b", END]), st.floats(0, 1)), max_size=4).map(tuple)
steps = st.builds(
    WorkflowStepView, st.booleans(), st.none() | times, edges, st.booleans(), edges, st.integers(0, 60),
    calls_tool=st.booleans(),
)  # fmt: skip


@pytest.mark.parametrize("policy", registered("retention"))
@settings(max_examples=40, deadline=None)
@given(turn=turns, now=times)
def test_retention(policy: Any, turn: FinishedTurnView, now: float) -> None:
    before = turn.history.snapshot()
    keep = policy.keep(turn, now)
    assert isinstance(keep, RetentionDecision)
    assert isinstance(keep.reason, DecisionReason)
    assert 0.0 <= keep.ttl_s <= getattr(policy, "ttl_s", 300.0), "every lease ends"
    assert policy.keep(turn, now) == keep == copy.deepcopy(policy).keep(turn, now)
    assert policy.keep(turn, now + 1000.0) == keep, "the answer does not depend on the clock"
    assert turn.history.snapshot() == before
    if turn.tool is None and turn.hinted_ttl_s is None:
        assert keep.ttl_s == 0.0, "a turn without tool call gets no lease"


@pytest.mark.parametrize("policy", registered("order"))
@given(requests=st.lists(waiting, max_size=8, unique_by=lambda request: request.arrival))
def test_order(policy: Any, requests: list[WaitingRequestView]) -> None:
    keys = [policy.key(request) for request in requests]
    assert keys == [policy.key(request) for request in requests]
    assert len(set(keys)) == len(keys), "no ties: the own arrival tells two requests apart"
    in_order = sorted(requests, key=policy.key)
    assert in_order == sorted(reversed(requests), key=policy.key)
    if type(policy) in (QueueOrderPolicy, ProgramFcfs):
        assert [r.preempted for r in in_order] == sorted((r.preempted for r in requests), reverse=True)


@pytest.mark.parametrize("policy", registered("order"))
@given(request=waiting, later_s=st.floats(0, 1000))
def test_a_queue_key_changes_with_time_only_at_promoted_s(
    policy: Any, request: WaitingRequestView, later_s: float
) -> None:
    """The queue computes a key once and again at ``promoted_s``: in between it must hold."""
    promoted_s = policy.promoted_s(request)
    later = request._replace(now_s=request.now_s + later_s)
    assert policy.promoted_s(later) == promoted_s
    if (promoted_s <= request.now_s) == (promoted_s <= later.now_s):
        assert policy.key(later) == policy.key(request)
    else:
        assert policy.key(later) < policy.key(request), "waiting never moves a request back"


@pytest.mark.parametrize("policy", registered("lease_reclaim"))
@given(need=needs, held=leases, now=times, data=st.data())
def test_lease_reclaim(
    policy: Any, need: ReclaimRequest, held: list[LeaseView], now: float, data: st.DataObject
) -> None:
    before = list(held)
    chosen = policy.release(need, tuple(held), now)
    assert policy.release(need, tuple(data.draw(st.permutations(held))), now) == chosen, (
        "no order of the input"
    )
    assert held == before
    by_name = {lease.program_id: lease for lease in held}
    others = by_name.keys() - {need.program_id}
    if chosen is None and others:
        # Else the latest program that runs is preempted instead.
        assert not need.running or isinstance(policy, LaterProgramsReclaim), "a running request is starved"
        assert need.running or need.anything_running or not need.idle_s, "an idle engine is starved"
    if chosen is None:
        return
    assert chosen, "no lease to end is None"
    assert len(set(chosen)) == len(chosen)
    assert need.program_id not in chosen, "a program does not reclaim its own lease"
    gained = [by_name[name].blocks for name in chosen]
    assert sum(gained) >= need.blocks or set(chosen) == others, "enough blocks, or all leases"
    assert sum(gained[:-1]) < need.blocks, "no lease more than needed"


@pytest.mark.parametrize("policy", registered("victim"))
@given(candidates=request_sets, need=shortages, now=times)
def test_victim(policy: Any, candidates: list[RunningRequestView], need: BlockShortage, now: float) -> None:
    before = list(candidates)
    chosen = policy.victim(candidates, need, now)
    assert chosen is None or chosen in {view.request_id for view in candidates}
    assert policy.victim(list(reversed(candidates)), need, now) == chosen
    assert candidates == before
    assert policy.victim([], need, now) is None


@pytest.mark.parametrize("policy", registered("eviction"))
@given(views=st.lists(owners, min_size=1, max_size=8), scale=scales)
def test_eviction(policy: Any, views: list[EvictionCandidateView], scale: EvictionScoreScale) -> None:
    def score(view: EvictionCandidateView) -> tuple[float, ...]:
        placed: tuple[float, ...] = policy.score(policy.score_inputs(view), scale)
        return placed

    assert isinstance(policy.by_program, bool)
    scores = [score(view) for view in views]
    assert scores == [score(view) for view in views]
    assert sorted(scores), "scores of any two owners compare"
    if policy.by_program:
        first = min(views, key=score)
        assert first.over or not any(view.over for view in views), "ended programs go first"


@pytest.mark.parametrize("policy", registered("workflow_prediction"))
@given(step=steps, now=times)
def test_workflow_prediction(policy: Any, step: WorkflowStepView, now: float) -> None:
    expected = policy.expect(step, now)
    assert expected == policy.expect(step, now)
    assert expected.continuation_probability is None or 0.0 <= expected.continuation_probability <= 1.0
    assert expected.successor != END, "END is not a step to prefetch for"
    if not policy.is_used:
        assert expected.continuation_probability is None, "a policy that does not look predicts nothing"


@pytest.mark.parametrize("policy", registered("prefetch"))
@given(goes_on=st.floats(0, 1), durations=st.lists(times, max_size=5).map(sorted), reload_s=times, now=times)
def test_prefetch(policy: Any, goes_on: float, durations: list[float], reload_s: float, now: float) -> None:
    view = PrefetchView(goes_on, durations, reload_s)
    plan = policy.plan(view, now)
    assert plan == policy.plan(view, now)
    if plan is not None:
        assert policy.is_used
        assert now <= plan


@pytest.mark.parametrize("policy", registered("prefetch"))
@given(
    blocks=st.tuples(*[st.integers(0, 1000)] * 4),
    compute_s=st.floats(0, 1),
    load_s=st.none() | st.floats(0, 1),
    queue_s=st.sampled_from([0.0, 0.0, 1.0]),
)
def test_load_ahead(
    policy: Any, blocks: tuple[int, ...], compute_s: float, load_s: float | None, queue_s: float
) -> None:
    view = LoadAheadView(*blocks, compute_s, load_s, queue_s)
    loaded = policy.load_ahead(view, 0.0)
    assert loaded == policy.load_ahead(view, 0.0)
    assert 0 <= loaded <= min(view.host_blocks, view.spare_blocks)
    assert not loaded or (policy.is_used and not queue_s)


@pytest.mark.parametrize("policy", registered("output_length"))
@given(view=written, now=times)
def test_remaining(policy: Any, view: OutputLengthView, now: float) -> None:
    before = list(view.lengths)
    left = policy.remaining(view, now)
    assert policy.remaining(view, now + 1000.0) == left, "the answer does not depend on the clock"
    assert view.lengths == before
    if left is None:
        return
    assert policy.predicts, "a policy that predicts nothing returns None"
    assert isinstance(left, tuple)
    assert left
    assert list(left) == sorted(left)
    assert 1.0 <= left[0] <= left[-1] <= view.most_tokens, "at least the next token, at most the limit"


@pytest.mark.parametrize("policy", registered("forecast"))
@given(
    needed=st.lists(st.floats(0, 1e4), min_size=len(STEP_POINTS), max_size=len(STEP_POINTS)),
    room=st.integers(0, 5000),
    now=times,
)
def test_forecast(policy: Any, needed: list[float], room: int, now: float) -> None:
    expected = policy.expects_shortage(KvDemandView(tuple(needed), room), now)
    assert policy.expects_shortage(KvDemandView(needed, room), now) is expected
    if expected:
        assert policy.is_used
        assert max(needed) > room, "no shortage if all fits"


@pytest.mark.parametrize("policy", registered("recovery"))
@given(victim=preempted, now=times)
def test_recovery(policy: Any, victim: PreemptedRequestView, now: float) -> None:
    way = policy.recovery(victim, now)
    assert isinstance(way, RecoveryMethod)
    assert policy.recovery(victim, now + 1000.0) is way
    nowhere = victim._replace(offload_s_per_token=None)
    assert policy.recovery(nowhere, now) is RecoveryMethod.RECOMPUTE, "there is no host memory"


@pytest.mark.parametrize(
    "preset", [load_preset(name) for name in preset_names()], ids=lambda preset: preset.name
)
def test_policies_are_frozen_and_equal_by_value(preset: Preset) -> None:
    again = load_preset(preset.name)
    for question in POLICY_CLASSES:
        policy = getattr(preset, question)
        assert policy == getattr(again, question)
        assert hash(policy) == hash(getattr(again, question))
        assert policy.__dataclass_params__.frozen


# -- imports of the packages -------------------------------------------------------------


PURE_FILES = sorted(path for package in PURE_PACKAGES for path in (SERVER / package).rglob("*.py"))


@pytest.mark.parametrize("path", PURE_FILES, ids=lambda path: str(path.relative_to(SERVER)))
def test_pure_packages_have_no_clock_no_io_no_engine(path: Path) -> None:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    used = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    used |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    used |= {node.id for node in nodes if isinstance(node, ast.Name)}
    assert not BANNED & {name.partition(".")[0] for name in used}


def test_core_and_policies_load_without_an_engine() -> None:
    code = (
        "import sys; import sojourn_server.core.engine_service; from sojourn_server.policies import preset;"
        "[preset.load_preset(n) for n in preset.preset_names()];"
        "heavy = {'vllm', 'torch', 'ray', 'numpy', 'asyncio', 'prometheus_client', 'fastapi'};"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
