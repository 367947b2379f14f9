"""What several programs share keeps the rank of whoever needs it most."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from sojourn.ids import ProgramId
from sojourn_server.core import context_hashes, shared_prefixes
from sojourn_server.core.context_hashes import PlacedPrefixes
from sojourn_server.metrics.turn_ledger import common_prefix_length

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
    assert len(placed._of) == 1
    assert placed.keys_of(P) == chain("p")
    assert placed.keys_of(Q) == ()


def test_who_has_nothing_is_not_noted() -> None:
    placed = PlacedPrefixes()
    placed.put(P, chain("p"), 3)
    assert placed.put(P, (), 0) == 0
    assert len(placed._of) == 0
    assert placed.put(Q, chain("q"), 0) == 0


@pytest.mark.parametrize("rank", [0, 2, 3])
def test_a_system_prompt_of_thousands_costs_no_look_at_each(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """A program that moves, is admitted or ends used to be compared with each program of a higher rank."""
    placed = PlacedPrefixes()
    for number in range(4096):
        placed.put(ProgramId(f"q{number}"), chain(f"{number:04}"), 4)
    compared = 0

    def counted(compare: Callable[[Any, Any], int]) -> Callable[[Any, Any], int]:
        def both(one: Any, other: Any) -> int:
            nonlocal compared
            compared += 1
            return compare(one, other)

        return both

    monkeypatch.setattr(context_hashes, "common_prefix_length", counted(common_prefix_length))
    monkeypatch.setattr(shared_prefixes, "common_prefix_length", counted(common_prefix_length))
    assert placed.put(P, chain("p"), rank) == len(HEAD)
    assert placed.put(P, chain("2000x"), rank) == len(HEAD)
    assert placed.put(P, chain("2000", 3), rank) == len(HEAD) + 3
    assert 0 < compared < 3 * 50


def test_it_says_what_a_look_at_each_says() -> None:
    rng = random.Random(3)
    placed, model = PlacedPrefixes(), dict[ProgramId, tuple[list[bytes], int]]()
    for _ in range(3000):
        name = ProgramId(f"p{rng.randrange(30)}")
        if rng.random() < 0.2:
            placed.forget(name)
            model.pop(name, None)
            continue
        keys, rank = [b""], rng.randrange(5)  # a key covers all before it
        for _ in range(rng.randrange(6)):
            keys.append(keys[-1] + rng.choice([b"a", b"b"]))
        keys = keys[rng.random() < 0.1 :]
        model.pop(name, None)
        higher = (common_prefix_length(keys, other) for other, at in model.values() if at > rank)
        assert placed.put(name, keys, rank) == max(higher, default=0)
        if keys:
            model[name] = keys, rank
        assert len(placed._of) == len(model)
