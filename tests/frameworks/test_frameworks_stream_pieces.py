"""The comparison of streams itself: cuts do not matter, all else does."""

from __future__ import annotations

import pytest
from stream_pieces import StreamPiece, join_pieces

CUT = [StreamPiece("a", "on"), StreamPiece("a", "e two"), "item", StreamPiece("a", "three")]
UNCUT = [StreamPiece("a", "one two"), "item", StreamPiece("a", "three")]


def test_cuts_do_not_matter() -> None:
    assert CUT != UNCUT
    assert join_pieces(("returned", CUT)) == join_pieces(("returned", UNCUT)) == ("returned", UNCUT)


@pytest.mark.parametrize(
    "other",
    [
        [StreamPiece("a", "one two!"), "item", StreamPiece("a", "three")],
        [StreamPiece("b", "one two"), "item", StreamPiece("a", "three")],
        [StreamPiece("a", "one twothree"), "item"],
        [StreamPiece("a", "one two"), StreamPiece("a", "three")],
        ["one two", "item", StreamPiece("a", "three")],
        [StreamPiece("a", "one two"), "item", "item", StreamPiece("a", "three")],
    ],
)
def test_anything_else_does(other: list[object]) -> None:
    assert join_pieces(other) != join_pieces(CUT)
