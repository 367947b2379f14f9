"""The traffic manager with real threads and sockets: what virtual time cannot show."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from kv_blocks import LAYERS, identity, keys, payload
from simulated_transfers import LAYER_BYTES, layers_of
from sojourn_server.kv_transfer.transfer import ReadingPeer, TransferOutcome
from sojourn_server.kv_transfer.transfer_manager import fetch_stats
from sojourn_server.kv_transfer.transfer_wire import (
    HEAD_BYTES,
    AbortMessage,
    NeedMessage,
    OfferMessage,
    WelcomeMessage,
    WireMessage,
    decode,
    decode_head,
    encode,
)
from transfer_manager_harness import (
    PATIENCE_S,
    MemoryStore,
    assert_clean,
    ended,
    manager,
    threads_of,
)
from waiting import wait_until

CONTEXT = keys(*range(8))
WHOLE = [*CONTEXT, b"tail of t"]


PATIENT = {"patience_s": PATIENCE_S, "lease_s": 2 * PATIENCE_S}
"""A busy machine or a closed gate must not look like a hanging store: that has tests of its own."""


@pytest.fixture
def store() -> MemoryStore:
    made = MemoryStore()
    made.fill(*CONTEXT)
    return made


@pytest.mark.parametrize("address", ["unix:{}/d.sock", "tcp:127.0.0.1:0"])
def test_a_turn_over_real_sockets(store: MemoryStore, address: str, tmp_path: Path) -> None:
    there = manager(store, "d", [address.format(tmp_path)], limits=PATIENT)
    here = manager(store, "p", limits={**PATIENT, "chunk_bytes": 3 * LAYER_BYTES})
    (to,) = there.addresses
    mine = here.node.load("mine", CONTEXT[:3])
    theirs = here.node.load("t", CONTEXT[3:], peer=ReadingPeer(to, 9))
    for layer in range(LAYERS):
        blocks = mine.wait_layer(layer, PATIENCE_S) + theirs.wait_layer(layer, PATIENCE_S)
        found = [bytes(block) for block in blocks]
        assert found == [bytes(block) for block in layers_of(CONTEXT, layer)]
    assert (ended(mine), ended(theirs)) == (TransferOutcome(3), TransferOutcome(5))
    mine.end()
    theirs.end()
    push = here.node.offer("t", to, WHOLE)
    prompt = there.node.expect("t")
    for layer in range(LAYERS):
        push.give(layer, layers_of(WHOLE, layer))
    assert ended(prompt) == TransferOutcome(len(WHOLE))
    assert ended(push) == TransferOutcome(len(WHOLE))
    assert [bytes(block) for block in prompt.blocks()] == [payload(one) for one in WHOLE]
    prompt.end()
    assert_clean(here, there)
    mine, theirs = here.stats(Counter(blocks_not_filled=2)), there.stats()
    sent = mine["links"]["compute network"]["moved_bytes"]
    assert sent == theirs["received_bytes"] == 4 * LAYERS * LAYER_BYTES, "what was read there was not sent"
    assert mine["links"]["storage read"]["moved_bytes"] == 3 * LAYERS * LAYER_BYTES
    assert mine["block_s"] > 0
    assert (mine["counts"]["blocks_read"], mine["counts"]["blocks_not_filled"]) == (3, 2)
    assert mine["slots_used"] == theirs["slots_used"] == 0
    assert here.close()
    assert there.close()
    assert threads_of("p") + threads_of("d") == []


def test_who_waits_when_the_engine_closes_is_told(store: MemoryStore, tmp_path: Path) -> None:
    gate = threading.Event()
    slow = MemoryStore()
    slow.fill(*CONTEXT)
    slow.before = lambda what, one: wait_until(gate.is_set)
    there = manager(store, "d", [f"unix:{tmp_path}/d.sock"])
    here = manager(slow, "p", limits=PATIENT)
    load = here.node.load("a", CONTEXT)
    push = here.node.offer("t", there.addresses[0], CONTEXT)
    prompt = there.node.expect("t")
    wait_until(lambda: there.stats()["slots_used"] == 8)
    waited = []

    def wait() -> None:
        waited.append(ended(load))
        gate.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert here.close()
    thread.join(PATIENCE_S)
    assert waited == [TransferOutcome(0, "the engine is closing")]
    assert ended(push) is not None
    assert ended(prompt).why
    prompt.end()
    assert_clean(there)
    assert there.close()
    assert there.close(), "closing again does no harm"
    with pytest.raises(ValueError, match="closed"):
        here.node.load("b", CONTEXT)
    load.end()


DYING = textwrap.dedent(
    """
    import sys, time
    sys.path[:0] = {path!r}
    from sojourn_server.kv_transfer.peer_transport import SocketStream
    from transfer_manager_harness import MemoryStore, manager
    from kv_blocks import keys
    store = MemoryStore()
    store.fill(*keys(*range(8)))
    write = SocketStream.write
    def slow(stream, parts):
        time.sleep(0.05)
        return write(stream, parts)
    SocketStream.write = slow
    made = manager(store, "d", ["unix:" + sys.argv[1]], limits={{"chunk_bytes": 32}})
    print("listening", flush=True)
    sys.stdin.read()
    """
)


def test_a_process_that_is_killed_in_the_middle_of_a_stream(store: MemoryStore, tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    process = subprocess.Popen(
        [sys.executable, "-c", DYING.format(path=[*sys.path]), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout.readline() == b"listening\n"
        here = manager(store, "p")
        to = f"unix:{path}"
        load = here.node.load("t", CONTEXT, peer=ReadingPeer(to, 9))
        push = here.node.offer("u", to, [b"tail"])
        assert load.wait_layer(0, PATIENCE_S)
        os.kill(process.pid, signal.SIGKILL)
        assert ended(load).good == 0
        assert ended(push) is not None
        load.end()
        process.wait()  # till then a listening socket of it may still take calls
        again = here.node.offer("v", to, CONTEXT)
        assert "cannot reach unix:" in ended(again).why
        assert_clean(here)
        assert here.close()
    finally:
        process.kill()
        process.communicate()
    # Its socket is a dead engine's: the next may have the place, and nobody else's is taken.
    with closing(manager(MemoryStore(), "d", [to])), pytest.raises(OSError, match="another process listens"):
        manager(MemoryStore(), "e", [to])
    assert threads_of("e") == []
    path.unlink()
    path.write_text("not a socket")
    with pytest.raises(OSError, match="already in use"):
        manager(MemoryStore(), "e", [to])


def test_addresses_that_are_none_are_said_to_be() -> None:
    for wrong in ("here", "unix:", "tcp:host", "tcp:host:port", "tcp::80", "tcp:host:99999"):
        with pytest.raises(ValueError, match="not an address"):
            manager(MemoryStore(), "d", [wrong])
    with pytest.raises(OSError, match="AF_UNIX path too long"):
        manager(MemoryStore(), "d", ["unix:/" + "x" * 107])
    made = manager(MemoryStore(), "p")
    push = made.node.offer("t", "nixl:decode-0", CONTEXT)
    assert "not an address; expected unix:PATH or tcp:HOST:PORT" in ended(push).why
    assert_clean(made)
    assert made.close()


# -- Peers that stop reading, over real sockets: they are cut off, and nobody else waits for them.


LARGE = identity(block_bytes=4 << 20, layers=2)
"""One Layer Block of it is more than any socket here takes."""


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
            self.socket.sendall(encode(WelcomeMessage()))
            while not isinstance(offer := self._heard(), OfferMessage):
                pass
            self.send(NeedMessage(transfer=offer.transfer, indices=list(range(len(offer.keys)))))
            self.has_stopped.set()

    def send(self, message: WireMessage) -> None:
        self.socket.sendall(encode(message))

    def _heard(self) -> WireMessage:
        message_bytes, _ = decode_head(self._exactly(HEAD_BYTES))
        return decode(self._exactly(message_bytes))

    def _exactly(self, count: int) -> bytes:
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


@pytest.mark.parametrize("aborts", [False, True])
def test_a_peer_that_stops_reading_is_cut_off_and_its_push_has_an_outcome(
    tmp_path: Path, aborts: bool
) -> None:
    stuck = Stuck(tmp_path / "stuck.sock")
    with closing(stuck), closing(manager(MemoryStore(LARGE), "p", limits={"patience_s": 2.0})) as here:
        push = here.node.offer("t", stuck.address, CONTEXT)
        for layer in range(LARGE.layers):
            push.give(layer, [memoryview(bytes(LARGE.block_bytes // LARGE.layers)) for _ in CONTEXT])
        assert stuck.has_stopped.wait(PATIENCE_S)
        if aborts:
            wait_until(lambda: here.node.queued_send_bytes > 0)
            stuck.send(AbortMessage(transfer="t", reason="the peer does not answer"))
        assert ended(push) == TransferOutcome(0, "the peer does not answer")
        wait_until(lambda: not here.node.peers.conns)
        assert here.stats()["counts"]["stalls"] == 1
        assert_clean(here)
    assert threads_of("p") == []


# -- The socket at which it tells another process how it goes.


def test_statistics_are_told_to_whoever_asks_until_it_closes() -> None:
    answers: list[dict[str, Any] | None] = [{"asked": 1}, None, {"big": "b" * (1 << 23)}, {"asked": 4}]
    with closing(manager(MemoryStore(), "p")) as here:
        address = here.serve_stats(lambda: answers.pop(0))
        assert Path(address).parent.stat().st_mode & 0o077 == 0, "its user's alone"
        assert fetch_stats(address) == {"asked": 1}
        assert fetch_stats(address) is None
        with socket.socket(socket.AF_UNIX) as lazy:  # whoever does not read holds up nobody
            lazy.connect(address)
            wait_until(lambda: len(answers) == 1)
            assert fetch_stats(address) == {"asked": 4}
    assert not Path(address).parent.exists()
    with pytest.raises(OSError, match="No such file"):
        fetch_stats(address)
