"""Shared prefixes against a naive count of sets."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from sojourn_server.core.shared_prefixes import MAX_LEARNED, SharedPrefixes

GROUPS = ("device", "host")


def chain(*tokens: int) -> list[Any]:
    """Chained hashes: each stands for all tokens up to it."""
    return [tokens[: at + 1] for at in range(len(tokens))]


def common(one: list[Any], other: list[Any]) -> int:
    return len({*one} & {*other})


@pytest.mark.parametrize("seed", range(20))
def test_what_contexts_share_is_what_sets_of_blocks_say(seed: int) -> None:
    draw = random.Random(seed)
    prefixes, model = SharedPrefixes(), dict[str, tuple[list[Any], str]]()
    for _ in range(300):
        key = f"p{draw.randrange(12)}"
        action = draw.random()
        if action < 0.6:
            made = chain(*(draw.randrange(3) for _ in range(draw.randrange(1, 9))))
            group = draw.choice(GROUPS)
            prefixes.put(key, made, group)
            model[key] = made, group
        elif action < 0.8:
            prefixes.remove(key)
            model.pop(key, None)
        elif key in model:
            group = draw.choice(GROUPS)
            prefixes.move(key, group)
            model[key] = model[key][0], group
        for name, (blocks, _) in model.items():
            nearest = max(
                (common(blocks, other) for one, (other, _) in model.items() if one != name), default=0
            )
            assert prefixes.shared(name) == nearest
            assert (prefixes.length(name), prefixes.chain(name)) == (len(blocks), blocks)
        asked = chain(*(draw.randrange(3) for _ in range(6)))
        nearest = max((common(asked, other) for other, _ in model.values()), default=0)
        assert prefixes.shared("new", asked) == nearest
        twice = Counter[str]()
        for group in GROUPS:
            held = [blocks for blocks, where in model.values() if where == group]
            twice[group] = sum(map(len, held)) - len({block for blocks in held for block in blocks})
        assert +prefixes.overlaps() == +twice


def test_a_chain_that_the_engine_goes_on_to_fill_counts_as_long_as_it_was() -> None:
    prefixes, live = SharedPrefixes(), chain(1, 2)
    prefixes.put("p", live, "device")
    prefixes.put("q", chain(1, 2, 3), "device")
    live.append((1, 2, 3))
    assert (prefixes.shared("p"), prefixes.length("p")) == (2, 2)
    prefixes.remove("q")
    prefixes.remove("p")
    assert "p" not in prefixes
    assert prefixes.overlaps() == {}


def test_what_is_learned_is_bounded() -> None:
    prefixes = SharedPrefixes()
    for number in range(MAX_LEARNED + 10):
        prefixes.learn(number, 7)
    assert [prefixes.expected(number) for number in (0, 9, 10)] == [0, 0, 7]
