"""The contexts' bound is exact, and the oldest go first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from sojourn.ids import ProgramId
from sojourn_server.core.context_hashes import ContextHashStore


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 8), st.booleans())), st.integers(0, 20))
def test_against_a_list(ops: list[tuple[str, int, bool]], limit: int) -> None:
    store = ContextHashStore(limit)
    model: dict[str, list[int]] = {}
    for name, size, drop in ops:
        model.pop(name, None)
        if drop:
            store.drop(ProgramId(name))
        else:
            store.put(ProgramId(name), [*range(size)])
            model[name] = [*range(size)]
            while sum(map(len, model.values())) > limit:
                del model[next(iter(model))]
        assert store.hashes == sum(map(len, model.values())) <= limit
        assert {n: store.get(ProgramId(n)) for n in "abcd"} == {n: model.get(n) for n in "abcd"}
    assert store.clear() == list(model)
    assert store.hashes == 0
    assert store.get(ProgramId("a")) is None


def test_a_branch_counts_and_goes_with_its_context() -> None:
    store, a, b = ContextHashStore(10), ProgramId("a"), ProgramId("b")
    store.put(a, [1, 2, 3])
    store.put_branch(a, [4, 5])
    store.put_branch(a, [4, 5, 6])
    assert (store.hashes, store.branch(a), store.get(a)) == (6, [4, 5, 6], [1, 2, 3])
    store.put(b, [1, 2, 3])
    store.put_branch(b, [7, 8])  # one too many: the oldest context goes, with its branch
    assert (store.hashes, store.get(a), store.branch(a)) == (5, None, ())
    store.put(b, [9])
    assert (store.hashes, store.branch(b)) == (1, ())
