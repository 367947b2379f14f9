"""Runs one engine's KV transfers with a ``TransferCore``, an event loop for sockets, and store threads.

The core makes all decisions. The manager carries out the core's actions and reports their results to it.
The engine's threads call the core directly, under one lock. No thread holds this lock while it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from ..kv_offload.shared_store import SharedStore
from ..metrics.rate_limited_log import RateLimitedLog
from .load_table import ReadingPeer
from .peer_transport import PeerConnection, SocketStream, UnknownTransport, dial, listen, stop_listening
from .store_threads import StoreThreads
from .transfer_actions import (
    GIVEN_UP,
    CloseConnection,
    DialPeer,
    LayerLoaded,
    LoadEnded,
    PromptTransferEnded,
    PushEnded,
    ReadBlock,
    SendMessage,
    TransferEnd,
    TransferEvent,
    WriteBlock,
)
from .transfer_core import TransferCore
from .transfer_limits import TransferLimits
from .transfer_wire import HEAD_BYTES, DataMessage, PeerWireError, decode, decode_head

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
CLOSE_GRACE_S = 1.0
"""Maximum seconds for sending the last messages when the manager closes."""
MAX_HANDSHAKE_BYTES = 64 << 10
"""Maximum bytes of a message from a peer that has not identified itself. Such a peer may send no payload."""
MIN_PAYLOAD_BYTES = 1 << 20
"""Payloads up to this size, in bytes, are accepted from every identified peer, even if this engine's own
payloads are smaller."""
MAX_CONNECTIONS = 256
MAX_UNIDENTIFIED_PEERS = 64
"""Maximum number of connections whose peer has not identified itself. Further connections are closed."""
_CONNECTION_ERRORS = (OSError, EOFError)
"""Exceptions of a connection that has failed or that the other side has closed."""


OutcomeT = TypeVar("OutcomeT", LoadEnded, PushEnded, PromptTransferEnded)


class TransferHandle(Generic[OutcomeT]):
    """The engine's handle of one open transfer. Thread-safe."""

    kind: str
    _ended_by: type[OutcomeT]

    def __init__(self, owner: TransferManager, name: str) -> None:
        self.name = name
        self.outcome: OutcomeT | None = None
        """Outcome of the transfer; ``None`` while it is open."""
        self._owner = owner

    def on_event(self, event: TransferEvent) -> None:
        """Handle an event of this transfer. The caller holds the owner's lock."""
        if isinstance(event, self._ended_by):
            self.outcome = event

    def wait(self, timeout_s: float | None = None) -> OutcomeT | None:
        """Wait at most ``timeout_s`` seconds (``None``: without limit) for the end of the transfer. Returns
        the outcome; ``None`` if the transfer is still open."""
        self._wait(lambda: self.outcome is not None, timeout_s)
        return self.outcome

    def _wait(self, until: Callable[[], bool], timeout_s: float | None) -> None:
        with self._owner.changed:
            self._owner.changed.wait_for(until, timeout_s)


class LoadHandle(TransferHandle[LoadEnded]):
    """Handle of a load of blocks into this engine's buffers."""

    kind = "load"
    _ended_by = LoadEnded

    def __init__(self, owner: TransferManager, name: str) -> None:
        super().__init__(owner, name)
        self.requested_blocks = 0
        """Number of blocks that the load tries to get: at most as many as fit the buffers."""
        self.layers_loaded = 0
        """Number of leading layers that have arrived for all blocks that the load still expects."""
        self._first_s = self._newest_s = 0.0

    def on_event(self, event: TransferEvent) -> None:
        super().on_event(event)
        if isinstance(event, LayerLoaded):
            self.layers_loaded = event.layer + 1
            self._newest_s = time.perf_counter()
            if not event.layer:
                self._first_s = self._newest_s

    @property
    def streamed_s(self) -> float:
        """Seconds between the arrival of the first layer and of the newest one."""
        return self._newest_s - self._first_s

    def ready(self, layerwise: bool) -> int | None:
        """Return how many leading blocks a request can use now; ``None`` if it must wait. Blocks can be used
        once the load is over. With ``layerwise``, they can be used once their first layer has arrived."""
        if self.outcome is None:
            return self.requested_blocks if layerwise and self.layers_loaded else None
        if not self.outcome.good:
            return 0
        try:
            return len(self.blocks())  # pins them, so that their buffers are not reused
        except ValueError:
            return 0

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        """Wait for a layer or the end of the load, at most ``timeout_s`` seconds (``None``: without limit).
        Returns whether the layer has arrived."""
        self._wait(lambda: self.layers_loaded > layer or self.outcome is not None, timeout_s)
        return self.layers_loaded > layer and (self.outcome is None or self.outcome.good > 0)

    def layer(self, layer: int) -> list[memoryview]:
        """Return one layer of each block of the load. Raises ``ValueError`` if it has not arrived."""
        found: list[memoryview] = self._owner.do(lambda now: self._owner.core.loads.layer(self.name, layer))
        return found

    def blocks(self) -> list[memoryview]:
        """Return the leading blocks that have arrived. They are valid until ``end``. Raises ``ValueError``
        before the load is over."""
        found: list[memoryview] = self._owner.do(lambda now: self._owner.core.loads.blocks(self.name))
        return found

    def end(self) -> None:
        """End the load, whether or not its blocks have arrived, and release its buffers."""
        self._owner.do(self._owner.core.loads.end, self.name)
        self._owner.forget(self)


