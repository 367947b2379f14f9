"""Leases on buffers: whole or not at all, in order, never more than there are."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kv_blocks import keys
from sojourn_server.kv_transfer.staging_buffers import BufferPool, BufferSlot, LeaseTooLarge, SlotMemory

SLOTS, LEASE_S = 6, 10.0


def buffers() -> BufferPool:
    return BufferPool(SLOTS, LEASE_S)


def test_what_never_fits_is_refused_with_both_sizes() -> None:
    made = buffers()
    with pytest.raises(LeaseTooLarge, match="a context of 7 Full Blocks does not fit buffers of 6"):
        made.request_lease("a", keys(0, 1), 5, 0.0)
    assert made.leases == 0
    made.request_lease("a", keys(0), 0, 0.0)
    with pytest.raises(ValueError, match="a has a lease already"):
        made.request_lease("a", keys(0), 0, 0.0)


class Machine(RuleBasedStateMachine):
    """Anybody asks, extends, drops, pins and releases, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.made = buffers()
        self.names: set[str] = set()
        self.pinned: list[BufferSlot] = []
        self.number = 0

    @rule(numbers=st.sets(st.integers(0, 9), max_size=5), extra=st.integers(0, 3))
    def ask(self, numbers: set[int], extra: int) -> None:
        self.number += 1
        name = f"lease {self.number}"
        if len(numbers) + extra > SLOTS:
            with pytest.raises(LeaseTooLarge):
                self.made.request_lease(name, keys(*numbers), extra, 0.0)
            return
        self.made.request_lease(name, keys(*numbers), extra, 0.0)
        self.names.add(name)

    @rule()
    def grant(self) -> None:
        for name in self.made.take_granted(0.0):
            assert self.made.granted(name)
        if self.made._queue:  # who is first in line did not fit, though nothing was counted again
            first = self.made._leases[self.made._queue[0]]
            fresh = sum(key not in self.made._by_key for key in first.keys)
            assert fresh + first.extra > len(self.made._free) - self.made._reserved

    @precondition(lambda self: self.names)
    @rule(data=st.data(), numbers=st.sets(st.integers(0, 9), max_size=3))
    def extend(self, data: st.DataObject, numbers: set[int]) -> None:
        name = data.draw(st.sampled_from(sorted(self.names)))
        before = self.made.used
        if not self.made.granted(name):
            assert not self.made.extend(name, keys(*numbers))
        elif self.made.extend(name, keys(*numbers)):
            assert self.made.used == before, "it had room for these"

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        self.made.release_extra(data.draw(st.sampled_from(sorted(self.names))))

    @precondition(lambda self: self.names)
    @rule(data=st.data(), number=st.integers(0, 9))
    def drop(self, data: st.DataObject, number: int) -> None:
        self.made.drop(data.draw(st.sampled_from(sorted(self.names))), keys(number)[0])

    @precondition(lambda self: self.made._used)
    @rule(data=st.data(), invalidate=st.booleans())
    def pin(self, data: st.DataObject, invalidate: bool) -> None:
        slot = self.made._used[data.draw(st.sampled_from(sorted(self.made._used)))]
        self.made.pin(slot)
        self.pinned.append(slot)
        if invalidate:
            self.made.invalidate(slot)

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.made.unpin(self.pinned.pop(0))

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.names)))
        self.names.remove(name)
        self.made.release(name)

    @invariant()
    def bounded(self) -> None:
        made = self.made
        assert 0 <= made.used <= SLOTS
        assert made._reserved >= 0
        assert len(made._used) + len(made._free) == SLOTS
        assert not set(made._used) & set(made._free)
        good = [slot.key for slot in made._used.values() if slot.holders and not slot.bad]
        assert len(set(good)) == len(good), "a block is in one slot at most"

    def teardown(self) -> None:
        for name in self.names:
            self.made.release(name)
        for slot in self.pinned:
            self.made.unpin(slot)
        assert self.made.used == 0
        assert sorted(self.made._free) == list(range(SLOTS))


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40)


def test_memory_is_cut_into_slots_and_layers() -> None:
    memory = SlotMemory(3, 12, 3)
    memory.block(1)[:] = bytes(range(12))
    assert bytes(memory.layer(1, 2)) == bytes([8, 9, 10, 11])
    assert bytes(memory.block(0)) == bytes(12)
    for wrong in ((3, 13, 3), (0, 12, 3), (3, 0, 1), (3, 12, 0)):
        with pytest.raises(ValueError, match="layers of one size"):
            SlotMemory(*wrong)
