"""The compute quota in vLLM's own scheduler: what each step computes, and that nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sojourn_server.policies.costs.engine_profile import EngineProfile, PrefillCurve
from sojourn_server.policies.costs.step_costs import StepCosts
from sojourn_server.policies.prefill_decode.prefill_compute_quota import StepQuotaUsage
from test_vllm_unchanged_without_hints import SHAPE as SMALL
from test_vllm_unchanged_without_hints import preemptions_of, random_load

BLOCK = 16
PAIR_S = 1e-6
COSTS = StepCosts(step_s=0.01, token_s=1e-4, pair_s=PAIR_S, kv_token_s=1e-5, request_s=1e-3)
ATTENTION = COSTS._replace(token_s=0.0)


def profile(steps: StepCosts | None = COSTS) -> EngineProfile:
    return EngineProfile(
        model="m",
        hardware="h",
        engine="e",
        block_size=BLOCK,
        prefill=PrefillCurve(0.0, 1e-4, 0.0),
        points=(),
        steps=steps,
    )


@pytest.fixture
def make(make_engine: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """``make(quota_s, costs=…, policy=…, **shape)``: an engine with that quota."""

    def build(quota_s: float, *, costs: StepCosts = COSTS, policy: str = "observe", **shape: Any) -> Any:
        path = tmp_path / "profile.toml"
        path.write_text(profile(costs).to_toml())
        settings = {"compute_quota_s": quota_s, "profile_file": str(path), **shape.pop("settings", {})}
        return make_engine(policy, settings=settings, **shape)

    return build


class Chunk(NamedTuple):
    """What a step computes of a request."""

    request_id: str
    cached: int
    new: int
    left: int = 0
    """Of its prompt, after the step; at least 0."""


def chunks(engine: Any, planned: Any) -> list[Chunk]:
    """Of a step that has just been planned, in the scheduler's order."""
    told = []
    for name, new in planned.num_scheduled_tokens.items():
        request = engine.scheduler.requests[name]
        after = request.num_computed_tokens
        told.append(Chunk(name, after - new, new, max(0, request.num_tokens - after)))
    return told


def attention_s(step: list[Chunk], costs: StepCosts = ATTENTION) -> float:
    return sum(costs.chunk_s(chunk.cached, chunk.new) for chunk in step)


def play(engine: Any, max_steps: int = 10_000) -> list[list[Chunk]]:
    """Step until nothing is left; what each step computed."""
    steps = []
    while engine.scheduler.has_unfinished_requests():
        planned = engine.plan()
        steps.append(chunks(engine, planned))
        engine.update_from_output(planned)
        assert len(steps) < max_steps
    return steps


def prompt(number: int, tokens: int) -> range:
    return range(number * 100_000, number * 100_000 + tokens)


# -- what a step computes ---------------------------------------------------------


def test_under_load_the_quota_is_kept_and_used(make: Callable[..., Any]) -> None:
    """Agents' turns: long contexts that are there, short appends. Costs of an 8B model, about."""
    costs = StepCosts(step_s=0.01, token_s=0.0, pair_s=3.5e-9, kv_token_s=4e-8, request_s=0.0)
    engine = make(0.1, costs=costs, blocks=120_000, max_num_batched_tokens=65_536, max_num_seqs=64)
    draw = random.Random(1)
    contexts = [draw.randrange(4_000, 60_000) for _ in range(24)]
    for agent, tokens in enumerate(contexts):
        engine.add(f"first{agent}", prompt(agent, tokens), max_tokens=1)
    engine.run()
    engine.ask("drain_metrics")
    for agent, tokens in enumerate(contexts):
        engine.add(f"turn{agent}", prompt(agent, tokens + draw.randrange(200, 4_000)), max_tokens=20)
    attention = costs._replace(token_s=0.0)
    with_prompts_s = 0.0
    for step in play(engine):
        spent_s = attention_s(step, attention)
        assert spent_s <= 0.1 * (1 + 1e-9)
        assert all(chunk.cached > 1000 for chunk in step), "hits are known before anything is cut"
        for cut in (chunk for chunk in step if chunk.left):
            more_s = attention.chunk_s(cut.cached + cut.new, BLOCK)
            assert spent_s + more_s > 0.1, "a prompt is cut where the quota ends"
        with_prompts_s += spent_s if any(chunk.new > 1 for chunk in step) else 0.0
    told = engine.ask("drain_metrics")
    ((_, used),) = told["histograms"]["sojourn_step_quota_ratio"]
    ((_, seconds),) = told["histograms"]["sojourn_step_attention_seconds"]
    ((_, cuts),) = told["counters"]["sojourn_quota_cuts_total"]
    assert used["count"] >= 10
    assert cuts >= 10
    assert used["sum"] / used["count"] >= 0.95
    assert not any(used["buckets"][:3]), "each of them by itself, too: 90 % and more"
    assert not any(used["buckets"][6:]), "and never above it"
    assert seconds["count"] >= used["count"]
    assert seconds["sum"] == pytest.approx(with_prompts_s)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("quota_s", [0.002, 0.02, 0.06])
