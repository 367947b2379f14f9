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
