"""Contexts that nobody asks for, while others wait for their buffers."""

from __future__ import annotations

import pytest
from simulated_transfers import Engine, World, assert_clean, content, keys, two_engines
from sojourn_server.kv_transfer.transfer_actions import LoadEnded, PromptTransferEnded, PushEnded


def pushed(world: World, sender: Engine, name: str, first: int, blocks: int = 8) -> list[bytes]:
    context = keys(*range(first, first + blocks))
    sender.push(name, "d", context)
    return context


def test_what_was_left_makes_room_before_others_lose_patience() -> None:
    world, p, d = two_engines(limits={"slots": 16})
    for number in range(2):
        pushed(world, p, f"left{number}", 100 * number)
    world.run(0.1)
    assert d.core.ctx.buffers.used == 16
    for number in range(6):
        context = pushed(world, p, f"live{number}", 1000 + 10 * number)
        d.do(d.core.expect, f"live{number}")
        world.run(1.4, until=lambda name=f"live{number}": d.over(PromptTransferEnded, name) is not None)  # type: ignore[misc]
        assert d.over(PromptTransferEnded, f"live{number}").complete
        assert p.over(PushEnded, f"live{number}").complete
        assert d.prompt(f"live{number}") == [content(one) for one in context]
    assert d.core.ctx.counts["prompts_evicted"] == 1  # and no more than were in the way
    d.do(d.core.expect, "left0")
    over = d.over(PromptTransferEnded, "left0")
    assert over is not None, "it is told at once"
    assert not over.complete
    assert "buffers" in over.why
    d.do(d.core.end_prompt, "left0")
    d.do(d.core.expect, "left1")
    assert len(d.prompt("left1")) == 8
    world.run(1.0)
    assert_clean(p, d)


def test_what_is_expected_or_came_only_now_is_left_alone() -> None:
    world, p, d = two_engines(limits={"slots": 16})
    pushed(world, p, "asked", 0)
    d.do(d.core.expect, "asked")
    world.run(5.0)
    pushed(world, p, "new", 100)
    world.run(0.1)
    pushed(world, p, "next", 200)
    world.run(0.3)
    assert d.core.ctx.counts["prompts_evicted"] == 0
    d.do(d.core.expect, "new")
    world.run(5.0)
    assert d.core.ctx.counts["prompts_evicted"] == 0
    assert [len(d.prompt(name)) for name in ("asked", "new")] == [8, 8]
    world.run(60.0)
    assert_clean(p, d)


def test_without_anybody_who_waits_it_stays_for_its_lease() -> None:
    world, p, d = two_engines(limits={"slots": 16})
    pushed(world, p, "left", 0)
    world.run(20.0)
    d.do(d.core.expect, "left")
    assert d.over(PromptTransferEnded, "left").complete
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
    assert p.over(LoadEnded, "read").good == 8
    p.taken("read")
    if dies:
        world.kill("p")
    pushed(world, q, "next", 100)
    d.do(d.core.expect, "next")
    world.run(3.0)
    # A peer that is there may be computing the rest of it.
    assert d.over(PromptTransferEnded, "next").complete is dies
    d.do(d.core.end_prompt, "next")
    world.run(60.0)
    assert_clean(q, d)


# -- contexts whose request waits in this engine's own queue ------------------------------------------


def queued(world: World, engine: Engine, *names: str, seconds: float) -> None:
    """Requests wait in an engine's queue; it steps, and says so."""
    end = world.now + seconds
    while world.now < end:
        engine.do(engine.core.want, names)
        world.run(min(0.5, end - world.now))


def test_a_context_whose_request_is_in_the_queue_stays_however_long_that_is() -> None:
    world, p, d = two_engines(limits={"slots": 16})
    context = pushed(world, p, "t", 0)
    queued(world, d, "t", seconds=200.0)
    d.do(d.core.expect, "t")
    assert d.over(PromptTransferEnded, "t").complete
    assert d.prompt("t") == [content(one) for one in context]
    assert_clean(p, d)


def test_what_nobody_wants_makes_room_before_what_a_request_in_the_queue_wants() -> None:
    world, p, d = two_engines(limits={"slots": 16})
    pushed(world, p, "wanted", 0)
    world.run(1.0)
    pushed(world, p, "left", 100)
    queued(world, d, "wanted", seconds=1.0)
    pushed(world, p, "next", 200)
    d.do(d.core.expect, "next")
    queued(world, d, "wanted", seconds=1.4)
    assert d.over(PromptTransferEnded, "next").complete
    assert len(d.prompt("next")) == 8
    queued(world, d, "wanted", seconds=40.0)
    d.do(d.core.expect, "left")
    assert not d.over(PromptTransferEnded, "left").complete
    d.do(d.core.end_prompt, "left")
    d.do(d.core.expect, "wanted")
    assert len(d.prompt("wanted")) == 8
    world.run(1.0)
    assert_clean(p, d)


