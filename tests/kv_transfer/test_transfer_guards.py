"""Each guard of what comes in, and of time, alone: without it something here goes wrong."""

from __future__ import annotations

from kv_blocks import LAYERS, keys
from simulated_transfers import LAYER_BYTES, LoadEnded, PushEnded, assert_clean, layers_of, two_engines
from sojourn_server.kv_transfer.transfer import TransferOutcome
from sojourn_server.kv_transfer.transfer_wire import DataMessage, HelloMessage

CONTEXT = keys(*range(4))


def test_a_dial_that_is_not_answered_fails_and_the_next_is_another() -> None:
    world, p, _ = two_engines()
    world.lose = lambda sender, receiver, message: isinstance(message, HelloMessage)
    p.offer("t", "d", CONTEXT)
    assert p.wait(PushEnded, "t").why == "cannot reach d: it does not answer"
    world.lose = lambda sender, receiver, message: False
    p.push("u", "d", CONTEXT)
    assert p.wait(PushEnded, "u").complete
    world.kill("d")
    p.push("v", "d", CONTEXT)
    assert p.wait(PushEnded, "v").why == "cannot reach d: connection refused"
    assert_clean(p)


def test_a_peer_that_lives_and_gives_nothing_loses_its_buffers() -> None:
    world, p, d = two_engines()
    lease_s = d.node.limits.lease_s
    for number in range(20):
        p.offer(f"t{number}", "d", keys(*range(100 * number, 100 * number + 60)))
    world.run(lease_s - 1.0)
    assert d.buffers.used == 60, "a long step is no crime"
    world.run(2.0)
    assert not d.node.prompts
    assert not p.over(PushEnded, "t0").complete
    assert_clean(p, d)


def test_data_that_was_not_asked_for_is_not_taken() -> None:
    world, p, d = two_engines()
    world.put(CONTEXT[0])
    p.load("t", CONTEXT, address="d", total=4)
    assert p.wait(LoadEnded, "t").good == 1
    p.end_load("t")
    p.offer("t", "d", CONTEXT)
    world.run(0.1)
    data = DataMessage(transfer="t", layer=0, indices=[0])
    world.do(p.transfers["push", "t"].conn.send(data, [memoryview(b"x" * LAYER_BYTES)]))
    assert p.wait(PushEnded, "t").why == "the peer sent unexpected data"
    assert d.counts["out_of_order"] == 1
    assert_clean(p, d)


def test_a_second_push_of_an_open_transfer_fails_and_the_first_goes_on() -> None:
    world, p, d = two_engines()
    p.offer("t", "d", CONTEXT)
    first = p.transfers["push", "t"]
    second = p.offer("t", "d", CONTEXT)
    assert "already" in p.wait(PushEnded, "t").why
    second.end()
    for layer in range(LAYERS):
        first.give(layer, layers_of(CONTEXT, layer))
    world.run(1.0)
    assert first.outcome == TransferOutcome(len(CONTEXT))
    d.forget("t")
    assert_clean(p, d)
