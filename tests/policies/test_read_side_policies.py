"""The read side: the shorter queue, and the best split against all splits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.policies.prefill_decode.prefill_decode_views import ReadSplit, StorageReadView
from sojourn_server.policies.prefill_decode.read_side_policies import (
    PrefillSideRead,
    ShorterQueueRead,
    WaterFillingRead,
    read_duration_s,
)

seconds = st.floats(-5, 20, allow_nan=False)
speeds = st.floats(0.01, 3)
views = st.builds(StorageReadView, st.integers(1, 200), seconds, seconds, speeds, speeds, st.booleans())


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
    view = StorageReadView(8, prefill_s, decode_s, 0.1, 0.1, one_node)
    assert ShorterQueueRead().split(view) == split
    assert PrefillSideRead().split(view) == (8, 0)


@pytest.mark.parametrize(
    ("case", "view", "split"),
    [
        ("two idle sides share evenly", StorageReadView(8, 0.0, 0.0, 1.0, 1.0), (4, 4)),
        ("an odd block goes to the prefill side", StorageReadView(9, 0.0, 0.0, 1.0, 1.0), (5, 4)),
        ("a queue is levelled first", StorageReadView(8, 2.0, 0.0, 1.0, 1.0), (3, 5)),
        ("a side that is busy for longer than it all takes", StorageReadView(8, 9.0, 0.0, 1.0, 1.0), (0, 8)),
        ("by speed", StorageReadView(9, 0.0, 0.0, 1.0, 2.0), (6, 3)),
        ("one block stays whole", StorageReadView(1, 0.2, 0.0, 1.0, 1.0), (0, 1)),
        ("how long a side has been idle does not matter", StorageReadView(8, -9.0, -1.0, 1.0, 1.0), (4, 4)),
        ("one node reads for both", StorageReadView(8, 0.0, 0.0, 1.0, 1.0, True), (8, 0)),
    ],
)
def test_a_split_fills_both_sides_like_water(
    case: str, view: StorageReadView, split: tuple[int, int]
) -> None:
    assert WaterFillingRead().split(view) == split, case


@given(views)
def test_no_split_is_done_sooner(view: StorageReadView) -> None:
    found = WaterFillingRead().split(view)
    assert found.prefill_blocks + found.decode_blocks == view.blocks  # bytes are conserved
    assert min(found) >= 0
    if view.one_node:
        return
    best = min(
        read_duration_s(view, ReadSplit(blocks, view.blocks - blocks))
        for blocks in range(view.blocks + 1)
        if view.blocks >= 2 or blocks in (0, view.blocks)
    )
    assert read_duration_s(view, found) <= best + 1e-9


@given(views)
def test_bytes_are_conserved_and_answers_repeat(view: StorageReadView) -> None:
    for policy in (
        PrefillSideRead(),
        ShorterQueueRead(),
        WaterFillingRead(),
        WaterFillingRead(least_blocks=20),
    ):
        split = policy.split(view)
        assert sum(split) == view.blocks
        assert policy.split(view) == split
        if policy != WaterFillingRead() and view.blocks < 20:
            assert 0 in split


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        WaterFillingRead(least_blocks=0)
