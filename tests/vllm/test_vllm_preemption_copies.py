"""What a preemption frees, what of a victim is copied or is not, and a forecast that fails."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from sojourn_server.kv_offload.host_block_pool import RetentionRank
from sojourn_server.policies.preemption_policies import (
    NO_OFFLOAD_S_PER_TOKEN,
    CheaperRecovery,
    RecoveryMethod,
)
from sojourn_server.simulator.simulated_engine import DUMMY_TOKEN
from test_vllm_preemption_faults import COPY_S, Timed, crowded, nothing_is_left

__all__ = ["crowded"]


def some_tokens(name: str, count: int) -> list[int]:
    """Others for each name."""
    draw = random.Random(name)
    return [draw.randrange(9, 30_000) for _ in range(count)]


BEGINNING = some_tokens("system prompt", 64)
"""Sixteen blocks."""


@pytest.fixture
def engine(crowded: Any) -> Any:
    """``engine(toml, **options)``: outputs do not end, all requests are admitted, steps make their copies."""

    def make(toml: str = 'recovery = "offload"', **options: Any) -> Timed:
        on: Timed = crowded(toml, COPY_S, **options)
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


def away(on: Timed, *request_ids: str) -> None:
    """Preempts these, as the engine would."""
    scheduler = on.engine.scheduler
    for request_id in request_ids:
        request = scheduler.requests[request_id]
        scheduler.running.remove(request)
        scheduler._preempt_request(request, on.clock.now)


def kept(on: Timed, request: Any) -> int:
    """Return a request's computed blocks that host memory keeps."""
    host = on.engine.scheduler.connector.planner.host
    entries = [entry for entry in map(host.get, request.block_hashes) if entry is not None]
    return sum(entry.rank == RetentionRank.WANTED for entry in entries)


def how(on: Timed) -> str:
    """How the newest victim comes back."""
    told = on.engine.ask("decisions", limit=5000)["decisions"]
    return str([decision["reason"] for decision in told if decision["kind"] == "preempt"][-1])


def test_a_preemption_frees_only_unshared_blocks(engine: Any) -> None:
    on = engine()
    add(on, "a", [*BEGINNING, *some_tokens("a", 40)], "A")
    add(on, "b", [*BEGINNING, *some_tokens("b", 80)], "B")
    add(on, "c", some_tokens("c", 80), "C")
    scheduler = on.engine.scheduler
    views = {
        view.request_id: view for view in scheduler.sojourn._allocation_fallback._views(scheduler.running)
    }
    assert {name: view.shared_blocks for name, view in views.items()} == {"a": 16, "b": 16, "c": 0}
    pool = scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    away(on, "a")
    assert pool.get_num_free_blocks() - free == views["a"].blocks - views["a"].shared_blocks
    left = scheduler.sojourn._allocation_fallback._views(scheduler.running)
    assert [view.shared_blocks for view in left] == [0, 0], "no request shares with one that has left"


@pytest.mark.parametrize(("host_blocks", "way"), [(800, "offload"), (330, "recompute")])
def test_where_all_of_host_memory_is_kept_for_others_the_next_victim_is_computed_again(
    engine: Any, host_blocks: int, way: str
) -> None:
    on = engine(host_blocks=host_blocks)
    first = add(on, "a", some_tokens("a", 1200), "A", steps=30)
    add(on, "b", some_tokens("b", 600), "B")
    assert below(on).offload_costs(host_blocks)[0] != NO_OFFLOAD_S_PER_TOKEN
    assert below(on).offload_costs(host_blocks + 1)[0] == NO_OFFLOAD_S_PER_TOKEN
    away(on, "a")
    assert how(on) == "offload"
    room = host_blocks - len(first.block_hashes)
    assert room > 1
    # Nothing of it was copied yet; and yet it will be.
    assert below(on).offload_costs(room)[0] != NO_OFFLOAD_S_PER_TOKEN
    assert below(on).offload_costs(room + 1)[0] == NO_OFFLOAD_S_PER_TOKEN
    hashes = [b"x%d" % number for number in range(room)]
    if way == "recompute":
        blocks = [SimpleNamespace(block_hash=each + bytes(4)) for each in hashes]
        below(on).keep_preempted("x", blocks)
    on.engine.scheduler.sojourn._allocation_fallback._forecast_due_in = 0
    on.engine.scheduler.sojourn._allocation_fallback.forecast(on.clock.now)
    away(on, "b")
    assert how(on) == way


@pytest.mark.parametrize("program", ["B", None])
@pytest.mark.parametrize("ended", [False, True], ids=["others run", "others have ended"])
def test_recomputing_one_request_does_not_change_others_copies(
    engine: Any, program: str | None, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheaperRecovery, "recovery", lambda *_: RecoveryMethod.RECOMPUTE)
    on = engine('recovery = "cheaper"')
    add(on, "a", [*BEGINNING, *some_tokens("a", 40)], "A")
    victim = add(on, "b", [*BEGINNING, *some_tokens("b", 40)], program)
    if ended:
        on.engine.abort("a")
        on.step()
    away(on, "b")
    marked = set(below(on)._recomputed)
    assert marked == set(victim.block_hashes[16 : len(marked) + 16])
    assert len(marked) >= 10


@pytest.mark.parametrize("programs", [("A", "B"), ("P", "P")], ids=["two programs", "one program"])
@pytest.mark.parametrize("aborted", [False, True])
def test_what_each_request_that_is_away_will_load_is_kept_until_it_is_back(
    engine: Any, programs: tuple[str, str], aborted: bool
) -> None:
    on = engine()
    first = add(on, "a", [*BEGINNING, *some_tokens("a", 40)], programs[0])
    second = add(on, "b", [*BEGINNING, *some_tokens("b", 40)], programs[1])
    for name in ("a", "b"):
        blocks = on.engine.scheduler.kv_cache_manager.get_blocks(name).blocks[0]
        below(on).copy_ahead([block for block in blocks if block.block_hash])
    away(on, "a", "b")
    both = kept(on, second)
    assert both >= 26
    if aborted:
        on.engine.abort("a")
        on.engine.abort("b")
    else:
        below(on).release_preempted("a", programs[0], first.block_hashes)
        assert kept(on, second) == both
        assert kept(on, first) == 16, "that they begin with"
        below(on).release_preempted("b", programs[1], second.block_hashes)
        assert kept(on, first) == kept(on, second) == 0
        while on.engine.scheduler.requests:
            on.step()
    nothing_is_left(on)
