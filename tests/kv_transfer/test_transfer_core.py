"""The ways of KV between two engines and their store, in virtual time."""

from __future__ import annotations

from kv_blocks import BLOCK_BYTES, LAYERS, keys, payload
from simulated_transfers import (
    LoadEnded,
    PromptTransferEnded,
    PushEnded,
    assert_clean,
    two_engines,
)
from sojourn_server.kv_transfer.transfer_wire import DataMessage, NeedMessage

CONTEXT = keys(*range(8))


def test_a_peer_reads_it_and_its_layers_come_in_order(  # the decode side's path
) -> None:
    world, here, there = two_engines()
    world.put(*CONTEXT)
    here.load("t", CONTEXT, address="d", total=9)
    assert here.wait(LoadEnded, "t") == LoadEnded("t", 8)
    assert {name for name, _ in world.reads} == {"d"}
    said = [
        message for sender, _, message in world.messages if isinstance(message, DataMessage) and sender == "d"
    ]
    assert [message.layer for message in said] == sorted(message.layer for message in said)
    assert here.taken("t") == [payload(one) for one in CONTEXT]

    # What was read there stays there: of the whole context only the ninth block is sent.
    whole = [*CONTEXT, b"tail of t"]
    here.offer("t", "d", whole)
    here.give("t", whole)
    there.expect("t")
    assert there.wait(PromptTransferEnded, "t") == PromptTransferEnded("t", True)
    assert here.over(PushEnded, "t") == PushEnded("t", True)
    assert [message.indices for _, _, message in world.messages if isinstance(message, NeedMessage)] == [[8]]
    assert there.prompt("t") == [payload(one) for one in whole]
    assert_clean(here, there)


def test_a_push_sends_each_block_once_and_layers_as_they_are_computed() -> None:
    world, here, there = two_engines()
    there.expect("t")
    here.offer("t", "d", CONTEXT)
    for layer in range(LAYERS):
        here.give("t", CONTEXT, layer + 1, first=layer)
        world.run(0.5)
        assert there.counts["bytes_taken"] == (layer + 1) * 8 * BLOCK_BYTES // LAYERS
    there.wait(PromptTransferEnded, "t")
    assert there.prompt("t") == [payload(one) for one in CONTEXT]
    assert here.counts["bytes_pushed"] == 8 * BLOCK_BYTES
    assert_clean(here, there)
