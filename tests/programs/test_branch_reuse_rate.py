"""How often what was put aside is used again."""

from __future__ import annotations

import pytest
from sojourn_server.programs.tool_and_turn_history import BranchReuseRate


def test_it_begins_undecided_and_learns() -> None:
    share = BranchReuseRate(at_first=0.5, weight=100.0)
    assert (share.share, share.changes) == (0.5, 0)
    share.observe(0, 900)
    assert share.share == pytest.approx(0.05)
    share.observe(900, 900)
    assert share.share == pytest.approx(950 / 1900)


def test_one_context_put_aside_moves_it_little() -> None:
    share = BranchReuseRate()
    share.observe(0, 200)
    assert (share.share, share.changes) == (0.5, 0)


def test_it_moves_in_strides_and_counts_them() -> None:
    share = BranchReuseRate(at_first=0.5, weight=100.0, stride=0.05)
    for evicted in range(1, 11):
        share.observe(0, evicted)
    assert (share.share, share.changes) == (0.5, 0)
    share.observe(0, 12)
    assert (share.share, share.changes) == (pytest.approx(50 / 112), 1)


def test_a_changed_habit_is_learned_again() -> None:
    share = BranchReuseRate(weight=256.0, window=1000.0)
    again = evicted = 0
    for _ in range(10):
        evicted += 1000
        share.observe(again, evicted)
    assert share.share < 0.05
    for _ in range(10):
        again += 1000
        share.observe(again, evicted)
    assert share.share > 0.9


def test_a_great_many_at_once_fade_too() -> None:
    share = BranchReuseRate(weight=256.0, window=1000.0)
    share.observe(0, 1_000_000)
    share.observe(1000, 1_000_000)
    assert share.share > 0.3
