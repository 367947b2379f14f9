"""The transfers of one engine in one event loop: their tables, buffers, links and peers.

A transfer is a coroutine (``BlockLoad``, ``BlockPush``, ``IncomingPrompt``). The node starts it, hands it the
messages of its peer, and finds out whether peers are alive. Nothing here opens a socket or a file, or has a
clock other than the loop's: tests run two nodes in virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from ..kv_offload.block_file import KvIdentity
from .block_transfers import BlockLoad, BlockPush, IncomingPrompt, ReadingPeer
from .peer_connection import PeerConnection, PeerTable
from .transfer import GIVEN_UP, Transfer, TransferContext, TransferOutcome
from .transfer_limits import TransferLimits
from .transfer_wire import (
    AbortMessage,
    AnyWireMessage,
    CompleteMessage,
    DataMessage,
    FailedMessage,
    NeedMessage,
    OfferMessage,
    PingMessage,
    ReadMessage,
)

CLOSE_GRACE_S = 1.0
"""Maximum seconds for sending the last messages when the node closes."""
CLOSING = "the engine is closing"
EVICTED = "evicted before any request asked for it: other transfers waited for its buffers"
PINGS = 4
"""A peer that has not answered so many pings counts as dead. They are counted, so that a pause of this
process is not taken for a dead peer."""


class TransferNode(TransferContext):
    """All transfers of one engine. Create it in its event loop, which owns all of it except ``changed``.
    ``load``, ``offer``, ``expect`` and ``post`` are also for other threads. The first three raise
    ``ValueError`` once the node is closing."""

    def __init__(self, identity: KvIdentity, limits: TransferLimits, **options: Any) -> None:
        super().__init__(identity, limits, **options)
        self.loads: set[Transfer] = set()
        self.fetches: dict[str, BlockLoad] = {}
        """Transfer → the load whose blocks a peer reads for it."""
        self.pushes: dict[str, BlockPush] = {}
        self.prompts: dict[str, IncomingPrompt] = {}
        """Prompts that peers send, or that the engine expects. Guarded by ``changed``."""
        self.peers = PeerTable(self)
        self._services = [self.spawn(self.reads.run()), self.spawn(self._beat())]

    # -- what the engine asks for -----------------------------------------------------

    def load(self, name: str, keys: Sequence[bytes], peer: ReadingPeer | None = None) -> BlockLoad:
        """Start to load the leading blocks of ``keys`` that are stored, from storage or through a ``peer``
        that reads them for the transfer ``name``. Returns a handle to wait for them; its ``end`` must be
        called. If a peer reads for another load of the transfer, this engine reads the blocks."""
        load = BlockLoad(self, name, keys, peer)
        self._post_start(self._start_load, load)
        return load

    def offer(self, transfer: str, address: str, keys: Sequence[bytes]) -> BlockPush:
        """Start to push a prompt, whose Full Blocks are ``keys``, to the peer at ``address``; the handle's
        ``give`` adds the layers. A push of a transfer that is open already fails."""
        push = BlockPush(self, transfer, address, keys)
        self._post_start(self._start_push, push)
        return push

    def give_up(self, transfer: str, address: str) -> None:
        """End the push of a prompt, or tell the peer at ``address``, which may have read for it, that there
        will be none."""
        self.post(self._give_up, transfer, address)

    def expect(self, transfer: str) -> IncomingPrompt:
        """Announce that the engine needs a prompt that a peer pushes to it, and return a handle to wait for
        it; its ``end`` must be called. Until then a complete prompt stays in the buffers. Raises
        ``ValueError`` if the prompt is expected already."""
        with self.changed:
            prompt = self.prompts.get(transfer)
            if prompt is not None and prompt.is_expected:
                raise ValueError(f"transfer {transfer!r} is expected already")
            if prompt is None or prompt.is_ending:
                prompt = self.prompts[transfer] = IncomingPrompt(self, transfer)
            prompt.is_expected = True
        self._post_start(prompt.expected)
        return prompt

    async def close(self) -> None:
        """Abort all transfers and close all connections. Each transfer ends with an outcome."""
        self.is_closing = True
        for transfer in self._transfers():
            transfer.stop(CLOSING)
        work = self.tasks.difference(self._services, [asyncio.current_task()])
        if work:  # let final messages be sent
            await asyncio.wait(work, timeout=CLOSE_GRACE_S)
        for conn in list(self.peers.conns):
            self.peers.drop(conn, CLOSING)
        for service in self._services:
            service.cancel()
        await asyncio.sleep(0)  # the others are cancelled with the loop

    @property
    def is_clean(self) -> bool:
        """Whether nothing is open, and no buffer or queued read is left over."""
        return not (self._transfers() or len(self.reads) or self.buffers.used or self.buffers.waiting)

    # -- for transfers and connections ------------------------------------------------

    def forget(self, transfer: Transfer) -> None:
        """Remove a transfer that has ended."""
        self.loads.discard(transfer)
        tables: tuple[dict[str, Any], ...] = (self.fetches, self.pushes, self.prompts)
        with self.changed:
            for table in tables:
                if table.get(transfer.name) is transfer:
                    del table[transfer.name]

    def received(self, conn: PeerConnection, message: AnyWireMessage, payload: bytes) -> None:
        """Handle a message of an identified peer."""
        if isinstance(message, PingMessage):
            if not message.is_answer:
                conn.post(PingMessage(is_answer=True))
        elif isinstance(message, ReadMessage | OfferMessage):
            self._asked(conn, message)
        elif isinstance(message, DataMessage | FailedMessage | NeedMessage | CompleteMessage | AbortMessage):
            name = message.transfer
            parts = self.fetches.get(name), self.pushes.get(name), self.prompts.get(name)
            shared = [part for part in parts if part is not None and part.conn is conn]
            self.counts["stray"] += not shared  # sent before the peer learned of the end
            for each in shared:
                each.received(message, payload)
        else:
            self.peers.drop(conn, f"{type(message).__name__} is not allowed here now")

    def lost(self, conn: PeerConnection, why: str) -> None:
        """Handle the end of a connection."""
        for transfer in self._transfers():
            if transfer.conn is conn:
                transfer.lost(why)

    # -- inside -----------------------------------------------------------------------

    def _transfers(self) -> list[Transfer]:
        with self.changed:
            return [*self.loads, *self.pushes.values(), *self.prompts.values()]

    def _post_start(self, start: Callable[..., None], *arguments: object) -> None:
        if self.is_closing or not self.post(start, *arguments):
            raise ValueError(f"the transfer manager of {self.name} is closed")

    def _start_load(self, load: BlockLoad) -> None:
        if load.name in self.fetches:
            load.peer = None
        if load.peer is not None:
            self.fetches[load.name] = load
        self.loads.add(load)
        load.start()

    def _start_push(self, push: BlockPush) -> None:
        if push.name in self.pushes:
            push.finish(TransferOutcome(0, f"transfer {push.name!r} was offered already"))
        else:
            self.pushes[push.name] = push
            push.start()

    def _give_up(self, transfer: str, address: str) -> None:
        async def tell() -> None:
            conn = await self.peers.reach(address)
            conn.post(AbortMessage(transfer=transfer, reason=GIVEN_UP))

        push = self.pushes.get(transfer)
        if push is not None:
            push.stop(GIVEN_UP)
        else:
            self.spawn(tell())

    def _asked(self, conn: PeerConnection, message: ReadMessage | OfferMessage) -> None:
        if self.is_closing or not message.keys or len(set(message.keys)) != len(message.keys):
            why = CLOSING if self.is_closing else "no blocks, or a duplicate block"
            conn.post(AbortMessage(transfer=message.transfer, reason=why))
        else:
            with self.changed:
                prompt = self.prompts.get(message.transfer) or IncomingPrompt(self, message.transfer)
                self.prompts[message.transfer] = prompt
            prompt.asked(conn, message)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.limits.patience_s / PINGS)
            self.loop.call_soon(self._ping_peers)  # the loop logs an error of either, and the beat goes on
            self.loop.call_soon(self._make_room)

    def _ping_peers(self) -> None:
        """Close the connections of peers that do not answer, while a transfer or a message waits for them."""
        in_use = {transfer.conn for transfer in self._transfers()}
        for conn in list(self.peers.conns):
            if conn.unanswered >= PINGS:
                self.counts["stalls"] += 1
                self.peers.drop(conn, "the peer does not answer")
            elif conn in in_use or conn.sending.locked():
                conn.unanswered += 1
                conn.post(PingMessage())

    def _make_room(self) -> None:
        """While a transfer waits for buffers, evict prompts that no request has asked for, the longest
        complete first. A prompt is kept for half of ``patience_s``, because its request may still be on the
        way."""
        lacking = self.buffers.lacking
        until_s = self.loop.time() - self.limits.patience_s / 2
        with self.changed:
            prompts = sorted(self.prompts.values(), key=lambda each: each.complete_since_s or 0.0)
        for prompt in prompts:
            if prompt.is_abandoned and lacking > 0 and (prompt.complete_since_s or 0.0) <= until_s:
                self.counts["prompts_evicted"] += 1
                lacking -= len(prompt.slots)
                prompt.stop(EVICTED)
