"""Transfers between engines in virtual time: real nodes, a store in a dictionary, and a network that can be
cut.

There are no threads and no sleeps. Storage and sockets take time only if the engine has a rate for them.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine, Sequence
from itertools import takewhile
from typing import Any

from kv_blocks import BLOCK_BYTES, LAYERS, identity, payload
from sojourn_server.kv_transfer.staging_buffers import TransferLimits
from sojourn_server.kv_transfer.transfer import ReadingPeer, Transfer, TransferNode
from sojourn_server.kv_transfer.transfer_wire import HEAD_BYTES, WireMessage, decode, decode_head

LAYER_BYTES = BLOCK_BYTES // LAYERS


def layers_of(wanted: Sequence[bytes], layer: int) -> list[memoryview]:
    """One layer of the content of blocks, as an engine would compute it."""
    start = layer * LAYER_BYTES
    return [memoryview(payload(one)[start : start + LAYER_BYTES]) for one in wanted]


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes at once if nothing else is to be done."""

    def __init__(self) -> None:
        self.now_s = 100.0
        super().__init__(_VirtualSelector(self))

    def time(self) -> float:
        return self.now_s


class _VirtualSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing will ever happen"
        self._loop.now_s += max(0.0, timeout)
        return super().select(0)


class SimulatedStream:
    """One end of a connection between two engines."""

    def __init__(self, engine: Engine, peer: Engine) -> None:
        self.engine = engine
        self.peer = peer
        self.other: SimulatedStream
        self.is_closed = False
        self._reader = asyncio.StreamReader()

    async def read(self, length: int) -> bytes:
        return await self._reader.readexactly(length)

    async def write(self, parts: Sequence[bytes | memoryview]) -> None:
        # Encoded, so that nodes can only send messages that the wire format allows.
        data, world = b"".join(bytes(part) for part in parts), self.engine.world
        message_bytes, payload_bytes = decode_head(data[:HEAD_BYTES])
        message = decode(data[HEAD_BYTES : HEAD_BYTES + message_bytes])
        await self.engine.occupy("compute", payload_bytes)
        if self.is_closed:
            raise ConnectionResetError("the connection has ended")
        world.messages.append((self.engine.name, self.peer.name, message))
        if world.cut(self.engine.name, self.peer.name, message):
            world.kill(self.peer.name)
        elif not world.lose(self.engine.name, self.peer.name, message) and not self.other.is_closed:
            self.other._reader.feed_data(data)
        world.changed()

    def close(self) -> None:
        for end in (self, self.other):
            if not end.is_closed:
                end.is_closed = True
                end._reader.feed_eof()


class Engine:
    """One engine's node, and the ends of its transfers."""

    def __init__(self, world: World, name: str, **options: Any) -> None:
        limits = TransferLimits(**{"slots": 64, "chunk_bytes": 2 * LAYER_BYTES, **options.pop("limits", {})})
        self.rates: dict[str, float] = options.pop("rates", {})
        """Bytes per second of ``storage_read`` and ``compute`` (sends to peers)."""
        self._busy_until_s: dict[str, float] = {}
        self.name = name
        self.world = world
        self.alive = True
        self.streams: list[SimulatedStream] = []
        self.transfers: dict[tuple[str, str], Any] = {}
        """Kind (load, push or prompt) and name → the last such transfer."""
        of = options.pop("identity", identity())
        assert not options, options

        async def make() -> TransferNode:
            return TransferNode(of, limits, name=name, storage=self, dial=self._dial)

        self.node = world.do(make())
        self.node.changed = _Changes(world.changed)

    @property
    def counts(self) -> Any:
        return self.node.counts

    @property
    def buffers(self) -> Any:
        return self.node.buffers

    def load(self, load: str, wanted: Sequence[bytes], **peer: Any) -> int:
        of = ReadingPeer(**{"total": len(wanted), **peer}) if peer else None
        return len(self._keep(lambda: self.node.load(load, wanted, of)).keys)

    def end_load(self, load: str) -> None:
        self._end("load", load)

    def offer(self, transfer: str, to: str, wanted: Sequence[bytes], **options: Any) -> Any:
        return self._keep(lambda: self.node.offer(transfer, to, wanted, **options))

    def give(self, transfer: str, wanted: Sequence[bytes], layers: int = LAYERS, first: int = 0) -> None:
        for layer in range(first, layers):
            self.transfers["push", transfer].give(layer, layers_of(wanted, layer))
        self.world.settle()

    def push(self, transfer: str, to: str, wanted: Sequence[bytes], **options: Any) -> None:
        """Offer a context whose layers are all computed already."""
        self.offer(transfer, to, wanted, **options)
        self.give(transfer, wanted)

    def abort(self, transfer: str) -> None:
        self._end("push", transfer)

    def expect(self, transfer: str, **options: Any) -> Any:
        return self._keep(lambda: self.node.expect(transfer, **options))

    def forget(self, transfer: str) -> None:
        """End a prompt, whether or not it was expected."""
        if ("prompt", transfer) in self.transfers:
            self._end("prompt", transfer)
        elif transfer in self.node.prompts:
            self.node.prompts[transfer].end()
            self.world.settle()

    def over(self, kind: str, name: str) -> Any:
        """Outcome of a transfer; ``None`` if there is none yet."""
        transfer = self.transfers.get((kind, name))
        return transfer.outcome if transfer is not None else None

    def wait(self, kind: str, name: str) -> Any:
        """Advance the time until a transfer has an outcome, and return it."""
        self.world.run(until=lambda: self.over(kind, name) is not None)
        return self.over(kind, name)

    def taken(self, load: str) -> list[bytes]:
        """Take a load's blocks, and release the load."""
        made = self.transfers["load", load]
        blocks = [bytes(block) for block in made.blocks()] if made.outcome.good else []
        self.end_load(load)
        return blocks

    def prompt(self, transfer: str) -> list[bytes]:
        blocks = [bytes(block) for block in self.transfers["prompt", transfer].blocks()]
        self.forget(transfer)
        return blocks

    async def occupy(self, device: str, nbytes: int) -> None:
        """Occupy a device with one transfer after the other, until this one has ended."""
        now = self.world.now
        if device in self.rates and nbytes:
            start_s = max(now, self._busy_until_s.get(device, 0.0))
            self._busy_until_s[device] = start_s + nbytes / self.rates[device]
        wait_s = self._busy_until_s.get(device, 0.0) - now if nbytes else 0.0
        await asyncio.sleep(max(0.0, wait_s))

    def _keep(self, what: Callable[[], Transfer]) -> Any:
        made = self.world.call(what)
        self.transfers[made.kind, made.name] = made
        self.world.settle()
        return made

    def _end(self, kind: str, name: str) -> None:
        transfer = self.transfers.get((kind, name))
        if transfer is not None:
            transfer.end()
            self.world.settle()

    async def _dial(self, address: str) -> SimulatedStream:
        await asyncio.sleep(0)
        peer = self.world.engines.get(address)
        if peer is None:
            raise ConnectionRefusedError("connection refused")
        here, there = SimulatedStream(self, peer), SimulatedStream(peer, self)
        here.other, there.other = there, here
        self.streams.append(here)
        peer.streams.append(there)
        peer.node.spawn(peer.node.peers.accept(there))
        return here

    async def look_up(self, keys: Sequence[bytes]) -> int:
        return sum(1 for _ in takewhile(self.world.stored.__contains__, keys))

    def read(self, key: bytes, into: memoryview) -> asyncio.Future[str | None]:
        world = self.world

        async def read() -> str | None:
            world.reads.append((self.name, key))
            world.changed()
            if key in world.hung:
                await world.released.wait()
            await self.occupy("storage_read", BLOCK_BYTES)
            if key in world.broken or key not in world.stored:
                return world.broken.get(key, "missing")
            into[:] = world.stored[key]
            return None

        return asyncio.ensure_future(read())