def test_whatever_the_load_no_step_is_above_the_quota_but_for_one_block(
    make: Callable[..., Any], asynchronous: bool, quota_s: float
) -> None:
    """Shared prefixes, aborts, preemptions, prompts and decodes in the same steps."""
    cuts = floors = 0
    preempted = []
    for seed in range(4):
        engine = make(quota_s, asynchronous=asynchronous, **SMALL)
        plan = engine.plan
        preempted.append(preemptions_of(engine))

        def checked(engine: Any = engine, plan: Any = plan) -> Any:
            nonlocal cuts, floors
            planned = plan()
            step = engine.scheduler.sojourn.quota.step
            told = chunks(engine, planned)
            if step is None:
                assert not planned.scheduled_new_reqs
                return planned
            assert step.taken() <= planned.num_scheduled_tokens.keys()
            prompts = [chunk for chunk in told if chunk.request_id in step.taken()]
            if attention_s(told) > quota_s * (1 + 1e-9):
                assert len(prompts) <= 1
                assert sum(chunk.new for chunk in prompts) <= BLOCK
                floors += bool(prompts)
            if step.cut is not None:
                cuts += 1
                (cut,) = (chunk for chunk in prompts if chunk.request_id == step.cut)
                assert (cut.cached + cut.new) % BLOCK == 0
                assert cut.left
                assert prompts[-1] is cut, "no request passes a cut one"
            return planned

        engine.plan = checked
        random_load(engine, seed)
        assert engine.pool.get_num_free_blocks() == SMALL["blocks"] - 1
        assert not engine.scheduler.requests
    assert any(preempted)
    assert cuts > 0
    assert floors > 0 or quota_s > 0.002


def test_loads_from_host_memory_count_and_begin_behind_a_cut(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(0.5, blocks=2_000, max_num_batched_tokens=16_384, host_blocks=60, own_tiers=True)
    connector = engine.scheduler.connector
    asked: list[tuple[str, int]] = []
    reading = {"read"}

    def matched(request: Any, computed: int) -> tuple[int | None, bool]:
        asked.append((request.request_id, computed))
        if request.request_id in reading:
            return None, False
        return (8_000, False) if request.request_id == "external" else (0, False)

    monkeypatch.setattr(connector, "get_num_new_matched_tokens", matched)
    monkeypatch.setattr(connector, "update_state_after_alloc", lambda *args: None)
    engine.add("external", prompt(1, 9_000))
    engine.add("read", prompt(2, 600))
    engine.add("ready", prompt(3, 600))
    engine.add("behind", prompt(4, 600))
    planned = engine.plan()
    (first,) = chunks(engine, planned)
    assert (first.request_id, first.cached) == ("external", 8_000)
    assert attention_s([first]) <= 0.5 < attention_s([Chunk("", 8_000, first.new + BLOCK)])
    # The connector is asked about the request whose KV is still to be read, so that its read begins; the next
    # request that could be computed waits.
    assert [request_id for request_id, _ in asked] == ["external", "read", "ready"]
    reading.clear()
    engine.update_from_output(planned)
    order = [chunk.request_id for step in play(engine) for chunk in step if not chunk.cached]
    assert order == ["read", "ready", "behind"]


# -- what may happen in the middle of a prompt -------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_quota_that_is_never_reached_changes_no_step(
    make: Callable[..., Any], make_engine: Callable[..., Any], asynchronous: bool
) -> None:
    for seed in range(3):
        stock = make_engine(None, asynchronous=asynchronous, **SMALL)
        ours = make(1e9, asynchronous=asynchronous, **SMALL)
        assert random_load(ours, seed) == random_load(stock, seed)


def test_a_failure_of_the_quota_is_not_the_engines(
    make: Callable[..., Any], make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("offer", "take", "undo_take", "taken"):
        monkeypatch.setattr(StepQuotaUsage, name, None)
    ours, stock = make(0.01, settings={"strict": False}, **SMALL), make_engine(None, **SMALL)
    assert random_load(ours, 1) == random_load(stock, 1)
    assert ours.scheduler.sojourn.failures > 0


# -- settings ----------------------------------------------------------------------


@pytest.mark.parametrize("steps", [None, COSTS._replace(pair_s=0.0)])
def test_a_profile_that_says_too_little_is_refused(
    make_engine: Callable[..., Any], tmp_path: Path, steps: StepCosts | None
) -> None:
    path = tmp_path / "profile.toml"
    path.write_text(profile(steps).to_toml())
    with pytest.raises(ValueError, match="measure longer contexts"):
        make_engine("observe", settings={"compute_quota_s": 0.3, "profile_file": str(path)})
