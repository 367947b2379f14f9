"""The comparison of streams itself: cuts do not matter, all else does."""

from __future__ import annotations

import pytest
from pieces import Piece, whole

CUT = [Piece("a", "on"), Piece("a", "e two"), "item", Piece("a", "three")]
UNCUT = [Piece("a", "one two"), "item", Piece("a", "three")]


def test_cuts_do_not_matter() -> None:
    assert CUT != UNCUT
    assert whole(("returned", CUT)) == whole(("returned", UNCUT)) == ("returned", UNCUT)


@pytest.mark.parametrize(
    "other",
    [
        [Piece("a", "one two!"), "item", Piece("a", "three")],
        [Piece("b", "one two"), "item", Piece("a", "three")],
        [Piece("a", "one twothree"), "item"],
        [Piece("a", "one two"), Piece("a", "three")],
        ["one two", "item", Piece("a", "three")],
        [Piece("a", "one two"), "item", "item", Piece("a", "three")],
    ],
)
def test_anything_else_does(other: list[object]) -> None:
    assert whole(other) != whole(CUT)