class _Changes(threading.Condition):
    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self._call = call

    def notify_all(self) -> None:
        super().notify_all()
        asyncio.get_running_loop().call_soon(self._call)


class World:
    """Engines, stored blocks, and a virtual clock. ``conftest.py`` closes it at the end of the test."""

    open: list[World] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.open.append(self)
        self.loop = VirtualLoop()
        self.stored: dict[bytes, bytes] = {}
        self.broken: dict[bytes, str] = {}
        """Blocks that cannot be read → the error."""
        self.hung: set[bytes] = set()
        """Blocks whose reads do not return before ``released`` is set."""
        self.released = asyncio.Event()
        self.reads: list[tuple[str, bytes]] = []
        self.messages: list[tuple[str, str, WireMessage]] = []
        """All messages, as (sender, receiver, message)."""
        self.cut: Callable[[str, str, WireMessage], bool] = lambda sender, receiver, message: False
        """Called before a message arrives. True kills the receiver instead."""
        self.lose: Callable[[str, str, WireMessage], bool] = lambda sender, receiver, message: False
        """Called before a message arrives. True drops the message without an error."""
        self.engines: dict[str, Engine] = {}
        self._change = asyncio.Event()
        self._dead: list[Engine] = []

    @property
    def now(self) -> float:
        return self.loop.now_s

    def engine(self, name: str, **options: Any) -> Engine:
        made = self.engines[name] = Engine(self, name, **options)
        return made

    def put(self, *wanted: bytes) -> None:
        self.stored.update({one: payload(one) for one in wanted})

    def do(self, what: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(what)

    def call(self, what: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return what()

        return self.do(run())

    def settle(self) -> None:
        """Do what is to be done now."""

        async def run() -> None:
            for _ in range(10):
                await asyncio.sleep(0)

        self.do(run())

    def changed(self) -> None:
        self._change.set()

    def kill(self, name: str) -> None:
        """Let a process die. Its connections end, and its tasks have no effect any more."""
        engine = self.engines.pop(name, None)
        if engine is not None:
            engine.alive = False
            self._dead.append(engine)
            for stream in engine.streams:
                stream.close()
            for task in list(engine.node.tasks):
                self.loop.call_soon(task.cancel)

    def run(self, seconds: float = 30.0, until: Callable[[], bool] = lambda: False) -> None:
        """Advance the time by at most ``seconds``, or until ``until`` is true."""

        async def drive() -> None:
            end = self.now + seconds
            while not until() and self.now < end:
                self._change.clear()
                try:
                    async with asyncio.timeout_at(end):
                        await self._change.wait()
                except TimeoutError:
                    return

        self.do(drive())

    def close(self) -> None:
        for engine in self.engines.values():
            self.do(engine.node.close())
        self.released.set()
        self.settle()
        self.loop.close()


def two_engines(**of_d: Any) -> tuple[World, Engine, Engine]:
    """A world with the engines ``p`` and ``d``. ``of_d`` are options of ``d``."""
    world = World()
    return world, world.engine("p"), world.engine("d", **of_d)


def assert_clean(*engines: Engine) -> None:
    """Check that no buffer, lease, place in a queue or transfer has leaked."""
    for engine in engines:
        engine.world.settle()
        node = engine.node
        assert node.is_clean, (engine.name, node.counts, node._transfers())
        buffers = node.buffers
        assert (buffers.used, buffers.waiting) == (0, 0)
        assert sorted(buffers._free) == list(range(buffers.slots))
        assert (node.fetches, len(node.reads), node.queued_send_bytes) == ({}, 0, 0)
