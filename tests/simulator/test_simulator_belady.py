"""benchmarks/belady.py: no choice of victims does better, and LRU is the run itself."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations
from typing import Any

import pytest
from script_modules import benchmark
from simulator_small_runs import SmallRun
from simulator_small_workload import small_workload, turns

belady = benchmark("belady")


def made_log(seed: int) -> Any:
    """Requests of two programs that begin with the same blocks and branch; each holds its whole chain."""
    drawn = random.Random(seed)
    made = belady.AccessLog(pool_blocks=4, block_size=16)
    for _ in range(7):
        number, length = len(made.chains), drawn.randint(1, 4)
        branch, at = drawn.randint(0, 2), drawn.randint(0, 2)
        made.chains.append([place if place < at else 10 * branch + place + 10 for place in range(length)])
        made.owners.append(f"p{branch}")
        access = belady.Access(belady.Kind.ADMIT, number, length, length, drawn.randint(0, length))
        made.accesses += [access, access._replace(kind=belady.Kind.FREE)]
    return made


def fewest(made: Any) -> int:
    """Charged touches with the best of all choices of victims."""
    accesses, chains = made.accesses, made.chains

    @cache
    def best(index: int, cached: frozenset[int], known: frozenset[int]) -> int:
        if index == len(accesses):
            return 0
        kind, request, _, full, asked = accesses[index]
        blocks = chains[request][:full]
        if kind == belady.Kind.FREE:
            return best(index + 1, cached, known)
        lost = sum(block in known and block not in cached for block in blocks[:asked])
        after = cached | set(blocks)
        unpinned = sorted(after - set(blocks))
        least = 10**9
        too_many = max(0, len(after) - made.pool_blocks)
        for victims in combinations(unpinned, too_many):
            least = min(least, best(index + 1, after - {*victims}, known | set(blocks)))
        return lost + least

    return best(0, frozenset(), frozenset())


@pytest.mark.parametrize("seed", range(60))
def test_no_choice_of_victims_recomputes_less(seed: int) -> None:
    made = made_log(seed)
    best = belady.recomputed_tokens(made, "belady")
    assert best == 16 * fewest(made)
    for order in ("lru", "prefix-lru"):
        assert belady.recomputed_tokens(made, order) >= best


@pytest.mark.parametrize("asynchronous", [False, True], ids=["as they come", "one ahead"])
@pytest.mark.parametrize("seed", range(3))
def test_the_recorded_accesses_replayed_lru_are_the_run(seed: int, asynchronous: bool) -> None:
    recorders: list[Any] = []
    run = SmallRun(
        "stock",
        small_workload(seed=seed),
        asynchronous=asynchronous,
        prepare=lambda simulation: recorders.append(belady.AccessRecorder(simulation)),
    )
    log = recorders[0].close()
    lost = sum(turn.regenerated_tokens for turn in turns(run.log) if turn.admitted_s is not None)
    replayed = belady.recomputed_tokens(log, "lru")
    # Requests that compute the same block at the same time are one in the replay.
    assert replayed == pytest.approx(lost, rel=0.05)
    assert belady.recomputed_tokens(log, "belady") < replayed
