"""Reads that two engines share, when one of the two goes: nobody holds half of what he needs and waits."""

from __future__ import annotations

from typing import Any

from simulated_transfers import (
    BLOCK_BYTES,
    Engine,
    World,
    assert_clean,
    content,
    keys,
    layers_of,
    two_engines,
)
from sojourn_server.kv_transfer.split_fetch import SplitFetch
from sojourn_server.kv_transfer.transfer_actions import LayerLoaded, LoadEnded
from sojourn_server.kv_transfer.transfer_jobs import FetchJob
from sojourn_server.kv_transfer.transfer_wire import DataMessage

READ_RATE = 10 * BLOCK_BYTES
"""Ten blocks a second."""


class Handle:
    """A load, as the worker has it."""

    streamed_s = 0.0

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self.name = name
        self.requested_blocks = 0

    @property
    def outcome(self) -> LoadEnded | None:
        over: LoadEnded | None = self.engine.over(LoadEnded, self.name)
        return over

    @property
    def layers_loaded(self) -> int:
        return sum(isinstance(event, LayerLoaded) and event.load == self.name for event in self.engine.events)

    def blocks(self) -> list[memoryview]:
        return self.engine.core.loads.blocks(self.name)

    def layer(self, layer: int) -> list[memoryview]:
        return self.engine.core.loads.layer(self.name, layer)

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        return self.layers_loaded > layer and (self.outcome is None or self.outcome.good > 0)

    def end(self) -> None:
        self.engine.do(self.engine.core.end_load, self.name)


class Books:
    """A traffic manager whose core lives in virtual time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def load(self, load: str, wanted: list[bytes], *, peer: Any = None) -> Handle:
        made = Handle(self.engine, load)
        made.requested_blocks = self.engine.do(self.engine.core.load, load, wanted, peer=peer)
        return made


def split(engine: Engine, number: int, wanted: list[bytes]) -> SplitFetch:
    """A request half of whose blocks D is to read."""
    fetch = FetchJob(number, wanted, 0.5, "d", f"c{number}", len(wanted) + 1, None)
    made = SplitFetch(Books(engine), fetch)  # type: ignore[arg-type]
    made.begin(len(wanted))
    return made


def wait_for_all(world: World, fetchings: dict[int, SplitFetch], seconds: float) -> dict[int, int]:
    """Each is taken as soon as it is ready: of how many blocks it was."""
    end, found = world.now + seconds, dict[int, int]()
    while len(found) < len(fetchings) and world.now < end:
        world.run(0.05)
        for number, split_fetch in fetchings.items():
            if number not in found and (blocks := split_fetch.ready()) is not None:
                found[number] = blocks
                assert len(split_fetch.layer(0, 0.0)) == blocks
                split_fetch.end()
    return found


def test_requests_whose_peer_dies_do_not_wait_for_each_others_half() -> None:
    world = World()
    p = world.engine("p", limits={"slots": 100}, rates={"storage_read": READ_RATE})
    world.engine("d", limits={"slots": 400}, rates={"storage_read": READ_RATE / 10})
    fetchings = {}
    for number in range(3):
        wanted = keys(*range(1000 * number, 1000 * number + 100))
        world.put(*wanted)
        fetchings[number] = split(p, number, wanted)
    world.run(3.0)
    world.kill("d")
    # As long as it takes to read them all here, one after the other.
    found = wait_for_all(world, fetchings, 3 * 100 / 10 + 3.0)
    assert found == dict.fromkeys(range(3), 100)
    world.run(1.0)
    assert_clean(p)


def test_what_a_peer_does_not_bring_is_read_in_the_places_kept_for_it() -> None:
    world = World()
    p = world.engine("p", limits={"slots": 8})
    world.engine("d", rates={"storage_read": READ_RATE / 10})
    wanted, others = keys(*range(8)), keys(*range(100, 108))
    world.put(*wanted, *others)
    split_fetch = split(p, 1, wanted)
    p.load("next", others)
    world.run(0.5)
    world.kill("d")
    world.run(0.1)
    assert split_fetch.ready() == 8
    assert [bytes(part) for part in split_fetch.layer(1, 0.0)] == [
        bytes(part) for part in layers_of(wanted, 1)
    ]
    assert p.core.ctx.counts["blocks_read_instead"] == 4
    assert p.over(LoadEnded, "next") is None, "it waits for its turn"
    split_fetch.end()
    world.run(0.1)
    assert p.taken("next") == [content(one) for one in others]
    assert_clean(p)


def test_once_a_layer_has_come_nobody_is_made_to_wait_for_storage_instead() -> None:
    world, p, d = two_engines(rates={"compute": 400.0})
    wanted = keys(*range(8))
    world.put(*wanted)
    split_fetch = split(p, 1, wanted)
    theirs = split_fetch.pieces[-1].load
    world.run(5.0, until=lambda: theirs.layers_loaded > 0)
    assert split_fetch.ready() == 8
    reads = len(world.reads)
    world.kill("d")
    world.run(0.1)
    assert split_fetch.pieces[-1].load.outcome is not None, "a step stands still for it"
    assert split_fetch.ready() == 4
    assert len(world.reads) == reads
    split_fetch.end()
    assert any(isinstance(message, DataMessage) for _, _, message in world.messages)
    world.run(1.0)
    assert_clean(p)
    assert not d.alive
