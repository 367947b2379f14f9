"""What each eviction order gives up first, how a replay counts, and what a bad log is told."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_access_logs import access_logs, random_log
from sojourn_server.simulator.limits.belady import compare_eviction_orders, competitive_ratio
from sojourn_server.simulator.limits.block_accesses import (
    AccessLog,
    AccessLogError,
    BlockAccess,
    BlockAccessKind,
    prepare_access_sequence,
)
from sojourn_server.simulator.limits.eviction_replay import replay_evictions
from sojourn_server.simulator.limits.replay_eviction_orders import (
    MAX_OWNERS,
    LruEvictionOrder,
    eviction_order_factory,
    eviction_order_names,
    latest_program,
    prefix_lru,
)

ADMIT, GROW, FREE = BlockAccessKind.ADMIT, BlockAccessKind.GROW, BlockAccessKind.FREE


def small_log(**changes: object) -> AccessLog:
    fields = {
        "pool_blocks": 4,
        "block_size": 16,
        "chains": [[10, 11, 12], [10, 11, 13]],
        "prompt_blocks": [2, 3],
        "owners": ["a", "b"],
        "accesses": [
            BlockAccess(ADMIT, 0, 3, 2),
            BlockAccess(FREE, 0, 0, 3),
            BlockAccess(ADMIT, 1, 3, 3),
            BlockAccess(FREE, 1, 0, 0),
        ],
    }
    return AccessLog(**{**fields, **changes})


# -- orders, by themselves ------------------------------------------------------


def test_lru_gives_up_what_was_freed_first() -> None:
    order = LruEvictionOrder()
    order.freed([2, 1, 0], owner=0, now=0)
    order.freed([5, 4], owner=1, now=1)
    order.reused([1])
    order.freed([1], owner=1, now=2)

    assert order.pop_victims(2) == [2, 0]
    assert order.pop_victims(9) == [5, 4, 1]
    assert order.pop_victims(1) == []


def test_prefix_lru_keeps_all_of_a_program_as_fresh_as_its_last_turn() -> None:
    for order, expected in ((LruEvictionOrder(), [1, 0]), (prefix_lru(["a", "b"]), [5, 4])):
        order.freed([1, 0], owner=0, now=0)  # an old branch of a
        order.freed([5, 4], owner=1, now=1)
        order.freed([3, 2], owner=0, now=2)  # a goes on elsewhere
        assert order.pop_victims(2) == expected


def test_prefix_lru_keeps_what_is_shared_as_long_as_its_latest_user() -> None:
    order = prefix_lru(["a", "b", "c"])
    order.freed([1, 0], owner=0, now=0)
    order.freed([4, 3], owner=2, now=1)
    order.reused([0])
    order.freed([2, 0], owner=1, now=2)

    # a's leaf, then c's, then b's leaf, then what a and b share.
    assert order.pop_victims(9) == [1, 4, 3, 2, 0]


def test_latest_program_gives_up_programs_that_are_over_then_the_latest() -> None:
    order = latest_program(["a", "b", "c"])
    order.freed([1, 0], owner=0, now=0)
    order.freed([3, 2], owner=1, now=1)
    order.freed([5, 4], owner=2, now=2)
    order.owner_ended(0)

    assert order.pop_victims(9) == [1, 0, 5, 4, 3, 2]


def test_latest_program_keeps_what_living_programs_share() -> None:
    order = latest_program(["a", "b", "c"])
    order.freed([1, 0], owner=0, now=0)
    order.reused([0])
    order.freed([2, 0], owner=2, now=1)
    order.freed([3], owner=1, now=2)

    assert order.pop_victims(1) == [2]  # c's leaf: c came last
    order.owner_ended(2)
    # 0 is a's alone now: after its leaf, and after b's, since b came later than a.
    assert order.pop_victims(9) == [3, 1, 0]


def test_what_is_shared_stays_as_fresh_as_a_program_that_goes_on_elsewhere() -> None:
    order = prefix_lru(["a", "b", "c"])
    order.freed([0], owner=0, now=0)
    order.reused([0])
    order.freed([1, 0], owner=1, now=1)
    order.freed([2], owner=2, now=2)
    order.freed([3], owner=0, now=3)

    assert order.pop_victims(9) == [1, 2, 3, 0]


def test_who_used_a_place_before_it_was_given_up_is_forgotten() -> None:
    order = latest_program(["a", "b"])
    order.freed([0], owner=0, now=0)
    assert order.pop_victims(1) == [0]
    order.freed([0], owner=1, now=1)
    order.freed([1], owner=0, now=2)

    assert order.pop_victims(2) == [0, 1]


def test_a_block_of_no_program_goes_first() -> None:
    order = latest_program(["a", ""])
    order.freed([0], owner=0, now=0)
    order.freed([1], owner=1, now=1)

    assert order.pop_victims(2) == [1, 0]


@pytest.mark.parametrize("make", [prefix_lru, latest_program])
def test_a_block_of_very_many_programs_goes_last(make: object) -> None:
    count = MAX_OWNERS + 3
    order = make([f"p{i}" for i in range(count)])  # type: ignore[operator]
    for owner in range(count):
        if owner:
            order.reused([0])
        order.freed([owner + 1, 0], owner=owner, now=owner)
        if owner < count - 1:
            order.owner_ended(owner)

    assert order.pop_victims(99)[-1] == 0


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(eviction_order_names()), st.integers(0, 2**32))
def test_an_order_gives_up_every_free_block_once(name: str, seed: int) -> None:
    rng = random.Random(seed)
    order = eviction_order_factory(name)([f"p{i}" for i in range(4)])
    free: set[int] = set()
    busy: dict[int, list[int]] = {}
    unused = list(range(30))
    for now in range(60):
        owner = rng.randrange(4)
        if owner in busy:
            blocks = busy.pop(owner)
            shared = {block for other in busy.values() for block in other}
            order.freed([block for block in reversed(blocks) if block not in shared], owner, now)
            free |= set(blocks) - shared
            continue
        reused = rng.sample(sorted(free), rng.randrange(len(free) + 1))
        order.reused(reused)
        free -= set(reused)
        wanted = rng.randrange(12)
        taken, unused = unused[:wanted], unused[wanted:]
        if len(taken) < wanted:
            victims = order.pop_victims(wanted - len(taken))
            assert len(victims) == min(wanted - len(taken), len(free))
            assert len(set(victims)) == len(victims)
            assert set(victims) <= free
            free -= set(victims)
            taken += victims
        busy[owner] = reused + taken
    assert set(order.pop_victims(99)) == free


# -- what a replay counts ---------------------------------------------------------


def test_a_cached_prefix_is_found_and_the_rest_computed() -> None:
    result = replay_evictions(small_log(), LruEvictionOrder())

    assert result.hit_blocks == [0, 2]
    assert result.asked_tokens == (2 + 3) * 16
    assert result.hit_tokens == 2 * 16
    assert result.computed_tokens == 3 * 16
    assert result.regenerated_tokens == 0


def test_a_last_block_may_become_full_with_the_last_token() -> None:
    accesses = [BlockAccess(ADMIT, 0, 3, 2), BlockAccess(FREE, 0, 0, 3), BlockAccess(ADMIT, 1, 3, 3)]
    log = small_log(chains=[[10, 11, 12], [10, 11, 12]], accesses=accesses)

    assert replay_evictions(log, LruEvictionOrder()).hit_blocks == [0, 3]


def test_a_request_that_resumes_may_ask_for_what_it_had_generated() -> None:
    accesses = [
        BlockAccess(ADMIT, 0, 3, 2),
        BlockAccess(GROW, 0, 4, 3),
        BlockAccess(FREE, 0, 0, 0),
        BlockAccess(ADMIT, 0, 4, 3),
    ]
    log = small_log(accesses=accesses)

    assert replay_evictions(log, LruEvictionOrder()).hit_blocks == [0, 3]
    # Another takes its place meanwhile: everything is computed again, the generated block too.
    chains = [*log.chains, [20, 21, 22, 23]]
    between = [BlockAccess(ADMIT, 2, 4, 4), BlockAccess(FREE, 2, 0, 0)]
    accesses = [*accesses[:3], *between, accesses[3]]
    log = small_log(chains=chains, prompt_blocks=[2, 3, 4], owners=["a", "b", "c"], accesses=accesses)
    result = replay_evictions(log, LruEvictionOrder())
    assert result.hit_blocks == [0, 0, 0]
    assert result.regenerated_by_request == [3 * 16, 0, 0]
    assert result.regenerated_tokens == 3 * 16


def test_what_two_compute_at_once_is_nobodys_loss() -> None:
    # Both compute 10 and 11, which neither finds; both copies are cached, and evicted one after the other.
    accesses = [
        BlockAccess(ADMIT, 0, 2, 0),
        BlockAccess(ADMIT, 1, 2, 0),
        BlockAccess(GROW, 0, 2, 2),
        BlockAccess(GROW, 1, 2, 2),
    ]
    result = replay_evictions(small_log(accesses=accesses), LruEvictionOrder())

    assert result.hit_blocks == [0, 0]
    assert result.duplicated_tokens == 2 * 16
    assert result.regenerated_tokens == 0


def test_what_two_compute_again_at_once_is_the_first_ones_loss() -> None:
    chains = [[10, 11], [20, 21, 22, 23], [10, 11], [10, 11]]
    accesses = [
        BlockAccess(ADMIT, 0, 2, 2),
        BlockAccess(FREE, 0, 0, 0),
        BlockAccess(ADMIT, 1, 4, 4),
        BlockAccess(FREE, 1, 0, 0),
        BlockAccess(ADMIT, 2, 2, 0),
        BlockAccess(ADMIT, 3, 2, 0),
    ]
    log = small_log(chains=chains, prompt_blocks=[2, 4, 2, 2], owners=list("abcd"), accesses=accesses)
    result = replay_evictions(log, LruEvictionOrder())

    assert result.regenerated_by_request == [0, 0, 2 * 16, 0]
    assert result.duplicated_tokens == 2 * 16


def test_what_was_found_but_does_not_fit_is_given_back_from_the_tail() -> None:
    # In the recorded run request 1 found nothing and held one block while 2 held three. Here it finds all
    # three of its blocks, since the pool is the same but nothing evicted them; then 2 needs the space.
    chains = [[10, 11, 12], [10, 11, 12], [20, 21, 22], [10, 11, 12]]
    accesses = [
        BlockAccess(ADMIT, 0, 3, 3),
        BlockAccess(FREE, 0, 0, 0),
        BlockAccess(ADMIT, 1, 1, 1),
        BlockAccess(ADMIT, 2, 3, 3),
        BlockAccess(FREE, 2, 0, 0),
        BlockAccess(GROW, 1, 3, 3),
        BlockAccess(FREE, 1, 0, 0),
        BlockAccess(ADMIT, 3, 3, 3),
    ]
    log = small_log(chains=chains, prompt_blocks=[3, 3, 3, 3], owners=list("abcd"), accesses=accesses)
    result = replay_evictions(log, LruEvictionOrder())

    assert result.given_back_tokens == 2 * 16
    assert result.hit_blocks == [0, 3, 0, 3]
    assert result.regenerated_by_request == [0, 2 * 16, 0, 0]
    assert result.asked_tokens == 12 * 16
    assert result.overflow_blocks == 0


@settings(max_examples=100, deadline=None)
@given(access_logs(pool=10, programs=4, moves=80), st.sampled_from(eviction_order_names()))
def test_a_pool_that_holds_everything_regenerates_nothing(log: AccessLog, name: str) -> None:
    log.pool_blocks = sum(map(len, log.chains)) * 20 + 1
    result = compare_eviction_orders(log, [name])[name]

    assert result.regenerated_tokens == 0
    assert result.over_belady == 1.0
    assert result.given_back_tokens == result.overflow_blocks == 0


@settings(max_examples=100, deadline=None)
@given(access_logs(pool=10, programs=4, moves=80), st.sampled_from(eviction_order_names()))
def test_of_ids_only_their_equality_counts(log: AccessLog, name: str) -> None:
    once = compare_eviction_orders(log, [name])
    log.chains = [[(block * 2654435761) ^ 0x5DEECE66D for block in chain] for chain in log.chains]

    assert compare_eviction_orders(log, [name]) == once


# -- the comparison -----------------------------------------------------------------


def test_every_order_stands_beside_the_optimum() -> None:
    log = random_log(random.Random(3), pool=6, programs=4, moves=200)
    results = compare_eviction_orders(log)

    assert list(results) == ["belady", "lru", "prefix-lru", "latest-program"]
    assert [result.order for result in results.values()] == list(results)
    best = results["belady"].regenerated_tokens
    assert best > 0
    assert results["belady"].over_belady == 1.0
    for name in eviction_order_names():
        assert results[name].over_belady == results[name].regenerated_tokens / best > 1.0


def test_ratios_without_a_bound_say_so() -> None:
    assert competitive_ratio(0, 0) == 1.0
    assert competitive_ratio(5, 0) is None
    assert competitive_ratio(30, 20) == 1.5
    # Half of a pool is enough for the two that come back, but LRU keeps what came last.
    chains = [[1, 2], [3], [4], [5], [1, 2]]
    accesses = [
        access
        for request, chain in enumerate(chains)
        for access in (BlockAccess(ADMIT, request, len(chain), len(chain)), BlockAccess(FREE, request, 0, 0))
    ]
    log = small_log(
        pool_blocks=3, chains=chains, prompt_blocks=[2, 1, 1, 1, 2], owners=list("abcda"), accesses=accesses
    )
    result = compare_eviction_orders(log, ["lru"])["lru"]
    assert result.regenerated_tokens == 2 * 16
    assert result.over_belady is None
    assert result.note == "no ratio: the offline optimum loses nothing"


def test_an_unknown_order_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown eviction order 'latest'.*did you mean 'latest-program'"):
        compare_eviction_orders(small_log(), ["lru", "latest"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pool_blocks": 0}, "access log: pool_blocks is 0; expected at least 1"),
        ({"owners": ["a"]}, "access log: owners has 1 entries, chains 2; expected one of each per request"),
        (
            {"prompt_blocks": [2, 4]},
            "request 1: prompt_blocks is 4; expected 0 to 3, the length of its chain",
        ),
        (
            {"chains": [[10, 11, 12], [10, 12, 11]]},
            "request 1: block 1 of its chain has id 12, which follows",
        ),
        (
            {"chains": [[10, 11, 12], [13, 13, 13]]},
            "request 1: block 1 of its chain has id 13, which follows",
        ),
        ({"accesses": [BlockAccess(ADMIT, 7, 1, 1)]}, "entry 0: request is 7; expected 0 to 1"),
        ({"accesses": [BlockAccess(GROW, 1, 1, 1)]}, "entry 0: GROW of request 1, which is not admitted"),
        (
            {"accesses": [BlockAccess(ADMIT, 1, 1, 1), BlockAccess(ADMIT, 1, 2, 2)]},
            "entry 1: ADMIT of request 1, which is admitted already",
        ),
        (
            {"accesses": [BlockAccess(ADMIT, 0, 1, 2)]},
            "entry 0: full_blocks is 2; expected 0 to held_blocks, 1",
        ),
        (
            {"accesses": [BlockAccess(ADMIT, 0, 9, 4)]},
            "entry 0: full_blocks is 4, but the chain of request 0 names 3",
        ),
    ],
)
def test_a_log_that_cannot_have_happened_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(AccessLogError) as refused:
        prepare_access_sequence(small_log(**changes))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
