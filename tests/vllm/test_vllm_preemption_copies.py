"""What a preemption frees, what of a victim is copied or is not, and a forecast that fails."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sojourn_server.policies.preemption.preemption_recovery import NO_OFFLOAD_S_PER_TOKEN
from sojourn_server.simulator.simulated_engine import DUMMY_TOKEN
from test_vllm_preemption_faults import COPY_S, HOST, SHAPE, Timed, away, kept, nothing_is_left, some_tokens

BEGINNING = some_tokens("system prompt", 64)
"""Sixteen blocks."""


@pytest.fixture
def engine(make_engine: Any, clock: Any, tmp_path: Path) -> Any:
    """``engine(toml, **options)``: outputs do not end, all requests are admitted, steps make their copies."""

    def make(toml: str = 'recovery = "offload"', **options: Any) -> Timed:
        path = tmp_path / "everybody.toml"
        path.write_text(f'extends = "tetris"\nadmission = "everyone"\n{toml}\n')
        on = Timed(
            make_engine("tetris", {"policy_file": str(path)}, **SHAPE, **HOST | options), clock, COPY_S
        )
        on.engine.tokens = lambda request: DUMMY_TOKEN
        return on

    return make


def add(on: Timed, name: str, tokens: list[int], program: str | None, *, steps: int = 20) -> Any:
    """A request that has run for some steps."""
    request = on.engine.add(name, tokens, max_tokens=300, program_id=program)
    for _ in range(steps):
        on.step()
    return request


def below(on: Timed) -> Any:
    return on.engine.scheduler.sojourn._offload


def context_of(keys: list[bytes]) -> Any:
    from sojourn_server.vllm.preempted_contexts import KeptContext

    return KeptContext(keys, len(keys), keys[-1:])


def how(on: Timed) -> str:
    """How the newest victim comes back."""
    told = on.engine.ask("decisions", limit=5000)["decisions"]
    return str([decision["reason"] for decision in told if decision["kind"] == "preempt"][-1])


# -- what a preemption frees -----------------------------------------------------------------


def test_a_preemption_frees_only_unshared_blocks(engine: Any) -> None:
    on = engine()
    add(on, "a", [*BEGINNING, *some_tokens("a", 40)], "A")
    add(on, "b", [*BEGINNING, *some_tokens("b", 80)], "B")
    add(on, "c", some_tokens("c", 80), "C")
    scheduler = on.engine.scheduler
    views = {view.request_id: view for view in scheduler.sojourn._demand_monitor.views(scheduler.running)}
    assert {name: view.shared_blocks for name, view in views.items()} == {"a": 16, "b": 16, "c": 0}
    pool = scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    away(on, "a")
    assert pool.get_num_free_blocks() - free == views["a"].freed_blocks
    left = scheduler.sojourn._demand_monitor.views(scheduler.running)
    assert [view.shared_blocks for view in left] == [0, 0], "no request shares with one that has left"


# -- whether host memory has room --------------------------------------------------------------


@pytest.mark.parametrize(("host_blocks", "way"), [(800, "offload"), (330, "recompute")])
def test_where_all_of_host_memory_is_kept_for_others_the_next_victim_is_computed_again(
    engine: Any, host_blocks: int, way: str
) -> None:
    on = engine(host_blocks=host_blocks)
    first = add(on, "a", some_tokens("a", 1200), "A", steps=30)
    add(on, "b", some_tokens("b", 600), "B")
    assert below(on).link.offload_costs(host_blocks)[0] != NO_OFFLOAD_S_PER_TOKEN
    assert below(on).link.offload_costs(host_blocks + 1)[0] == NO_OFFLOAD_S_PER_TOKEN
    away(on, "a")
    assert how(on) == "offload"
    room = host_blocks - len(first.block_hashes)
    assert room > 1
    # Nothing of it was copied yet; and yet it will be.
    assert below(on).link.offload_costs(room)[0] != NO_OFFLOAD_S_PER_TOKEN
    assert below(on).link.offload_costs(room + 1)[0] == NO_OFFLOAD_S_PER_TOKEN
    others = [b"x%d" % number for number in range(room)]
    if way == "recompute":
        below(on)._keep_preempted("X", context_of(others))
    on.engine.scheduler.sojourn._demand_monitor._due_in = 0
    on.engine.scheduler.sojourn._demand_monitor.before_step(on.clock.now)
    away(on, "b")
    assert how(on) == way


def test_what_is_off_has_no_room(engine: Any) -> None:
    on = engine()
    assert below(on).link.offload_costs()[0] is None, "nothing was measured yet"
    below(on).turn_off("a test")
    assert below(on).link.offload_costs()[0] == NO_OFFLOAD_S_PER_TOKEN


# -- what is not worth saving --------------------------------------------------------------------


@pytest.mark.parametrize("program", ["B", None])
@pytest.mark.parametrize("ended", [False, True], ids=["others run", "others have ended"])
def test_recomputing_one_request_does_not_change_others_copies(
    engine: Any, program: str | None, ended: bool
) -> None:
    on = engine('recovery = "recompute"')
    add(on, "a", [*BEGINNING, *some_tokens("a", 40)], "A")
    victim = add(on, "b", [*BEGINNING, *some_tokens("b", 40)], program)
    if ended:
        on.engine.abort("a")
        on.step()
    away(on, "b")
    marked = set(below(on)._preempted.recomputed)
    assert marked == set(victim.block_hashes[16 : len(marked) + 16])
    assert len(marked) >= 10


@pytest.mark.parametrize("program", ["A", None])
def test_a_request_aborted_while_preempted_leaves_no_mark(engine: Any, program: str | None) -> None:
    on = engine('recovery = "recompute"')
    add(on, "a", some_tokens("a", 80), program)
    away(on, "a")
    assert below(on)._preempted.recomputed
    on.engine.abort("a")
    assert not below(on)._preempted.recomputed
    nothing_is_left(on)


# -- what is kept for those who are away -----------------------------------------------------------


def test_what_another_programs_request_will_load_too_is_kept_for_it(engine: Any) -> None:
    on = engine()
    first = add(on, "a", [*BEGINNING, *some_tokens("a", 40)], "A")
    second = add(on, "b", [*BEGINNING, *some_tokens("b", 40)], "B")
    for name in "ab":
        blocks = on.engine.scheduler.kv_cache_manager.get_blocks(name).blocks[0]
        below(on).copy_ahead([block for block in blocks if block.block_hash])
    away(on, "a", "b")
    both = kept(on, second)
    assert both >= 26
    below(on).release_preempted("A", first.block_hashes)
    assert kept(on, second) == both
    assert kept(on, first) == 16, "that they begin with"
    below(on).release_preempted("B", second.block_hashes)
    assert kept(on, first) == kept(on, second) == 0


def test_wanted_keys_are_those_that_preempted_requests_will_load(engine: Any) -> None:
    target, draw = below(engine()), random.Random(3)
    for _ in range(400):
        program = draw.choice("PQR")
        if draw.random() < 0.5:
            chain = [b"%d" % draw.randrange(2)] * 2 + [b"%d" % draw.randrange(9)] * draw.randrange(1, 4)
            keys = [b"/".join(chain[: end + 1]) for end in range(len(chain))]
            target._keep_preempted(program, context_of(keys))
        else:
            before = target._preempted._kept.get(program, ())
            released = draw.choice(before).keys if before and draw.random() < 0.7 else ()
            target.release_preempted(program, released)
        every = Counter(
            key for away in target._preempted._kept.values() for context in away for key in context.keys
        )
        assert target._preempted.wanted == every
        assert all(target._preempted.wanted.values())


def test_releasing_a_preempted_request_takes_time_in_its_own_blocks_only(engine: Any) -> None:
    class Counted(list[bytes]):
        looked_at = 0

        def __iter__(self) -> Any:
            type(self).looked_at += 1
            return super().__iter__()

    target = below(engine())
    target._keep_preempted("others", context_of(Counted([b"x"] * 5)))
    target._keep_preempted("its", context_of([b"y"]))
    before = Counted.looked_at
    target.release_preempted("its", [b"y"])
    assert Counted.looked_at == before


def test_a_sibling_too_short_to_have_anything_gives_up_nothing_of_its_programs(engine: Any) -> None:
    on = engine()
    first = add(on, "a", some_tokens("a", 200), "A")
    on.engine.scheduler.sojourn._demand_monitor._copy_ahead(first, below(on))
    away(on, "a")
    had = kept(on, first)
    assert had > 40
    on.engine.add("short", some_tokens("short", 2), max_tokens=1, program_id="A")
    on.engine.abort("short")
    assert kept(on, first) == had


def test_behind_a_block_that_was_not_filled_nothing_is_kept_and_nothing_for_ever(engine: Any) -> None:
    """The engine does not name it again, and names those behind it."""
    on = engine()
    request = add(on, "a", some_tokens("a", 200), "A")
    on.engine.scheduler.sojourn._demand_monitor._copy_ahead(request, below(on))
    block_ids = on.engine.scheduler.kv_cache_manager.get_block_ids("a")[0]
    on.engine.scheduler.sojourn._pool.evict_blocks({block_ids[10]})
    away(on, "a")
    assert kept(on, request) == 10
    for _ in range(200):
        on.step()
    on.engine.abort("a")
    assert not below(on)._preempted.wanted
    nothing_is_left(on)


def test_when_its_last_request_has_left_a_program_has_no_preempted_context(engine: Any) -> None:
    on = engine()
    add(on, "a", some_tokens("a", 200), "A")
    below(on)._keep_preempted("A", context_of([b"x", b"y"]))  # whose it was is not to be found any more
    on.engine.abort("a")
    assert not below(on)._preempted.wanted


# -- copying ahead -----------------------------------------------------------------------------------


def test_a_likely_victim_is_copied_incrementally_between_other_victims(engine: Any) -> None:
    on = engine()
    requests = [add(on, name, some_tokens(name, 200), name.upper()) for name in "ab"]
    outlook, planner = on.engine.scheduler.sojourn._demand_monitor, on.engine.scheduler.connector.planner
    submitted: list[int] = []
    store = planner.store

    def counted(blocks: Any, *args: Any, **more: Any) -> int:
        blocks = list(blocks)
        submitted.append(len(blocks))
        return int(store(blocks, *args, **more))

    planner.store = counted
    for _ in range(3):
        for request in requests:
            outlook._copy_ahead(request, below(on))
    assert min(submitted[:2]) > 50
    assert submitted[2:] == [0] * 4


def test_whose_copy_was_lost_is_copied_from_its_beginning(engine: Any) -> None:
    """Else a tail would be stored that nothing can be loaded by."""
    on = engine()
    request = add(on, "a", some_tokens("a", 200), "A")
    outlook, planner = on.engine.scheduler.sojourn._demand_monitor, on.engine.scheduler.connector.planner
    outlook._copy_ahead(request, below(on))
    copied = below(on).count_leading_copied(request.block_hashes)
    assert copied > 50
    for key in request.block_hashes[10:]:
        entry = planner.host.get(key)
        if entry is not None:
            planner.host.remove(entry)
    assert below(on).count_leading_copied(request.block_hashes) == 10
    for _ in range(20):
        on.step()
    outlook._copy_ahead(request, below(on))
    assert below(on).count_leading_copied(request.block_hashes) >= copied + 4


# -- a forecast that fails -------------------------------------------------------------------------------

FAILING = '''
class Fails:
    """A user's, with a mistake in it."""
    predicts = True
    reads_hidden_states = False

    def remaining(self, length, now):
        raise ZeroDivisionError("mistake")

    def victim(self, running, need, now):
        raise ZeroDivisionError("mistake")
