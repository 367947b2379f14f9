"""Models with several KV cache groups in vLLM's own scheduler: windows or states beside full attention."""

from __future__ import annotations

from typing import Any

import pytest
from cache_group_specs import BLOCK, MORE_GROUPS, WINDOW, serve_alone, state_spec, window_spec
from sojourn_server.vllm.kv_cache_groups import KVCacheGroups, UnsupportedModel
from turns import change_config, last_turn, prompt, tool


@pytest.fixture(params=MORE_GROUPS)
def groups(request: pytest.FixtureRequest) -> tuple[Any, ...]:
    return MORE_GROUPS[request.param]()


def count_cached(engine: Any, hashes: Any) -> list[int]:
    """By group, how many of these hashes have a block."""
    groups = range(len(engine.scheduler.kv_cache_config.kv_cache_groups))
    found = [[engine.pool.get_cached_block(each, [group]) for each in hashes] for group in groups]
    return [sum(1 for blocks in group if blocks is not None) for group in found]


def second_turn(engine: Any, others: int, *, hinted: bool = False) -> dict[str, Any]:
    """The second turn of program A, whose tool call saw ``others`` requests run. ``hinted``: it asked for a
    lease with its request, else it tells afterwards that its tool runs."""
    context = {"kv_retention_ttl_seconds": 10} if hinted else None
    first = engine.add("a1", prompt(1, 300), program_id="A", max_tokens=40, context=context)
    engine.run()
    if not hinted:
        engine.tell(tool("A"))
    for other in range(others):
        engine.add(f"x{other}", prompt(10 + other, 300))
        engine.run()
    engine.add("a2", [*first.all_token_ids, *prompt(2, 50)], program_id="A")
    engine.run()
    return last_turn(engine, "A")


@pytest.mark.parametrize("model", [*MORE_GROUPS, window_spec, state_spec])
def test_a_lease_keeps_what_the_next_turn_needs_of_each_group(make_engine, monkeypatch, model):
    """Beside full attention; and of models that have windows in all layers, or states in all layers."""
    shape, others = {"blocks": 60}, 80
    if isinstance(model, str):
        more = MORE_GROUPS[model]()
        shape, others = {"blocks": 60 * (1 + len(more)), "other_groups": more}, 20
    else:
        serve_alone(monkeypatch, model)
        change_config(monkeypatch, lambda config: setattr(config.cache_config, "mamba_cache_mode", "align"))
    in_memory = second_turn(make_engine("observe", **{**shape, "blocks": 1000}), others=0)
    assert in_memory["tokens"]["device"] == 336, "the full blocks of 340 tokens"
    evicted = second_turn(make_engine("observe", **shape), others)
    assert evicted["tokens"]["device"] < 336
    assert evicted["tokens"]["lost"], "and the ledger knows why"
    assert "unknown" not in evicted["tokens"]["lost"]
    for hinted in (False, True):
        engine = make_engine("continuum-paper" if hinted else "fixed-ttl", **shape)
        assert second_turn(engine, others, hinted=hinted)["tokens"] == in_memory["tokens"]


def test_an_order_of_eviction_by_program_keeps_a_context_in_each_group(make_engine, groups):
    """Without any lease: what requests of no program leave goes first. A state that vLLM has freed before the
    turn's end belongs to the program too, else the rest of its context would be worth nothing."""
    shape = {"blocks": 60 * (1 + len(groups)), "other_groups": groups}
    engine = make_engine("saga", settings={"lease_budget_fraction": 0.0}, **shape)
    assert second_turn(engine, others=20)["tokens"]["device"] == 336


def test_with_eagle_a_lease_keeps_the_block_that_a_hit_drops(make_engine, groups):
    """A hit ends a block before the last one that was found, also the look-up for a lease granted later."""

    def make(policy: str, **shape: Any) -> Any:
        engine = make_engine(policy, other_groups=groups, **shape)
        coordinator = engine.scheduler.kv_cache_manager.coordinator
        for name in ("eagle_group_ids", "drop_eagle_group_ids"):  # the second is 0.33's
            if hasattr(coordinator, name):
                setattr(coordinator, name, set(range(1 + len(groups))))
        coordinator.verify_and_split_kv_cache_groups()
        engine.scheduler.use_eagle_block_drop = engine.scheduler.sojourn._groups._drops_last_block = True
        return engine

    in_memory = second_turn(make("observe", blocks=1000), others=0)
    assert 0 < in_memory["tokens"]["device"] < 336
    for policy in ("fixed-ttl", "continuum-paper"):
        engine = make(policy, blocks=60 * (1 + len(groups)))
        leased = second_turn(engine, others=20, hinted=policy != "fixed-ttl")
        assert leased["tokens"]["device"] == in_memory["tokens"]["device"], policy


