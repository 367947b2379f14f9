"""Runs one engine's KV transfers: a ``TransferNode`` in an event loop of its own, and threads for the store.

The engine's threads call the manager and the handles of transfers, which hand the work to the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from ..kv_offload.shared_store import SharedStore
from .block_load import BlockLoad, ReadingPeer
from .block_push import BlockPush
from .incoming_prompt import IncomingPrompt
from .peer_transport import dial, listen, stop_listening
from .store_threads import StoreThreads
from .transfer_limits import TransferLimits
from .transfer_node import TransferNode, link_stats

START_TIMEOUT_S = 30.0
ResultT = TypeVar("ResultT")


class TransferManager:
    """Runs the KV transfers of one engine, over its links and buffers. Use it as a context manager."""

    def __init__(
        self, store: SharedStore, limits: TransferLimits, *, name: str, listen: Sequence[str] = ()
    ) -> None:
        """Start the threads, and listen on the addresses ``listen``; port 0 selects a free port.

        ``name``: this engine's name, for peers and logs. ``close`` does not close ``store``. Raises
        ``ValueError`` or ``UnknownTransport`` for a bad address, ``OSError`` if it cannot listen, and
        ``TimeoutError`` if it does not start in ``START_TIMEOUT_S``.
        """
        self.epoch = secrets.token_hex(8)
        self.name = name
        self.addresses: list[str] = []
        """Addresses at which peers reach this engine."""
        self.node: TransferNode
        self._store = store
        self._limits = limits
        self._threads = StoreThreads(store, limits)
        self._is_closing = False
        self._started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(list(listen),), name=f"sojourn-paths-{name}", daemon=True
        )
        self._thread.start()
        try:
            self._started.result(START_TIMEOUT_S)
        except BaseException:
            self._threads.close()
            raise

    def __enter__(self) -> TransferManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what the engine asks for ---------------------------------------------------

    def load(
        self, load: str, keys: Sequence[bytes], *, peer: ReadingPeer | None = None, look_up: bool = False
    ) -> BlockLoad:
        """Start to load the blocks ``keys`` from storage, or through a ``peer`` that reads them. Returns a
        handle to wait for them; its ``end`` must be called. ``look_up``: load only the leading blocks that
        the store has. If the peer reads for another load of the transfer, this engine reads the blocks.

        Raises ``ValueError`` if there are no keys or a duplicate key, if the peer's address is this engine's
        own, or after ``close``."""
        if peer is not None and peer.address in self.addresses:
            raise ValueError(
                f"{peer.address} is this engine's own address: the engine cannot be its own peer"
            )
        return self.node.load(load, keys, peer, look_up)

    def offer(
        self, transfer: str, address: str, keys: Sequence[bytes], *, epoch: str | None = None
    ) -> BlockPush:
        """Start to push a prompt to the peer at ``address``; the handle's ``give`` adds the layers.

        ``keys``: the prompt's Full Blocks, in order. ``epoch``: the run of the peer's process that the router
        chose; ``None`` for any. Raises ``ValueError`` for no keys, a duplicate key, or after ``close``. A
        push of a transfer that is open already fails."""
        return self.node.offer(transfer, address, keys, epoch)

    def expect(self, transfer: str, *, epoch: str | None = None) -> IncomingPrompt:
        """Announce that the engine needs a prompt that a peer pushes to it, and return a handle to wait for
        it; its ``end`` must be called. ``epoch``: the run of this engine's process to which the prompt is
        pushed; ``None`` if unknown. If it is an earlier run, the prompt fails at once. Raises ``ValueError``
        if the prompt is expected already, or after ``close``."""
        return self.call(lambda: self.node.expect(transfer, epoch))

    def discard(self, transfer: str, *, epoch: str | None = None) -> bool:
        """Release a pushed prompt that no request will ask for. Returns false, and keeps the prompt, if this
        engine expects it. ``epoch``: the run of this engine's process to which the prompt is pushed; ``None``
        if unknown."""
        return self.call(lambda: self.node.discard(transfer, epoch))

    def want(self, transfers: Sequence[str]) -> None:
        """Announce transfers that queued requests will ``expect``, in queue order. Complete prompts of these
        transfers stay in the buffers for ``TransferLimits.lease_s`` seconds. Repeat the call to keep them
        longer."""
        self.node.post(self.node.want, list(transfers))

    def store(self, key: bytes, parent: bytes, content: Sequence[memoryview]) -> bool:
        """Queue a write of a block to the store. ``content`` must not change any more. Returns false, and
        queues nothing, if too many writes wait or the store hangs. Raises ``ValueError`` for a wrong size.
        ``parent``: key of the previous block of the context; empty if there is none."""
        expected, found = self.node.identity.block_bytes, sum(part.nbytes for part in content)
        if found != expected:
            raise ValueError(f"a block of {found} bytes; expected {expected}")
        return self._threads.write(key, parent, content)

    @property
    def is_clean(self) -> bool:
        """Whether no transfer or write is open, and no buffer is in use."""
        return self.node.is_clean and not self._threads.writes.queued_bytes

    def stats(self) -> dict[str, Any]:
        """Return ``TransferNode.stats``, with the link of writes to storage."""
        stats = self.call(self.node.stats)
        writes = self._threads.writes
        stats["links"]["storage write"] = link_stats(writes, writes.seconds_for(writes.queued_bytes))
        for name, count in self._threads.counts.items():
            stats["counts"][name] = stats["counts"].get(name, 0) + count
        stats["counts"] = {name: count for name, count in sorted(stats["counts"].items()) if count}
        return stats

    def close(self, timeout_s: float = 10.0) -> bool:
        """Abort all transfers and stop the threads. Returns false if a thread still runs afterwards, for
        example in a hanging store. ``timeout_s``: maximum seconds to wait for the event loop."""
        if not self._is_closing:
            self._is_closing = True
            self.node.post(self._over.set)
            self._thread.join(timeout_s)
        return self._threads.close() and not self._thread.is_alive()

    def call(self, what: Callable[[], ResultT]) -> ResultT:
        """Call ``what`` in the event loop, and return its result. Raises ``ValueError`` after ``close``."""
        answer: Future[ResultT] = Future()

        def run() -> None:
            try:
                answer.set_result(what())
            except BaseException as error:
                answer.set_exception(error)

        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(run)
            while self._thread.is_alive():
                with contextlib.suppress(TimeoutError):
                    return answer.result(1.0)
        raise ValueError(f"the transfer manager of {self.name} is closed")

    # -- inside ---------------------------------------------------------------------

    def _run(self, listen_at: list[str]) -> None:
        try:
            asyncio.run(self._serve(listen_at))
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def _serve(self, listen_at: list[str]) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self.node = TransferNode(
            self._store.identity, self._limits, name=self.name, epoch=self.epoch, read=self._threads.read,
            look_up=self._threads.look_up,
            dial=dial,
        )  # fmt: skip
        servers: list[asyncio.Server] = []
        try:
            for address in listen_at:
                server, reachable = await listen(address, self.node.peers.accept)
                servers.append(server)
                self.addresses.append(reachable)
            self._started.set_result(None)
            await self._over.wait()
        finally:
            for server, address in zip(servers, self.addresses, strict=True):
                stop_listening(server, address)
            await self.node.close()
