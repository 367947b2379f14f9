"""What goes wrong between two engines and their store. After each: nothing leaked, and everyone was told."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
from kv_blocks import BLOCK_BYTES, identity, key, keys, payload
from simulated_transfers import (
    Engine,
    World,
    assert_clean,
    two_engines,
)
from sojourn_server.kv_transfer.transfer import STALLED, TransferOutcome
from sojourn_server.kv_transfer.transfer_wire import (
    AbortMessage,
    AnyWireMessage,
    CompleteMessage,
    DataMessage,
    FailedMessage,
    HelloMessage,
    PingMessage,
    ReadMessage,
    RefusedMessage,
    WireMessage,
)

CONTEXT = keys(*range(8))
WHOLE = [*CONTEXT, b"tail of t"]
PATIENCE_S = 1.5
LEASE_S = 30.0
SLOW = {"storage_read": 1000.0, "compute": 1500.0}
"""Rates of an engine at which pings are sent, too."""

SPOKEN = [each for each in get_args(AnyWireMessage) if each not in (RefusedMessage, AbortMessage)]
"""What is said while a turn goes well or a block is missing; the two others are said when it does not."""


def turn(world: World, here: Engine, there: Engine, stop: Callable[[], bool], limit_s: float = 10.0) -> None:
    """One request: half of its context is read there, the rest is computed, and all of it is pushed."""
    world.put(*CONTEXT)
    world.broken[key(6)] = "damaged"  # so that Failed is said too
    here.load("t", CONTEXT, address="d", total=9)
    world.run(limit_s, until=lambda: stop() or here.over("load", "t") is not None)
    if "p" in world.engines and here.over("load", "t") is not None:
        here.end_load("t")
        here.push("t", "d", WHOLE)
    if "d" in world.engines:
        there.expect("t")
    world.run(limit_s, until=lambda: stop() or there.over("prompt", "t") is not None)


def release_buffers(world: World, *engines: Engine) -> None:
    """Engines take what is theirs; what is nobody's ends by itself."""
    for engine in engines:
        if engine.alive:
            engine.end_load("t")
            engine.forget("t")
    world.run(3 * LEASE_S)
    assert_clean(*(engine for engine in engines if engine.alive))


