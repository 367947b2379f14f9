"""Contexts that nobody asks for, while others wait for their buffers."""

from __future__ import annotations

from kv_blocks import keys, payload
from simulated_transfers import (
    Engine,
    PromptTransferEnded,
    PushEnded,
    World,
    assert_clean,
    two_engines,
)


def pushed(world: World, sender: Engine, name: str, first: int, blocks: int = 8) -> list[bytes]:
    context = keys(*range(first, first + blocks))
    sender.push(name, "d", context)
    return context


def test_what_was_left_makes_room_before_others_lose_patience() -> None:
    world, p, d = two_engines(limits={"slots": 16})
    for number in range(2):
        pushed(world, p, f"left{number}", 100 * number)
    world.run(0.1)
    assert d.buffers.used == 16
    for number in range(6):
        context = pushed(world, p, f"live{number}", 1000 + 10 * number)
        d.expect(f"live{number}")
        world.run(1.4, until=lambda name=f"live{number}": d.over(PromptTransferEnded, name) is not None)  # type: ignore[misc]
        assert d.over(PromptTransferEnded, f"live{number}").complete
        world.settle()
        assert p.over(PushEnded, f"live{number}").complete
        assert d.prompt(f"live{number}") == [payload(one) for one in context]
    assert d.counts["prompts_evicted"] == 1  # and no more than were in the way
    d.expect("left1")
    assert len(d.prompt("left1")) == 8
    world.run(1.0)
    assert_clean(p, d)


def test_what_a_request_in_the_queue_expects_stays_and_what_nobody_expects_makes_room() -> None:
    world, p, d = two_engines(limits={"slots": 16})
    pushed(world, p, "expected", 0)
    d.expect("expected")
    world.run(1.0)
    pushed(world, p, "left", 100)
    world.run(1.0)
    pushed(world, p, "next", 200)
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