'''


def failing(make_engine: Any, folder: Path, toml: str, **shape: Any) -> Any:
    (folder / "mistaken.py").write_text(FAILING)
    (folder / "own.toml").write_text(toml)
    settings = {"policy_file": str(folder / "own.toml"), "strict": False}
    shape = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 640, **shape}
    return make_engine("tetris", settings, **shape)


def test_leases_give_way_though_a_forecast_fails(make_engine: Any, tmp_path: Path) -> None:
    engine = failing(
        make_engine,
        tmp_path,
        'extends = "fixed-ttl"\noutput_length = "mistaken:Fails"\nforecast = "expected-need"\n',
        blocks=41,
    )
    adapter = engine.scheduler.sojourn
    engine.add("leased", some_tokens("leased", 320), max_tokens=1, program_id="A")
    engine.run()
    engine.tell({"type": "tool_start", "program_id": "A", "seq": 1, "call_id": "c", "tool": "bash"})
    assert "A" in adapter.program_scheduler.state.leases
    engine.add("small", some_tokens("small", 8), max_tokens=60, program_id="B")
    engine.step()
    engine.step()
    manager, shortage = engine.scheduler.kv_cache_manager, adapter._allocation_fallback
    assert manager.allocate_slots is shortage._allocate, "nothing can run short"
    failures, adapter._demand_monitor._due_in = adapter.failures, 0
    engine.add("large", some_tokens("large", 400), max_tokens=1, program_id="C")
    engine.step()
    assert adapter.failures == failures + 1
    counters = adapter.program_scheduler.recorder.drain()["counters"]
    assert counters["sojourn_internal_errors_total"] == [[{}, adapter.failures]]
    assert manager.allocate_slots is not shortage._allocate
    engine.run()
    assert "A" not in adapter.program_scheduler.state.leases
    assert not engine.scheduler.requests


def test_where_ending_leases_fails_a_victim_is_chosen_all_the_same(make_engine: Any, tmp_path: Path) -> None:
    engine = failing(make_engine, tmp_path, 'extends = "tetris"\nadmission = "everyone"\n', blocks=21)
    shortage, chosen = engine.scheduler.sojourn._allocation_fallback, []

    def fails(*args: Any) -> None:
        raise ZeroDivisionError("mistake")

    shortage._reclaim_leases = fails
    choose = shortage._stock_victim
    shortage._stock_victim = lambda candidates: chosen.append(1) or choose(candidates)
    for number in range(3):
        engine.add(f"r{number}", some_tokens(f"r{number}", 64), max_tokens=100, program_id=f"P{number}")
    engine.run()
    assert engine.scheduler.sojourn.failures > 0
    assert chosen, "nothing is known yet, so it is the engine's own choice"


def test_where_choosing_a_victim_fails_the_engines_own_choice_is_made(
    make_engine: Any, tmp_path: Path
) -> None:
    engine = failing(
        make_engine,
        tmp_path,
        'extends = "tetris"\nadmission = "everyone"\nvictim = "mistaken:Fails"\n',
        blocks=21,
    )
    preempt, preempted = engine.scheduler._preempt_request, []

    def noted(request: Any, *args: Any, **more: Any) -> None:
        preempted.append((request.request_id, [other.request_id for other in engine.scheduler.running]))
        preempt(request, *args, **more)

    engine.scheduler._preempt_request = noted
    for number in range(3):  # the engine is told that the first came last
        engine.add(f"r{number}", some_tokens(f"r{number}", 64), max_tokens=100, program_id=f"P{number}",
                   arrival_s=9.0 - number)  # fmt: skip
    engine.run()
    assert not engine.scheduler.requests
    assert preempted[0][0] == "r2"
    assert engine.scheduler.sojourn.failures >= 1
