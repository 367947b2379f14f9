"""What goes wrong between two engines and their store. After each: nothing leaked, and everyone was told."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import get_args

import pytest
from simulated_transfers import (
    BLOCK_BYTES,
    LAYERS,
    Engine,
    World,
    assert_clean,
    content,
    identity,
    key,
    keys,
    two_engines,
)
from sojourn_server.kv_transfer.peer_table import _FIELD_DESCRIPTIONS
from sojourn_server.kv_transfer.transfer_actions import (
    BlockStoreEnded,
    LoadEnded,
    PromptTransferEnded,
    PushEnded,
    WriteBlock,
)
from sojourn_server.kv_transfer.transfer_link import TrafficClass
from sojourn_server.kv_transfer.transfer_wire import (
    AbortMessage,
    AnyWireMessage,
    CompleteMessage,
    DataMessage,
    FailedMessage,
    HelloMessage,
    NeedMessage,
    OfferMessage,
    ProgressMessage,
    ReadMessage,
    RefusedMessage,
    WelcomeMessage,
    WireMessage,
)

CONTEXT = keys(*range(8))
WHOLE = [*CONTEXT, b"tail of t"]
PATIENCE_S = 1.5
LEASE_S = 30.0

SPOKEN = [each for each in get_args(AnyWireMessage) if each not in (RefusedMessage, AbortMessage)]
"""What is said while a turn goes well or a block is missing; the two others are said when it does not."""


def turn(world: World, here: Engine, there: Engine, stop: Callable[[], bool]) -> None:
    """One request: half of its context is read there, the rest is computed, and all of it is pushed."""
    world.put(*CONTEXT)
    world.broken[key(6)] = "damaged"  # so that Failed is said too
    here.load("t", CONTEXT, address="d", total=9)
    world.run(10.0, until=lambda: stop() or here.over(LoadEnded, "t") is not None)
    if "p" in world.engines and here.over(LoadEnded, "t") is not None:
        here.do(here.core.end_load, "t")
        here.push("t", "d", WHOLE)
    if "d" in world.engines:
        there.do(there.core.expect, "t")
    world.run(10.0, until=lambda: stop() or there.over(PromptTransferEnded, "t") is not None)


def world_of_two() -> tuple[World, Engine, Engine]:
    world = World()
    # Slow enough that Progress is said.
    return world, world.engine("p"), world.engine("d", rates={"storage_read": 1000.0, "compute": 1500.0})


def release_buffers(world: World, *engines: Engine) -> None:
    """Engines take what is theirs; what is nobody's ends by itself."""
    for engine in engines:
        if engine.alive:
            engine.do(engine.core.end_load, "t")
            engine.do(engine.core.end_prompt, "t")
    world.run(3 * LEASE_S)
    assert_clean(*(engine for engine in engines if engine.alive))


def test_the_turn_says_everything_that_there_is_to_say() -> None:
    """Else the tests below would pass for messages that never come."""
    world, here, there = world_of_two()
    turn(world, here, there, lambda: False)
    assert {type(message) for _, _, message in world.messages} == set(SPOKEN)
    assert here.over(LoadEnded, "t") == LoadEnded("t", 6, "damaged")
    assert there.over(PromptTransferEnded, "t") == PromptTransferEnded("t", True)
    assert there.prompt("t") == [content(one) for one in WHOLE]
    release_buffers(world, here, there)


