"""Which prefill engine: DualPath's table by hand, and random stories against the rule."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sojourn_server.policies.prefill_decode.prefill_engine_selection import (
    PrefillEngineSelector,
    PrefillSelectionLimits,
)
from sojourn_server.policies.prefill_decode.storage_read_queues import StorageReadQueues

LIMITS = PrefillSelectionLimits(short_queue_s=3.0, most_tokens=100)


def queues_of(**seconds: float) -> StorageReadQueues:
    """``n0=2.5``: node 0 has 2.5 s to read at time 0."""
    queues = StorageReadQueues()
    for name, queue_s in seconds.items():
        queues.add(int(name[1:]), 1.0)
        queues.report(int(name[1:]), queue_s, 0.0)
    return queues


def by_the_rule(engines: PrefillEngineSelector, queues: StorageReadQueues, now: float) -> int | None:
    """The engine to choose, found by comparing all."""
    found = [
        (queues.queue_s(engine.node, now) > LIMITS.short_queue_s, engine.tokens, engine.number)
        for engine in engines.available()
        if engine.tokens <= LIMITS.most_tokens
    ]
    return min(found)[2] if found else None


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
def test_the_three_classes(
    case: str, tokens: tuple[int, ...], queue_s: tuple[float, ...], chosen: int | None
) -> None:
    queues = queues_of(**{f"n{node}": seconds for node, seconds in enumerate(queue_s)})
    engines = PrefillEngineSelector(LIMITS, queues)
    for number, count in enumerate(tokens):
        engines.add(number, number)
        engines.assign(number, count)
    assert engines.choose(0.0) == chosen, case
    assert by_the_rule(engines, queues, 0.0) == chosen, case


def test_a_long_queue_is_short_once_it_has_been_read() -> None:
    queues = queues_of(n0=5.0, n1=0.0)
    engines = PrefillEngineSelector(LIMITS, queues)
    engines.add(0, 0)
    engines.add(1, 1)
    engines.assign(1, 10)
    assert engines.choose(0.0) == 1
    assert engines.choose(1.999) == 1
    assert engines.choose(2.0) == 0


def test_a_node_that_reports_less_is_asked_again() -> None:
    queues = queues_of(n0=50.0, n1=0.0)
    engines = PrefillEngineSelector(LIMITS, queues)
    engines.add(0, 0)
    engines.add(1, 1)
    engines.assign(1, 10)
    assert engines.choose(0.0) == 1
    queues.report(0, 1.0, 0.0)
    assert engines.choose(0.0) == 0


steps = st.one_of(
    st.tuples(st.just("assign"), st.integers(0, 11), st.integers(0, 60)),
    st.tuples(st.just("finish"), st.integers(0, 11), st.integers(0, 60)),
    st.tuples(st.just("read"), st.integers(0, 3), st.integers(0, 9)),
    st.tuples(st.just("report"), st.integers(0, 3), st.integers(0, 9)),
    st.tuples(st.just("pass"), st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.just("remove"), st.integers(0, 11), st.just(0)),
    st.tuples(st.just("place"), st.integers(1, 60), st.just(0)),
)


@settings(max_examples=300)
@given(st.lists(steps, max_size=60))
def test_it_answers_as_the_rule_does(story: list[tuple[str, int, int]]) -> None:
    queues = StorageReadQueues()
    for node in range(4):
        queues.add(node, 0.7)
    engines = PrefillEngineSelector(LIMITS, queues)
    for number in range(12):
        engines.add(number, number % 4)
    there, now = set(range(12)), 0.0
    for what, which, amount in story:
        if what == "assign" and which in there:
            engines.assign(which, amount)
        elif what == "finish" and which in there:
            engines.finish(which, amount)
        elif what == "read":
            queues.add_read(which, amount, now)
        elif what == "report":
            queues.report(which, float(amount), now)
        elif what == "pass":
            now += amount * 0.9
        elif what == "remove" and which in there:
            del engines.engines[which]
            there.discard(which)
        chosen = engines.choose(now)
        assert chosen == by_the_rule(engines, queues, now)
        if what == "place" and chosen is not None:
            before = {view.number: view.tokens for view in engines.available()}
            assert before[chosen] <= LIMITS.most_tokens  # no engine above β is chosen
            engines.assign(chosen, which)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"short_queue_s is -1\.0, expected seconds ≥ 0"):
        PrefillSelectionLimits(short_queue_s=-1.0)
    queues = queues_of(n0=0.0)
    engines = PrefillEngineSelector(LIMITS, queues)
    engines.add(0, 0)
    with pytest.raises(KeyError):
        engines.add(1, 99)
    with pytest.raises(ValueError, match="expected seconds"):
        queues.report(0, float("nan"), 0.0)
    with pytest.raises(ValueError, match="expected seconds"):
        queues.add(5, 0.0)
