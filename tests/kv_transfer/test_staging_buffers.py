"""Leases on buffers: whole or not at all, in order, never more than there are."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kv_blocks import keys
from sojourn_server.kv_transfer.staging_buffers import BufferLease, BufferPool, BufferSlot

SLOTS = 6
SLOT = st.integers(0, SLOTS - 1)


class Machine(RuleBasedStateMachine):
    """Transfers ask, give up, extend, drop and release, and threads hold slots, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.made = BufferPool(SLOTS, 12, 3)
        self.asked: list[tuple[asyncio.Task[BufferLease], int]] = []
        """Leases that are not granted yet, in order, and how many slots each needs at most."""
        self.leases: list[BufferLease] = []
        self.pinned: list[BufferSlot] = []

    def settle(self) -> None:
        self.loop.run_until_complete(asyncio.sleep(0))
        granted = [task for task, _ in self.asked if task.done()]
        assert granted == [task for task, _ in self.asked[: len(granted)]], "in order"
        del self.asked[: len(granted)]
        self.leases += [task.result() for task in granted]

    @rule(numbers=st.sets(st.integers(0, 9), max_size=5), extra=st.integers(0, SLOTS - 5))
    def ask(self, numbers: set[int], extra: int) -> None:
        asking = self.made.lease(keys(*numbers), extra)
        self.asked.append((self.loop.create_task(asking), len(numbers) + extra))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        task, _ = self.asked.pop(data.draw(st.integers(0, len(self.asked) - 1)))
        self.loop.run_until_complete(asyncio.sleep(0))
        task.cancel()
        self.loop.run_until_complete(asyncio.wait({task}))
        if not task.cancelled():  # it had been granted
            self.leases.append(task.result())

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), numbers=st.sets(st.integers(0, 9), max_size=3))
    def extend(self, data: st.DataObject, numbers: set[int]) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        extra, before = lease.extra, set(lease.slots)
        if self.made.extend(lease, keys(*numbers)):
            assert set(lease.slots) == before | set(keys(*numbers))
        else:
            assert (lease.extra, set(lease.slots)) == (extra, before)

    @precondition(lambda self: any(lease.slots for lease in self.leases))
    @rule(data=st.data(), what=st.sampled_from(["drop", "pin", "fail"]))
    def use(self, data: st.DataObject, what: str) -> None:
        held = [(lease, slot) for lease in self.leases for slot in lease.slots.values()]
        lease, slot = data.draw(st.sampled_from(held))
        if what == "drop":
            self.made.drop(lease, slot)
        elif what == "pin":
            slot.pins += 1
            self.pinned.append(slot)
        else:
            was_bad = slot.bad
            self.made.fail(slot, "why")
            assert slot.bad == (was_bad or slot.pins > 0)

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.made.unpin(self.pinned.pop(0))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.made.release(self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))))

    @invariant()
    def bounded(self) -> None:
        made = self.made
        self.settle()
        used: dict[int, Any] = {slot.index: slot for lease in self.leases for slot in lease.slots.values()}
        used |= {slot.index: slot for slot in self.pinned}
        assert len(used) + len(made._free) == SLOTS
        assert not set(used) & set(made._free)
        assert made.used == len(used) + sum(lease.extra for lease in self.leases) <= SLOTS
        good = [slot.key for slot in used.values() if slot.leases and not slot.bad]
        assert len(set(good)) == len(good), "a block is in one slot at most"
        if self.asked:
            assert self.asked[0][1] > SLOTS - made.used, "the first in line fits"

    def teardown(self) -> None:
        for task, _ in self.asked:
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        for lease in self.leases:
            self.made.release(lease)
        for slot in self.pinned:
            self.made.unpin(slot)
        assert (self.made.used, self.made.leases, self.made.waiting) == (0, 0, 0)
        self.loop.close()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40)


async def test_memory_is_cut_into_slots_and_layers() -> None:
    pool = BufferPool(3, 12, 3)
    lease = await pool.lease(keys(0, 1))
    one, other = lease.slots.values()
    one.memory[:] = bytes(range(12))
    assert bytes(one.layer(2)) == bytes([8, 9, 10, 11])
    assert bytes(other.memory) == bytes(12)
