"""Runs one engine's KV transfers: a ``TransferNode`` in an event loop of its own, and threads for the store.

It also answers each connection to a local socket with the engine's statistics. Another process asks a worker
once for the socket's address. It does not call the worker each time: vLLM's worker processes spin for a
second after a call, so a call every second would keep a core busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from ..kv_offload.shared_store import KvIdentity, SharedStore
from .peer_transport import dial, listen
from .staging_buffers import TransferLimits
from .store_threads import StoreThreads
from .transfer import TransferNode

START_TIMEOUT_S = 30.0
STATS_TIMEOUT_S = 1.0
"""Maximum seconds that either side of the stats socket waits for the other."""


class TransferManager:
    """Runs the KV transfers of one engine, over its links and buffers."""

    def __init__(
        self, store: SharedStore, limits: TransferLimits, *, name: str, listen: Sequence[str] = ()
    ) -> None:
        """Start the threads, and listen on the addresses ``listen``; port 0 selects a free port.

        ``name``: this engine's name, for peers and logs. ``close`` does not close ``store``. Raises
        ``ValueError`` for a bad address, ``OSError`` if it cannot listen, and ``TimeoutError`` if it does not
        start in ``START_TIMEOUT_S``.
        """
        self.epoch = secrets.token_hex(8)
        """Identifies one run of the process, for gateways."""
        self.name = name
        self.addresses: list[str] = []
        """Addresses at which peers reach this engine."""
        self.node: TransferNode
        self.storage = StoreThreads(store, limits)
        self._folder = ""
        """Temporary folder of the stats socket, which only this process's user can access."""
        self._servers: list[asyncio.Server] = []
        self._is_closing = False
        self._started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run,
            args=(store.identity, limits, [*listen]),
            name=f"sojourn-paths-{name}",
            daemon=True,
        )
        self._thread.start()
        try:
            self._started.result(START_TIMEOUT_S)
        except BaseException:
            self.storage.close()
            raise

    @property
    def is_clean(self) -> bool:
        """Whether no transfer or write is open, and no buffer is in use."""
        return self.node.is_clean and not self.storage.queued_writes

    def stats(self, counts: Counter[str] | None = None) -> dict[str, Any]:
        """Return the use of buffers, the state of each link by its name, and counters, for operators. For
        gateways: ``addresses`` and ``epoch``; ``block_s``, the mean seconds of the read of a block (0 if
        unknown); and ``kv``, a digest that is equal for workers that can exchange KV. ``counts``: counters of
        the worker, which are added. ``queued_s`` of reads: estimated seconds until a new read would begin,
        ``None`` if unknown.
        """
        node, reads, storage = self.node, self.node.reads, self.storage
        block_bytes, queued_s = node.identity.block_bytes, reads.queued_s(node.loop.time())
        # Copies, because other threads count meanwhile.
        merged = Counter(node.counts) + Counter(storage.counts) + Counter(counts)
        return {
            "slots": node.buffers.slots,
            "slots_used": node.buffers.used,
            "leases_waiting": node.buffers.waiting,
            "links": {
                name: {"queued_bytes": queued_bytes, "queued_s": queued_s, "moved_bytes": moved_bytes}
                for name, queued_bytes, queued_s, moved_bytes in (
                    ("storage read", len(reads) * block_bytes, queued_s, reads.ended * block_bytes),
                    ("storage write", storage.queued_writes * block_bytes, None, storage.written_bytes),
                    ("compute network", node.queued_send_bytes, None, node.counts["bytes_sent"]),
                )
            },
            "received_bytes": node.counts["bytes_fetched"] + node.counts["bytes_taken"],
            "block_s": reads.block_s,
            "addresses": list(self.addresses),
            "epoch": self.epoch,
            "kv": node.identity.digest().hex(),
            "counts": dict(sorted(merged.items())),
        }

    def serve_stats(self, document: Callable[[], dict[str, Any] | None]) -> str:
        """Open the stats socket, and return its path. Each connection gets the JSON of ``document``. Raises
        ``OSError`` if no socket can be opened."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, TimeoutError):
                writer.write(json.dumps(document()).encode())
                async with asyncio.timeout(STATS_TIMEOUT_S):
                    await writer.drain()
            writer.close()

        self._folder = tempfile.mkdtemp(prefix="sojourn-paths-")
        path = os.path.join(self._folder, "stats")
        opening = asyncio.run_coroutine_threadsafe(asyncio.start_unix_server(answer, path), self.node.loop)
        self._servers.append(opening.result(START_TIMEOUT_S))
        return path

    def close(self, timeout_s: float = 10.0) -> bool:
        """Abort all transfers and stop the threads. Returns false if a thread still runs afterwards, for
        example in a hanging store. ``timeout_s``: maximum seconds to wait for the event loop."""
        if not self._is_closing:
            self._is_closing = True
            self.node.post(self._over.set)
            self._thread.join(timeout_s)
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)
        return self.storage.close() and not self._thread.is_alive()

    def _run(self, *arguments: Any) -> None:
        try:
            asyncio.run(self._serve(*arguments))
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def _serve(self, identity: KvIdentity, limits: TransferLimits, listen_at: list[str]) -> None:
        self._over = asyncio.Event()
        self.node = TransferNode(identity, limits, name=self.name, storage=self.storage, dial=dial)
        try:
            for address in listen_at:
                server, reachable = await listen(address, self.node.peers.accept)
                self._servers.append(server)
                self.addresses.append(reachable)
            self._started.set_result(None)
            await self._over.wait()
        finally:
            for server in self._servers:
                server.close()
            await self.node.close()


def fetch_stats(address: str) -> dict[str, Any] | None:
    """Return the document at the stats socket ``address``; ``None`` if the worker has none now. Raises
    ``OSError``, or ``ValueError`` for an answer that is cut off."""
    answer = bytearray()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(STATS_TIMEOUT_S)
        asking.connect(address)
        while part := asking.recv(1 << 16):
            answer += part
    document: dict[str, Any] | None = json.loads(answer)
    return document