def test_what_was_wanted_before_it_was_offered_is_kept_too() -> None:
    world, p, d = two_engines(limits={"slots": 8})
    queued(world, d, "t", seconds=1.0)
    pushed(world, p, "t", 0)
    queued(world, d, "t", seconds=1.0)
    pushed(world, p, "next", 100)
    queued(world, d, "t", seconds=40.0)
    d.do(d.core.expect, "t")
    assert len(d.prompt("t")) == 8
    world.run(60.0)
    assert_clean(p, d)


def test_requests_in_the_queue_leave_a_share_of_the_buffers_to_others() -> None:
    """The last in the queue yields, and of those before it none."""
    world, p, d = two_engines(limits={"slots": 32})
    names = [f"t{number}" for number in range(4)]
    for number, name in enumerate(names):
        pushed(world, p, name, 100 * number)
        queued(world, d, *names[: number + 1], seconds=0.5)
    queued(world, d, *names, seconds=40.0)
    assert d.core.ctx.counts["prompts_evicted"] == 0, "nobody else wants the room"
    for number in range(3):
        pushed(world, p, f"live{number}", 1000 + 100 * number)
        d.do(d.core.expect, f"live{number}")
        queued(world, d, *names, seconds=1.4)
        assert len(d.prompt(f"live{number}")) == 8
    assert d.core.ctx.counts["prompts_evicted"] == 1
    for name in names:
        d.do(d.core.expect, name)
    assert [d.over(PromptTransferEnded, name).complete for name in names] == [True, True, True, False]
    assert "queue" in d.over(PromptTransferEnded, "t3").why
    for name in names:
        d.do(d.core.end_prompt, name)
    world.run(1.0)
    assert_clean(p, d)


def test_the_order_that_the_engine_named_last_says_who_is_last_in_the_queue() -> None:
    """The engine's scheduler may put a later request before an earlier one."""
    world, p, d = two_engines(limits={"slots": 32})
    names = [f"t{number}" for number in range(4)]
    for number, name in enumerate(names):
        pushed(world, p, name, 100 * number)
    queued(world, d, *names, seconds=20.0)
    queued(world, d, *reversed(names), seconds=20.0)
    pushed(world, p, "live", 1000)
    d.do(d.core.expect, "live")
    queued(world, d, *reversed(names), seconds=1.4)
    assert len(d.prompt("live")) == 8
    for name in names:
        d.do(d.core.expect, name)
    assert [d.over(PromptTransferEnded, name).complete for name in names] == [False, True, True, True]
    for name in names:
        d.do(d.core.end_prompt, name)
    world.run(1.0)
    assert_clean(p, d)


def test_a_context_that_fills_the_buffers_is_kept_for_the_first_in_the_queue() -> None:
    world, p, d = two_engines(limits={"slots": 8})
    pushed(world, p, "t", 0)
    queued(world, d, "t", seconds=1.0)
    pushed(world, p, "next", 100)
    d.do(d.core.expect, "next")
    queued(world, d, "t", seconds=3.0)
    assert not d.over(PromptTransferEnded, "next").complete, "who has nothing yet loses nothing"
    d.do(d.core.end_prompt, "next")
    d.do(d.core.expect, "t")
    assert len(d.prompt("t")) == 8
    world.run(1.0)
    assert_clean(p, d)


@pytest.mark.parametrize("how", ["aborted", "silent"])
def test_a_request_that_has_left_the_queue_keeps_nothing(how: str) -> None:
    world, p, d = two_engines(limits={"slots": 8})
    pushed(world, p, "t", 0)
    queued(world, d, "t", seconds=100.0)
    assert d.core.ctx.buffers.used == 8
    if how == "aborted":
        d.do(d.core.expect, "t")
        d.do(d.core.end_prompt, "t")
    else:  # an engine that does not step keeps nothing for ever
        world.run(29.0)
        assert d.core.ctx.buffers.used == 8
        world.run(2.0)
    assert_clean(p, d)


def test_who_asks_for_what_has_lapsed_is_told_at_once() -> None:
    world, p, d = two_engines(limits={"slots": 16})
    pushed(world, p, "t", 0)
    world.run(40.0)
    d.do(d.core.expect, "t")
    over = d.over(PromptTransferEnded, "t")
    assert over is not None
    assert (over.complete, over.why) == (False, "the lease on its buffers has expired")
    d.do(d.core.end_prompt, "t")
    pushed(world, p, "t", 0)
    world.run(0.1)
    d.do(d.core.expect, "t")
    assert len(d.prompt("t")) == 8, "offered again it is another one"
    assert_clean(p, d)
