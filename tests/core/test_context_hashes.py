"""The bound of the contexts' hashes is exact, and the oldest go first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.core.context_hashes import HashLists


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 8))), st.integers(0, 20))
def test_against_a_list(ops: list[tuple[str, int]], limit: int) -> None:
    lists = HashLists[str](limit)
    model: list[tuple[str, list[int]]] = []
    for name, size in ops:
        lists.put(name, [*range(size)])
        model = [each for each in model if each[0] != name] + [(name, [*range(size)])]
        while sum(len(hashes) for _, hashes in model) > limit:
            del model[0]
        assert list(lists.items()) == model
