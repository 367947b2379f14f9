"""Who reads: the shorter queue, and the split against every split there is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.policy.pd_read_side import PrefillSide, ShorterQueue, WaterFilled, read_s
from sojourn_server.policy.pd_views import ReadSplit, ReadView

seconds = st.floats(-5, 20, allow_nan=False)
speeds = st.floats(0.01, 3)
views = st.builds(ReadView, st.integers(1, 200), seconds, seconds, speeds, speeds, st.booleans())


@pytest.mark.parametrize(
    ("prefill_s", "decode_s", "one_node", "split"),
    [
        (1.0, 0.5, False, (0, 8)),
        (0.5, 1.0, False, (8, 0)),
        (1.0, 1.0, False, (8, 0)),
        (-0.1, -2.0, False, (0, 8)),
        (1.0, 0.5, True, (8, 0)),
    ],
)
def test_the_shorter_queue_reads(
    prefill_s: float, decode_s: float, one_node: bool, split: tuple[int, int]
) -> None:
    view = ReadView(8, prefill_s, decode_s, 0.1, 0.1, one_node)
    assert ShorterQueue().split(view) == split
    assert PrefillSide().split(view) == (8, 0)


@pytest.mark.parametrize(
    ("case", "view", "split"),
    [
        ("two idle sides share evenly", ReadView(8, 0.0, 0.0, 1.0, 1.0), (4, 4)),
        ("an odd block goes to the prefill side", ReadView(9, 0.0, 0.0, 1.0, 1.0), (5, 4)),
        ("a queue is levelled first", ReadView(8, 2.0, 0.0, 1.0, 1.0), (3, 5)),
        ("a side that is busy for longer than it all takes", ReadView(8, 9.0, 0.0, 1.0, 1.0), (0, 8)),
        ("by speed", ReadView(9, 0.0, 0.0, 1.0, 2.0), (6, 3)),
        ("one block stays whole", ReadView(1, 0.2, 0.0, 1.0, 1.0), (0, 1)),
        ("how long a side has been idle does not matter", ReadView(8, -9.0, -1.0, 1.0, 1.0), (4, 4)),
        ("one node reads for both", ReadView(8, 0.0, 0.0, 1.0, 1.0, True), (8, 0)),
    ],
)
def test_a_split_fills_both_sides_like_water(case: str, view: ReadView, split: tuple[int, int]) -> None:
    assert WaterFilled().split(view) == split, case


@given(views)
def test_no_split_is_done_sooner(view: ReadView) -> None:
    found = WaterFilled().split(view)
    assert found.prefill_blocks + found.decode_blocks == view.blocks  # bytes are conserved
    assert min(found) >= 0
    if view.one_node:
        return
    best = min(
        read_s(view, ReadSplit(blocks, view.blocks - blocks))
        for blocks in range(view.blocks + 1)
        if view.blocks >= 2 or blocks in (0, view.blocks)
    )
    assert read_s(view, found) <= best + 1e-9


@given(views)
def test_bytes_are_conserved_and_answers_repeat(view: ReadView) -> None:
    for policy in (PrefillSide(), ShorterQueue(), WaterFilled(), WaterFilled(least_blocks=20)):
        split = policy.split(view)
        assert sum(split) == view.blocks
        assert policy.split(view) == split
        if policy != WaterFilled() and view.blocks < 20:
            assert 0 in split


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        WaterFilled(least_blocks=0)