@pytest.mark.parametrize("which", ["first", "last"])
@pytest.mark.parametrize("kind", SPOKEN, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dies", ["receiver", "sender"])
def test_a_peer_that_dies_at_any_message_leaves_nothing_behind(
    kind: type[WireMessage], dies: str, which: str
) -> None:
    task_dry_run, here, there = two_engines(rates=SLOW)
    turn(task_dry_run, here, there, lambda: False)
    times = [at for at, (_, _, message) in enumerate(task_dry_run.messages) if isinstance(message, kind)]
    fatal = times[0 if which == "first" else -1]

    world, here, there = two_engines(rates=SLOW)
    dead: list[str] = []

    def cut(sender: str, receiver: str, message: WireMessage) -> bool:
        if len(world.messages) - 1 != fatal or dead:
            return False
        assert isinstance(message, kind), "the world is not what it was at the rehearsal"
        dead.append(receiver if dies == "receiver" else sender)
        if dies == "sender":
            world.kill(sender)
        return dies == "receiver"

    world.cut = cut
    began = world.now
    turn(world, here, there, lambda: bool(dead))
    assert dead
    # Each of those who live learns of it, and soon: by the connection or by patience.
    (survivor,) = (engine for engine in (here, there) if engine.alive)
    died = world.now
    world.run(PATIENCE_S + 1.0)
    if survivor is here:
        assert here.over("load", "t") is not None
        assert not here.node.pushes
    elif survivor.over("prompt", "t") is None:
        survivor.expect("t")
        died = world.now
        world.run(PATIENCE_S + 1.0, until=lambda: survivor.over("prompt", "t") is not None)
        assert survivor.over("prompt", "t") is not None
    assert world.now - died <= PATIENCE_S + 1.1
    assert world.now - began < 10.0
    release_buffers(world, here, there)


@pytest.mark.parametrize(
    "kind", [each for each in SPOKEN if each is not PingMessage], ids=lambda kind: kind.__name__
)
def test_a_message_that_is_lost_and_nobody_hears_of_it_costs_a_lease_and_no_more(
    kind: type[WireMessage],
) -> None:
    """No connection does that; a peer that forgets does."""
    world, here, there = two_engines(rates=SLOW)
    world.put(*CONTEXT)
    world.lose = lambda sender, receiver, message: isinstance(message, kind)
    turn(world, here, there, lambda: False, LEASE_S + 5.0)
    # The silence is broken off, with what has come till then, and no wrong byte was taken for a right one.
    loaded = here.over("load", "t")
    assert loaded is not None
    prompt = there.over("prompt", "t")
    if not prompt.why:
        assert there.prompt("t") == [payload(one) for one in WHOLE]
    # Where nothing was read there, all is computed here and pushed.
    assert (not prompt.why) == (kind in (ReadMessage, FailedMessage, CompleteMessage))
    pushed = here.over("push", "t")
    if pushed is None:
        world.run(LEASE_S + PATIENCE_S)
        pushed = here.over("push", "t")
    assert pushed.why or not prompt.why
    release_buffers(world, here, there)


# -- the store ---------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(8))
@pytest.mark.parametrize("side", ["here", "there"])
def test_what_lies_before_a_block_that_cannot_be_read_is_good(side: str, index: int) -> None:
    world, here, there = two_engines()
    world.put(*CONTEXT)
    world.broken[key(index)] = "its payload is damaged"
    here.load("t", CONTEXT, **({} if side == "here" else {"address": "d", "total": 9}))
    assert here.wait("load", "t") == TransferOutcome(index, "its payload is damaged")
    assert here.taken("t") == [payload(one) for one in CONTEXT[:index]]
    # The rest is computed here and pushed; the peer asks for what it could not read either.
    here.push("t", "d", WHOLE)
    there.expect("t")
    there.wait("prompt", "t")
    assert there.prompt("t") == [payload(one) for one in WHOLE]
    assert_clean(here, there)


@pytest.mark.parametrize("side", ["here", "there"])
def test_storage_that_never_answers_costs_patience_and_few_slots_until_it_does(side: str) -> None:
    world, here, there = two_engines()
    reader = here if side == "here" else there
    world.put(*CONTEXT)
    world.hung.add(key(3))
    here.load("t", CONTEXT, **({} if side == "here" else {"address": "d", "total": 9}))
    world.settle()
    unknown = world.call(lambda: reader.node.reads.queued_s(world.now))
    assert unknown is None or reader.node.reads.block_s, "0 would say that nothing waits"
    assert here.wait("load", "t") == TransferOutcome(3, "storage has not answered")
    assert reader.node.reads.queued_s(world.now + 60.0) > 60.0, "it would be chosen first"
    assert here.taken("t") == [payload(one) for one in CONTEXT[:3]]
    there.forget("t")
    assert reader.buffers.used == 1
    world.released.set()
    world.settle()
    assert_clean(here, there)


# -- leases, restarts, sizes, handshakes -----------------------------------------------------------


def test_a_peer_that_has_started_anew_is_not_believed_to_have_what_it_had() -> None:
    world, here, _ = two_engines()
    here.push("t", "d", CONTEXT)
    world.run(1.0)
    world.kill("d")  # with the whole context in its buffers
    again = world.engine("d")
    again.expect("t")
    assert again.wait("prompt", "t").why
    again.forget("t")
    here.push("v", "d", CONTEXT)
    again.expect("v")
    world.run(1.0)
    assert again.prompt("v") == [payload(one) for one in CONTEXT]
    assert here.counts["bytes_pushed"] == 2 * len(CONTEXT) * BLOCK_BYTES
    assert_clean(here, again)


def test_a_context_larger_than_the_peers_buffers_is_refused_with_both_sizes() -> None:
    world, here, there = two_engines(limits={"slots": 6})
    world.put(*CONTEXT)
    there.expect("t")
    here.load("r", CONTEXT, address="d")
    here.offer("t", "d", CONTEXT)
    world.run(1.0)
    why = "a context of 8 Full Blocks does not fit buffers of 6; make them larger"
    assert here.over("load", "r") == TransferOutcome(8), "it was read here then"
    assert here.counts["blocks_read_instead"] == 8
    assert here.over("push", "t") == TransferOutcome(0, why)
    assert there.over("prompt", "t") == TransferOutcome(0, why)
    assert there.counts["too_large"] == 2
    here.end_load("r")
    there.forget("t")
    assert_clean(here, there)


def test_a_prompt_with_more_keys_than_a_message_holds_fails_with_both_sizes() -> None:
    _, here, there = two_engines()
    here.offer("t", "d", [bytes(9 << 20)])
    assert here.wait("push", "t").why.startswith("a message of 9437")
    assert_clean(here, there)


def test_peers_with_kv_of_another_kind_are_refused_before_a_byte_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    here, there = world.engine("p", identity=identity(kv_dtype="fp8")), world.engine("d")
    here.offer("t", "d", CONTEXT)
    world.run(1.0)
    pushed = here.over("push", "t")
    assert pushed.why.startswith(
        "KV of another kind cannot be used here: kv_dtype (--kv-cache-dtype): 'fp8' there, 'float32' here"
    )
    assert {type(message) for _, _, message in world.messages} == {HelloMessage, RefusedMessage}
    assert here.counts["refused"] == there.counts["refused"] > 0
    # Both logs say it.
    assert "used here: kv_dtype" in caplog.text
    assert f"p: no KV goes to or from d: {pushed.why}" in caplog.text
    assert_clean(here, there)


def test_a_step_that_waits_for_layers_loses_patience_with_a_peer_that_lives() -> None:
    world, here, there = two_engines()
    world.put(*CONTEXT)
    world.lose = lambda sender, receiver, message: isinstance(message, DataMessage) and message.layer > 0
    began = world.now
    here.load("t", CONTEXT, address="d")
    assert here.wait("load", "t") == TransferOutcome(0, STALLED)
    assert world.now - began < 2 * PATIENCE_S
    assert here.taken("t") == []
    world.run(2 * LEASE_S)
    assert_clean(here, there)


def test_a_load_waits_for_a_busy_peer_for_a_lease() -> None:
    world, here, there = two_engines(rates={"storage_read": 192.0}, limits={"slots": 110})
    world.put(*keys(*range(100, 200)), *CONTEXT)
    there.load("before", keys(*range(100, 200)))
    began = world.now
    here.load("t", CONTEXT, address="d")
    world.run(2 * LEASE_S, until=lambda: here.over("load", "t") is not None)
    assert here.over("load", "t") == TransferOutcome(len(CONTEXT))
    assert LEASE_S <= world.now - began < LEASE_S + 1.0
    assert here.counts["blocks_read"] == len(CONTEXT), "it was read here then"
    here.taken("t")
    world.run(60.0)
    there.taken("before")
    assert_clean(here, there)
