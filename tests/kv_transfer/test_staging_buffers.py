"""Leases on buffers: whole or not at all, in order, never more than there are."""

from __future__ import annotations

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sojourn_server.kv_transfer.staging_buffers import BufferPool, BufferSlot

SLOTS = 6


class Machine(RuleBasedStateMachine):
    """Transfers ask, give up and release, and threads write to slots, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.made = BufferPool(SLOTS, 12, 3)
        self.asked: list[tuple[asyncio.Future[list[BufferSlot]], int]] = []
        """Leases that are not granted yet, in order, with their sizes."""
        self.leases: list[list[BufferSlot]] = []
        self.written: list[BufferSlot] = []

    @rule(count=st.integers(1, SLOTS))
    def ask(self, count: int) -> None:
        async def lease() -> asyncio.Future[list[BufferSlot]]:
            return self.made.lease(count)

        self.asked.append((self.loop.run_until_complete(lease()), count))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        lease, _ = self.asked.pop(data.draw(st.integers(0, len(self.asked) - 1)))
        assert self.made.end_wait(lease) == []

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(data.draw(st.sampled_from(self.leases))))
        if not slot.is_written:
            slot.is_written = True
            self.written.append(slot)

    @precondition(lambda self: self.written)
    @rule()
    def end_write(self) -> None:
        self.made.written(self.written.pop(0))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), keep=st.integers(0, 2))
    def release(self, data: st.DataObject, keep: int) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.made.release(lease[keep:])
        del lease[keep:]
        if not lease:
            self.leases = [each for each in self.leases if each]

    @invariant()
    def bounded(self) -> None:
        made = self.made
        granted = [lease for lease, _ in self.asked if lease.done()]
        assert granted == [lease for lease, _ in self.asked[: len(granted)]], "in order"
        del self.asked[: len(granted)]
        self.leases += [made.end_wait(lease) for lease in granted]
        used = {slot.index for lease in self.leases for slot in lease} | {slot.index for slot in self.written}
        assert sum(map(len, self.leases)) <= len(used), "a slot has one lease"
        assert made.used == len(used) <= SLOTS
        assert not used & set(made._free)
        assert made.waiting == len(self.asked)
        if self.asked:
            assert self.asked[0][1] == made.lacking + SLOTS - made.used
            assert made.lacking > 0, "the first in line fits"

    def teardown(self) -> None:
        for waiting, _ in self.asked:
            self.leases.append(self.made.end_wait(waiting))
        for lease in self.leases:
            self.made.release(lease)
        for slot in self.written:
            self.made.written(slot)
        assert (self.made.used, self.made.waiting) == (0, 0)
        self.loop.close()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40)