@pytest.mark.parametrize("which", ["first", "last"])
@pytest.mark.parametrize("kind", SPOKEN, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dies", ["receiver", "sender"])
def test_a_peer_that_dies_at_any_message_leaves_nothing_behind(
    kind: type[WireMessage], dies: str, which: str
) -> None:
    task_dry_run, here, there = world_of_two()
    turn(task_dry_run, here, there, lambda: False)
    times = [at for at, (_, _, message) in enumerate(task_dry_run.messages) if isinstance(message, kind)]
    fatal = times[0 if which == "first" else -1]

    world, here, there = world_of_two()
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
        assert here.over(LoadEnded, "t") is not None
        assert here.core.pushes.find("t") is None
    elif survivor.over(PromptTransferEnded, "t") is None:
        survivor.do(survivor.core.expect, "t")
        died = world.now
        world.run(PATIENCE_S + 1.0, until=lambda: survivor.over(PromptTransferEnded, "t") is not None)
        assert survivor.over(PromptTransferEnded, "t") is not None
    assert world.now - died <= PATIENCE_S + 1.1
    assert world.now - began < 10.0
    release_buffers(world, here, there)


LOSABLE = [
    HelloMessage,
    WelcomeMessage,
    ReadMessage,
    OfferMessage,
    NeedMessage,
    DataMessage,
    FailedMessage,
    CompleteMessage,
]


@pytest.mark.parametrize("kind", LOSABLE, ids=lambda kind: kind.__name__)
def test_a_message_that_is_lost_and_nobody_hears_of_it_costs_patience_and_no_more(
    kind: type[WireMessage],
) -> None:
    """No connection does that; a peer that forgets does."""
    world, here, there = world_of_two()
    world.put(*CONTEXT)
    world.lose = lambda sender, receiver, message: isinstance(message, kind)
    turn(world, here, there, lambda: False)
    # The silence is broken off, with what has come till then, and no wrong byte was taken for a right one.
    loaded = here.over(LoadEnded, "t")
    assert loaded is not None
    prompt = there.over(PromptTransferEnded, "t")
    assert prompt is not None
    if prompt.complete:
        assert there.prompt("t") == [content(one) for one in WHOLE]
    # Where nothing was read there, all is computed here and pushed.
    assert prompt.complete == (kind in (ReadMessage, FailedMessage, CompleteMessage))
    pushed = here.over(PushEnded, "t")
    if pushed is None:
        world.run(2 * PATIENCE_S)
        pushed = here.over(PushEnded, "t")
    assert pushed is not None
    assert not (pushed.complete and not prompt.complete)
    release_buffers(world, here, there)


def test_a_push_to_nobody_fails_at_once() -> None:
    world = World()
    here = world.engine("p")
    here.push("t", "nowhere", CONTEXT)
    world.run(1.0)
    assert here.over(PushEnded, "t") == PushEnded("t", False, "cannot reach nowhere: connection refused")
    assert_clean(here)


def test_a_fetch_from_nobody_fails_at_once_and_good_for_nothing() -> None:
    world = World()
    here = world.engine("p")
    here.load("t", CONTEXT, address="nowhere")
    world.run(1.0)
    assert here.over(LoadEnded, "t") == LoadEnded("t", 0, "cannot reach nowhere: connection refused")
    assert here.taken("t") == []
    assert_clean(here)


def test_a_push_that_never_comes_is_waited_for_no_longer_than_patience() -> None:
    world = World()
    there = world.engine("d")
    began = world.now
    there.do(there.core.expect, "t")
    assert there.wait(PromptTransferEnded, "t") == PromptTransferEnded("t", False, "it makes no progress")
    assert PATIENCE_S <= world.now - began <= PATIENCE_S + 0.5
    there.do(there.core.end_prompt, "t")
    assert_clean(there)


def test_a_push_whose_engine_is_slow_is_no_stall_before_somebody_waits_for_it() -> None:
    world, here, there = two_engines()
    here.offer("t", "d", CONTEXT)
    world.run(3 * LEASE_S)  # it computes
    here.give("t", CONTEXT)
    assert here.wait(PushEnded, "t") == PushEnded("t", True)
    there.do(there.core.expect, "t")
    assert there.prompt("t") == [content(one) for one in CONTEXT]
    assert_clean(here, there)


@pytest.mark.parametrize(
    ("aborts", "why"), [(False, "the peer accepts no data"), (True, "the engine has given it up")]
)
def test_a_peer_whose_socket_is_full_is_hung_up_on(aborts: bool, why: str) -> None:
    """``test_transfer_manager_stalled`` has it with a real socket, which is what ends it."""
    world, here, _ = two_engines()
    here.offer("t", "d", CONTEXT)
    world.run(1.0)
    world.deaf.add("d")
    here.give("t", CONTEXT)
    if aborts:
        here.do(here.core.abort_push, "t")
    world.run(PATIENCE_S - 0.1)
    # What was on its way is out of memory's reach only when the socket says so.
    assert here.over(PushEnded, "t") is None
    world.run(0.2)
    assert here.over(PushEnded, "t") == PushEnded("t", False, why)
    world.run(1.0)
    assert_clean(here)


def test_peers_whose_sockets_are_full_keep_the_others_from_nothing() -> None:
    """Together they could take every place on the link for as long as patience lasts, which is as long as
    the peer that is well waits without hearing of anything."""
    world, here, there = two_engines()
    hung = ["x", "y", "z"]
    for name in hung:
        world.engine(name)
        here.offer(f"to {name}", name, CONTEXT)
    here.offer("t", "d", CONTEXT)
    world.run(1.0)
    world.deaf.update(hung)
    for name in hung:
        here.give(f"to {name}", CONTEXT)
    there.do(there.core.expect, "t")
    here.give("t", CONTEXT)
    world.run(PATIENCE_S / 2)
    assert here.over(PushEnded, "t") == PushEnded("t", True)
    assert [here.over(PushEnded, f"to {name}") for name in hung] == [None] * 3
    assert there.prompt("t") == [content(one) for one in CONTEXT]
    world.run(PATIENCE_S)
    for name in hung:
        assert here.over(PushEnded, f"to {name}") == PushEnded(
            f"to {name}", False, "the peer accepts no data"
        )
    assert here.core.ctx.counts["stalls"] == 3
    assert_clean(here, there)


def test_a_peer_that_takes_nothing_of_what_it_had_read_here_is_cut_off() -> None:
    world, here, there = two_engines(rates={"storage_read": 1000.0})
    world.put(*CONTEXT)
    here.load("t", CONTEXT, address="d")
    world.run(0.1)
    world.deaf.add("p")
    world.run(5.0)
    assert here.over(LoadEnded, "t").good == 0
    assert there.core.ctx.counts["stalls"] == 1
    assert there.core.peers.conns() == []
    assert there.core.ctx.peer_send.in_flight == 0
    here.do(here.core.end_load, "t")
    there.do(there.core.end_prompt, "t")
    assert_clean(here, there)


# -- the store ---------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(8))
@pytest.mark.parametrize("side", ["here", "there"])
def test_what_lies_before_a_block_that_cannot_be_read_is_good(side: str, index: int) -> None:
    world, here, there = two_engines()
    world.put(*CONTEXT)
    world.broken[key(index)] = "its payload is damaged"
    here.load("t", CONTEXT, **({} if side == "here" else {"address": "d", "total": 9}))
    assert here.wait(LoadEnded, "t") == LoadEnded("t", index, "its payload is damaged")
    assert here.taken("t") == [content(one) for one in CONTEXT[:index]]
    # The rest is computed here and pushed; the peer asks for what it could not read either.
    here.push("t", "d", WHOLE)
    there.do(there.core.expect, "t")
    there.wait(PromptTransferEnded, "t")
    assert there.prompt("t") == [content(one) for one in WHOLE]
    assert_clean(here, there)


def test_a_block_that_cannot_be_read_while_it_is_offered_is_asked_for_after_all() -> None:
    """Two transfers share it: the one has it read, the other had thought it would come."""
    world, here, there = two_engines(rates={"storage_read": 200.0})
    world.put(*CONTEXT)
    world.broken[key(7)] = "torn"
    here.load("one", CONTEXT, address="d", total=8)
    world.run(1.0)
    here.push("two", "d", CONTEXT)
    there.do(there.core.expect, "two")
    there.wait(PromptTransferEnded, "two")
    needs = [message.indices for _, _, message in world.messages if isinstance(message, NeedMessage)]
    assert needs == [[], [7]]
    assert there.prompt("two") == [content(one) for one in CONTEXT]
    assert here.over(LoadEnded, "one") is not None
    here.do(here.core.end_load, "one")
    there.do(there.core.end_prompt, "one")
    assert_clean(here, there)


@pytest.mark.parametrize("side", ["here", "there"])
def test_storage_that_never_answers_costs_patience_and_its_slot_until_it_does(side: str) -> None:
    world, here, there = two_engines()
    reader = here if side == "here" else there
    world.put(*CONTEXT)
    world.hung.add(key(3))
    here.load("t", CONTEXT, **({} if side == "here" else {"address": "d", "total": 9}))
    assert here.wait(LoadEnded, "t") == LoadEnded("t", 3, "storage has not answered")
    assert here.taken("t") == [content(one) for one in CONTEXT[:3]]
    there.do(there.core.end_prompt, "t")
    assert reader.core.ctx.buffers.used == 1
    (item,) = reader.core.ctx.reads._in_flight
    reader.do(reader.core.read_done, item, None)
    assert_clean(here, there)


def test_a_store_that_is_full_says_so_and_nothing_waits_on() -> None:
    world = World()
    engine = world.engine("d")
    writes: list[int] = []
    original = world._write

    def full(of: Engine, action: object) -> None:
        writes.append(1)
        of.do(of.core.write_done, action.item, "disk_full")  # type: ignore[attr-defined]

    world._write = full  # type: ignore[method-assign, assignment]
    assert engine.do(engine.core.store, "r", key(1), b"", [memoryview(content(key(1)))])
    world.run(1.0)
    world._write = original  # type: ignore[method-assign]
    assert [event.outcome for event in engine.events if event[0] == "r"] == ["disk_full"]  # type: ignore[union-attr]
    assert engine.core.ctx.counts["write_disk_full"] == 1
    assert_clean(engine)


def test_a_write_that_never_comes_back_holds_its_own_memory_and_nobody_elses() -> None:
    world = World()
    engine = world.engine("d")
    held: list[WriteBlock] = []
    world._write = lambda of, action: held.append(action)  # type: ignore[method-assign, assignment]
    for number in range(4):
        assert engine.do(engine.core.store, "r", key(number), b"", [memoryview(content(key(number)))])
    world.run(2 * PATIENCE_S)
    stalled = [event for event in engine.events if isinstance(event, BlockStoreEnded)]
    assert stalled == [BlockStoreEnded("r", key(number), "stalled") for number in (1, 2, 3)]
    assert engine.do(engine.core.store, "r", key(9), b"", [memoryview(content(key(9)))]) is False
    (action,) = held
    engine.do(engine.core.write_done, action.item, "stored")
    assert engine.events[-1] == BlockStoreEnded("r", key(0), "stored")
    assert engine.do(engine.core.store, "r", key(9), b"", [memoryview(content(key(9)))])
    world.run(0.1)
    engine.do(engine.core.write_done, held[-1].item, "stored")
    assert_clean(engine)


# -- aborts in each phase ----------------------------------------------------------------------


def phases() -> dict[str, Callable[[Engine, Engine], bool]]:
    def said(kind: type[WireMessage], times: int = 1) -> Callable[[Engine, Engine], bool]:
        return lambda here, there: (
            sum(isinstance(message, kind) for _, _, message in here.world.messages) >= times
        )

    return {
        "at once": lambda here, there: True,
        "greeting": said(HelloMessage),
        "lined up there": said(ReadMessage),
        "reading": lambda here, there: len(here.world.reads) >= 3,
        "streaming": said(DataMessage),
        "half streamed": said(DataMessage, 7),
        "loaded": lambda here, there: here.over(LoadEnded, "t") is not None,
    }


@pytest.mark.parametrize("phase", phases())
def test_a_load_may_be_given_up_in_any_phase(phase: str) -> None:
    world, here, there = world_of_two()
    world.put(*CONTEXT)
    here.load("t", CONTEXT, address="d", total=9)
    world.run(until=lambda: phases()[phase](here, there))
    here.do(here.core.end_load, "t")
    world.run(2.0)
    if phase == "loaded":  # then its transfer goes on, to the peer's mind
        there.do(there.core.end_prompt, "t")
        world.run(1.0)
    assert_clean(here, there)


@pytest.mark.parametrize("phase", ["at once", "reading", "loaded"])
def test_a_load_from_ones_own_storage_may_be_given_up_in_any_phase(phase: str) -> None:
    world = World()
    engine = world.engine("p", rates={"storage_read": 1000.0})
    world.put(*CONTEXT)
    engine.load("t", CONTEXT)
    world.run(until=lambda: phases()[phase](engine, engine))
    engine.do(engine.core.end_load, "t")
    world.run(2.0)
    assert phase == "loaded" or len(world.reads) < 8
    assert_clean(engine)


@pytest.mark.parametrize("who", ["here", "there"])
@pytest.mark.parametrize("layers", range(LAYERS + 1))
def test_a_push_may_be_given_up_in_any_phase_by_either(who: str, layers: int) -> None:
    for seconds in (0.0, 0.1, 0.3, 1.0):
        world = World()
        here, there = world.engine("p", rates={"compute": 1500.0}), world.engine("d")
        there.do(there.core.expect, "t")
        here.offer("t", "d", WHOLE)
        here.give("t", WHOLE, layers)
        world.run(seconds)
        if who == "here":
            here.do(here.core.abort_push, "t")
        else:
            there.do(there.core.end_prompt, "t")
        world.run(2.0)
        assert here.over(PushEnded, "t") is not None
        there.do(there.core.end_prompt, "t")
        world.run(1.0)
        assert_clean(here, there)


def test_who_gives_up_leaves_what_others_wait_for_on_its_way() -> None:
    world, here, there = two_engines(rates={"storage_read": 500.0})
    world.put(*CONTEXT)
    here.load("one", CONTEXT, address="d")
    here.load("two", CONTEXT, address="d")
    world.run(0.5)
    here.do(here.core.end_load, "one")
    here.wait(LoadEnded, "two")
    assert here.taken("two") == [content(one) for one in CONTEXT]
    assert len(world.reads) == 8
    there.do(there.core.end_prompt, "one")
    there.do(there.core.end_prompt, "two")
    world.run(2.0)
    assert_clean(here, there)


def test_a_reader_that_is_given_up_reads_on_for_others() -> None:
    world = World()
    engine = world.engine("p", rates={"storage_read": 500.0})
    world.put(*CONTEXT)
    engine.load("one", CONTEXT)
    engine.load("two", CONTEXT[:4])
    engine.do(engine.core.end_load, "one")
    engine.wait(LoadEnded, "two")
    assert engine.taken("two") == [content(one) for one in CONTEXT[:4]]
    world.run(2.0)
    assert len(world.reads) == 4, "what only the other wanted is not read"
    assert_clean(engine)


# -- leases, epochs, sizes, handshakes -----------------------------------------------------------


def test_what_nobody_takes_is_given_back_by_itself() -> None:
    world, here, there = two_engines()
    world.put(*CONTEXT)
    here.load("t", CONTEXT, address="d", total=9)
    here.wait(LoadEnded, "t")
    assert here.core.ctx.buffers.used == 8
    assert there.core.ctx.buffers.used == 9
    world.run(LEASE_S + 2.0)
    assert here.over(LoadEnded, "t") == LoadEnded("t", 0, "the lease on its buffers has expired")
    assert here.core.ctx.counts["leases_expired"] == 1
    assert there.core.ctx.counts["leases_expired"] == 1
    assert_clean(here, there)


def test_a_context_that_is_whole_and_not_asked_for_is_given_back_too() -> None:
    world, here, there = two_engines()
    here.push("t", "d", CONTEXT)
    world.run(LEASE_S + 2.0)
    assert there.core.ctx.counts["leases_expired"] == 1
    assert_clean(here, there)


def test_a_lease_does_not_expire_under_who_takes_its_blocks() -> None:
    world = World()
    engine = world.engine("p")
    world.put(*CONTEXT)
    engine.load("t", CONTEXT)
    world.run(1.0)
    blocks = engine.core.loads.blocks("t")
    world.run(3 * LEASE_S)
    assert [bytes(block) for block in blocks] == [content(one) for one in CONTEXT]
    engine.do(engine.core.end_load, "t")
    assert_clean(engine)


def test_a_peer_that_has_started_anew_is_not_whom_the_router_meant() -> None:
    world, here, there = two_engines()
    epoch = there.core.peers.epoch
    here.push("t", "d", CONTEXT)
    world.run(1.0)
    world.kill("d")  # with the whole context in its buffers
    again = world.engine("d")
    assert again.do(again.core.expect, "t", epoch=epoch) is False
    assert again.core.ctx.counts["stale"] == 1
    here.offer("u", "d", CONTEXT, epoch=epoch)
    here.load("u", CONTEXT, address="d", epoch=epoch)
    world.run(1.0)
    assert here.over(PushEnded, "u") == PushEnded("u", False, "the peer has restarted since it was chosen")
    assert here.over(LoadEnded, "u") == LoadEnded("u", 0, "d has restarted since it was chosen")
    # Without an epoch, what it has is asked and not believed: all of it is sent again.
    here.push("v", "d", CONTEXT)
    again.do(again.core.expect, "v")
    world.run(1.0)
    assert again.prompt("v") == [content(one) for one in CONTEXT]
    here.do(here.core.end_load, "u")
    assert_clean(here, again)


def test_a_context_larger_than_the_peers_buffers_is_refused_with_both_sizes() -> None:
    world, here, there = two_engines(limits={"slots": 6})
    world.put(*CONTEXT)
    there.do(there.core.expect, "t")
    here.load("r", CONTEXT, address="d")
    here.offer("t", "d", CONTEXT)
    world.run(1.0)
    why = "a context of 8 Full Blocks does not fit buffers of 6; make them larger"
    assert here.over(LoadEnded, "r") == LoadEnded("r", 0, why)
    assert here.over(PushEnded, "t") == PushEnded("t", False, why)
    assert there.over(PromptTransferEnded, "t") == PromptTransferEnded("t", False, why)
    assert there.core.ctx.counts["too_large"] == 2
    here.do(here.core.end_load, "r")
    there.do(there.core.end_prompt, "t")
    assert_clean(here, there)


def test_a_load_larger_than_ones_own_buffers_is_cut_to_what_fits() -> None:
    world = World()
    engine = world.engine("p", limits={"slots": 6})
    world.put(*CONTEXT)
    assert engine.load("t", CONTEXT) == 6
    world.run(1.0)
    assert engine.over(LoadEnded, "t") == LoadEnded("t", 6)
    assert engine.taken("t") == [content(one) for one in CONTEXT[:6]]
    assert engine.core.ctx.counts["loads_cut"] == 1
    assert_clean(engine)


def test_more_than_was_announced_does_not_take_the_room_of_others() -> None:
    world, here, there = two_engines(limits={"slots": 10})
    world.put(*keys(*range(20)))
    here.load("t", CONTEXT, address="d", total=8)
    world.run(1.0)
    there.do(there.core.load, "other", keys(10, 11))
    here.push("t", "d", WHOLE)
    world.run(1.0)
    assert here.over(PushEnded, "t").why == "9 blocks were offered; the read reserved fewer"
    assert there.core.ctx.buffers.most_used <= 10
    here.do(here.core.end_load, "t")
    there.do(there.core.end_load, "other")
    world.run(1.0)
    assert_clean(here, there)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"model": "large@2"}, r"the model\. Start both engines alike"),
        ({"kv_dtype": "fp8"}, r"the data type of KV \(--kv-cache-dtype\): 'fp8' there, 'float32' here"),
        ({"block_tokens": 128}, "the tokens of a Full Block: 128 there, 64 here"),
        ({"block_bytes": 192}, "the bytes of a Full Block: 192 there, 96 here"),
        ({"layers": 6}, "the number of layers: 6 there, 3 here"),
        ({"hash_scheme": "sha256/seed=1/16"}, "how blocks are hashed"),
        ({"vllm_version": "0.33.0"}, "the layout within a layer: '0.33.0' there, '0.32.0' here"),
        ({"tp_size": 2}, "the number of ranks: 2 there, 1 here"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_peers_with_kv_of_another_kind_are_refused_before_a_byte_of_it(
    changed: dict[str, object], what: str
) -> None:
    world = World()
    here, there = world.engine("p", identity=identity(**changed)), world.engine("d")
    here.offer("t", "d", CONTEXT)
    here.load("u", CONTEXT, address="d")
    world.run(1.0)
    pushed = here.over(PushEnded, "t")
    assert pushed.why.startswith("KV of another kind cannot be used here: ")
    assert re.search(what, pushed.why), pushed.why
    assert here.over(LoadEnded, "u").good == 0
    assert [type(message) for _, _, message in world.messages] == [HelloMessage, RefusedMessage]
    assert (here.core.ctx.counts["refused"], there.core.ctx.counts["refused"]) == (1, 1)
    # Both logs say it once, and what weights and hashes are there is only in the log of who has them.
    [(peer, why)] = there.core.peers.refusals.items()
    assert peer == "p"
    assert f"{_FIELD_DESCRIPTIONS[next(iter(changed))]}: " in why
    assert here.core.peers.refusals == {"d": pushed.why}
    for private in ("tiny@1", "seed=0"):
        assert private not in pushed.why
    here.do(here.core.end_load, "u")
    assert_clean(here, there)


EARLY = [
    ReadMessage(transfer="t", keys=[key(1)], total=1, traffic_class="kv"),  # type: ignore[arg-type]
    OfferMessage(transfer="t", keys=[key(1)], traffic_class="kv"),  # type: ignore[arg-type]
    NeedMessage(transfer="t", indices=[0]),
    CompleteMessage(transfer="t"),
    ProgressMessage(transfers=["t"], done=1),
    WelcomeMessage(name="x", epoch="y"),
]


@pytest.mark.parametrize("message", EARLY, ids=lambda message: type(message).__name__)
def test_who_says_anything_before_hello_is_hung_up_on(message: WireMessage) -> None:
    world = World()
    engine = world.engine("d")
    engine.do(engine.core.accepted, 7)
    engine.do(engine.core.received, 7, message, memoryview(b""))
    assert engine.core.ctx.counts["hung_up"] == 1
    assert_clean(engine)


def test_who_dials_and_says_nothing_is_hung_up_on() -> None:
    world = World()
    engine = world.engine("d")
    engine.do(engine.core.accepted, 7)
    world.run(5.0)
    assert engine.core.ctx.counts["stalls"] == 1
    assert_clean(engine)


@pytest.mark.parametrize(
    "data",
    [
        DataMessage(transfer="t", layer=1, indices=[0], traffic_class="kv"),  # type: ignore[arg-type]
        DataMessage(transfer="t", layer=0, indices=[99], traffic_class="kv"),  # type: ignore[arg-type]
        DataMessage(transfer="t", layer=0, indices=[-1], traffic_class="kv"),  # type: ignore[arg-type]
        DataMessage(transfer="t", layer=0, indices=[0, 1], traffic_class="kv"),  # type: ignore[arg-type]
        DataMessage(transfer="t", layer=-1, indices=[0], traffic_class="kv"),  # type: ignore[arg-type]
    ],
    ids=["not the next layer", "no such block", "negative", "too few bytes", "negative layer"],
)
def test_layers_that_cannot_be_right_end_the_transfer(data: DataMessage) -> None:
    world, here, there = two_engines()
    there.do(there.core.expect, "t")
    here.offer("t", "d", CONTEXT)
    world.run(1.0)
    (conn,) = there.core.peers._conns
    there.do(there.core.received, conn, data, memoryview(bytes(BLOCK_BYTES // LAYERS)))
    world.run(1.0)
    assert there.over(PromptTransferEnded, "t").complete is False
    assert here.over(PushEnded, "t").complete is False
    there.do(there.core.end_prompt, "t")
    assert_clean(here, there)


def test_a_need_of_what_was_not_offered_ends_the_push() -> None:
    world, here, there = two_engines()
    here.offer("t", "d", CONTEXT)
    world.run(1.0)
    (conn,) = here.core.peers._conns
    here.do(here.core.received, conn, NeedMessage(transfer="t", indices=[8]), memoryview(b""))
    world.run(1.0)
    assert here.over(PushEnded, "t").why == "the peer asked for a block that was not offered"
    assert_clean(here, there)


def test_a_transfer_is_begun_once() -> None:
    world, here, there = two_engines()
    other = world.engine("q")
    here.offer("t", "d", CONTEXT)
    world.run(1.0)
    other.offer("t", "d", CONTEXT)
    world.run(1.0)
    other.load("t", CONTEXT, address="d")
    world.run(1.0)
    assert other.over(PushEnded, "t") == PushEnded("t", False, "it was offered already")
    assert other.over(LoadEnded, "t").why == "the transfer is in progress already"
    here.give("t", CONTEXT)
    world.run(1.0)
    assert here.over(PushEnded, "t").complete
    other.do(other.core.end_load, "t")
    there.do(there.core.end_prompt, "t")
    assert_clean(here, there, other)


def test_events_are_told_once() -> None:
    """Of one abort nobody hears twice, whoever else hears of it."""
    world, here, there = world_of_two()
    turn(world, here, there, lambda: False)
    found = [(type(event), *event) for event in (*here.events, *there.events)]
    assert len(set(found)) == len(found)
    release_buffers(world, here, there)


def test_a_read_that_comes_back_after_all_writes_where_nobody_looks_any_more() -> None:
    """One thread hangs inside a slot; the block is gathered anew in another while it does."""
    world, here, there = two_engines()
    world.put(*CONTEXT)
    world.hung.add(key(3))
    here.load("one", CONTEXT, address="d", total=8)
    world.run(0.1)
    here.offer("two", "d", CONTEXT)  # waits for the same read
    here.give("two", CONTEXT)
    there.do(there.core.expect, "two")
    assert there.wait(PromptTransferEnded, "two").complete is False
    here.push("three", "d", CONTEXT)
    there.do(there.core.expect, "three")
    there.wait(PromptTransferEnded, "three")
    (item,) = there.core.ctx.reads._in_flight.values()
    there.core.ctx.memory.block(item.work.slot.index)[:] = b"!" * BLOCK_BYTES
    there.do(there.core.read_done, item.number, None)
    assert there.prompt("three") == [content(one) for one in CONTEXT]
    assert here.over(LoadEnded, "one").good == 3
    for engine in (here, there):
        engine.do(engine.core.end_load, "one")
        engine.do(engine.core.end_prompt, "one")
        engine.do(engine.core.end_prompt, "two")
    world.run(LEASE_S + 2.0)
    assert_clean(here, there)


@pytest.mark.parametrize(
    ("layer", "indices", "size"),
    [(1, [0], 1), (0, [8], 1), (0, [-1], 1), (0, [0, 1], 1), (3, [0], 1)],
    ids=["not the next layer", "no such block", "negative", "too few bytes", "no such layer"],
)
def test_layers_that_were_not_asked_for_end_the_fetch_and_the_connection(
    layer: int, indices: list[int], size: int
) -> None:
    world, here, there = two_engines(rates={"storage_read": 96.0})
    world.put(*CONTEXT)
    here.load("t", CONTEXT, address="d")
    world.run(1.0)
    (conn,) = here.core.peers._conns
    data = DataMessage(transfer="t", layer=layer, indices=indices, traffic_class=TrafficClass.KV)
    here.do(here.core.received, conn, data, memoryview(bytes(size * BLOCK_BYTES // LAYERS)))
    world.run(0.1)
    assert here.over(LoadEnded, "t") == LoadEnded("t", 0, "the peer sent unexpected data")
    assert here.core.peers.conns() == []
    here.do(here.core.end_load, "t")
    there.do(there.core.end_prompt, "t")
    world.run(2.0)
    assert_clean(here, there)


def test_what_is_given_up_is_not_sent_to_its_end() -> None:
    world, here, there = two_engines(rates={"compute": 500.0})
    world.put(*CONTEXT)
    here.load("t", CONTEXT, address="d")
    world.run(until=lambda: any(isinstance(message, DataMessage) for _, _, message in world.messages))
    here.do(here.core.end_load, "t")
    world.run(0.01)
    sent = sum(isinstance(message, DataMessage) for _, _, message in world.messages)
    world.run(10.0)
    assert sum(isinstance(message, DataMessage) for _, _, message in world.messages) == sent < 4 * LAYERS
    assert_clean(here, there)


def test_who_waits_for_buffers_there_longer_than_patience_and_lease_gets_them() -> None:
    """Fifty seconds in line, with something going on in front all the time."""
    world, here, there = two_engines(rates={"storage_read": 96.0}, limits={"slots": 50})
    world.put(*keys(*range(100, 150)))
    there.load("before", keys(*range(100, 150)))
    here.push("t", "d", CONTEXT)
    there.do(there.core.expect, "t")
    world.run(60.0, until=lambda: there.over(LoadEnded, "before") is not None)
    assert there.over(LoadEnded, "before") == LoadEnded("before", 50)
    assert (there.over(PromptTransferEnded, "t"), here.over(PushEnded, "t")) == (None, None)
    there.taken("before")
    world.run(1.0)
    assert there.prompt("t") == [content(one) for one in CONTEXT]
    assert_clean(here, there)


def test_a_peer_that_is_busy_for_longer_than_a_lease_is_waited_for() -> None:
    """Nothing moves here meanwhile, but the peer tells of its progress."""
    world, here, there = two_engines(rates={"storage_read": 96.0}, limits={"slots": 60})
    world.put(*keys(*range(100, 150)), *CONTEXT)
    there.load("before", keys(*range(100, 150)))
    here.load("t", CONTEXT, address="d")
    world.run(100.0, until=lambda: here.over(LoadEnded, "t") is not None)
    assert world.now > LEASE_S
    assert here.over(LoadEnded, "t") == LoadEnded("t", len(CONTEXT))
    here.taken("t")
    there.taken("before")
    there.do(there.core.end_prompt, "t")
    world.run(1.0)
    assert_clean(here, there)


def test_a_line_at_storage_longer_than_a_lease_is_waited_for() -> None:
    world = World()
    engine = world.engine("p", rates={"storage_read": 96.0})
    world.put(*keys(*range(60)))
    engine.load("first", keys(*range(50)))
    engine.load("second", keys(*range(50, 60)))
    world.run(100.0, until=lambda: engine.over(LoadEnded, "first") is not None)
    engine.taken("first")
    world.run(100.0, until=lambda: engine.over(LoadEnded, "second") is not None)
    assert engine.over(LoadEnded, "second") == LoadEnded("second", 10)
    engine.taken("second")
    assert_clean(engine)