class PushHandle(TransferHandle[PushEnded]):
    """Handle of a push of blocks to a peer."""

    kind = "push"
    _ended_by = PushEnded

    def give(self, layer: int, blocks: Sequence[memoryview]) -> bool:
        """Add the next layer of all blocks. The memory of ``blocks`` must not change until ``outcome`` is
        set. Returns whether the push is still open. Raises ``ValueError`` if ``layer`` is not the next, or
        the number or size of the blocks is wrong."""
        wanted: bool = self._owner.do(self._owner.core.pushes.give, self.name, layer, blocks)
        return wanted

    def abort(self) -> None:
        """Cancel the push. The memory of its blocks stays in use until ``outcome`` is set."""
        self._owner.do(self._owner.core.pushes.abort, self.name)


class PromptHandle(TransferHandle[PromptTransferEnded]):
    """Handle of a prompt that a peer pushes to this engine."""

    kind = "prompt"
    _ended_by = PromptTransferEnded

    def blocks(self) -> list[memoryview]:
        """Return the prompt's blocks, in order. They are valid until ``end``. Raises ``ValueError`` if the
        prompt is not complete."""
        found: list[memoryview] = self._owner.do(lambda now: self._owner.core.prompts.blocks(self.name))
        return found

    def end(self) -> None:
        """End the prompt's transfer, complete or not, and release its buffers."""
        self._owner.do(self._owner.core.prompts.forget, self.name)
        self._owner.forget(self)


