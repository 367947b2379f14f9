"""Two engines, their requests and their deaths at random: every byte is right, and nothing is left over."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kv_blocks import BLOCK_BYTES, LAYERS, key, keys, payload
from simulated_transfers import World, assert_clean
from sojourn_server.kv_transfer.transfer import COMPUTE_LEASES
from sojourn_server.kv_transfer.transfer_wire import DataMessage

pytestmark = pytest.mark.slow

CONTEXTS = st.integers(1, 9).flatmap(lambda size: st.tuples(st.integers(0, 3), st.just(size)))
"""Contexts of four programs, as long as a few turns: those of one share their beginnings."""

REQUEST = st.fixed_dictionaries(
    {
        "context": CONTEXTS,
        "cut": st.floats(0, 1),
        "pause": st.sampled_from([0.0, 0.01, 0.3, 2.0]),
        "gives_up": st.none() | st.sampled_from([0.0, 0.05, 0.5, 3.0]),
        "expects": st.booleans(),
        "aborts": st.sampled_from(["", "", "sender", "receiver"]),
    }
)


def _request(context: tuple[int, int], *, cut: float = 0.0, pause: float = 0.0) -> dict[str, Any]:
    said = {"gives_up": None, "expects": False, "aborts": ""}
    return {"context": context, "cut": cut, "pause": pause, **said}


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(  # the last one's buffers are granted after four leases
    requests=[_request(context) for context in ((0, 1), (1, 2), (0, 6), (1, 2))]
    + [_request((0, 4), pause=2.0), _request((2, 2), cut=0.51)],
    broken=set(),
    slots=7,
    rates={},
    dies_at=None,
    which="p",
)
@example(  # the last block and the end of its connection arrive together
    requests=[
        _request((0, 5), cut=0.28),
        _request((3, 5)),
        _request((3, 1)),
        {**_request((0, 1)), "expects": True},
        _request((0, 1), pause=2.0),
        _request((0, 1)),
        _request((0, 1)),
    ],
    broken=set(),
    slots=11,
    rates={"storage_read": 2000.0, "compute": 5000.0},
    dies_at=49,
    which="p",
)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=8),
    broken=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 8)), max_size=4),
    slots=st.integers(6, 24),
    rates=st.sampled_from([{}, {"storage_read": 2000.0, "compute": 5000.0}]),
    dies_at=st.none() | st.integers(0, 60),
    which=st.sampled_from(["p", "d"]),
)
def test_whatever_happens(
    requests: list[dict[str, Any]],
    broken: set[tuple[int, int]],
    slots: int,
    rates: dict[str, float],
    dies_at: int | None,
    which: str,
) -> None:
    world = World()
    here = world.engine("p", rates=rates, limits={"slots": slots})
    there = world.engine("d", rates=rates, limits={"slots": slots})
    for program in range(4):
        world.put(*(key(100 * program + at) for at in range(8)))
    world.broken = {key(100 * program + at): "damaged" for program, at in broken}
    if dies_at is not None:
        world.cut = lambda sender, receiver, message: (
            receiver == which and len(world.messages) > dies_at and bool(world.engines.get(receiver))
        )

    asked: dict[str, tuple[int, int]] = {}
    """Loads: of how many blocks, and of those how many can be read."""
    for number, request in enumerate(requests):
        program, size = request["context"]
        context = keys(*(100 * program + at for at in range(size)))
        cut = round(request["cut"] * size)
        mine, theirs, whole = context[:cut], context[cut:], [*context, f"tail {number}".encode()]
        name, push = f"r{number}", f"t{number}"
        if "p" in world.engines and mine:
            asked[name] = here.load(name, mine), len(mine)
        if "p" in world.engines and theirs:
            peer = {"address": "d", "total": len(whole)}
            asked[push] = here.load(push, theirs, **peer), len(theirs)
        world.run(request["pause"])
        if request["gives_up"] is not None and "p" in world.engines:
            world.run(request["gives_up"])
            here.end_load(name)
            here.end_load(push)
            asked.pop(name, None)
            asked.pop(push, None)
        if "p" in world.engines:
            here.offer(push, "d", whole)
            here.give(push, whole, 2 if request["aborts"] else LAYERS)
        if request["expects"] and "d" in world.engines:
            there.expect(push)
        world.run(0.01 if request["aborts"] else 0.0)
        if request["aborts"] == "sender" and "p" in world.engines:
            here.abort(push)
        elif request["aborts"] and "d" in world.engines:
            there.forget(push)
        assert all(engine.buffers.used <= slots for engine in world.engines.values())
    # Everybody takes what is his as soon as it is there, once.
    seen = set[Any]()
    for _ in range(200):
        world.run(0.5)
        open_transfers = [each for engine in world.engines.values() for each in engine.transfers.values()]
        if seen.issuperset(open_transfers):
            break
        for engine in list(world.engines.values()):
            for (kind, name), transfer in list(engine.transfers.items()):
                if not engine.alive:  # the peer's last message has killed it
                    break
                if transfer.outcome is None or transfer in seen:
                    continue
                seen.add(transfer)
                if kind == "load" and name in asked:
                    assert len(engine.taken(name)) == transfer.outcome.good
                elif kind == "prompt" and not transfer.outcome.why:
                    assert engine.prompt(name) == [payload(one) for one in transfer.keys]
                elif kind == "prompt":
                    engine.forget(name)
    alive = list(world.engines.values())
    if here.alive:
        for name in asked:
            assert here.over("load", name) is not None, name
        for number in range(len(requests)):
            if f"t{number}" in here.node.pushes:
                raise AssertionError(f"t{number} is still being pushed")
    # Of what was given up here, buffers there are kept for leases, in case it is offered yet; and where they
    # are few, the next in line gets them only then.
    lease_s = max(engine.node.limits.lease_s for engine in alive)
    world.run(
        COMPUTE_LEASES * lease_s * (len(requests) + 2), until=lambda: all(e.node.is_clean for e in alive)
    )
    assert_clean(*alive)

    # Bytes are conserved: what one side counts as sent, the other has taken, or had no use for.
    for engine in alive:
        counts = engine.counts
        assert counts["bytes_sent"] >= counts["bytes_pushed"] + counts["bytes_streamed"]
    if len(alive) == 2:
        to_peer = sum(
            BLOCK_BYTES // 3 * len(message.indices)
            for sender, _, message in world.messages
            if sender == "p" and isinstance(message, DataMessage)
        )
        assert to_peer >= here.counts["bytes_sent"], "what is aborted is sent, but not counted"
        assert there.counts["bytes_taken"] <= to_peer


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=12),
    from_peer=st.booleans(),
)
def test_requests_are_served_in_the_order_in_which_they_came(sizes: list[int], from_peer: bool) -> None:
    world = World()
    options: dict[str, Any] = {
        "rates": {"storage_read": 3000.0},
        "limits": {"slots": 100},
    }
    here, there = world.engine("p", **options), world.engine("d", **options)
    expected = []
    for number, size in enumerate(sizes):
        context = keys(*(100 * number + at for at in range(size)))
        world.put(*context)
        expected += context
        here.load(str(number), context, **({"address": "d"} if from_peer else {}))
    names = [str(number) for number in range(len(sizes))]
    world.run(until=lambda: all(here.over("load", name) for name in names))
    assert [one for _, one in world.reads] == expected
    sent = [message.transfer for _, _, message in world.messages if isinstance(message, DataMessage)]
    assert list(dict.fromkeys(sent)) == names * from_peer
    for number in range(len(sizes)):
        here.taken(str(number))
        there.forget(str(number))
    world.run(1.0)
    assert_clean(here, there)
