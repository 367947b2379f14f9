"""Selection of the decode engine: DualPath's two phases by hand, and invariants of random runs."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sojourn_server.policies.prefill_decode.decode_engine_selection import (
    DecodeEngine,
    DecodeEngineSelector,
    choose_decode,
    high_token_threshold,
)
from sojourn_server.policies.prefill_decode.prefill_decode_views import PdRequest


def request(name: int, tokens: int, kv_tokens: int | None = None) -> PdRequest:
    return PdRequest(name, tokens, kv_tokens=tokens if kv_tokens is None else kv_tokens)


def engine(
    number: int, free: int, tokens: int = 0, requests: int = 0, most: float = math.inf
) -> DecodeEngine:
    return DecodeEngine(number, 0, 0, free, free, tokens, requests, most)


def test_z_is_an_even_share_and_a_bit() -> None:
    engines = [engine(0, 30, 100), engine(1, 30, 50)]
    assert high_token_threshold(engines, [request(0, 50)], 1.05) == pytest.approx(105.0)


def test_z_counts_of_the_queue_what_fits_if_memory_were_in_one_piece() -> None:
    engines = [engine(0, 30), engine(1, 30)]
    queue = [request(0, 25), request(1, 25), request(2, 25), request(3, 1)]
    assert high_token_threshold(engines, queue, 1.0) == 25.0  # the first two; the fourth is behind the third


def test_z_counts_of_the_queue_no_more_than_can_run() -> None:
    engines = [engine(0, 99, 40, 2, 3), engine(1, 99, 10, 1, 1)]
    assert high_token_threshold(engines, [request(0, 10), request(1, 10)], 1.0) == 30.0


@pytest.mark.parametrize(
    ("case", "engines", "chosen"),
    [
        # (free, tokens, requests, most requests); the request: 10 tokens, 10 of KV; Z = 100
        ("fewest requests of those below Z", [(99, 50, 5), (99, 80, 2), (99, 10, 9)], 1),
        ("engines above Z come last", [(99, 95, 0), (99, 90, 8)], 1),
        ("all pass Z: fewest tokens", [(99, 120, 0), (99, 99, 7), (99, 105, 1)], 1),
        ("memory comes first", [(9, 0, 0), (10, 200, 9)], 1),
        ("no engine has the memory", [(9, 0, 0), (5, 0, 0)], None),
        ("ties: fewer tokens, then the lowest number", [(99, 30, 2), (99, 20, 2), (99, 20, 2)], 1),
        ("an engine at its limit gets none", [(99, 10, 2, 2), (99, 95, 9, 10)], 1),
        ("all run as many as they can", [(99, 10, 2, 2), (99, 0, 1, 1)], None),
    ],
)
def test_phase_2(case: str, engines: list[tuple[int, ...]], chosen: int | None) -> None:
    views = [engine(n, *load) for n, load in enumerate(engines)]
    assert choose_decode(views, request(0, 10), most_tokens=100) == chosen, case


some_engines = st.lists(
    st.tuples(
        st.sampled_from([5, 10, 99]), st.integers(0, 12), st.integers(0, 3), st.sampled_from([1, 2, math.inf])
    ),
    max_size=8,
)


@given(some_engines, st.integers(0, 14), st.randoms(use_true_random=False))
def test_phase_2_is_the_least_by_the_rule(
    engines: list[tuple[int, int, int, float]], most: int, shuffled: random.Random
) -> None:
    views = [engine(n, *load) for n, load in enumerate(engines)]
    shuffled.shuffle(views)
    fitting = [view for view in views if view.free_kv_tokens >= 10 and view.requests < view.most_requests]
    low = [(v.requests, v.tokens, v.number) for v in fitting if v.tokens + 2 <= most]
    high = [(v.tokens, v.requests, v.number) for v in fitting if v.tokens + 2 > most]
    expected = min(low or high)[2] if fitting else None
    assert choose_decode(views, request(0, 2, 10), most) == expected


def test_a_request_too_large_for_all_engines_is_refused() -> None:
    engines = DecodeEngineSelector()
    assert not engines.enqueue(request(1, 10))  # there is no engine
    engines.add(0, 0, 0, kv_tokens=100)
    engines.add(1, 1, 1, kv_tokens=300)
    with pytest.raises(ValueError, match=r"needs 301 tokens of KV; expected at most 300"):
        engines.enqueue(request(1, 301))
    engines.enqueue(request(2, 250))  # past the emptier group that could never hold it
    assert [number for _, number in engines.assign_queued()] == [1]


def three_of_one_each() -> DecodeEngineSelector:
    """Two engines in one group, and one in another; each runs one request at once."""
    engines = DecodeEngineSelector()
    for number in range(3):
        engines.add(number, number, number // 2, kv_tokens=1000)
        engines.set_request_limit(number, 1)
    return engines


def test_a_group_at_its_limit_comes_after_one_with_more_tokens() -> None:
    engines = three_of_one_each()
    engines.add(3, 3, 1, kv_tokens=1000)
    engines.enqueue(request(0, 10))
    engines.enqueue(request(1, 500))
    engines.enqueue(request(2, 10))
    assert [(mine.request_id, number) for mine, number in engines.assign_queued()] == [(0, 0), (2, 1), (1, 2)]
    engines.enqueue(
        request(3, 10)
    )  # the first group has 20 tokens, the other 500 and an engine without bounds
    assert [number for _, number in engines.assign_queued()] == [3]


stories = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(1, 40), st.integers(0, 30)),
        st.tuples(st.just("end"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("withdraw"), st.integers(0, 20), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(stories, st.lists(st.sampled_from([1, 2, math.inf]), min_size=6, max_size=6))
def test_accounts_add_up_and_nothing_is_granted_twice(
    story: list[tuple[str, int, int]], most: list[float]
) -> None:
    engines = DecodeEngineSelector()
    for number in range(6):
        engines.add(number, number // 2, number // 3, kv_tokens=70)
        engines.set_request_limit(number, most[number])
    running: dict[int | str, tuple[PdRequest, int]] = {}
    waiting: dict[int | str, PdRequest] = {}
    for name, (what, amount, more) in enumerate(story):
        if what == "come":
            mine = request(name, amount, amount + more)
            if engines.enqueue(mine):
                waiting[name] = mine
            assert (name in waiting) or not engines.has_room()
        elif what == "end" and running:
            mine, number = running.pop(sorted(running)[amount % len(running)])
            engines.finish(number, mine)
        elif what == "withdraw" and waiting:
            assert engines.withdraw(waiting.popitem()[0])
        for mine, number in engines.assign_queued():
            assert waiting.pop(mine.request_id) is mine
            running[mine.request_id] = (mine, number)
        for view in engines.available():
            held = [mine for mine, number in running.values() if number == view.number]
            assert view.tokens == sum(mine.tokens for mine in held)
            assert view.requests == len(held) <= view.most_requests == most[view.number]
            assert view.free_kv_tokens == 70 - sum(mine.kv_tokens for mine in held) >= 0
        assert sum(len(group.queue) for group in engines._groups.values()) == len(waiting)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40))
def test_phase_1_levels_groups(sizes: list[int]) -> None:
    engines = DecodeEngineSelector()
    for number in range(4):
        engines.add(number, number, number, kv_tokens=10**6)
    loads = dict.fromkeys(range(4), 0)
    for name, tokens in enumerate(sizes):
        expected = min(loads, key=lambda group: (loads[group], group))
        engines.enqueue(request(name, tokens))
        ((_, number),) = engines.assign_queued()
        assert number == expected
        loads[number] += tokens
    assert max(loads.values()) - min(loads.values()) <= max(sizes)
