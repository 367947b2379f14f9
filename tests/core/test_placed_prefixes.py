"""What several programs share keeps the rank of whoever needs it most."""

from __future__ import annotations

from sojourn.ids import ProgramId
from sojourn_server.core.context_hashes import PlacedPrefixes

P, Q = ProgramId("p"), ProgramId("q")
HEAD = [b"h0", b"h1", b"h2"]


def chain(name: str, length: int = 4) -> list[bytes]:
    """Begins like all others, and goes on by itself."""
    return [*HEAD, *(f"{name}{index}".encode() for index in range(length))]


def test_what_a_higher_rank_shares_is_left_at_it() -> None:
    placed = PlacedPrefixes()
    assert placed.put(Q, chain("q"), 3) == 0
    assert placed.put(P, chain("p"), 0) == len(HEAD)
    assert placed.put(P, chain("p"), 3) == 0, "as high as the other: nothing is to be spared"
    assert placed.put(Q, chain("q")[:2], 0) == 2, "all of it is another's too"


def test_who_is_forgotten_spares_nothing() -> None:
    placed = PlacedPrefixes()
    placed.put(Q, chain("q"), 3)
    placed.forget(Q)
    placed.forget(Q)
    assert placed.put(P, chain("p"), 0) == 0
    assert len(placed) == 1
    assert placed.keys_of(P) == chain("p")
    assert placed.keys_of(Q) == ()


def test_who_has_nothing_is_not_noted() -> None:
    placed = PlacedPrefixes()
    placed.put(P, chain("p"), 3)
    assert placed.put(P, (), 0) == 0
    assert len(placed) == 0
    assert placed._by_head == {}
