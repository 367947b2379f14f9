"""What all transfers have in common: a coroutine in the node's event loop, and a handle for the engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from .peer_connection import PeerConnection, TransferFailed
from .staging_buffers import BufferLease, BufferSlot
from .transfer_resources import GIVEN_UP, TransferResources
from .transfer_wire import DataMessage, WireMessage

LEASE_EXPIRED = "the lease on its buffers has expired"


class TransferOutcome(NamedTuple):
    """How a transfer has ended."""

    good: int
    """Number of leading blocks that have arrived. The other blocks will not arrive."""
    why: str = ""
    """Why blocks are missing; empty if all have arrived."""

    @property
    def complete(self) -> bool:
        return not self.why


class Transfer:
    """One transfer. The methods of the first section and ``outcome`` are for the engine's threads; all else
    belongs to the event loop."""

    kind = ""
    received_as = ""
    """Name of the count of received bytes."""
    why_stalled = "the peer shows no progress"
    """Reason of a transfer that has made no progress for ``allowed_s`` seconds."""

    def __init__(self, node: TransferResources, name: str) -> None:
        self.name = name
        self.outcome: TransferOutcome | None = None
        """Outcome of the transfer; ``None`` while it is open."""
        self.node = node
        self.slots: list[BufferSlot] = []
        """Slots of the blocks, in order. Empty before they are leased and after they are released."""
        self.is_waiting_here = False
        """Whether the transfer waits for this engine's own buffers, reads or sends. It then continues as long
        as any transfer of this engine makes progress."""
        self.allowed_s = node.limits.lease_s
        """Seconds without progress after which the transfer fails."""
        self.lease: BufferLease | None = None
        self.peer_done = -1
        """Highest progress counter that the peer has reported."""
        self._has_begun = self._is_released = False
        self._why_stopped: str | None = None
        self._timeout: asyncio.Timeout | None = None
        self._read_here: set[BufferSlot] = set()
        """Slots that this engine has read from storage for this transfer."""
        self._children: set[asyncio.Task[object]] = set()
        """Tasks that use the buffers beside ``run``."""
        self._task: asyncio.Task[object] | None = None

    # -- for the engine's threads -----------------------------------------------------

    def wait(self, timeout_s: float | None = None) -> TransferOutcome | None:
        """Wait at most ``timeout_s`` seconds (``None``: without limit) for the end of the transfer. Returns
        the outcome; ``None`` if the transfer is still open."""
        self._wait_until(lambda: self.outcome is not None, timeout_s)
        return self.outcome

    def blocks(self) -> list[memoryview]:
        """Return the leading blocks that have arrived. They are valid until ``end``. Raises ``ValueError``
        if the transfer is open, has failed or has released its buffers."""
        with self.node.changed:
            if self.outcome is None or self._is_released:
                raise ValueError(f"{self.kind} {self.name!r} is not over, has failed or is released")
            return [slot.memory for slot in self.slots[: self.outcome.good]]

    def ready(self, layerwise: bool) -> int | None:
        """Return how many leading blocks a request can use now; ``None`` if it must wait until the transfer
        is over. ``layerwise``: blocks can be used once their first layer has arrived."""
        if self.outcome is None:
            return None
        return 0 if self._is_released else self.outcome.good

    def end(self) -> None:
        """End the transfer, whether or not its blocks have arrived, and release its buffers."""
        self.node.post(self.stop, GIVEN_UP)

    def _wait_until(self, until: Callable[[], bool], timeout_s: float | None) -> None:
        with self.node.changed:
            self.node.changed.wait_for(until, timeout_s)

    # -- what each kind of transfer supplies ------------------------------------------

    async def run(self) -> None:
        """Do the transfer, and keep its blocks until they are not needed any more."""
        raise NotImplementedError

    def conns(self) -> set[PeerConnection]:
        """Return the connections over which the transfer waits for a peer, or a peer waits for it."""
        raise NotImplementedError

    def received(self, conn: PeerConnection, message: WireMessage, payload: bytes) -> None:
        """Handle a message of a peer. Messages that are not for this side of a transfer are ignored, because
        an engine may have both sides of transfers with one id."""
        raise NotImplementedError

    def lost(self, conn: PeerConnection, why: str) -> None:
        """Handle the end of a connection of ``conns``."""
        raise NotImplementedError

    def ended(self, why: str) -> None:
        """Handle the end of ``run``. ``why``: the reason of a failure, or why the transfer was stopped."""
        raise NotImplementedError

    @property
    def wire_name(self) -> str:
        """Id of the transfer in messages."""
        return self.name

    # -- life -------------------------------------------------------------------------

    def start(self) -> None:
        """Start the coroutine, unless it runs or has been stopped."""
        if self._task is None and self.outcome is None:
            self._task = self.node.spawn(self._live())

    @property
    def is_ending(self) -> bool:
        """Whether the buffers are released, or will be soon."""
        return self._why_stopped is not None

    def stop(self, why: str) -> None:
        """End the transfer for the reason ``why``. Does nothing if it is ending already."""
        if self._task is None or self._task.done():
            self.finish(TransferOutcome(0, why))
            self.node.forget(self)
        elif self._why_stopped is None:
            self._why_stopped = why
            if self._has_begun:  # at once, so that it does not end well before it is cancelled
                self._task.cancel()
            else:  # after its first step
                self.node.loop.call_soon(self._task.cancel)

    async def over(self) -> None:
        """Wait until the buffers are released."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _live(self) -> None:
        why, self._has_begun = "", True
        try:
            await self.run()
        except asyncio.CancelledError:
            why = self._why_stopped or GIVEN_UP
        except TimeoutError:
            self.node.counts["stalls"] += 1
            why = self.why_stalled
        except TransferFailed as error:
            why = str(error)
        finally:
            self._why_stopped = why
            self.ended(why)
            self.finish(TransferOutcome(0, why))
            with self.node.changed:
                self._is_released, self.slots = True, []
            for child in self._children:
                child.cancel()
            if self._children:  # a message that is being sent still reads the buffers
                await asyncio.wait(self._children)
            if self.lease is not None:
                self.node.buffers.release(self.lease)
            self.node.forget(self)

    def finish(self, outcome: TransferOutcome) -> None:
        """Report the outcome to the engine, if there is none yet."""
        if self.outcome is None:
            with self.node.changed:
                self.outcome = outcome
                self.node.changed.notify_all()
            if outcome.why and not self.node.is_closing and GIVEN_UP not in outcome.why:
                message = "%s: a %s of KV (%s) failed, so missing blocks are computed: %s"
                self.node.warn(message, self.node.name, self.kind, self.name, outcome.why)

    @contextlib.asynccontextmanager
    async def patience(self) -> AsyncIterator[None]:
        """Raise ``TimeoutError`` in the body after ``allowed_s`` seconds without ``renew``."""
        async with asyncio.timeout(self.allowed_s) as self._timeout:
            try:
                yield
            finally:
                self._timeout = None

    def renew(self) -> None:
        """Start the time of ``patience`` again."""
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(self.node.loop.time() + self.allowed_s)

    def on_progress(self, done: int) -> None:
        """Handle a progress report of the peer. ``done``: its progress counter."""
        if done > self.peer_done:
            self.peer_done = done
            self.renew()

    def moved_here(self) -> None:
        """Handle progress of this engine, for which the transfer waits."""
        self.renew()

    # -- buffers and messages -----------------------------------------------------------

    async def lease_slots(self, keys: Sequence[bytes], extra: int = 0) -> list[BufferSlot]:
        """Wait for buffers, as long as this engine makes progress."""
        need, have = len(set(keys)) + extra, self.node.limits.slots
        if need > have:
            self.node.counts["too_large"] += 1
            raise TransferFailed(
                f"a context of {need} Full Blocks does not fit buffers of {have}; make them larger"
            )
        self.is_waiting_here = True
        try:
            async with self.patience():
                self.lease = await self.node.buffers.lease(keys, extra)
        except TimeoutError:
            self.node.counts["leases_expired"] += 1
            raise TransferFailed(LEASE_EXPIRED) from None
        finally:
            self.is_waiting_here = False
        return list(self.lease.slots.values())

    async def has(self, slot: BufferSlot, layer: int) -> bool:
        """Wait for a layer of a block. If the transfer that was to bring the block has failed, read the block
        from storage, at most once. Returns whether the layer has arrived; if not, ``slot.why`` is the
        reason."""
        while slot.filled <= layer and not slot.bad:
            if slot.filler is not None:
                await slot.changed()
            elif slot in self._read_here:
                break
            else:
                self.read(slot)
        return slot.filled > layer

    def read(self, slot: BufferSlot) -> None:
        """Queue a read of a slot's block from storage."""
        self._read_here.add(slot)
        self.node.reads.put(slot)

    def take(self, slots: Sequence[BufferSlot], message: DataMessage, payload: bytes) -> bool:
        """Copy one received layer of some blocks into the slots that this transfer fills. Returns false for a
        wrong size, an unknown block, or a layer that is not the next of its block."""
        size = self.node.layer_bytes
        if len(payload) != len(message.indices) * size:
            return False
        for at, index in enumerate(message.indices):
            if not 0 <= index < len(slots):
                return False
            slot = slots[index]
            if slot.filler is self:
                if slot.filled != message.layer:
                    return False
                slot.layer(message.layer)[:] = payload[at * size : (at + 1) * size]
                slot.advance(message.layer + 1)
                self.node.counts[f"bytes_{self.received_as}"] += size
        self.renew()
        return True

    async def send_layer(
        self, conn: PeerConnection, transfer: str, layer: int, blocks: Sequence[tuple[int, memoryview]]
    ) -> None:
        """Send one layer of some blocks to a peer, in chunks. ``blocks``: (index within the transfer, memory
        of the layer)."""
        node, size = self.node, self.node.layer_bytes
        per = max(1, node.limits.chunk_bytes // size)
        for start in range(0, len(blocks), per):
            part = blocks[start : start + per]
            message = DataMessage(transfer=transfer, layer=layer, indices=[index for index, _ in part])
            node.queued_send_bytes += len(part) * size
            try:
                await conn.send(message, [memory.cast("B") for _, memory in part])
                node.counts["bytes_sent"] += len(part) * size
            finally:
                node.queued_send_bytes -= len(part) * size