class TransferManager:
    """Runs the KV transfers of one engine, over its links and buffers. Use it as a context manager."""

    def __init__(
        self,
        store: SharedStore,
        limits: TransferLimits,
        *,
        name: str,
        listen: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
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
        self.core = TransferCore(store.identity, limits, name=name, epoch=self.epoch)
        self.changed = threading.Condition(threading.Lock())
        self._patience_s = limits.patience_s
        self._max_payload_bytes = max(limits.chunk_bytes, self.core.ctx.memory.layer_bytes, MIN_PAYLOAD_BYTES)
        self._clock = clock
        self._handles: dict[tuple[str, str], TransferHandle[Any]] = {}
        self._logged_refusals = 0
        self._rate_limited_log = RateLimitedLog(logger)
        self._actions: deque[SendMessage | DialPeer | CloseConnection] = deque()
        self._woken = False
        self._closing = False
        self._failed: BaseException | None = None
        self._conns: dict[int, PeerConnection] = {}
        self._numbers = 0
        self._servers: list[asyncio.Server] = []
        self._timer: asyncio.TimerHandle | None = None
        self._store_threads = StoreThreads(
            store,
            limits.read_width,
            read_done=lambda item, why: self.do(self.core.ctx.read_done, item, why),
            write_done=lambda item, outcome: self.do(self.core.write_done, item, outcome),
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(list(listen),), name=f"sojourn-paths-{name}", daemon=True
        )
        self._thread.start()
        self._started.wait(START_TIMEOUT_S)
        if self._failed is not None or not self._started.is_set():
            self._store_threads.close()
            raise self._failed or TimeoutError("the transfer manager has not started")

    def __enter__(self) -> TransferManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what the engine asks for ---------------------------------------------------

    def load(self, load: str, keys: Sequence[bytes], *, peer: ReadingPeer | None = None) -> LoadHandle:
        """Start to load the blocks ``keys`` from storage, or through a ``peer`` that reads them. Returns a
        handle to wait for them. ``load``: a new id.

        Raises ``ValueError`` if the id or the peer's transfer is in use, if there are no keys or a duplicate
        key, if the peer's address is this engine's own, or after ``close``."""
        if peer is not None and peer.address in self.addresses:
            raise ValueError(
                f"{peer.address} is this engine's own address: the engine cannot be its own peer"
            )
        handle = LoadHandle(self, load)
        handle.requested_blocks = self._begin(handle, self.core.loads.begin, load, keys, peer=peer)
        return handle

    def offer(
        self, transfer: str, address: str, keys: Sequence[bytes], *, epoch: str | None = None
    ) -> PushHandle:
        """Start to push a prompt to the peer at ``address``; the handle's ``give`` adds the layers.

        ``keys``: the prompt's Full Blocks, in order. ``epoch``: the run of the peer's process that the router
        chose; ``None`` for any. Raises ``ValueError`` for a transfer that is open already, no keys, a
        duplicate key, or after ``close``."""
        handle = PushHandle(self, transfer)
        self._begin(handle, self.core.pushes.offer, transfer, address, keys, epoch=epoch)
        return handle

    def expect(self, transfer: str, *, epoch: str | None = None) -> PromptHandle:
        """Announce that the engine needs a prompt that a peer pushes to it, and return a handle to wait for
        it. ``epoch``: the run of this engine's process to which the prompt is pushed; ``None`` if unknown. If
        ``epoch`` is an earlier run, the returned handle has failed already. Raises ``ValueError`` if the
        prompt is expected already, or after ``close``."""
        handle = PromptHandle(self, transfer)
        if not self._begin(handle, self.core.prompts.expect, transfer, epoch=epoch):
            handle.outcome = PromptTransferEnded(
                transfer, False, "this engine has restarted since the prompt was pushed"
            )
            self.forget(handle)
            self._log_failure(handle.outcome)
        return handle

    def discard(self, transfer: str, *, epoch: str | None = None) -> bool:
        """Release a pushed prompt that no request will ask for. Returns false, and keeps the prompt, if this
        engine expects it. ``epoch``: the run of this engine's process to which the prompt is pushed; ``None``
        if unknown."""
        discarded: bool = self.do(self.core.prompts.discard, transfer, epoch=epoch)
        return discarded

    def want(self, transfers: Sequence[str]) -> None:
        """Announce transfers that queued requests will ``expect``, in queue order. Complete prompts of these
        transfers stay in the buffers for ``TransferLimits.lease_s`` seconds. Repeat the call to keep them
        longer."""
        self.do(self.core.prompts.want, transfers)

    def store(self, key: bytes, parent: bytes, content: Sequence[memoryview]) -> bool:
        """Queue a write of a block to the store. ``content`` must not change any more. Returns false, and
        queues nothing, if too many writes wait or the store hangs. Raises ``ValueError`` for a wrong size.
        ``parent``: key of the previous block of the context; empty if there is none."""
        taken: bool = self.do(self.core.store, key, parent, content)
        return taken

    def stats(self) -> dict[str, Any]:
        """Return ``TransferCore.stats``."""
        found: dict[str, Any] = self.do(self.core.stats)
        return found

    def close(self, timeout_s: float = 10.0) -> bool:
        """Abort all transfers and stop the threads. Returns false if a thread still runs afterwards, for
        example in a hanging store. ``timeout_s``: maximum seconds to wait for the event loop."""
        with self.changed:
            if self._closing:
                return not self._thread.is_alive()
            self._closing = True
        self.do(self.core.close)
        assert self._loop is not None
        assert self._over is not None
        with contextlib.suppress(RuntimeError):  # its loop has ended by itself
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(timeout_s)
        return self._store_threads.close() and not self._thread.is_alive()

    # -- for handles ----------------------------------------------------------------

    def do(self, what: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call ``what``, a method of the core or of its tables, with ``arguments``, ``options`` and the time
        as ``now``. Then deliver the resulting events, start the resulting actions, and return the method's
        result."""
        failed: list[TransferEnd] = []
        refusals: list[tuple[str, str]] = []
        try:
            with self.changed:
                try:
                    return what(*arguments, now=self._clock(), **options)
                finally:
                    failed = self._deliver()
                    if len(self.core.peers.refusals) > self._logged_refusals:
                        refusals = list(self.core.peers.refusals.items())[self._logged_refusals :]
                        self._logged_refusals += len(refusals)
        finally:  # outside the lock
            for peer, why in refusals:
                logger.warning("%s: no KV goes to or from %s: %s", self.name, peer, why)
            for event in failed:
                self._log_failure(event)

    def forget(self, handle: TransferHandle[Any]) -> None:
        with self.changed:
            if self._handles.get((handle.kind, handle.name)) is handle:
                del self._handles[handle.kind, handle.name]

    # -- inside ---------------------------------------------------------------------

    def _begin(
        self, handle: TransferHandle[Any], what: Callable[..., Any], *arguments: Any, **options: Any
    ) -> Any:
        """Call ``what`` as ``do`` does, and register ``handle``, so that it gets all events of its transfer,
        including those of this call. Raises ``ValueError`` if the manager is closed."""
        name = handle.kind, handle.name

        def begin(now: float) -> Any:
            if self._closing:
                raise ValueError(f"the transfer manager of {self.name} is closed")
            answer = what(*arguments, now=now, **options)
            self._handles[name] = handle  # ``do`` delivers the events of this call afterwards
            return answer

        return self.do(begin)

    def _deliver(self) -> list[TransferEnd]:
        """Deliver the core's events to handles and queue its actions. The caller holds the lock. Returns the
        failed transfers, which the caller logs after releasing the lock."""
        failed: list[TransferEnd] = []
        actions, events = self.core.take(self._clock())
        for event in events:
            target = _event_target(event)
            handle = self._handles.get(target)
            if handle is None:
                continue
            handle.on_event(event)
            if isinstance(event, LayerLoaded):
                continue
            # Not logged: an engine has cancelled the transfer, or a logged refusal has ended it. A peer's
            # abort contains the peer's reason.
            why, refusals = event.why, self.core.peers.refusals.values()
            if why and not self._closing and GIVEN_UP not in why and why not in refusals:
                failed.append(event)
            if isinstance(event, PushEnded):
                del self._handles[target]
        for action in actions:
            if isinstance(action, ReadBlock):  # directly to a store thread, not through the loop
                self._store_threads.read(action)
            elif isinstance(action, WriteBlock):
                self._store_threads.write(action)
            else:
                self._actions.append(action)
        self.changed.notify_all()
        if not self._woken and self._loop is not None and not self._loop.is_closed():
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                self._loop.call_soon_threadsafe(self._carry_out)
        return failed

    def _log_failure(self, event: TransferEnd) -> None:
        """Log at a limited rate why a transfer ended before all of its blocks arrived."""
        what = {
            LoadEnded: "a load of KV",
            PushEnded: "the push of a prompt's KV",
            PromptTransferEnded: "the arrival of a prompt's KV",
        }[type(event)]
        message = "%s: %s (%s) failed, so missing blocks are computed: %s"
        self._rate_limited_log.log(logging.WARNING, message, self.name, what, event[0], event.why)

    def _run(self, listen: list[str]) -> None:
        try:
            asyncio.run(self._serve(listen))
        except BaseException as error:
            self._failed = error
        finally:
            self._started.set()

    async def _serve(self, listen_at: list[str]) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        try:
            for address in listen_at:
                server, reachable = await listen(address, self._accepted)
                self._servers.append(server)
                self.addresses.append(reachable)
            self._started.set()
            await self._over.wait()
            self._carry_out()
        finally:
            for server, address in zip(self._servers, self.addresses, strict=True):
                stop_listening(server, address)
            conns = list(self._conns.values())
            for conn in conns:
                conn.finish()
            tasks = [task for conn in conns for task in conn.tasks]
            if tasks:  # let final messages be sent
                await asyncio.wait(tasks, timeout=CLOSE_GRACE_S)
            for number in list(self._conns):
                self._drop(number, "the engine is closing")
            if tasks:
                await asyncio.wait(tasks, timeout=CLOSE_GRACE_S)

    def _carry_out(self) -> None:
        """Carry out all queued actions. Runs in the event loop."""
        while True:
            with self.changed:
                self._woken = False
                actions = list(self._actions)
                self._actions.clear()
                wake_at = self.core.wake_at()
            if not actions:
                break
            for action in actions:
                self._carry_out_one(action)
        assert self._loop is not None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wake_at != float("inf"):
            self._timer = self._loop.call_later(max(0.0, wake_at - self._clock()), self._tick)

    def _carry_out_one(self, action: SendMessage | DialPeer | CloseConnection) -> None:
        assert self._loop is not None
        if isinstance(action, SendMessage):
            if not self._send(action) and action.item is not None:
                self.do(self.core.ctx.sent, action.item)
        elif isinstance(action, DialPeer):
            task = self._loop.create_task(self._dial(action))
            task.add_done_callback(_report_task_error)
        else:
            conn = self._conns.get(action.conn)
            if conn is not None:
                conn.finish()
                self._loop.call_later(self._patience_s, self._drop, action.conn, "closed by this side")

    def _send(self, action: SendMessage) -> bool:
        """Queue a message on its connection. Returns false if the connection is gone. If the queue is full or
        the message is too long, close the connection and return false."""
        conn = self._conns.get(action.conn)
        if conn is None:
            return False
        try:
            if conn.send(action):
                return True
        except PeerWireError as error:
            self._drop(action.conn, str(error))
        else:
            self._stalled(action.conn)
        return False

    def _tick(self) -> None:
        self._timer = None
        self.do(self.core.tick)

    # -- connections ------------------------------------------------------------------

    async def _dial(self, action: DialPeer) -> None:
        try:
            stream = await dial(action.address)
        except (*_CONNECTION_ERRORS, ValueError, UnknownTransport) as error:
            self.do(self.core.peers.dial_failed, action, str(error))
            return
        number = self._take_in(stream)
        self.do(self.core.peers.dialled, action, number)

    async def _accepted(self, stream: SocketStream) -> None:
        with self.changed:
            full = (
                len(self._conns) >= MAX_CONNECTIONS
                or self.core.peers.unidentified_peers >= MAX_UNIDENTIFIED_PEERS
            )
            if full:
                self.core.ctx.counts["turned_away"] += 1
        if full or self._closing:
            stream.close()
            return
        number = self._take_in(stream)
        self.do(self.core.peers.accepted, number)

    def _take_in(self, stream: SocketStream) -> int:
        assert self._loop is not None
        self._numbers += 1
        number = self._numbers
        conn = self._conns[number] = PeerConnection(
            stream,
            self._patience_s,
            lambda item: self.do(self.core.ctx.sent, item),
            lambda: self._stalled(number),
        )
        conn.tasks = [
            self._loop.create_task(self._run_receiver(number, conn)),
            self._loop.create_task(self._run_sender(number, conn)),
        ]
        for task in conn.tasks:
            task.add_done_callback(_report_task_error)
        return number

    async def _run_receiver(self, number: int, conn: PeerConnection) -> None:
        why = "the connection has ended"
        try:
            while number in self._conns:
                head = decode_head(await conn.stream.read(HEAD_BYTES))
                greets = not self.core.peers.is_ready(number)
                if greets and (head.payload_bytes or head.message_bytes > MAX_HANDSHAKE_BYTES):
                    raise PeerWireError("the message is too large for a peer that has not identified itself")
                if head.payload_bytes > self._max_payload_bytes:
                    raise PeerWireError(
                        f"a payload of {head.payload_bytes} bytes is too long, expected at most "
                        f"{self._max_payload_bytes}; give all engines the same chunk_bytes"
                    )
                message = decode(await conn.stream.read(head.message_bytes))
                if head.payload_bytes and not isinstance(message, DataMessage):
                    raise PeerWireError(f"{type(message).__name__} has no payload")
                payload = await conn.stream.read(head.payload_bytes) if head.payload_bytes else b""
                self.do(self.core.received, number, message, memoryview(payload))
        except _CONNECTION_ERRORS as error:
            why = str(error) or why
        except PeerWireError as error:
            why = str(error)
            with self.changed:
                self.core.ctx.counts["not_understood"] += 1
        self._drop(number, why)

    async def _run_sender(self, number: int, conn: PeerConnection) -> None:
        why = "the connection has ended"
        try:
            await conn.run_sender()
        except _CONNECTION_ERRORS as error:
            why = str(error) or why
        self._drop(number, why)

    def _stalled(self, number: int) -> None:
        """Handle a peer that accepts no data: fail its transfers, then close the connection."""
        if number not in self._conns:
            return
        self.do(self.core.stalled, number)
        self._drop(number, "the peer accepts no data")

    def _drop(self, number: int, why: str) -> None:
        """Close a connection at once, for the reason ``why``. Its queued messages are dropped."""
        conn = self._conns.pop(number, None)
        if conn is None:
            return
        conn.stream.close()
        unsent = conn.drain()
        conn.finish()
        self.do(self.core.connection_lost, number, why)
        for item in unsent:
            self.do(self.core.ctx.sent, item)


def _event_target(event: TransferEvent) -> tuple[str, str]:
    if isinstance(event, (LayerLoaded, LoadEnded)):
        return "load", event.load
    if isinstance(event, PushEnded):
        return "push", event.transfer
    assert isinstance(event, PromptTransferEnded)
    return "prompt", event.transfer


def _report_task_error(task: asyncio.Task[None]) -> None:
    """Report an unexpected error of a task through ``threading.excepthook`` as soon as the task ends."""
    if not task.cancelled() and (error := task.exception()) is not None:
        threading.excepthook(
            threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread()))
        )
