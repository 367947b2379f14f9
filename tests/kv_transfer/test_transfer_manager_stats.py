"""What a traffic manager tells of itself, after real transfers."""

from __future__ import annotations

import threading

from kv_blocks import LAYERS, identity, keys
from simulated_transfers import layers_of
from sojourn_server.kv_transfer.transfer_stats import transfer_manager_stats
from transfer_manager_harness import PATIENCE_S, MemoryStore, assert_clean, manager

CONTEXT = keys(*range(4))
BLOCK_BYTES = identity().block_bytes


def test_reads_have_a_speed_and_what_is_sent_is_received() -> None:
    store = MemoryStore()
    store.fill(*CONTEXT)
    with manager(store, "p") as here, manager(store, "d", ["tcp:127.0.0.1:0"]) as there:
        load = here.load("l", CONTEXT)
        assert load.wait(PATIENCE_S) is not None
        assert transfer_manager_stats(here, {})["slots_used"] == 4
        push = here.offer("t", there.addresses[0], CONTEXT, epoch=there.epoch)
        prompt = there.expect("t", epoch=there.epoch)
        for layer in range(LAYERS):
            push.give(layer, layers_of(CONTEXT, layer))
        assert prompt.wait(PATIENCE_S) is not None
        prompt.end()
        load.end()
        assert_clean(here, there)
        mine, theirs = (
            transfer_manager_stats(here, {"blocks_not_filled": 2}),
            transfer_manager_stats(there, {}),
        )
    whole = 4 * BLOCK_BYTES
    assert mine["links"]["storage read"]["moved_bytes"] == whole
    assert mine["links"]["compute network"]["moved_bytes"] == theirs["received_bytes"] == whole
    assert mine["block_s"] > 0
    assert (mine["counts"]["blocks_read"], mine["counts"]["blocks_not_filled"]) == (4, 2)
    assert mine["slots_used"] == theirs["slots_used"] == 0


def test_a_queue_of_unknown_speed_is_told_as_unknown() -> None:
    """0 would say that nothing waits, and who hangs would be chosen first."""
    store, gate = MemoryStore(), threading.Event()
    store.fill(*CONTEXT)
    store.before = lambda what, key: assert_in_time(gate)
    patient = {"patience_s": PATIENCE_S, "lease_s": 2 * PATIENCE_S}
    with manager(store, "p", limits=patient) as here:
        load = here.load("l", CONTEXT)
        link = transfer_manager_stats(here, {})["links"]["storage read"]
        assert link == {"queued_bytes": 4 * BLOCK_BYTES, "queued_s": None, "moved_bytes": 0}
        gate.set()
        assert load.wait(PATIENCE_S) is not None
        load.end()


def assert_in_time(gate: threading.Event) -> None:
    assert gate.wait(PATIENCE_S)
