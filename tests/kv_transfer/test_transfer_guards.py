"""Each guard of what comes in, and of time, alone: without it something here goes wrong."""

from __future__ import annotations

import pytest
from kv_blocks import LAYERS, keys, payload
from simulated_transfers import LAYER_BYTES, PushEnded, World, assert_clean, layers_of, two_engines
from sojourn_server.kv_transfer.transfer import TransferOutcome
from sojourn_server.kv_transfer.transfer_wire import DataMessage, HelloMessage, NeedMessage

CONTEXT = keys(*range(4))


def test_a_block_that_somebody_else_brings_is_not_taken_from_a_peer_who_was_not_asked_for_it() -> None:
    world = World()
    p, q, d = world.engine("p"), world.engine("q"), world.engine("d")
    p.offer("first", "d", CONTEXT)
    world.run(0.1)
    q.offer("second", "d", CONTEXT)
    world.run(0.1)
    needs = [(to, message) for _, to, message in world.messages if isinstance(message, NeedMessage)]
    assert [(to, len(message.indices)) for to, message in needs] == [("p", 4), ("q", 0)]
    conn = q.transfers["push", "second"].conn
    wrong = [memoryview(b"x" * LAYER_BYTES)]
    world.do(conn.send(DataMessage(transfer="second", layer=0, indices=[0]), wrong))
    p.give("first", CONTEXT)
    d.expect("first")
    world.run(1.0)
    assert d.prompt("first") == [payload(one) for one in CONTEXT]
    assert q.wait(PushEnded, "second").complete
    d.forget("second")
    assert_clean(p, q, d)


def test_a_sender_that_computes_for_long_has_its_patience_from_its_last_layer_on() -> None:
    world = World()
    p = world.engine("p")
    world.engine("d")
    p.offer("t", "d", CONTEXT)
    world.run(0.1)
    # D says nothing more, and all that can be done is P's own computing.
    world.lose = lambda sender, receiver, message: sender == "d"
    world.run(5.0)
    assert p.over(PushEnded, "t") is None
    p.give("t", CONTEXT)
    world.run(p.node.limits.patience_s - 0.5)
    assert p.over(PushEnded, "t") is None
    world.run(2.0)
    assert p.over(PushEnded, "t").why == "the peer shows no progress"


def test_a_dial_that_is_not_answered_fails_and_the_next_is_another() -> None:
    world, p, _ = two_engines()
    world.lose = lambda sender, receiver, message: isinstance(message, HelloMessage)
    p.offer("t", "d", CONTEXT)
    assert p.wait(PushEnded, "t").why == "d does not answer"
    world.lose = lambda sender, receiver, message: False
    p.push("u", "d", CONTEXT)
    assert p.wait(PushEnded, "u").complete
    world.kill("d")
    p.push("v", "d", CONTEXT)
    assert p.wait(PushEnded, "v").why == "cannot reach d: connection refused"
    assert_clean(p)


@pytest.mark.parametrize("grows", [False, True])
def test_a_peer_that_says_it_lives_and_gives_nothing_loses_its_buffers(grows: bool) -> None:
    world, p, d = two_engines()
    lease_s = d.node.limits.lease_s
    for number in range(20):
        p.offer(f"t{number}", "d", keys(*range(100 * number, 100 * number + 60)))
    world.run(2 * lease_s)
    assert d.buffers.used >= 60, "a long step is no crime"
    if grows:
        p.node.buffers.released = 10**9
    for _ in range(20):
        p.node.buffers.released += grows
        world.run(5 * lease_s)
    assert not d.node.prompts
    assert_clean(d)


def test_a_second_push_of_an_open_transfer_fails_and_the_first_goes_on() -> None:
    world, p, d = two_engines()
    p.offer("t", "d", CONTEXT)
    first = p.transfers["push", "t"]
    second = p.offer("t", "d", CONTEXT)
    assert "already" in p.wait(PushEnded, "t").why
    second.abort()
    for layer in range(LAYERS):
        first.give(layer, layers_of(CONTEXT, layer))
    world.run(1.0)
    assert first.outcome == TransferOutcome(len(CONTEXT))
    d.forget("t")
    assert_clean(p, d)
