"""The store beside a step: it is never waited for, whatever it does, and gets what is left of requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from sojourn_server.kv_offload.cpu_device_backend import KvBlockArrays
from sojourn_server.kv_transfer.block_saver import BlockSaver
from sojourn_server.kv_transfer.transfer_jobs import SaveJob

PATIENCE_S = 1.5


class Storage:
    """A store that takes ``room`` blocks, and has some already."""

    def __init__(self, room: int = 1000, have: Sequence[bytes] = ()) -> None:
        self.room = room
        self.known = set(have)
        self.written: list[tuple[bytes, bytes, bytes]] = []

    def knows(self, key: bytes) -> bool:
        return key in self.known

    @property
    def has_room(self) -> bool:
        return len(self.written) < self.room

    def write(self, key: bytes, parent: bytes, content: Sequence[memoryview]) -> None:
        self.known.add(key)
        self.written.append((key, parent, b"".join(content)))


class Saver(BlockSaver):
    def __init__(self, storage: Storage, max_held_blocks: int = 1 << 30) -> None:
        rows = {f"l{at}": np.arange(64 * 8, dtype=np.uint8).reshape(64, 8) + at for at in range(2)}
        self.now_s = 0.0
        self.counts: Counter[str] = Counter()
        of: Any = storage
        super().__init__(
            of, KvBlockArrays(rows, 4), patience_s=PATIENCE_S, clock=lambda: self.now_s, counts=self.counts,
            attempt=lambda what, call, *arguments: call(*arguments), max_held_blocks=max_held_blocks,
        )  # fmt: skip

    def step(self, saves: Sequence[SaveJob] = (), ended: Sequence[str] = ()) -> dict[str, int]:
        self.begin_step(saves, ended)
        return self.end_step(())


def saves(count: int, request: str = "r") -> list[SaveJob]:
    blocks = [[4 * at + one for one in range(4)] for at in range(count)]
    keys = [f"{request}{at}".encode() for at in range(-1, count)]
    keys[0] = b""
    return [SaveJob(request, at, keys[at + 1], keys[at], blocks[at], []) for at in range(count)]


def test_a_block_is_copied_once_and_not_if_the_store_has_it() -> None:
    storage = Storage(have=[b"r0", b"r2"])
    saver = Saver(storage)
    for _ in range(3):
        assert saver.step(saves(4)) == {}
    assert [key for key, _, _ in storage.written] == [b"r1", b"r3"]
    assert saver.step(saves(4), ended=["r"]) == {}
    assert "r" not in saver, "nothing of it is left to save"


def test_a_store_without_room_gets_the_rest_in_a_later_step() -> None:
    storage = Storage(room=2)
    saver = Saver(storage)
    assert saver.step([*saves(4), *saves(1, "s")]) == {"r": 2, "s": 0}
    assert saver.counts["writes_refused"] == 2


def test_what_depends_on_a_block_that_was_not_filled_is_not_saved() -> None:
    storage = Storage()
    saver = Saver(storage)
    jobs = [job._replace(before=list(range(4 * job.place))) for job in saves(4)]
    saver.begin_step(jobs, ())
    assert saver.end_step({6}) == {"r": 1}
    assert [key for key, _, _ in storage.written] == [b"r0"]


def test_what_is_left_of_a_request_is_stored_step_by_step_while_its_blocks_are_held() -> None:
    storage = Storage(room=4, have=[b"r0", b"r1"])
    saver = Saver(storage)
    saver.step(saves(12), ended=["r"])
    saver.step()
    assert len(storage.written) == 4
    assert "r" in saver
    storage.room = 1000
    saver.step()
    assert "r" not in saver
    assert [key for key, _, _ in storage.written] == [b"r%d" % at for at in range(2, 12)]
    assert storage.written[3][2] == bytes(range(160, 192)) + bytes(range(161, 193)), (
        "all layers of its blocks"
    )


def test_blocks_are_held_no_longer_than_patience_for_a_store_that_takes_nothing() -> None:
    saver = Saver(Storage(room=0))
    saver.step(saves(3), ended=["r"])
    saver.now_s += PATIENCE_S - 0.1
    saver.step()
    assert "r" in saver
    saver.now_s += 0.2
    saver.step()
    assert "r" not in saver
    assert saver.counts["saves_given_up"] == 3


def test_a_store_that_is_slower_than_the_engine_does_not_fill_the_device() -> None:
    """It takes a block now and then, so requests that had ended used to hold their blocks for hours."""
    storage = Storage(room=0)
    saver = Saver(storage, max_held_blocks=100)
    most = 0
    for number in range(60):
        saver.step(saves(8, f"r{number}."), ended=[f"r{number}."])  # 32 blocks of the device
        most = max(most, len(saver))
        storage.room += 1
        saver.now_s += 1.0
    assert most == 3
    assert len(storage.written) >= 58, "as many as it takes are stored all the same"
    storage.room = 1000
    saver.step()
    assert not len(saver)


@pytest.mark.parametrize("blocks", [40, 100])
def test_a_step_copies_a_limited_number_of_blocks_of_requests_that_have_ended(blocks: int) -> None:
    storage = Storage()
    saver = Saver(storage)
    jobs = [job._replace(block_ids=[0, 1, 2, 3]) for job in saves(blocks)]
    saver.step(jobs, ended=["r"])
    assert len(storage.written) == 32
