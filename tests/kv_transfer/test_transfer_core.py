"""The ways of KV between two engines and their store, in virtual time."""

from __future__ import annotations

import asyncio

import pytest
from kv_blocks import LAYERS, keys, payload
from simulated_transfers import (
    LAYER_BYTES,
    Engine,
    World,
    assert_clean,
    layers_of,
    two_engines,
)
from sojourn_server.kv_transfer.transfer import TransferOutcome
from sojourn_server.kv_transfer.transfer_wire import DataMessage, HelloMessage, NeedMessage

CONTEXT = keys(*range(8))
FOUR = CONTEXT[:4]


def test_a_peer_reads_it_and_its_layers_come_in_order(  # the decode side's path
) -> None:
    world, here, there = two_engines()
    world.put(*CONTEXT)
    here.load("t", CONTEXT, address="d", total=9)
    assert here.wait("load", "t") == TransferOutcome(8)
    assert {name for name, _ in world.reads} == {"d"}
    said = [
        message for sender, _, message in world.messages if isinstance(message, DataMessage) and sender == "d"
    ]
    assert [message.layer for message in said] == sorted(message.layer for message in said)
    assert here.taken("t") == [payload(one) for one in CONTEXT]

    # What was read there stays there while this engine computes: only the ninth block is sent.
    world.run(3.5 * here.node.limits.lease_s)
    whole = [*CONTEXT, b"tail of t"]
    here.offer("t", "d", whole)
    here.give("t", whole)
    there.expect("t")
    assert there.wait("prompt", "t").why == ""
    assert here.over("push", "t").why == ""
    assert [message.indices for _, _, message in world.messages if isinstance(message, NeedMessage)] == [[8]]
    assert there.prompt("t") == [payload(one) for one in whole]
    assert_clean(here, there)


# -- Each guard of what comes in, and of time: without it something here goes wrong.


def test_a_dial_that_is_not_answered_fails_and_the_next_is_another() -> None:
    world, p, _ = two_engines()
    world.lose = lambda sender, receiver, message: isinstance(message, HelloMessage)
    p.offer("t", "d", FOUR)
    assert p.wait("push", "t").why == "cannot reach d: it does not answer"
    world.lose = lambda sender, receiver, message: False
    p.push("u", "d", FOUR)
    assert not p.wait("push", "u").why
    world.kill("d")
    p.push("v", "d", FOUR)
    assert p.wait("push", "v").why == "cannot reach d: connection refused"
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
    assert p.over("push", "t0").why
    assert_clean(p, d)


@pytest.mark.parametrize("ticks", range(8))
def test_a_load_that_ends_as_its_buffers_are_granted_gives_them_back(ticks: int) -> None:
    world = World()
    engine = world.engine("p", limits={"slots": 4})
    world.put(*CONTEXT)
    engine.load("first", FOUR)
    engine.wait("load", "first")
    engine.load("second", CONTEXT[4:])

    async def end_both() -> None:
        engine.transfers["load", "first"].end()
        for _ in range(ticks):
            await asyncio.sleep(0)
        engine.transfers["load", "second"].end()

    world.do(end_both())
    assert_clean(engine)


def test_data_that_was_not_asked_for_is_not_taken() -> None:
    world, p, d = two_engines()
    world.put(FOUR[0])
    p.load("t", FOUR, address="d", total=4)
    assert p.wait("load", "t").good == 1
    p.end_load("t")
    p.offer("t", "d", FOUR)
    world.run(0.1)
    data = DataMessage(transfer="t", layer=0, indices=[0])
    world.do(p.transfers["push", "t"].conn.send(data, [memoryview(b"x" * LAYER_BYTES)]))
    assert p.wait("push", "t").why == "the peer sent unexpected data"
    assert d.counts["out_of_order"] == 1
    assert_clean(p, d)


def test_a_second_push_of_an_open_transfer_fails_and_the_first_goes_on() -> None:
    world, p, d = two_engines()
    p.offer("t", "d", FOUR)
    first = p.transfers["push", "t"]
    second = p.offer("t", "d", FOUR)
    assert "already" in p.wait("push", "t").why
    second.end()
    for layer in range(LAYERS):
        first.give(layer, layers_of(FOUR, layer))
    world.run(1.0)
    assert first.outcome == TransferOutcome(len(FOUR))
    d.forget("t")
    assert_clean(p, d)


def test_a_peer_that_has_read_for_a_request_is_told_when_it_ends_without_a_push() -> None:
    world, p, d = two_engines()
    world.put(*CONTEXT)
    p.load("t", CONTEXT, address="d", total=9)
    p.wait("load", "t")
    p.end_load("t")
    assert d.buffers.used == 9, "the prompt is being computed"
    p.node.give_up("t", "d")
    world.run(0.1)
    assert_clean(p, d)


# -- Contexts that no request asks for, while others wait for their buffers.


def pushed(sender: Engine, name: str, first: int) -> list[bytes]:
    context = keys(*range(first, first + 8))
    sender.push(name, "d", context)
    return context


def test_what_was_left_makes_room_before_others_lose_patience() -> None:
    world, p, d = two_engines(limits={"slots": 16})
    for number in range(2):
        pushed(p, f"left{number}", 100 * number)
    world.run(0.1)
    assert d.buffers.used == 16
    for number in range(6):
        context = pushed(p, f"live{number}", 1000 + 10 * number)
        d.expect(f"live{number}")
        world.run(1.4, until=lambda name=f"live{number}": d.over("prompt", name) is not None)  # type: ignore[misc]
        assert not d.over("prompt", f"live{number}").why
        world.settle()
        assert not p.over("push", f"live{number}").why
        assert d.prompt(f"live{number}") == [payload(one) for one in context]
    assert d.counts["prompts_evicted"] == 1  # and no more than were in the way
    d.expect("left1")
    assert len(d.prompt("left1")) == 8
    world.run(1.0)
    assert_clean(p, d)


def test_what_a_request_in_the_queue_expects_stays_and_what_nobody_expects_makes_room() -> None:
    world, p, d = two_engines(limits={"slots": 16})
    pushed(p, "expected", 0)
    d.expect("expected")
    world.run(1.0)
    pushed(p, "left", 100)
    world.run(1.0)
    pushed(p, "next", 200)
    d.expect("next")
    world.run(1.4)
    assert len(d.prompt("next")) == 8
    assert d.counts["prompts_evicted"] == 1
    assert "left" not in d.node.prompts
    d.transfers["prompt", "expected"].blocks()  # taken while the request still waits
    world.run(40.0)
    assert len(d.prompt("expected")) == 8
    world.run(1.0)
    assert_clean(p, d)
