"""What one peer can make an engine keep, whatever it says and however often."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from simulated_transfers import (
    LAYERS,
    Engine,
    World,
    assert_clean,
    content,
    identity,
    keys,
    layers_of,
    two_engines,
)
from sojourn_server.kv_transfer.transfer_actions import LoadEnded, PromptTransferEnded, PushEnded, SendMessage
from sojourn_server.kv_transfer.transfer_core import TransferCore
from sojourn_server.kv_transfer.transfer_limits import LinkRates, TransferLimits
from sojourn_server.kv_transfer.transfer_wire import (
    AbortMessage,
    FailedMessage,
    HelloMessage,
    NeedMessage,
    OfferMessage,
    ProgressMessage,
    ReadMessage,
    WireMessage,
)

LEASE_S = 30.0
NOTHING = memoryview(b"")


class Guest:
    """A peer that says what it likes, and the engine that hears it."""

    def __init__(self, conns: int = 1, **limits: Any) -> None:
        self.core = TransferCore(
            identity(), TransferLimits(**{"slots": 64, **limits}), LinkRates(), name="d", epoch="e"
        )
        self.now = 0.0
        for conn in range(1, conns + 1):
            self.core.accepted(conn, self.now)
            self.send(HelloMessage(name="x", epoch="y", kv=asdict(identity())), conn)
        self.answers()

    def send(self, message: WireMessage, conn: int = 1) -> None:
        self.core.received(conn, message, NOTHING, self.now)

    def answers(self) -> list[WireMessage]:
        return [action.message for action in self.core.take_actions() if isinstance(action, SendMessage)]

    def wait(self, seconds: float, transfers: list[str], grows: bool) -> None:
        """Time passes, and the peer says every while that it lives."""
        end = self.now + seconds
        while self.now < end:
            self.now += 2.0
            done = int(self.now) if grows else 0
            if transfers:
                self.send(ProgressMessage(transfers=transfers, done=done))
            self.core.tick(self.now)
            self.core.take_actions()
            self.core.take_events()


def offer(name: str, first: int, blocks: int) -> OfferMessage:
    wanted = [b"%31d" % (first + at) for at in range(blocks)]
    return OfferMessage(transfer=name, keys=wanted, traffic_class="kv")  # type: ignore[arg-type]


def read(name: str, first: int, blocks: int) -> ReadMessage:
    wanted = [b"%31d" % (first + at) for at in range(blocks)]
    return ReadMessage(transfer=name, keys=wanted, total=blocks, traffic_class="kv")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"queue_share": 1.5}, {"queue_share": -0.1}, {"peer_contexts": 0}])
def test_bounds_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TransferLimits(slots=8, **wrong)


def test_contexts_of_one_peer_are_bounded() -> None:
    guest = Guest(peer_contexts=10)
    for number in range(25):
        make = offer if number % 2 else read
        guest.send(make(f"t{number}", 100 * number, 8))
    said = guest.answers()
    refused = [message for message in said if isinstance(message, (AbortMessage, FailedMessage))]
    assert [message.transfer for message in refused] == [f"t{number}" for number in range(10, 25)]
    assert "10 contexts" in refused[0].reason
    assert len(guest.core.prompts) == 10
    assert guest.core.ctx.buffers.leases == 10
    assert guest.core.ctx.counts["contexts_refused"] == 15
    guest.send(AbortMessage(transfer="t0", reason="enough"))
    guest.send(offer("next", 9000, 8))
    assert len(guest.core.prompts) == 10, "what has ended makes room"


def test_keys_of_one_peer_are_bounded() -> None:
    guest = Guest(slots=4096)
    most = guest.core.ctx.limits.peer_keys
    for number in range(500):
        guest.send(offer(f"t{number}", 4000 * number, 4000))
    held = sum(
        len(half.keys)
        for prompt in guest.core.prompts._prompts.values()
        for half in (prompt.read, prompt.offer)
        if half is not None
    )
    assert most - 4000 < held <= most < 1 << 18
    assert sum(isinstance(message, AbortMessage) for message in guest.answers()) == 500 - held // 4000


def test_a_whole_context_is_taken_from_everybody_and_one_peer_does_not_use_up_anothers_share() -> None:
    guest = Guest(conns=2, slots=64, peer_contexts=3)
    for number in range(5):
        guest.send(offer(f"one {number}", 100 * number, 64))
    guest.send(offer("two", 10_000, 64), conn=2)
    refused = [message.transfer for message in guest.answers() if isinstance(message, AbortMessage)]
    assert refused == ["one 3", "one 4"]


def test_contexts_of_all_peers_together_are_bounded_too() -> None:
    guest = Guest(conns=20, slots=64, peer_contexts=3)
    for conn in range(1, 21):
        for number in range(3):
            guest.send(offer(f"{conn}/{number}", 100 * (3 * conn + number), 4), conn)
    assert len(guest.core.prompts) == 4 * 3


def test_who_waits_for_a_context_that_is_refused_hears_of_it_at_once() -> None:
    world, p, d = two_engines(limits={"peer_contexts": 1})
    p.offer("first", "d", keys(1, 2))
    world.run(0.1)
    d.do(d.core.expect, "second")
    p.offer("second", "d", keys(3, 4))
    world.run(0.1)
    over = d.over(PromptTransferEnded, "second")
    assert over is not None
    assert "1 contexts" in over.why
    assert p.over(PushEnded, "second").why == over.why
    d.do(d.core.end_prompt, "second")
    p.load("third", keys(5, 6), address="d")
    world.run(0.1)
    assert "1 contexts" in p.over(LoadEnded, "third").why
    p.do(p.core.end_load, "third")
    p.give("first", keys(1, 2))
    d.do(d.core.expect, "first")
    world.run(1.0)
    assert d.prompt("first") == [content(one) for one in keys(1, 2)]
    world.run(1.0)
    assert_clean(p, d)


def test_the_rest_of_a_context_that_was_read_here_is_no_further_one() -> None:
    world, p, d = two_engines(limits={"peer_contexts": 1})
    wanted = keys(*range(6))
    world.put(*wanted[:4])
    p.load("t", wanted[:4], address="d", total=6)
    world.run(1.0)
    p.taken("t")
    p.offer("t", "d", wanted)
    p.give("t", wanted)
    d.do(d.core.expect, "t")
    world.run(1.0)
    assert d.prompt("t") == [content(one) for one in wanted]
    assert_clean(p, d)


def test_a_peer_that_says_it_lives_and_gives_nothing_loses_its_buffers() -> None:
    for grows in (False, True):
        guest = Guest(slots=64)
        names = [f"t{number}" for number in range(20)]
        for number, name in enumerate(names):
            guest.send(offer(name, 100 * number, 60))
        assert any(isinstance(message, NeedMessage) for message in guest.answers())
        guest.wait(2 * LEASE_S, names, grows)
        assert guest.core.ctx.buffers.used >= 60, "a long step is no crime"
        guest.wait(20 * 5 * LEASE_S, names, grows)
        assert len(guest.core.prompts) == 0, grows
        assert guest.core.ctx.buffers.used == 0


def test_who_waits_in_line_behind_a_silent_peer_is_not_kept_by_saying_that_it_lives() -> None:
    guest = Guest(slots=64)
    guest.send(offer("first", 0, 60))
    guest.send(offer("second", 100, 60))
    guest.wait(LEASE_S + 5.0, ["first", "second"], grows=False)
    assert list(guest.core.prompts._prompts) == ["first"]


def give_slowly(world: World, p: Engine, wanted: list[bytes]) -> None:
    for layer in range(LAYERS):
        world.run(3 * LEASE_S)
        p.do(p.core.give, "t", layer, layers_of(wanted, layer))


def test_a_peer_that_gives_a_layer_now_and_then_is_waited_for_however_long_it_takes() -> None:
    world, p, d = two_engines()
    wanted = keys(*range(6))
    p.offer("t", "d", wanted)
    give_slowly(world, p, wanted)
    world.run(1.0)
    assert p.over(PushEnded, "t").complete
    d.do(d.core.expect, "t")
    assert d.prompt("t") == [content(one) for one in wanted]
    assert_clean(p, d)
