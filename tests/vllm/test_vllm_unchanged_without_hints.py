"""Without hints the extension is stock vLLM, block by block; and its failures are not the engine's."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import vllm
from cache_group_specs import MORE_GROUPS
from scheduler_driver import check_tables
from sojourn_server.vllm.compat import UnsupportedEngine
from sojourn_server.vllm.kv_cache_groups import UnsupportedModel
from sojourn_server.vllm.scheduler import make_scheduler

SHAPE = {"blocks": 65, "max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 1024}


def random_load(
    engine, seed: int, *, requests: int = 60, grammars: float = 0.0, programs: int = 0
) -> list[tuple[dict[str, int], dict[str, list[int]]]]:
    """Overload a small pool, with shared prefixes, aborts and preemptions; returns every step's plan.

    ``grammars``: the share of requests that wait for a grammar, so that later requests pass them.
    ``programs``: the number of programs that the requests are of, if of any."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(1000) for _ in range(64)] for _ in range(4)]
    plans = []
    number = 0
    compiling: dict[str, int] = {}
    while number < requests or engine.scheduler.has_unfinished_requests():
        if number < requests and rng.random() < 0.5:
            prompt = [*rng.choice(prefixes), *(rng.randrange(1000) for _ in range(rng.randrange(1, 300)))]
            request = engine.add(
                f"r{number}",
                prompt,
                max_tokens=rng.randrange(1, 80),
                arrival_s=float(number),
                program_id=f"A{number % programs}" if programs else None,
            )
            if grammars and rng.random() < grammars:
                request.status = type(request.status).WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
                request.structured_output_request = SimpleNamespace(grammar=None, reasoning_ended=None)
                compiling[request.request_id] = len(plans) + rng.randrange(12)
            number += 1
        for request_id in [name for name, ready in compiling.items() if ready <= len(plans)]:
            del compiling[request_id]
            if request_id in engine.scheduler.requests:  # it is not aborted
                compiled = SimpleNamespace(accept_tokens=lambda *_: True, is_terminated=lambda: False)
                engine.scheduler.requests[request_id].structured_output_request.grammar = compiled
        if rng.random() < 0.03 and engine.scheduler.requests:
            engine.abort(sorted(engine.scheduler.requests)[0])
        planned = engine.step().planned
        blocks = {new.req_id: [list(ids) for ids in new.block_ids] for new in planned.scheduled_new_reqs}
        plans.append((dict(planned.num_scheduled_tokens), blocks))
    return plans


def preemptions_of(engine) -> list[str]:
    """Ids of the requests that the engine preempts from now on."""
    preempted = []
    preempt = engine.scheduler._preempt_request

    def counted(request, *args, **kwargs):
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    engine.scheduler._preempt_request = counted
    return preempted


def assert_steps_are_stocks(make_engine, shape, policies, seeds, *, grammars: float = 0.0) -> None:
    preempted = []
    for seed in seeds:
        stock = make_engine(None, **shape)
        preempted.append(preemptions_of(stock))
        expected = random_load(stock, seed, grammars=grammars)
        for policy in policies:
            ours = make_engine(policy, **shape)
            assert random_load(ours, seed, grammars=grammars) == expected, (policy, seed)
    assert all(preempted), "the load must be heavy enough to mean something"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("scheduling_policy", ["fcfs", "priority"])
def test_without_hints_every_step_is_stock_vllms(make_engine, asynchronous, scheduling_policy):
    shape = {**SHAPE, "asynchronous": asynchronous, "scheduling_policy": scheduling_policy}
    policies = ["observe", "continuum", "tetris"]
    if scheduling_policy == "fcfs":  # a policy that places programs is refused with priorities
        policies.append("sojourn")
    assert_steps_are_stocks(make_engine, shape, policies, range(4))


@pytest.mark.parametrize(
    ("scheduling_policy", "seeds"), [("fcfs", (6, 14, 24, 27)), ("priority", (2, 3, 4, 5))]
)
def test_with_requests_that_wait_for_a_grammar_as_well(make_engine, scheduling_policy, seeds):
    """They are admitted after later requests. So the last request that was admitted is not the last that
    arrived, and a preempted request is not always the earliest that waits."""
    shape = {**SHAPE, "scheduling_policy": scheduling_policy}
    assert_steps_are_stocks(make_engine, shape, ("observe", "continuum"), seeds, grammars=0.3)


@pytest.mark.parametrize("groups", MORE_GROUPS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_with_several_cache_groups_as_well(make_engine, groups, asynchronous):
    more = MORE_GROUPS[groups]()
    shape = {**SHAPE, "blocks": 65 + 20 * len(more), "asynchronous": asynchronous, "other_groups": more}
    assert_steps_are_stocks(make_engine, shape, ["continuum"], range(3))


@pytest.mark.parametrize("groups", [None, *MORE_GROUPS])
def test_observing_programs_changes_no_step(make_engine, groups):
    """``observe`` keeps the ledger of programs and decides as stock does."""
    more = MORE_GROUPS[groups]() if groups is not None else ()
    shape = {**SHAPE, "blocks": 65 * (1 + len(more)), "other_groups": more}

    observed, stock = make_engine("observe", **shape), make_engine(None, **shape)
    assert random_load(observed, 3, programs=6) == random_load(stock, 3)
    assert observed.ask("stats")["turns"] > 24
    check_tables(observed.scheduler.sojourn.program_scheduler)


def test_a_failure_of_ours_is_not_the_engines(make_engine, monkeypatch):
    """Every hook raises; every request still finishes."""
    engine = make_engine("continuum", blocks=33, settings={"strict": False}, max_model_len=512)
    adapter = engine.scheduler.sojourn
    monkeypatch.setattr(adapter.program_scheduler, "handle", None)
    requests = [
        engine.add(f"r{n}", range(n * 600, n * 600 + 200), max_tokens=60, program_id=f"P{n}")
        for n in range(6)
    ]
    engine.run()
    assert [request.num_output_tokens for request in requests] == [60] * 6
    assert adapter.failures > 0
    assert engine.pool.get_num_free_blocks() == 32


def test_an_untested_vllm_is_refused_with_the_list(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "9.99.0")
    with pytest.raises(UnsupportedEngine, match=r"9\.99\.0"):
        make_scheduler(vllm_config=None)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_diffusion_model_is_refused_because_it_needs_vllms_scheduler(asynchronous):
    config = SimpleNamespace(
        diffusion_config=object(), scheduler_config=SimpleNamespace(async_scheduling=asynchronous)
    )
    with pytest.raises(UnsupportedModel, match=r"diffusion .*--policy stock"):
        make_scheduler(vllm_config=config)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"polcy": "continuum"}, "did you mean 'policy'"),
        ({"policy": "continum"}, "did you mean 'continuum'"),
        ({"lease_budget_fraction": 1.5}, "lease_budget_fraction"),
        ({"lease_budget_fraction": "much"}, "expected `float`"),
        ({"max_programs": 0}, "max_programs"),
        ({"profile_file": "/nowhere/profile.toml"}, "profile_file"),
        ({"compute_quota_s": 0.3}, "sojourn profile measures one"),
    ],
)
def test_a_wrong_setting_is_named_at_start(make_engine, settings, named):
    with pytest.raises(ValueError, match=named):
        make_engine("continuum", settings=settings)
