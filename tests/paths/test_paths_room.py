"""Contexts that nobody asks for, while others wait for their buffers."""

from __future__ import annotations

import pytest
from paths_world import Engine, World, assert_clean, content, keys
from sojourn_server.paths.actions import LoadOver, PromptOver, PushOver


def pushed(world: World, sender: Engine, name: str, first: int, blocks: int = 8) -> list[bytes]:
    context = keys(*range(first, first + blocks))
    sender.offer(name, "d", context)
    sender.give(name, context)
    return context


def test_what_was_left_makes_room_before_others_lose_patience() -> None:
    world = World()
    p, d = world.engine("p"), world.engine("d", limits={"slots": 16})
    for number in range(2):
        pushed(world, p, f"left{number}", 100 * number)
    world.run(0.1)
    assert d.core.depot.buffers.used == 16
    for number in range(6):
        context = pushed(world, p, f"live{number}", 1000 + 10 * number)
        d.do(d.core.expect, f"live{number}")
        world.run(1.4, until=lambda name=f"live{number}": d.over(PromptOver, name) is not None)  # type: ignore[misc]
        assert d.over(PromptOver, f"live{number}").complete
        assert p.over(PushOver, f"live{number}").complete
        assert d.prompt(f"live{number}") == [content(one) for one in context]
    assert d.core.depot.counts["prompts_evicted"] == 1  # and no more than were in the way
    d.do(d.core.expect, "left0")
    over = d.over(PromptOver, "left0")
    assert over is not None, "it is told at once"
    assert not over.complete
    assert "buffers" in over.why
    d.do(d.core.end_prompt, "left0")
    d.do(d.core.expect, "left1")
    assert len(d.prompt("left1")) == 8
    world.run(1.0)
    assert_clean(p, d)


def test_what_is_expected_or_came_only_now_is_left_alone() -> None:
    world = World()
    p, d = world.engine("p"), world.engine("d", limits={"slots": 16})
    pushed(world, p, "asked", 0)
    d.do(d.core.expect, "asked")
    world.run(5.0)
    pushed(world, p, "new", 100)
    world.run(0.1)
    pushed(world, p, "next", 200)
    world.run(0.3)
    assert d.core.depot.counts["prompts_evicted"] == 0
    d.do(d.core.expect, "new")
    world.run(5.0)
    assert d.core.depot.counts["prompts_evicted"] == 0
    assert [len(d.prompt(name)) for name in ("asked", "new")] == [8, 8]
    world.run(60.0)
    assert_clean(p, d)


def test_without_anybody_who_waits_it_stays_for_its_lease() -> None:
    world = World()
    p, d = world.engine("p"), world.engine("d", limits={"slots": 16})
    pushed(world, p, "left", 0)
    world.run(20.0)
    d.do(d.core.expect, "left")
    assert d.over(PromptOver, "left").complete
    assert len(d.prompt("left")) == 8
    assert_clean(d)


@pytest.mark.parametrize("dies", [True, False])
def test_what_was_read_for_a_peer_that_is_gone_makes_room_too(dies: bool) -> None:
    world = World()
    p, q, d = world.engine("p"), world.engine("q"), world.engine("d", limits={"slots": 8})
    context = keys(*range(8))
    world.put(*context)
    p.load("read", context, address="d")
    world.run(0.5)
    assert p.over(LoadOver, "read").good == 8
    p.taken("read")
    if dies:
        world.kill("p")
    pushed(world, q, "next", 100)
    d.do(d.core.expect, "next")
    world.run(3.0)
    # A peer that is there may be computing the rest of it.
    assert d.over(PromptOver, "next").complete is dies
    d.do(d.core.end_prompt, "next")
    world.run(60.0)
    assert_clean(q, d)
