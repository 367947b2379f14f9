"""Shared prefixes against a naive count of sets."""

from __future__ import annotations

import random
from typing import Any

import pytest
from sojourn_server.core.shared_prefixes import MAX_LEARNED, ExpectedPrefixes, SharedPrefixes


def chain(*tokens: int) -> list[Any]:
    """Chained hashes: each stands for all tokens up to it."""
    return [tokens[: at + 1] for at in range(len(tokens))]


def common(one: list[Any], other: list[Any]) -> int:
    return len({*one} & {*other})


@pytest.mark.parametrize("seed", range(20))
def test_own_hashes_add_up_to_the_distinct_ones(seed: int) -> None:
    draw = random.Random(seed)
    prefixes, model = SharedPrefixes(), dict[str, list[Any]]()
    left_out: dict[str, int] = {}
    for _ in range(300):
        key = f"p{draw.randrange(12)}"
        if draw.random() < 0.6:
            model[key] = chain(*(draw.randrange(3) for _ in range(draw.randrange(1, 9))))
            changed = prefixes.put(key, model[key])
        else:
            model.pop(key, None)
            changed = prefixes.remove(key)
        before, left_out = left_out, {name: prefixes.left_out(name) for name in model}
        assert {name for name in model if name != key and left_out[name] != before[name]} <= changed
        distinct = {block for blocks in model.values() for block in blocks}
        assert sum(len(blocks) - left_out[name] for name, blocks in model.items()) == len(distinct)
        for name, blocks in model.items():
            assert (prefixes.length(name), prefixes.chain(name), name in prefixes) == (
                len(blocks),
                blocks,
                True,
            )
        asked = chain(*(draw.randrange(3) for _ in range(6)))
        assert prefixes.common(asked) == max((common(asked, other) for other in model.values()), default=0)


def test_a_chain_that_the_engine_goes_on_to_fill_counts_as_long_as_it_was() -> None:
    prefixes, live = SharedPrefixes(), chain(1, 2)
    prefixes.put("p", live)
    prefixes.put("q", chain(1, 2, 3))
    live.append((1, 2, 3))
    assert (prefixes.left_out("p"), prefixes.left_out("q"), prefixes.length("p")) == (0, 2, 2)
    assert prefixes.remove("p") == {"q"}
    assert prefixes.remove("q") == set()
    assert "p" not in prefixes
    assert prefixes.common(live) == 0


def test_what_is_expected_is_bounded_and_told_once() -> None:
    expected = ExpectedPrefixes()
    for number in range(MAX_LEARNED + 10):
        expected.learn(number, 7)
    assert [expected.of(number) for number in (0, 9, 10)] == [0, 0, 7]
    expected.changed.clear()
    expected.learn(20, 7)
    expected.learn(21, 8)
    assert expected.changed == {21}
