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
    d.expect("left0")
    over = d.over(PromptTransferEnded, "left0")
    assert over is not None, "it is told at once"
    assert not over.complete
    assert "buffers" in over.why
    d.forget("left0")
    d.expect("left1")
    assert len(d.prompt("left1")) == 8
    world.run(1.0)
    assert_clean(p, d)


# -- contexts whose request waits in this engine's own queue ------------------------------------------


def queued(world: World, engine: Engine, *names: str, seconds: float) -> None:
    """Requests wait in an engine's queue; it steps, and says so."""
    end = world.now + seconds
    while world.now < end:
        engine.want(names)
        world.run(min(0.5, end - world.now))


def test_what_nobody_wants_makes_room_before_what_a_request_in_the_queue_wants() -> None:
    world, p, d = two_engines(limits={"slots": 16})
    pushed(world, p, "wanted", 0)
    world.run(1.0)
    pushed(world, p, "left", 100)
    queued(world, d, "wanted", seconds=1.0)
    pushed(world, p, "next", 200)
    d.expect("next")
    queued(world, d, "wanted", seconds=1.4)
    assert d.over(PromptTransferEnded, "next").complete
    assert len(d.prompt("next")) == 8
    queued(world, d, "wanted", seconds=40.0)
    d.expect("left")
    assert not d.over(PromptTransferEnded, "left").complete
    d.forget("left")
    d.expect("wanted")
    assert len(d.prompt("wanted")) == 8
    world.run(1.0)
    assert_clean(p, d)


def test_requests_in_the_queue_leave_a_share_of_the_buffers_to_others() -> None:
    """The last in the queue yields, and of those before it none."""
    world, p, d = two_engines(limits={"slots": 32})
    names = [f"t{number}" for number in range(4)]
    for number, name in enumerate(names):
        pushed(world, p, name, 100 * number)
        queued(world, d, *names[: number + 1], seconds=0.5)
    queued(world, d, *names, seconds=40.0)
    assert d.counts["prompts_evicted"] == 0, "no other prompt wants the slots"
    for number in range(3):
        pushed(world, p, f"live{number}", 1000 + 100 * number)
        d.expect(f"live{number}")
        queued(world, d, *names, seconds=1.4)
        assert len(d.prompt(f"live{number}")) == 8
    assert d.counts["prompts_evicted"] == 1
    for name in names:
        d.expect(name)
    assert [d.over(PromptTransferEnded, name).complete for name in names] == [True, True, True, False]
    assert "queue" in d.over(PromptTransferEnded, "t3").why
    for name in names:
        d.forget(name)
    world.run(1.0)
    assert_clean(p, d)
