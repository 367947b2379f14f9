"""What peers can make an engine keep, whatever they say and however often."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kv_blocks import identity
from sojourn_server.kv_transfer.transfer_actions import SendMessage
from sojourn_server.kv_transfer.transfer_core import TransferCore
from sojourn_server.kv_transfer.transfer_limits import TransferLimits
from sojourn_server.kv_transfer.transfer_link import TrafficClass
from sojourn_server.kv_transfer.transfer_wire import (
    HelloMessage,
    NeedMessage,
    OfferMessage,
    ProgressMessage,
    WireMessage,
)

LEASE_S = 30.0
NOTHING = memoryview(b"")


class Guest:
    """A peer that says what it likes, and the engine that hears it."""

    def __init__(self, **limits: Any) -> None:
        self.core = TransferCore(identity(), TransferLimits(**{"slots": 64, **limits}), name="d", epoch="e")
        self.now = 0.0
        for conn in (1, 2, 3):
            self.core.peers.accepted(conn, self.now)
            self.send(HelloMessage(name=f"x{conn}", epoch="y", kv=asdict(identity())), conn)
        self.answers()

    def send(self, message: WireMessage, conn: int = 1) -> None:
        self.core.received(conn, message, NOTHING, self.now)

    def answers(self) -> list[WireMessage]:
        return [action.message for action in self.core.take(self.now)[0] if isinstance(action, SendMessage)]

    def wait(self, seconds: float, transfers: list[str], grows: bool) -> None:
        """Time passes, and the peer says every while that it lives."""
        end = self.now + seconds
        while self.now < end:
            self.now += 2.0
            done = int(self.now) if grows else 0
            if transfers:
                self.send(ProgressMessage(transfers=transfers, done=done))
            self.core.tick(self.now)
            self.core.take(self.now)


def offer(name: str, first: int, blocks: int) -> OfferMessage:
    wanted = [b"%31d" % (first + at) for at in range(blocks)]
    return OfferMessage(transfer=name, keys=wanted, traffic_class=TrafficClass.KV)


def test_a_peer_that_says_it_lives_and_gives_nothing_loses_its_buffers() -> None:
    for grows in (False, True):
        guest = Guest(slots=64)
        names = [f"t{number}" for number in range(20)]
        for number, name in enumerate(names):
            guest.send(offer(name, 100 * number, 60))
        assert any(isinstance(message, NeedMessage) for message in guest.answers())
        guest.wait(2 * LEASE_S, names, grows)
        assert guest.core.ctx.buffers.used >= 60, "a long step is no crime"
        guest.wait(20 * 5 * LEASE_S, names, grows)
        assert len(guest.core.prompts) == 0, grows
        assert guest.core.ctx.buffers.used == 0
