"""How often what was put aside is used again."""

from __future__ import annotations

import pytest
from sojourn_server.program.observations import ReuseShare


def test_it_begins_undecided_and_learns() -> None:
    share = ReuseShare(at_first=0.5, weight=100.0)
    assert (share.share, share.changes) == (0.5, 0)
    share.observe(0, 900)
    assert share.share == pytest.approx(0.05)
    share.observe(800, 1800)
    assert share.share == pytest.approx(850 / 1900)


def test_it_moves_in_strides_and_counts_them() -> None:
    share = ReuseShare(at_first=0.5, weight=100.0, stride=0.05)
    for aside in range(1, 11):
        share.observe(0, aside)
    assert (share.share, share.changes) == (0.5, 0)
    share.observe(0, 12)
    assert (share.share, share.changes) == (pytest.approx(50 / 112), 1)


def test_a_changed_habit_is_learned_again() -> None:
    share = ReuseShare(window=1000.0)
    again = aside = 0
    for _ in range(10):
        aside += 1000
        share.observe(again, aside)
    assert share.share < 0.05
    for _ in range(10):
        aside, again = aside + 1000, again + 1000
        share.observe(again, aside)
    assert share.share > 0.9


def test_it_stays_a_share_where_blocks_are_used_again_more_than_once() -> None:
    share = ReuseShare()
    share.observe(10_000, 1_000)
    assert share.share == 1.0


@pytest.mark.parametrize("options", [{"at_first": 1.5}, {"weight": 0.0}, {"window": 1.0}, {"stride": 0.0}])
def test_options_that_make_no_sense(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        ReuseShare(**options)
