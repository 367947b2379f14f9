"""Peers that stop reading, over real sockets: they are cut off, and nobody else waits for them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from kv_blocks import identity, keys
from sojourn_server.kv_transfer.transfer_actions import PromptTransferEnded, PushEnded
from sojourn_server.kv_transfer.transfer_wire import (
    HEAD_BYTES,
    NeedMessage,
    OfferMessage,
    WelcomeMessage,
    WireMessage,
    decode,
    decode_head,
    encode,
)
from transfer_manager_harness import PATIENCE_S, MemoryStore, assert_clean, eventually, manager, threads_of

LARGE = identity(block_bytes=4 << 20, layers=2)
"""One Layer Block of it is more than any socket here takes."""
CONTEXT = keys(*range(8))
SOON = {"patience_s": 2.0}
NOT_SOON = {"patience_s": 4 * PATIENCE_S, "lease_s": 8 * PATIENCE_S}


class Stuck:
    """A peer that greets, asks for all of the first context that is offered, and reads nothing more."""

    def __init__(self, path: Path) -> None:
        self.address = f"unix:{path}"
        self.socket: socket.socket | None = None
        self.has_stopped = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._greet)
        self._thread.start()

    def _greet(self) -> None:
        with suppress(OSError):
            self.socket, _ = self._listener.accept()
            self._heard()
            self.socket.sendall(encode(WelcomeMessage(name="stuck", epoch="e")))
            while not isinstance(offer := self._heard(), OfferMessage):
                pass
            self.send(NeedMessage(transfer=offer.transfer, indices=list(range(len(offer.keys)))))
            self.has_stopped.set()

    def send(self, message: WireMessage) -> None:
        assert self.socket is not None
        self.socket.sendall(encode(message))

    def _heard(self) -> WireMessage:
        head = decode_head(self._exactly(HEAD_BYTES))
        return decode(self._exactly(head.message_bytes))

    def _exactly(self, count: int) -> bytes:
        assert self.socket is not None
        found = b""
        while len(found) < count:
            more = self.socket.recv(count - len(found))
            if not more:
                raise OSError("the other end has hung up")
            found += more
        return found

    def close(self) -> None:
        self._listener.close()
        if self.socket is not None:
            self.socket.close()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[Stuck]:
    made = Stuck(tmp_path / "stuck.sock")
    yield made
    made.close()


def layer() -> list[memoryview]:
    return [memoryview(bytes(LARGE.block_bytes // LARGE.layers)) for _ in CONTEXT]


def give_all(push: object) -> None:
    for number in range(LARGE.layers):
        push.give(number, layer())  # type: ignore[attr-defined]


def test_a_peer_that_stops_reading_is_cut_off_and_its_push_has_an_outcome(stuck: Stuck) -> None:
    with manager(MemoryStore(LARGE), "p", limits=SOON) as here:
        push = here.offer("t", stuck.address, CONTEXT)
        give_all(push)
        assert stuck.has_stopped.wait(PATIENCE_S)
        assert push.wait(PATIENCE_S) == PushEnded("t", False, "the peer accepts no data")
        eventually(lambda: not here._conns)
        assert here.stats()["counts"]["stalls"] == 1
        assert_clean(here)
    assert threads_of("p") == []


def test_another_peer_is_served_while_one_takes_nothing(stuck: Stuck, tmp_path: Path) -> None:
    """With so much patience that nothing is cut off while the test runs."""
    here = manager(MemoryStore(LARGE), "p", limits=NOT_SOON)
    there = manager(MemoryStore(LARGE), "d", [f"unix:{tmp_path}/d.sock"], limits=NOT_SOON)
    first = here.offer("t", stuck.address, CONTEXT)
    give_all(first)
    assert stuck.has_stopped.wait(PATIENCE_S)
    eventually(lambda: here.core.ctx.peer_send.in_flight > 0)
    second = here.offer("u", there.addresses[0], CONTEXT)
    give_all(second)
    prompt = there.expect("u")
    assert prompt.wait(PATIENCE_S) == PromptTransferEnded("u", True)
    assert second.wait(PATIENCE_S) == PushEnded("u", True)
    prompt.end()
    assert first.outcome is None, "it was not cut off: the other was served beside it"
    assert len(here._conns) == 2
    # An engine that closes does not wait for it either, and its memory is its own again.
    assert here.close(PATIENCE_S)
    assert first.outcome is not None
    assert_clean(here, there)
    assert there.close()
    assert threads_of("p") + threads_of("d") == []
