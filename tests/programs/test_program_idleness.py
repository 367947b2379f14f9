"""Idleness: the share of the newest cycles that went into tools (M1; MORI §3.1, §4.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.programs.idleness import MAX_INTERVAL_S, IdlenessPhase, IdlenessTracker


@dataclass
class Agent:
    """Drives a clock the way an engine would, so that the tests below read like a log."""

    clock: IdlenessTracker = field(default_factory=IdlenessTracker)
    now: float = 100.0
    turns: int = 0

    def turn(self, reasoning_s: float, acting_s: float, *, gated_s: float = 0.0) -> None:
        """One whole cycle: gated for a while, then an inference, then a tool that has not ended yet."""
        self.turns += 1
        self.clock.arrived(f"r{self.turns}", self.now)
        self.now += gated_s
        self.clock.admitted(f"r{self.turns}", self.now)
        self.now += reasoning_s
        self.clock.finished(f"r{self.turns}", self.now)
        self.now += acting_s

    def idleness(self) -> float:
        return self.clock.idleness(self.now)


def test_waiting_for_the_scheduler_counts_in_neither() -> None:
    """§4.1: "the waiting time is excluded from both Reasoning and Acting measurements"."""
    gated, free = Agent(), Agent()
    for _ in range(3):
        gated.turn(3.0, 1.0, gated_s=500.0)
        free.turn(3.0, 1.0)
    assert gated.idleness() == free.idleness() == pytest.approx(0.25)
    gated.clock.arrived("again", gated.now)
    shown = gated.clock.reading()
    assert shown.counting is IdlenessPhase.NOTHING
    assert shown.at(gated.now + 1e6) == shown.at(gated.now) == pytest.approx(0.25), "nor does the wait itself"


FACTS = st.tuples(
    st.sampled_from(["arrived", "admitted", "preempted", "finished"]),
    st.sampled_from("abc"),
    st.one_of(
        st.sampled_from([0.0, 0.0, 1.0, 2.5, -3.0, math.nan, math.inf, -math.inf, 1e308, -1e308]),
        st.floats(0, 100),
    ),
)


@given(facts=st.lists(FACTS, max_size=40), k=st.integers(1, 6))
def test_whatever_it_is_told_it_stays_within_zero_and_one(
    facts: list[tuple[str, str, float]], k: int
) -> None:
    clock, now = IdlenessTracker(k), 0.0
    for what, request_id, step_s in facts:
        now = now + step_s if math.isfinite(step_s) else step_s
        getattr(clock, what)(request_id, now)
        for at in (now, now + 1.0, now - 1.0, math.nan, math.inf, -math.inf):
            assert 0.0 <= clock.idleness(at) <= 1.0
        shown = clock.reading()
        assert 0.0 <= shown.reasoning_s <= MAX_INTERVAL_S * len(facts)
        assert 0.0 <= shown.acting_s <= MAX_INTERVAL_S * len(facts)
        assert len(clock._earlier) <= k - 1


@given(cycles=st.lists(st.tuples(*[st.integers(0, 50)] * 4), min_size=1, max_size=12), k=st.integers(1, 6))
def test_it_is_what_a_full_record_says(cycles: list[tuple[int, int, int, int]], k: int) -> None:
    """Against a reference that keeps every cycle. Whole seconds, so that sums are exact."""
    clock, now = IdlenessTracker(k), 0.0
    for i, (gated_s, ran_s, preempted_s, acted_s) in enumerate(cycles):
        clock.arrived(f"r{i}", now)
        clock.admitted(f"r{i}", now := now + gated_s)
        clock.preempted(f"r{i}", now := now + ran_s)
        clock.admitted(f"r{i}", now := now + preempted_s)
        reasoning_s = sum(ran for _, ran, _, _ in cycles[max(0, i + 1 - k) : i + 1])
        before_s = sum(acted for _, _, _, acted in cycles[max(0, i + 1 - k) : i])
        assert clock.reading()[:2] == (reasoning_s, before_s)
        clock.finished(f"r{i}", now)
        now += acted_s
        acting_s = before_s + acted_s
        total_s = reasoning_s + acting_s
        assert clock.idleness(now) == (acting_s / total_s if total_s else 0.0)
