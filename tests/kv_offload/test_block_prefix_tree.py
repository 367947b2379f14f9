"""Which block goes first: against a model that looks at all of them each time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kv_blocks import key
from sojourn_server.kv_offload.shared_store import BlockPrefixTree

KEYS = [key(number) for number in range(12)]


def chain(tree: BlockPrefixTree, *numbers: int) -> None:
    """A context: each block follows the one before it."""
    for before, number in zip((None, *numbers), numbers, strict=False):
        tree.add(KEYS[number], None if before is None else KEYS[before])


def ends(tree: BlockPrefixTree) -> list[int]:
    found = []
    while (end := tree.pop_lru_leaf()) is not None:
        found.append(KEYS.index(end))
    return found


def test_the_heap_does_not_grow_with_uses() -> None:
    tree = BlockPrefixTree()
    chain(tree, 0, 1)
    for _ in range(5000):
        tree.touch(KEYS[1])
    assert len(tree._ends) < 100
    assert ends(tree) == [1, 0]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 11), st.none() | st.integers(0, 11)),
        st.tuples(st.just("touch"), st.integers(0, 11), st.none()),
        st.tuples(st.just("remove"), st.integers(0, 11), st.none()),
        st.tuples(st.just("take"), st.just(0), st.none()),
    ),
    max_size=60,
)


@given(ACTIONS)
def test_it_does_what_its_model_does(actions: list[tuple[str, int, int | None]]) -> None:
    tree = BlockPrefixTree()
    parents: dict[int, int | None] = {}
    order: list[int] = []
    for what, number, other in actions:
        if what == "add":
            if other is not None and other >= number:  # a hash cannot be of what comes after it
                other = None
            tree.add(KEYS[number], None if other is None else KEYS[other])
            if parents.get(number) is None:
                parents[number] = other
            order = [one for one in order if one != number] + [number]
        elif what == "touch":
            tree.touch(KEYS[number])
            if number in order:
                order = [one for one in order if one != number] + [number]
        elif what == "remove":
            assert tree.remove(KEYS[number]) == (number in order)
            order = [one for one in order if one != number]
            parents.pop(number, None)
        else:
            followed = {parents[one] for one in order}
            expected = next((one for one in order if one not in followed), None)
            assert tree.pop_lru_leaf() == (None if expected is None else KEYS[expected])
            if expected is not None:
                order.remove(expected)
                del parents[expected]
        assert len(tree) == len(order)
        assert {one for one in range(12) if KEYS[one] in tree} == set(order)