def test_a_lease_takes_no_more_than_the_next_turn_needs(make_engine):
    """Of a window its last blocks, of a state one block, however long the context is."""
    counts = {}
    for name, more in MORE_GROUPS.items():
        engine = make_engine("fixed-ttl", blocks=400, other_groups=more())
        engine.add("a1", prompt(1, 640), program_id="A")
        engine.run()
        engine.tell(tool("A"))
        counts[name] = engine.ask("stats")["blocks"]["leased"]
    full, window = 640 // BLOCK, WINDOW // BLOCK
    assert counts == {
        "a window": full + window,
        "a state": full + 1,
        "three states": full + 3,
        "a window and a state": full + window + 1,
    }


def test_blocks_of_a_context_are_counted_in_all_groups(make_engine):
    engine = make_engine(
        blocks=400,
        max_model_len=4096,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        other_groups=(window_spec(), state_spec()),
    )
    groups = engine.scheduler.sojourn._groups
    assert groups.tokens_per_block == BLOCK, "only full attention grows"
    assert groups.blocks_of(16) == 3
    assert groups.blocks_of(4096) - groups.blocks_of(2048) == 2048 // BLOCK
    request = engine.add("r", prompt(1, 1000), max_tokens=100)
    while not request.num_output_tokens:
        engine.step()
    held = [len(blocks) for blocks in groups.used_by(request)]
    assert held[0] == 63
    assert WINDOW // BLOCK <= held[1] < 63
    assert 1 <= held[2] <= 3
    free = engine.pool.get_num_free_blocks()
    assert 399 - free == sum(held)


def test_no_lease_ends_for_a_request_that_waits_for_a_state_of_this_step(make_engine):
    """vLLM gives no blocks to a prompt whose prefix another request computes in the same step, though many
    are free. Leases need not end for it, even if the request's program arrived before theirs."""
    engine = make_engine("fixed-ttl", blocks=400, other_groups=(state_spec(),))
    for program, start in (("B", 3), ("C", 4), ("A", 1)):
        engine.add(f"{program}1", prompt(start, 320), program_id=program)
        engine.run()
    engine.tell(tool("A"))
    shared = prompt(2, 321)
    engine.add("b2", shared, program_id="B", max_tokens=4)
    engine.add("c2", [*shared, *prompt(5, 40)], program_id="C", max_tokens=4)
    planned = engine.step().planned
    assert planned.num_scheduled_tokens.keys() == {"b2"}
    assert engine.ask("stats")["leases"] == 1
    engine.run()
    assert last_turn(engine, "C")["tokens"]["device"] == 320


def test_a_preempted_request_leaves_no_hash_of_what_was_not_computed(make_engine, groups):
    engine = make_engine("continuum", blocks=400, other_groups=groups)
    request = engine.add("r", prompt(1, 600), program_id="A", max_tokens=100)
    engine.scheduler.schedule()  # the step is planned, and computes nothing yet
    request.num_computed_tokens = 0
    sojourn = engine.scheduler.sojourn
    hashed = sojourn._groups.uncomputed(request)
    assert hashed
    engine.pool.evict_blocks(hashed)
    assert count_cached(engine, request.block_hashes) == [0] * (1 + len(groups))


def test_what_follows_a_block_that_was_not_filled_is_forgotten(make_engine):
    engine = make_engine("continuum", blocks=400)
    request = engine.add("r", prompt(1, 600), program_id="A", max_tokens=100)
    while not request.num_output_tokens:
        engine.step()
    sojourn = engine.scheduler.sojourn
    bad = engine.scheduler.kv_cache_manager.get_block_ids("r")[0][20]
    sojourn.evict_unfilled({bad})
    assert count_cached(engine, request.block_hashes[:20])[0] == 20
    for blocks in engine.scheduler.kv_cache_manager.get_blocks("r").blocks:
        assert not any(block.block_hash for block in blocks[20:])


@pytest.mark.parametrize("refused", ["no KV cache", "several block pools"])
def test_a_model_without_one_block_pool_is_refused(make_engine, refused):
    scheduler = make_engine(None, other_groups=(window_spec(),)).scheduler
    coordinator = scheduler.kv_cache_manager.coordinator
    if refused == "no KV cache":
        coordinator.single_type_managers = ()
    else:
        coordinator.single_type_managers[1].block_pool = object()
    with pytest.raises(UnsupportedModel, match=rf"{refused}[\s\S]*--policy stock"):
        KVCacheGroups(scheduler)
