"""Pairs of engines: the rules of choice by hand, freed capacity, and a state that adds up."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sojourn_server.policies.prefill_decode.engine_pair_scheduler import (
    DecodeEngine,
    EnginePair,
    PairScheduler,
    PdRequest,
    PrefillDecodeRules,
    PrefillEngine,
    StorageNic,
    choose_decode,
    choose_prefill,
    high_token_threshold,
    shorter_queue_reads,
)

BLOCK_S = 0.1


def scheduler(most_tokens: float) -> PairScheduler:
    """A scheduler whose β is a fixed number of tokens."""
    pairs = PairScheduler(PrefillDecodeRules(most_tokens_s=math.inf))
    pairs.most_prefill_tokens = most_tokens
    return pairs


def fleet(
    prefill_nodes: int = 1, decode_nodes: int = 1, engines: int = 2, most_tokens: float = 100.0, kv: int = 200
) -> PairScheduler:
    pairs = scheduler(most_tokens)
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


def request(name: int, tokens: int = 50, blocks: int = 0) -> PdRequest:
    return PdRequest(name, tokens, blocks, kv_tokens=tokens)


def engine(
    number: int, free: int, tokens: int = 0, requests: int = 0, most: float = math.inf
) -> DecodeEngine:
    return DecodeEngine(number, StorageNic(1.0), 0, free, free, tokens, requests, most)


def prefill_engines(tokens: tuple[int, ...], queue_s: tuple[float, ...]) -> list[PrefillEngine]:
    """Engines with so many tokens, and so many seconds of reads at the time 5."""
    return [
        PrefillEngine(number, StorageNic(1.0, busy_until_s=5.0 + busy_s), count)
        for number, (count, busy_s) in enumerate(zip(tokens, queue_s, strict=True))
    ]


@pytest.mark.parametrize(
    ("engines", "queued", "ratio", "z"),
    [
        ([engine(0, 30, 100), engine(1, 30, 50)], [50], 1.05, 105.0),
        # What fits if memory were in one piece: the first two. The fourth is behind the third.
        ([engine(0, 30), engine(1, 30)], [25, 25, 25, 1], 1.0, 25.0),
        # No more than can run.
        ([engine(0, 99, 40, 2, 3), engine(1, 99, 10, 1, 1)], [10, 10], 1.0, 30.0),
    ],
)
def test_z_is_an_even_share_of_what_is_there_and_of_what_can_enter(
    engines: list[DecodeEngine], queued: list[int], ratio: float, z: float
) -> None:
    queue = [request(name, tokens) for name, tokens in enumerate(queued)]
    assert high_token_threshold(engines, queue, ratio) == pytest.approx(z)


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
    found = choose_decode(views, request(0, 10), most_tokens=100)
    assert (found.name if found is not None else None) == chosen, case


@pytest.mark.parametrize(
    ("case", "tokens", "queue_s", "chosen"),
    [
        ("fewest tokens where all queues are short", (50, 20, 30), (0, 0, 0), 1),
        ("a short queue goes before fewer tokens", (90, 20, 30), (1, 9, 9), 0),
        ("in the class of long queues again fewest tokens", (90, 20, 30), (9, 9, 9), 1),
        ("a queue of α is short still", (90, 20, 30), (3, 3.1, 9), 0),
        ("an engine at β is not over it", (100, 101, 101), (9, 0, 0), 0),
        ("over β no engine is chosen, however short its queue", (101, 20, 30), (0, 9, 9), 1),
        ("a tie goes to the lowest number", (30, 20, 20), (0, 0, 0), 1),
        ("all over β: the request waits", (101, 102, 103), (0, 0, 0), None),
    ],
)
def test_the_three_classes_of_prefill_engines(
    case: str, tokens: tuple[int, ...], queue_s: tuple[float, ...], chosen: int | None
) -> None:
    engines = prefill_engines(tokens, queue_s)
    found = choose_prefill(engines, request(0, 10), short_queue_s=3.0, most_tokens=100, now=5.0)
    assert (found.name if found is not None else None) == chosen, case


@pytest.mark.parametrize(
    ("case", "tokens", "queue_s", "blocks", "chosen"),
    [
        ("home, although others have fewer tokens", (60, 20), (0, 0), 0, 0),
        ("another that is ahead by more tokens than home has", (71, 20), (0, 0), 0, 1),
        ("home is over β", (101, 20), (0, 0), 0, 1),
        ("nothing is read at home, so its queue does not count", (60, 20), (9, 0), 0, 0),
        ("what home lacks is read", (60, 20), (9, 0), 2, 1),
    ],
)
def test_a_program_returns_to_the_engine_that_has_its_context(
    case: str, tokens: tuple[int, ...], queue_s: tuple[float, ...], blocks: int, chosen: int
) -> None:
    engines = prefill_engines(tokens, queue_s)
    returns = PdRequest(0, 60, blocks, home=0, home_tokens=50)
    found = choose_prefill(engines, returns, short_queue_s=3.0, most_tokens=100, now=5.0)
    assert found is engines[chosen], case


def test_what_home_has_is_neither_its_load_nor_read() -> None:
    pairs = fleet(prefill_nodes=2, engines=1, most_tokens=10_000.0, kv=10_000)
    pairs.submit(PdRequest("a", 1000, 15, home=0, home_tokens=700))
    [pair] = pairs.dispatch(0.0)
    assert (pair.prefill, pairs.prefill[0].tokens) == (0, 300)
    nic = pairs.prefill[0].nic if not pair.decode_reads else pairs.decode[pair.decode].nic
    assert nic.busy_until_s == pytest.approx((15 - 700 // 64) * nic.block_s)
    pairs.prefilled("a")
    assert pairs.prefill[0].tokens == 0


def test_a_group_at_its_limit_comes_after_one_with_more_tokens() -> None:
    """Two engines in one group and one in another, each for one request at once; then one without a limit."""
    pairs = fleet(decode_nodes=3, engines=1, most_tokens=math.inf, kv=1000)
    for number, group in ((11, 1), (12, 1), (13, 2)):
        pairs.add_decode(number, group, group, 1000)
        pairs.decode[number].most_requests = 1
    for number in (1, 2, 3):
        pairs.remove(pairs.decode[number])
    pairs.add_decode(14, 2, 2, 1000)
    for name, tokens in enumerate((10, 500, 10)):
        pairs.submit(request(name, tokens))
    assert {pair.request.request_id: pair.decode for pair in pairs.dispatch(0.0)} == {0: 11, 2: 12, 1: 13}
    pairs.submit(request(3, 10))
    assert [pair.decode for pair in pairs.dispatch(0.0)] == [14]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40))
def test_phase_1_levels_groups(sizes: list[int]) -> None:
    pairs = fleet(decode_nodes=4, engines=1, most_tokens=math.inf, kv=10**6)
    loads = dict.fromkeys(range(1, 5), 0)
    for name, tokens in enumerate(sizes):
        expected = min(loads, key=lambda group: (loads[group], group))
        pairs.submit(request(name, tokens))
        assert [pair.decode for pair in pairs.dispatch(0.0)] == [expected]
        loads[expected] += tokens


def test_a_request_gets_a_pair_and_a_side() -> None:
    pairs = fleet()
    pairs.submit(request(1, blocks=4))
    assert pairs.dispatch(0.0) == [EnginePair(request(1, blocks=4), 0, 2, decode_reads=False)]
    pairs.submit(request(2, blocks=4))  # the first one is being read at the prefill side
    assert pairs.dispatch(0.0) == [EnginePair(request(2, blocks=4), 1, 3, decode_reads=True)]
    assert [nic.busy_until_s for nic in pairs.nics.values()] == pytest.approx([0.4, 0.4])


def test_first_come_first_served_while_all_prefill_engines_are_over_beta() -> None:
    pairs = fleet(engines=1, most_tokens=60.0, kv=10_000)
    for name in range(4):
        pairs.submit(request(name))
    assert [pair.request.request_id for pair in pairs.dispatch(0.0)] == [0, 1]  # 50 is not over 60, 100 is
    pairs.prefilled(0)
    assert [pair.request.request_id for pair in pairs.dispatch(0.0)] == [2]
    pairs.end(0)
    assert pairs.dispatch(0.0) == []
    pairs.end(1)  # given up while it was prefilled
    assert [pair.request.request_id for pair in pairs.dispatch(0.0)] == [3]


fleet_story = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(1, 300), st.integers(0, 9)),
        st.tuples(st.just("end"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("prefilled"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("report"), st.integers(0, 3), st.integers(0, 9)),
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
    pairs = scheduler(60.0)
    for node in range(2):
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

    def suspend(number: int, is_suspended: bool = True) -> None:
        (suspended.add if is_suspended else suspended.discard)(number)
        engine = pairs.prefill[number] if number in prefill else pairs.decode[number]
        engine.is_suspended = is_suspended
        pairs.line_up(sorted(waiting))

    def dispatch(now: float) -> None:
        for pair in pairs.dispatch(now):
            assert pair.prefill not in suspended
            assert pair.decode not in suspended
            assert pair.prefill in prefill, "nothing more goes to an engine that was removed"
            assert pair.decode in decode
            waiting.remove(pair.request.request_id)
            paired[pair.request.request_id] = pair

    for name, (what, amount, more) in enumerate(events):
        for node in range(4):  # one without engines was removed
            pairs.add_node(node, BLOCK_S)
        if what == "come":
            pairs.submit(request(name, amount, more))
            waiting.add(name)
        elif what == "end" and (waiting or paired):
            mine = sorted(waiting | paired.keys())[amount % (len(waiting) + len(paired))]
            pairs.end(mine)
            waiting.discard(mine)
            paired.pop(mine, None)
        elif what == "prefilled" and paired:
            pairs.prefilled(sorted(paired)[amount % len(paired)])
        elif what == "report":
            pairs.report(amount, float(more), float(name))
        elif what == "prefill engine comes":
            prefill.add(number := next(numbers))
            pairs.add_prefill(number, amount)
        elif what == "prefill engine goes" and prefill:
            prefill.remove(number := sorted(prefill)[amount % len(prefill)])
            pairs.remove(pairs.prefill[number])
        elif what == "decode engine comes":
            decode.add(number := next(numbers))
            pairs.add_decode(number, amount, amount, more)
            pairs.decode[number].most_requests = (1, 3, math.inf)[more % 3]
            kept[number] = more
        elif what in ("suspended", "resumed") and prefill | decode:
            number = sorted(prefill | decode)[amount % len(prefill | decode)]
            suspend(number, what == "suspended")
        elif what == "decode engine goes" and decode:
            decode.remove(number := sorted(decode)[amount % len(decode)])
            pairs.remove(pairs.decode[number])
        suspended &= prefill | decode
        if amount % 3:
            dispatch(float(name))
        assert len(pairs.in_flight) == len(waiting) + len(paired)
        for view in pairs.decode.values():
            # Suspended or not: a request that has not ended still takes memory.
            there = [pair.request for pair in paired.values() if pair.decode == view.name]
            assert view.free_kv_tokens <= kept[view.name] - sum(one.kv_tokens for one in there)
            assert view.most_requests >= view.requests >= len(there)
            assert view.free_kv_tokens >= 0
    for number in sorted(suspended):
        suspend(number, is_suspended=False)
    pairs.add_node(0, BLOCK_S)
    pairs.add_node(3, BLOCK_S)
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
    assert all(view.tokens == 0 for view in pairs.prefill.values())
    assert all((view.tokens, view.requests) == (0, 0) for view in pairs.decode.values())


def test_the_prefill_limit_in_seconds_is_by_the_speed_that_was_seen() -> None:
    pairs = PairScheduler(PrefillDecodeRules())
    pairs.add_node(0, 0.01)
    pairs.add_prefill(0, 0)
    pairs.add_decode(0, 0, 0, 1_000_000)
    assert pairs.most_prefill_tokens == math.inf, "nothing is known yet"
    now = 0.0
    for number in range(20):  # a prompt of 1,000 tokens takes 2 s, and the engine rests for a minute after it
        pairs.submit(PdRequest(number, 1000))
        assert len(pairs.dispatch(now)) == 1
        now += 2.0
        pairs.prefilled(number)
        pairs.dispatch(now)
        pairs.end(number)
        now += 60.0
    assert pairs.most_prefill_tokens == pytest.approx(2500.0)
    for number in range(100, 110):
        pairs.submit(PdRequest(number, 1000))
    assert [pair.request.request_id for pair in pairs.dispatch(now)] == [100, 101, 102]
    pairs.end(100)
    assert [pair.request.request_id for pair in pairs.dispatch(now + 1.0)] == [103]


def test_the_wait_for_memory_of_a_decode_engine_is_no_work_of_the_prefill_engine() -> None:
    pairs = PairScheduler(PrefillDecodeRules())
    pairs.add_node(0, 0.01)
    pairs.add_prefill(0, 0)
    pairs.add_decode(1, 0, 0, 5000)
    pairs.submit(request(1, 4000))
    pairs.dispatch(0.0)
    pairs.prefilled(1)
    pairs.dispatch(1.0)
    pairs.submit(request(2, 4000))
    pairs.submit(request(3, 4000))
    assert pairs.dispatch(2.0) == []
    pairs.end(3)  # its client gives up
    pairs.dispatch(30.0)
    pairs.end(1)
    assert len(pairs.dispatch(62.0)) == 1
    pairs.prefilled(2)
    pairs.dispatch(63.0)
    assert pairs.most_prefill_tokens == pytest.approx(5 * 4000)


@pytest.mark.parametrize(
    ("prefill_s", "decode_s", "decode_reads"),
    [(1.0, 0.5, True), (0.5, 1.0, False), (1.0, 1.0, False), (-0.1, -2.0, True)],
)
def test_the_shorter_queue_reads(prefill_s: float, decode_s: float, decode_reads: bool) -> None:
    assert shorter_queue_reads(prefill_s, decode_s) == decode_reads


@pytest.mark.parametrize(("read_side", "decode_node"), [("prefill", 1), ("shorter", 0)])
def test_the_prefill_side_reads_by_rule_and_where_both_engines_are_on_one_node(
    read_side: str, decode_node: int
) -> None:
    pairs = PairScheduler(PrefillDecodeRules(read_side))
    for node in (0, 1):
        pairs.add_node(node, BLOCK_S)
    pairs.add_prefill(0, 0)
    pairs.add_decode(1, decode_node, 0, 1000)
    pairs.report(0, 9.0, 0.0)
    pairs.submit(request(1, blocks=4))
    assert [pair.decode_reads for pair in pairs.dispatch(0.0)] == [False]
