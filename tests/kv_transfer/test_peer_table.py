"""Dials that are answered after they were given up, when another to the same place is under way."""

from __future__ import annotations

import pytest
from kv_blocks import keys
from simulated_transfers import Engine, World, assert_clean
from sojourn_server.kv_transfer.transfer_actions import CloseConnection, DialPeer, PushEnded, SendMessage
from sojourn_server.kv_transfer.transfer_wire import HelloMessage, OfferMessage, WelcomeMessage

CONTEXT = keys(*range(4))
FIRST, SECOND = 11, 12
"""Connections."""


class Dialling:
    """An engine whose first dial was given up, and whose second is under way."""

    def __init__(self) -> None:
        world = World()
        self.engine: Engine = world.engine("p")
        self.now = world.now
        self.core = self.engine.core
        self.first = self._dials("t")
        self.now += 2.0
        self.core.tick(self.now)
        assert self.core.take(self.now)[1] == [PushEnded("t", False, "d does not answer")]
        self.second = self._dials("u")
        assert self.first != self.second

    def _dials(self, transfer: str) -> DialPeer:
        self.core.pushes.offer(transfer, "d", CONTEXT, self.now)
        [dial] = self.core.take(self.now)[0]
        assert isinstance(dial, DialPeer)
        return dial

    def goes_well(self) -> None:
        """The second is answered, and used."""
        self.core.peers.dialled(self.second, SECOND, self.now)
        [hello] = self.core.take(self.now)[0]
        assert isinstance(hello, SendMessage)
        assert (hello.conn, type(hello.message)) == (SECOND, HelloMessage)
        self.core.received(SECOND, WelcomeMessage(name="d", epoch="e"), memoryview(b""), self.now)
        [offer] = self.core.take(self.now)[0]
        assert isinstance(offer, SendMessage)
        assert (offer.conn, type(offer.message)) == (SECOND, OfferMessage)
        assert self.core.ctx.counts["hung_up"] == 0
        self.core.connection_lost(SECOND, "the connection has ended", self.now)
        assert self.core.take(self.now)[1] == [PushEnded("u", False, "the connection has ended")]
        assert_clean(self.engine)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_dial_that_succeeds_after_its_patience_is_hung_up_and_not_taken_for_the_next(when: str) -> None:
    dialling = Dialling()
    core = dialling.core
    if when == "after":
        core.peers.dialled(dialling.second, SECOND, dialling.now)
        core.take(dialling.now)[0]
    core.peers.dialled(dialling.first, FIRST, dialling.now)
    assert core.take(dialling.now)[0] == [CloseConnection(FIRST)]
    core.connection_lost(FIRST, "the connection has ended", dialling.now)
    if when == "before":
        dialling.goes_well()
        return
    core.received(SECOND, WelcomeMessage(name="d", epoch="e"), memoryview(b""), dialling.now)
    [offer] = core.take(dialling.now)[0]
    assert isinstance(offer, SendMessage)
    assert (offer.conn, type(offer.message)) == (SECOND, OfferMessage)


def test_the_next_dial_may_fail_by_itself() -> None:
    dialling = Dialling()
    dialling.core.peers.dial_failed(dialling.second, "connection refused", dialling.now)
    assert dialling.core.take(dialling.now)[1] == [
        PushEnded("u", False, "cannot reach d: connection refused")
    ]
    assert_clean(dialling.engine)
