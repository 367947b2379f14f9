"""Each guard of what comes in, and of time, alone: without it something here goes wrong."""

from __future__ import annotations

from kv_blocks import keys, payload
from simulated_transfers import LAYER_BYTES, World, assert_clean
from sojourn_server.kv_transfer.transfer_actions import PushEnded, SendMessage
from sojourn_server.kv_transfer.transfer_wire import AbortMessage, DataMessage, NeedMessage

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
    [conn] = q.core.pushes.conns()
    wrong = [memoryview(b"x" * LAYER_BYTES)]
    data = DataMessage(transfer="second", layer=0, indices=[0], traffic_class="kv")  # type: ignore[arg-type]
    q.core.ctx.actions.append(SendMessage(conn, data, wrong))
    world.carry_out(q)
    world.run(0.1)
    assert not q.over(PushEnded, "second").complete
    assert [message.transfer for _, _, message in world.messages if isinstance(message, AbortMessage)] == [
        "second"
    ]
    p.give("first", CONTEXT)
    d.do(d.core.prompts.expect, "first")
    world.run(1.0)
    assert d.prompt("first") == [payload(one) for one in CONTEXT]
    world.run(1.0)
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
    world.run(p.core.ctx.limits.patience_s - 0.5)
    assert p.over(PushEnded, "t") is None
    world.run(2.0)
    assert p.over(PushEnded, "t").why == "the peer shows no progress"
