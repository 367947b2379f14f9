"""The bound of the contexts' hashes is exact, and the oldest go first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from sojourn.ids import ProgramId
from sojourn_server.core.context_hashes import ContextHashStore, HashLists


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


def test_a_branch_goes_with_its_context() -> None:
    store, a, b = ContextHashStore(), ProgramId("a"), ProgramId("b")
    for program_id in (a, b):
        store.put(program_id, [1, 2, 3])
        store.branches.put(program_id, [4, 5])
    store.put(a, [9])
    store.drop(b)
    assert (store, store.branches) == ({a: [9]}, {})
