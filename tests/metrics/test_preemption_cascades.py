"""Cascades: preemptions that follow one another (Tetris §1)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.metrics.preemption_cascades import CASCADE_STEPS, PreemptionCascades
from sojourn_server.simulator.report.run_metrics import cascades


def test_a_chain_ends_when_nothing_follows_soon_enough() -> None:
    chain = PreemptionCascades()
    assert chain.preempted(100) == 0
    assert chain.preempted(100) == 0
    assert chain.preempted(100 + CASCADE_STEPS) == 0
    assert chain.length == 3
    assert chain.end_if_stale(100 + 2 * CASCADE_STEPS) == 0, "one more could still belong to it"
    assert chain.preempted(101 + 2 * CASCADE_STEPS) == 3
    assert chain.length == 1


def test_a_chain_is_reported_once() -> None:
    chain = PreemptionCascades()
    chain.preempted(5)
    assert chain.end_if_stale(6 + CASCADE_STEPS) == 1
    assert chain.end_if_stale(7 + CASCADE_STEPS) == 0
    assert chain.preempted(8 + CASCADE_STEPS) == 0, "it was reported already"


@given(st.lists(st.integers(0, 30), max_size=60))
def test_chains_add_up_to_the_simulators_count(gaps: list[int]) -> None:
    """Every preemption of a chain except the first belongs to a cascade."""
    steps = [sum(gaps[: index + 1]) for index in range(len(gaps))]
    chain, lengths = PreemptionCascades(), []
    for step in steps:
        lengths.append(chain.preempted(step))
    lengths.append(chain.end_if_stale(10**9))
    lengths = [length for length in lengths if length]
    assert sum(lengths) == len(steps)
    assert sum(length - 1 for length in lengths) == cascades(steps)
