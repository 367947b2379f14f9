"""Transfers between engines in virtual time, with real transfer cores, a store in a dictionary, and a network
that can be cut.

There are no threads and no sleeps. Storage and sockets take time only if the engine has a rate for them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

from kv_blocks import BLOCK_BYTES, LAYERS, identity, payload
from sojourn_server.kv_transfer.load_table import ReadingPeer
from sojourn_server.kv_transfer.transfer_actions import (
    CloseConnection,
    DialPeer,
    LoadEnded,
    PromptTransferEnded,
    PushEnded,
    ReadBlock,
    SendMessage,
    TransferEvent,
    WriteBlock,
)
from sojourn_server.kv_transfer.transfer_core import TransferCore
from sojourn_server.kv_transfer.transfer_limits import TransferLimits
from sojourn_server.kv_transfer.transfer_wire import WireMessage, decode, decode_head, encode

LAYER_BYTES = BLOCK_BYTES // LAYERS


def layers_of(wanted: Sequence[bytes], layer: int) -> list[memoryview]:
    """One layer of the content of blocks, as an engine would compute it."""
    start = layer * LAYER_BYTES
    return [memoryview(payload(one)[start : start + LAYER_BYTES]) for one in wanted]


class Engine:
    """One engine's core, and the events that it received."""

    def __init__(self, world: World, name: str, epoch: int, **options: Any) -> None:
        limits = TransferLimits(**{"slots": 64, "chunk_bytes": 2 * LAYER_BYTES, **options.pop("limits", {})})
        self.rates: dict[str, float] = options.pop("rates", {})
        """Bytes per second of ``storage_read``, ``storage_write`` and ``compute`` (sends to peers)."""
        self._busy_until_s: dict[str, float] = {}
        self.name = name
        self.world = world
        self.core = TransferCore(
            options.pop("identity", identity()), limits, name=name, epoch=f"{name}/{epoch}"
        )
        assert not options, options
        self.events: list[TransferEvent] = []
        self.alive = True

    def load(self, load: str, wanted: Sequence[bytes], **peer: Any) -> int:
        of = ReadingPeer(**{"transfer": load, "total": len(wanted), **peer}) if peer else None
        return int(self.do(self.core.loads.begin, load, wanted, peer=of))

    def offer(self, transfer: str, to: str, wanted: Sequence[bytes], **options: Any) -> None:
        self.do(self.core.pushes.offer, transfer, to, wanted, **options)

    def give(self, transfer: str, wanted: Sequence[bytes], layers: int = LAYERS) -> None:
        for layer in range(layers):
            self.do(self.core.pushes.give, transfer, layer, layers_of(wanted, layer))

    def push(self, transfer: str, to: str, wanted: Sequence[bytes], **options: Any) -> None:
        """Offer a context whose layers are all computed already."""
        self.offer(transfer, to, wanted, **options)
        self.give(transfer, wanted)

    def do(self, what: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        answer = what(*arguments, now=self.world.now, **options)
        self.world.carry_out(self)
        return answer

    def takes_until(self, device: str, nbytes: int) -> float:
        """Occupy a device with one transfer after the other. Returns the time at which this one ends."""
        if device not in self.rates:
            return self.world.now
        start_s = max(self.world.now, self._busy_until_s.get(device, 0.0))
        self._busy_until_s[device] = start_s + nbytes / self.rates[device]
        return self._busy_until_s[device]

    def over(self, kind: type[LoadEnded | PushEnded | PromptTransferEnded], name: str) -> Any:
        """The last event of a kind about ``name``; ``None`` if there is none yet."""
        found = [event for event in self.events if isinstance(event, kind) and event[0] == name]
        return found[-1] if found else None

    def wait(self, kind: type[LoadEnded | PushEnded | PromptTransferEnded], name: str) -> Any:
        """Advance the time until an event of a kind about ``name`` comes, and return it."""
        self.world.run(until=lambda: self.over(kind, name) is not None)
        return self.over(kind, name)

    def taken(self, load: str) -> list[bytes]:
        """Take a load's blocks, and release the load."""
        blocks = [bytes(block) for block in self.core.loads.blocks(load)]
        self.do(self.core.loads.end, load)
        return blocks

    def prompt(self, transfer: str) -> list[bytes]:
        blocks = [bytes(block) for block in self.core.prompts.blocks(transfer)]
        self.do(self.core.prompts.forget, transfer)
        return blocks


class World:
    """Engines, stored blocks, and a virtual clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.stored: dict[bytes, bytes] = {}
        self.broken: dict[bytes, str] = {}
        """Blocks that cannot be read → the error."""
        self.hung: set[bytes] = set()
        """Blocks whose reads never return."""
        self.reads: list[tuple[str, bytes]] = []
        self.messages: list[tuple[str, str, WireMessage]] = []
        """All messages, as (sender, receiver, message)."""
        self.cut: Callable[[str, str, WireMessage], bool] = lambda sender, receiver, message: False
        """Called before a message arrives. True kills the receiver instead."""
        self.lose: Callable[[str, str, WireMessage], bool] = lambda sender, receiver, message: False
        """Called before a message arrives. True drops the message without an error."""
        self.engines: dict[str, Engine] = {}
        self._numbers = count(1)
        self._event_queue: list[tuple[float, int, Callable[[], None]]] = []
        self._ends: dict[tuple[str, int], tuple[str, int]] = {}
        """A connection's end → its other end."""
        self._epochs = count(1)
        self._busy_until_s: dict[tuple[str, int], float] = {}
        """A connection's end → time at which its last data arrive at the other end."""

    def engine(self, name: str, **options: Any) -> Engine:
        made = self.engines[name] = Engine(self, name, next(self._epochs), **options)
        return made

    def put(self, *wanted: bytes) -> None:
        self.stored.update({one: payload(one) for one in wanted})

    def kill(self, name: str) -> None:
        """Let a process die. Its connections end, and its pending actions have no effect."""
        engine = self.engines.pop(name, None)
        if engine is None:
            return
        engine.alive = False
        for end in [end for end in self._ends if end[0] == name]:
            self._hang_up(*end)

    def run(self, seconds: float = 30.0, until: Callable[[], bool] = lambda: False) -> None:
        """Advance the time by at most ``seconds``, or until ``until`` is true."""
        end = self.now + seconds
        while not until():
            due = min(
                [engine.core.wake_at() for engine in self.engines.values()]
                + [self._event_queue[0][0] if self._event_queue else float("inf")]
            )
            if due > end:
                self.now = end
                return
            self.now = max(self.now, due) + 1e-6
            while self._event_queue and self._event_queue[0][0] <= self.now:
                heapq.heappop(self._event_queue)[2]()
            for engine in list(self.engines.values()):
                if engine.core.wake_at() <= self.now:
                    engine.core.tick(self.now)
                    self.carry_out(engine)

    def carry_out(self, engine: Engine) -> None:
        """Carry out the core's actions, as a transfer manager would. Results come a moment later, as from
        threads and sockets."""
        actions, events = engine.core.take(self.now)
        for action in actions:
            at = self.now
            if isinstance(action, DialPeer):
                what, arguments = self._dial, (engine, action)
            elif isinstance(action, SendMessage):
                end = engine.name, action.conn
                at = self._busy_until_s.get(end, 0.0)  # messages arrive in the order of their sending
                if action.payload:
                    at = max(at, engine.takes_until("compute", sum(map(len, action.payload))))
                    self._busy_until_s[end] = at
                what, arguments = self._send, (engine, action)
            elif isinstance(action, CloseConnection):
                at = self._busy_until_s.get((engine.name, action.conn), 0.0)
                what, arguments = self._hang_up, (engine.name, action.conn)
            elif isinstance(action, ReadBlock):
                self.reads.append((engine.name, action.key))
                at = engine.takes_until("storage_read", BLOCK_BYTES)
                what, arguments = self._read, (engine, action)
            else:
                at = engine.takes_until("storage_write", BLOCK_BYTES)
                what, arguments = self._write, (engine, action)
            run = partial(what, *arguments)
            heapq.heappush(self._event_queue, (max(at, self.now), next(self._numbers), run))
        engine.events += events

    def _act(self, engine: Engine, what: Callable[..., None], *arguments: Any) -> None:
        if engine.alive:
            what(*arguments, now=self.now)
            self.carry_out(engine)

    def _dial(self, engine: Engine, dial: DialPeer) -> None:
        peer = self.engines.get(dial.address)
        if peer is None:
            self._act(engine, engine.core.peers.dial_failed, dial, "connection refused")
            return
        if not engine.alive:
            return
        here, there = (engine.name, next(self._numbers)), (dial.address, next(self._numbers))
        self._ends[here], self._ends[there] = there, here
        self._act(peer, peer.core.peers.accepted, there[1])
        self._act(engine, engine.core.peers.dialled, dial, here[1])

    def _send(self, engine: Engine, action: SendMessage) -> None:
        there = self._ends.get((engine.name, action.conn))
        payload = b"".join(action.payload)
        if there is not None and engine.alive:
            # Encode to bytes, so that a core can only send messages that the wire format allows.
            head = encode(action.message, len(payload))
            assert decode_head(head[:12]).payload_bytes == len(payload)
            message = decode(head[12:])
            self.messages.append((engine.name, there[0], message))
            if self.cut(engine.name, there[0], message):
                self.kill(there[0])
            elif not self.lose(engine.name, there[0], message):
                peer = self.engines[there[0]]
                self._act(peer, peer.core.received, there[1], message, memoryview(payload))
        if action.item is not None:
            self._act(engine, engine.core.ctx.sent, action.item)

    def _hang_up(self, name: str, conn: int) -> None:
        there = self._ends.pop((name, conn), None)
        if there is None:
            return
        del self._ends[there]
        for end, number in ((name, conn), there):
            engine = self.engines.get(end)
            if engine is not None:
                self._act(engine, engine.core.connection_lost, number, "the connection has ended")

    def _read(self, engine: Engine, action: ReadBlock) -> None:
        if action.key in self.hung:
            return
        why = self.broken.get(action.key)
        found = self.stored.get(action.key)
        if why is None and found is not None:
            at = 0
            for part in action.into:
                part[:] = found[at : at + part.nbytes]
                at += part.nbytes
        elif why is None:
            why = "missing"
        self._act(engine, engine.core.ctx.read_done, action.item, why)

    def _write(self, engine: Engine, action: WriteBlock) -> None:
        self.stored[action.key] = b"".join(action.content)
        self._act(engine, engine.core.write_done, action.item, "stored")


def two_engines(**of_d: Any) -> tuple[World, Engine, Engine]:
    """A world with the engines ``p`` and ``d``. ``of_d`` are options of ``d``."""
    world = World()
    return world, world.engine("p"), world.engine("d", **of_d)


def assert_clean(*engines: Engine) -> None:
    """Check that no buffer, lease, place in a queue or transfer has leaked."""
    for engine in engines:
        core = engine.core
        buffers = core.ctx.buffers
        assert core.is_clean, (
            engine.name,
            core.stats(engine.world.now),
            len(core.loads),
            len(core.pushes),
            len(core.prompts),
            buffers._leases.keys(),
        )
        assert (buffers.used, buffers.leases, buffers.waiting) == (0, 0, 0)
        assert sorted(buffers._free) == list(range(buffers.slots))
        assert core.ctx._holders == {}
