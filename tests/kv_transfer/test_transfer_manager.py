"""The traffic manager with real threads and sockets: what virtual time cannot show."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from kv_blocks import LAYERS, identity, key, keys, payload
from simulated_transfers import LAYER_BYTES, layers_of
from sojourn_server.kv_offload.disk_store import DiskStore
from sojourn_server.kv_offload.shared_store import SharedStore
from sojourn_server.kv_transfer.load_table import ReadingPeer
from sojourn_server.kv_transfer.peer_transport import UnknownTransport, check_address
from sojourn_server.kv_transfer.transfer_actions import (
    LoadEnded,
    PromptTransferEnded,
    PushEnded,
)
from sojourn_server.kv_transfer.transfer_limits import TransferLimits
from sojourn_server.kv_transfer.transfer_manager import TransferManager
from transfer_manager_harness import PATIENCE_S, MemoryStore, assert_clean, eventually, manager, threads_of

CONTEXT = keys(*range(8))
WHOLE = [*CONTEXT, b"tail of t"]


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"unix:{tmp_path}/d.sock" if request.param == "unix" else "tcp:127.0.0.1:0"


@pytest.fixture
def store() -> MemoryStore:
    made = MemoryStore()
    made.fill(*CONTEXT)
    return made


@pytest.fixture
def pair(store: MemoryStore, address: str) -> Iterator[tuple[TransferManager, TransferManager]]:
    # A busy machine or a closed gate must not look like a hanging store: that has tests of its own.
    patient = {"patience_s": PATIENCE_S, "lease_s": 2 * PATIENCE_S}
    there = manager(store, "d", [address], limits=patient)
    here = manager(store, "p", limits={**patient, "chunk_bytes": 3 * LAYER_BYTES})
    yield here, there
    assert here.close()
    assert there.close()
    assert threads_of("p") + threads_of("d") == []


def waits_for(gate: threading.Event) -> None:
    assert gate.wait(PATIENCE_S)


def take(blocks: list[memoryview]) -> list[bytes]:
    return [bytes(block) for block in blocks]


def test_a_turn_over_real_sockets(pair: tuple[TransferManager, TransferManager]) -> None:
    here, there = pair
    (to,) = there.addresses
    mine = here.load("mine", CONTEXT[:3])
    theirs = here.load(
        "t", CONTEXT[3:], peer=ReadingPeer(address=to, transfer="t", total=9, epoch=there.epoch)
    )
    assert mine.requested_blocks == 3
    for layer in range(LAYERS):
        assert mine.wait_layer(layer, PATIENCE_S)
        assert theirs.wait_layer(layer, PATIENCE_S)
        found = [bytes(block) for block in mine.layer(layer) + theirs.layer(layer)]
        assert found == [bytes(block) for block in layers_of(CONTEXT, layer)]
    assert (mine.wait(PATIENCE_S), theirs.wait(PATIENCE_S)) == (LoadEnded("mine", 3), LoadEnded("t", 5))
    mine.end()
    theirs.end()
    push = here.offer("t", to, WHOLE, epoch=there.epoch)
    prompt = there.expect("t", epoch=there.epoch)
    for layer in range(LAYERS):
        assert push.give(layer, layers_of(WHOLE, layer))
    assert prompt.wait(PATIENCE_S) == PromptTransferEnded("t", True)
    assert push.wait(PATIENCE_S) == PushEnded("t", True)
    assert take(prompt.blocks()) == [payload(one) for one in WHOLE]
    prompt.end()
    assert_clean(here, there)
    moved = here.core.ctx.peer_send.moved_bytes
    assert moved == 4 * LAYERS * LAYER_BYTES, "what was read there was not sent"


def test_blocks_are_stored_with_their_parents(tmp_path: Path) -> None:
    own = DiskStore.open(tmp_path, identity(), budget_bytes=1 << 20, name="d")
    with (
        closing(SharedStore(own)) as shared,
        TransferManager(shared, TransferLimits(slots=8), name="d") as made,
    ):
        parent = b""
        for one in CONTEXT:
            assert made.store(one, parent, [memoryview(payload(one))])
            parent = one
        eventually(lambda: made.stats()["counts"].get("write_stored") == 8)
        load = made.load("again", CONTEXT)
        assert load.wait(PATIENCE_S) == LoadEnded("again", 8)
        assert take(load.blocks()) == [payload(one) for one in CONTEXT]
        load.end()
        assert own.parent_of(CONTEXT[1]) == CONTEXT[0][:16]
        assert_clean(made)


def test_a_store_that_hangs_costs_patience_and_its_thread_ends_when_it_does(store: MemoryStore) -> None:
    gate = threading.Event()
    store.before = lambda what, one: waits_for(gate) if one == key(3) else None
    made = manager(store, "p")
    load = made.load("a", CONTEXT)
    assert load.wait(PATIENCE_S) == LoadEnded("a", 3, "storage has not answered")
    load.end()
    assert made.stats()["slots_used"] == 1
    gate.set()
    assert_clean(made)
    assert made.close()


def test_who_waits_when_the_engine_closes_is_told(store: MemoryStore, tmp_path: Path) -> None:
    gate = threading.Event()
    slow = MemoryStore()
    slow.before = lambda what, one: waits_for(gate)
    there = manager(store, "d", [f"unix:{tmp_path}/d.sock"])
    here = manager(slow, "p", limits={"patience_s": PATIENCE_S, "lease_s": 2 * PATIENCE_S})
    load = here.load("a", CONTEXT)
    push = here.offer("t", there.addresses[0], CONTEXT)
    prompt = there.expect("t")
    eventually(lambda: there.stats()["leases"] == 1)
    waited = []
    thread = threading.Thread(target=lambda: waited.append(load.wait(PATIENCE_S)))
    thread.start()
    threading.Timer(0.1, gate.set).start()
    assert here.close()
    thread.join(PATIENCE_S)
    assert waited == [LoadEnded("a", 0, "the engine is closing")]
    assert push.wait(PATIENCE_S) is not None
    outcome = prompt.wait(PATIENCE_S)
    assert outcome is not None
    assert not outcome.complete
    prompt.end()
    assert_clean(there)
    assert there.close()
    assert there.close(), "closing again does no harm"
    with pytest.raises(ValueError, match="closed"):
        here.load("b", CONTEXT)
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


def test_a_process_that_is_killed_in_the_middle_of_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    process = subprocess.Popen(
        [sys.executable, "-c", DYING.format(path=[*sys.path]), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"listening\n"
        here = manager(MemoryStore(), "p")
        to = f"unix:{path}"
        load = here.load("t", CONTEXT, peer=ReadingPeer(address=to, transfer="t", total=9))
        push = here.offer("u", to, [b"tail"])
        assert load.wait_layer(0, PATIENCE_S)
        os.kill(process.pid, signal.SIGKILL)
        outcome = load.wait(PATIENCE_S)
        assert outcome is not None
        assert outcome.good == 0
        assert push.wait(PATIENCE_S) is not None
        load.end()
        process.wait()  # till then a listening socket of it may still take calls
        again = here.offer("v", to, CONTEXT)
        outcome_again = again.wait(PATIENCE_S)
        assert outcome_again is not None
        assert "cannot reach unix:" in outcome_again.why
        assert_clean(here)
        assert here.close()
    finally:
        process.kill()
        process.communicate()
    # Its socket is a dead engine's: the next may have the place, and nobody else's is taken.
    with manager(MemoryStore(), "d", [to]), pytest.raises(OSError, match="another process listens"):
        manager(MemoryStore(), "e", [to])
    assert threads_of("e") == []
    path.write_text("not a socket")
    with pytest.raises(FileExistsError, match="not a socket"):
        manager(MemoryStore(), "e", [to])


def test_addresses_that_are_none_are_said_to_be() -> None:
    for wrong in ("here", "unix:", "tcp:host", "tcp:host:port", "tcp::80", "tcp:host:99999"):
        with pytest.raises(ValueError, match=r"not an address|not a host and port"):
            manager(MemoryStore(), "d", [wrong])
    with pytest.raises(ValueError, match="at most 107 bytes"):
        manager(MemoryStore(), "d", ["unix:/" + "x" * 107])
    with pytest.raises(UnknownTransport, match="unknown transport 'ib'; use tcp or unix"):
        check_address("ib:x")
    made = manager(MemoryStore(), "p")
    push = made.offer("t", "nixl:decode-0", CONTEXT)
    outcome = push.wait(PATIENCE_S)
    assert outcome is not None
    assert "NIXL is not built in; use tcp or unix" in outcome.why
    assert_clean(made)
    assert made.close()


# -- whoever dials ----------------------------------------------------------------


def dialled(address: str) -> socket.socket:
    host, port = address.removeprefix("tcp:").rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def test_a_peer_whose_machine_vanished_is_noticed(store: MemoryStore) -> None:
    with manager(store, "d", ["tcp:127.0.0.1:0"]) as here, dialled(here.addresses[0]):
        eventually(lambda: len(here._conns) == 1)
        [conn] = here._conns.values()
        sock = conn.stream._writer.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
