"""Pairs of engines: queues, freed capacity, and state that adds up after random events."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sojourn_server.policies.prefill_decode.engine_pair_scheduler import PairScheduler
from sojourn_server.policies.prefill_decode.prefill_decode_views import EnginePair, PdRequest
from sojourn_server.policies.prefill_decode.prefill_engine_selection import PrefillSelectionLimits

BLOCK_S = 0.1


def fleet(
    prefill_nodes: int = 1, decode_nodes: int = 1, engines: int = 2, most_tokens: float = 100.0, kv: int = 200
) -> PairScheduler:
    pairs = PairScheduler(PrefillSelectionLimits(most_tokens=most_tokens))
    number = 0
    for node in range(prefill_nodes + decode_nodes):
        pairs.add_node(node, BLOCK_S)
        for _ in range(engines):
            if node < prefill_nodes:
                pairs.add_prefill(number, node)
            else:
                pairs.add_decode(number, node, node, kv)
            number += 1
    return pairs


def ask(name: int, tokens: int = 50, blocks: int = 4) -> PdRequest:
    return PdRequest(name, tokens, blocks, kv_tokens=tokens)


def queue_lengths(pairs: PairScheduler) -> tuple[int, int, int]:
    """Requests without a prefill engine, requests without a decode engine, and all requests in flight."""
    flights = pairs.in_flight.values()
    return sum(f.prefill is None for f in flights), sum(f.decode is None for f in flights), len(flights)


def decode_loads(pairs: PairScheduler) -> list[tuple[int, int, int]]:
    """Free KV tokens, tokens and requests of each decode engine."""
    return [(one.free_kv_tokens, one.tokens, one.requests) for one in pairs.decode.available()]


def test_a_request_gets_a_pair_and_a_side() -> None:
    pairs = fleet()
    pairs.submit(ask(1))
    assert pairs.dispatch(0.0) == [EnginePair(ask(1), 0, 2, decode_reads=False)]
    pairs.submit(ask(2))  # the first one is being read at the prefill side
    assert pairs.dispatch(0.0) == [EnginePair(ask(2), 1, 3, decode_reads=True)]
    assert pairs.queues.queue_s(0, 0.1) == pytest.approx(0.3)
    assert pairs.queues.queue_s(1, 0.1) == pytest.approx(0.3)


def test_a_request_without_stored_blocks_queues_no_read() -> None:
    pairs = fleet()
    pairs.submit(ask(1, blocks=0))
    assert pairs.dispatch(0.0) == [EnginePair(ask(1, blocks=0), 0, 2, decode_reads=False)]
    assert pairs.queues.queue_s(0, 0.0) <= 0.0


def test_first_come_first_served_while_all_prefill_engines_are_over_beta() -> None:
    pairs = fleet(engines=1, most_tokens=60.0, kv=10_000)
    for name in range(4):
        pairs.submit(ask(name))
    assert [pair.request.request_id for pair in pairs.dispatch(0.0)] == [0, 1]  # 50 is not over 60, 100 is
    assert queue_lengths(pairs) == (2, 0, 4)
    pairs.prefilled(0)
    assert [pair.request.request_id for pair in pairs.dispatch(0.0)] == [2]
    pairs.end(0)
    assert pairs.dispatch(0.0) == []
    pairs.end(1)  # given up while it was prefilled
    assert [pair.request.request_id for pair in pairs.dispatch(0.0)] == [3]


def test_what_makes_no_sense_is_refused() -> None:
    pairs = fleet()
    pairs.submit(ask(1))
    with pytest.raises(ValueError, match="is already in flight; expected a new id"):
        pairs.submit(ask(1))
    with pytest.raises(ValueError, match="at least one token"):
        pairs.submit(ask(2, tokens=0))
    with pytest.raises(ValueError, match="needs 201 tokens"):
        pairs.submit(ask(3, tokens=201))
    assert len(pairs.in_flight) == 1
    with pytest.raises(KeyError):
        pairs.add_decode(9, 77, 0, 100)


story = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(1, 150), st.integers(0, 9)),
        st.tuples(st.just("prefilled"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("end"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("report"), st.integers(0, 3), st.integers(0, 9)),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(story)
def test_every_request_is_served_once_and_the_state_adds_up(events: list[tuple[str, int, int]]) -> None:
    pairs = fleet(prefill_nodes=2, decode_nodes=2)
    open_, paired, done = {}, {}, set()
    for name, (what, amount, more) in enumerate(events):
        now = float(name)
        if what == "come":
            open_[name] = PdRequest(name, amount, more, kv_tokens=amount + more)
            pairs.submit(open_[name])
        elif what == "prefilled" and paired:
            mine = sorted(paired)[amount % len(paired)]
            pairs.prefilled(mine)
            done.add(mine)
        elif what == "end" and open_:
            mine = sorted(open_)[amount % len(open_)]
            pairs.end(mine)
            del open_[mine]
            paired.pop(mine, None)
        elif what == "report":
            pairs.report(amount, float(more), now)
        for pair in pairs.dispatch(now):
            mine = pair.request.request_id
            assert pair.request is open_[mine]
            assert mine not in paired
            paired[mine] = pair
        # A request with a prefill engine that waits for memory counts there too.
        assert sum(view.tokens for view in pairs.prefill.available()) >= sum(
            pair.request.tokens for mine, pair in paired.items() if mine not in done
        )
        assert all(view.free_kv_tokens >= 0 for view in pairs.decode.available())
        assert len(pairs.in_flight) == len(open_)
    for mine in list(open_):
        pairs.end(mine)
    assert all(view.tokens == 0 for view in pairs.prefill.available())
    assert all(
        (view.free_kv_tokens, view.tokens, view.requests) == (200, 0, 0) for view in pairs.decode.available()
    )


fleet_story = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(1, 300), st.integers(0, 9)),
        st.tuples(st.just("end"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("prefilled"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("prefill engine comes"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("prefill engine goes"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("decode engine comes"), st.integers(0, 3), st.integers(60, 200)),
        st.tuples(st.just("decode engine goes"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("suspended"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("resumed"), st.integers(0, 5), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(fleet_story)
def test_while_engines_come_and_go_no_request_waits_for_ever(events: list[tuple[str, int, int]]) -> None:
    """Each request needs two engines. Two requests must not hold what the other one needs. When the paired
    requests end, the others get their pairs."""
    pairs = PairScheduler(PrefillSelectionLimits(most_tokens=60.0))
    for node in range(4):
        pairs.add_node(node, BLOCK_S)
    prefill, decode = {0}, {1}
    pairs.add_prefill(0, 0)
    pairs.add_decode(1, 1, 1, 150)
    numbers = iter(range(2, 200))
    paired: dict[int | str, EnginePair] = {}
    waiting: set[int | str] = set()
    suspended: set[int] = set()
    kept: dict[int, int] = {1: 150}
    """KV tokens of decode engines."""

    def suspend(number: int) -> None:
        suspended.add(number)
        (pairs.suspend_prefill if number in prefill else pairs.suspend_decode)(number)

    def resume(number: int) -> None:
        suspended.discard(number)
        (pairs.resume_prefill if number in prefill else pairs.resume_decode)(number)

    def dispatch(now: float) -> None:
        for pair in pairs.dispatch(now):
            assert pair.prefill not in suspended
            assert pair.decode not in suspended
            assert pair.prefill in prefill, "nothing more goes to an engine that was removed"
            assert pair.decode in decode
            waiting.remove(pair.request.request_id)
            paired[pair.request.request_id] = pair

    for name, (what, amount, more) in enumerate(events):
        if what == "come":
            request = PdRequest(name, amount, 0, kv_tokens=amount)
            try:
                pairs.submit(request)
            except ValueError:
                assert amount > pairs.decode.largest_kv_tokens() > 0
            else:
                waiting.add(name)
        elif what == "end" and (waiting or paired):
            mine = sorted(waiting | paired.keys())[amount % (len(waiting) + len(paired))]
            pairs.end(mine)
            waiting.discard(mine)
            paired.pop(mine, None)
        elif what == "prefilled" and paired:
            pairs.prefilled(sorted(paired)[amount % len(paired)])
        elif what == "prefill engine comes":
            prefill.add(number := next(numbers))
            pairs.add_prefill(number, amount)
        elif what == "prefill engine goes" and prefill:
            prefill.remove(number := sorted(prefill)[amount % len(prefill)])
            pairs.remove_prefill(number)
        elif what == "decode engine comes":
            decode.add(number := next(numbers))
            pairs.add_decode(number, amount, amount, more)
            kept[number] = more
        elif what in ("suspended", "resumed") and prefill | decode:
            number = sorted(prefill | decode)[amount % len(prefill | decode)]
            (suspend if what == "suspended" else resume)(number)
        elif what == "decode engine goes" and decode:
            decode.remove(number := sorted(decode)[amount % len(decode)])
            pairs.remove_decode(number)
        suspended &= prefill | decode
        if amount % 3:
            dispatch(float(name))
        assert len(pairs.in_flight) == len(waiting) + len(paired)
        for view in pairs.decode.available():
            # Suspended or not: a request that has not ended still takes memory.
            there = [pair.request for pair in paired.values() if pair.decode == view.number]
            assert view.free_kv_tokens <= kept[view.number] - sum(one.kv_tokens for one in there)
            assert view.requests >= len(there)
            assert view.free_kv_tokens >= 0
    for number in sorted(suspended):
        resume(number)
    if not prefill:
        prefill.add(number := next(numbers))
        pairs.add_prefill(number, 0)
    decode.add(number := next(numbers))
    pairs.add_decode(number, 3, 3, 300)
    for _ in range(len(events) + 1):
        dispatch(1000.0)
        for mine in list(paired):
            pairs.prefilled(mine)
            pairs.end(mine)
            del paired[mine]
    assert not waiting
    assert all(view.tokens == 0 for view in pairs.prefill.available())
    assert all((view.tokens, view.requests) == (0, 0) for view in pairs.decode.available())
    assert all(group.tokens == 0 for group in pairs.decode._groups.values())


def test_the_prefill_limit_in_seconds_is_by_the_speed_that_was_seen() -> None:
    pairs = PairScheduler(PrefillSelectionLimits(most_tokens_s=5.0))
    pairs.add_node(0, 0.01)
    pairs.add_prefill(0, 0)
    pairs.add_decode(0, 0, 0, 1_000_000)
    assert pairs.prefill.most_tokens == math.inf, "nothing is known yet"
    now = 0.0
    for number in range(20):  # a prompt of 1,000 tokens takes 2 s, and the engine rests for a minute after it
        pairs.submit(PdRequest(number, 1000))
        assert len(pairs.dispatch(now)) == 1
        now += 2.0
        pairs.prefilled(number)
        pairs.dispatch(now)
        pairs.end(number)
        now += 60.0
    assert pairs.prefill.most_tokens == pytest.approx(2500.0)
    for number in range(100, 110):
        pairs.submit(PdRequest(number, 1000))
    assert [pair.request.request_id for pair in pairs.dispatch(now)] == [100, 101, 102]
    pairs.end(100)
    assert [pair.request.request_id for pair in pairs.dispatch(now + 1.0)] == [103]
