"""Idleness: the share of the newest cycles that went into tools (M1; MORI §3.1, §4.2)."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.programs.idleness import IdlenessPhase, IdlenessTracker

GATED = {"running": False, "live": True}
RUNS = {"running": True, "live": True}
ACTS = {"running": False, "live": False}


@given(cycles=st.lists(st.tuples(*[st.integers(0, 50)] * 5), min_size=1, max_size=12), k=st.integers(1, 6))
def test_it_is_what_a_full_record_says(cycles: Sequence[Sequence[int]], k: int) -> None:
    """Against a reference that keeps every cycle. Whole seconds, so that sums are exact. §4.1: "the waiting
    time is excluded from both Reasoning and Acting measurements". A request that never runs begins no cycle.
    """
    tracker, now = IdlenessTracker(k), 0.0
    tracker.update(now, **ACTS)
    for i, (gated_s, ran_s, preempted_s, acted_s, aborted_s) in enumerate(cycles):
        tracker.update(now, **GATED)
        shown = tracker.reading()
        assert shown.counting is IdlenessPhase.NOTHING
        assert shown.at(now) == shown.at(now + 1e6), "nor does the wait itself"
        tracker.update(now := now + gated_s, **RUNS)
        tracker.update(now := now + ran_s, **GATED)
        tracker.update(now := now + preempted_s, **RUNS)
        reasoning_s = sum(ran for _, ran, *_ in cycles[max(0, i + 1 - k) : i + 1])
        before_s = sum(cycle[3] for cycle in cycles[max(0, i + 1 - k) : i])
        assert tracker.reading()[:2] == (reasoning_s, before_s)
        tracker.update(now, **ACTS)
        now += acted_s
        acting_s = before_s + acted_s
        total_s = reasoning_s + acting_s
        assert tracker.idleness(now) == (acting_s / total_s if total_s else 0.0)
        tracker.update(now, **GATED)
        tracker.update(now := now + aborted_s, **ACTS)
    assert tracker.idleness(now) == tracker.idleness(now - 1.0), "no time has passed"
