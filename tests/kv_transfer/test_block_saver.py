"""The store beside a step: it is never waited for, whatever it does, and gets what is left of requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from sojourn_server.kv_offload.cpu_device_backend import KvBlockArrays
from sojourn_server.kv_transfer.transfer_jobs import SaveJob, TransferJobs
from sojourn_server.kv_transfer.transfer_worker import TransferWorker

SOON_S = 60.0
PATIENCE_S = 1.5


class Books:
    """A traffic manager that takes ``room`` blocks to be stored, and loads nothing."""

    def __init__(self, room: int = 1000) -> None:
        self.room = room
        self.stored: list[tuple[bytes, bytes, bytes]] = []

    def store(self, key: bytes, parent: bytes, content: Sequence[memoryview]) -> bool:
        if len(self.stored) >= self.room:
            return False
        self.stored.append((key, parent, b"".join(content)))
        return True

    def load(self, *arguments: Any, **more: Any) -> Any:
        raise ValueError("there is none")


class Gate:
    """A store that answers when it may."""

    def __init__(self, have: Sequence[bytes] = (), shut: bool = False) -> None:
        self.have = set(have)
        self.asked: list[list[bytes]] = []
        self.reached = threading.Event()
        self.open = threading.Event()
        if not shut:
            self.open.set()

    def leading(self, keys: Sequence[bytes]) -> int:
        self.asked.append(list(keys))
        self.reached.set()
        assert self.open.wait(SOON_S)
        return next((at for at, key in enumerate(keys) if key not in self.have), len(keys))


Make = Callable[..., TransferWorker]


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def make(now: list[float]) -> Iterator[Make]:
    made: list[tuple[TransferWorker, Gate]] = []

    def worker(
        books: Books, gate: Gate, strict: bool = True, concurrent_steps: int = 1, **more: int
    ) -> TransferWorker:
        rows = {f"l{at}": np.arange(64 * 8, dtype=np.uint8).reshape(64, 8) + at for at in range(2)}
        built = TransferWorker(
            books, gate.leading, KvBlockArrays(rows, 4), slots=100, strict=strict, patience_s=PATIENCE_S,  # type: ignore[arg-type]
            clock=lambda: now[0], concurrent_steps=concurrent_steps, **more,
        )  # fmt: skip
        made.append((built, gate))
        return built

    yield worker
    for built, gate in made:
        gate.open.set()
        built.close()


def saves(count: int, request: str = "r", first: int = 0) -> list[SaveJob]:
    return [
        SaveJob(
            request, at, b"k%d" % at, b"k%d" % (at - 1) if at else b"", [4 * at + one for one in range(4)], []
        )
        for at in range(first, count)
    ]


def step(worker: TransferWorker, orders: TransferJobs | None = None) -> None:
    worker.begin_step(orders or TransferJobs())
    worker.end_step()


def steps(worker: TransferWorker, until: Callable[[], bool]) -> int:
    """Steps until something is so. How many."""
    for number in range(100_000):
        if until():
            return number
        step(worker)
        threading.Event().wait(0.001)
    raise AssertionError("it never is")


def test_a_step_does_not_wait_for_a_store_that_does_not_answer(make: Make) -> None:
    books, gate = Books(), Gate(shut=True)
    worker = make(books, gate)
    worker.begin_step(TransferJobs(saves=saves(2)))
    assert gate.reached.wait(SOON_S)
    worker.end_step()
    for _ in range(2):
        step(worker, TransferJobs(saves=saves(2)))
    assert [key for key, _, _ in books.stored] == [b"k0", b"k1"] * 3, "whoever writes sees that it is there"
    assert worker._saving._open_lookups == 1, "looks do not pile up behind one that hangs"
    assert not worker.take_results().stored


def test_what_the_store_is_seen_to_have_while_the_step_computes_is_not_copied(make: Make) -> None:
    books, gate = Books(), Gate([b"k0", b"k1", b"k2"])
    worker = make(books, gate)
    worker.begin_step(TransferJobs(saves=saves(4)))
    while len(gate.asked) < 4:
        threading.Event().wait(0.001)
    worker.end_step()
    assert {b"k3"} <= {key for key, _, _ in books.stored} <= {b"k2", b"k3"}


def test_what_is_left_of_a_request_is_stored_step_by_step_while_its_blocks_are_held(make: Make) -> None:
    books, gate = Books(room=4), Gate([b"k0", b"k1"])
    worker = make(books, gate)
    step(worker, TransferJobs(saves=saves(12), holds=["r"]))
    steps(worker, lambda: len(books.stored) == 4)
    step(worker)
    assert worker.take_sent() == set()
    assert worker.open_operations
    books.room = 1000
    steps(worker, lambda: len(books.stored) == 10)
    assert worker.take_sent() == {"r"}
    assert [key for key, _, _ in books.stored] == [b"k%d" % at for at in range(2, 12)]
    assert books.stored[3][2] == bytes(range(160, 192)) + bytes(range(161, 193)), "all layers of its blocks"
    assert worker.open_operations == 0
    assert not worker.take_results().stored


@pytest.mark.parametrize("which", ["hangs", "takes nothing"])
def test_blocks_are_held_no_longer_than_patience_for_a_store_that(
    make: Make, now: list[float], which: str
) -> None:
    books, gate = Books(room=0), Gate(shut=which == "hangs")
    worker = make(books, gate)
    step(worker, TransferJobs(saves=saves(3), holds=["r"]))
    assert gate.reached.wait(SOON_S)
    now[0] += PATIENCE_S - 0.1
    step(worker)
    assert worker.take_sent() == set()
    now[0] += PATIENCE_S + 0.2
    step(worker)
    assert worker.take_sent() == {"r"}
    assert worker.counts["saves_given_up"] == 3
    assert worker.open_operations == 0


def test_a_store_that_is_slower_than_the_engine_does_not_fill_the_device(
    make: Make, now: list[float]
) -> None:
    """It takes a block now and then, so requests that had ended used to hold their blocks for hours."""
    books = Books(room=0)
    worker = make(books, Gate(), max_held_blocks=100)
    held, freed, most = set(), set(), 0
    for number in range(60):
        name = f"r{number}"
        held.add(name)
        step(worker, TransferJobs(saves=saves(8, name), holds=[name]))  # 32 blocks of the device
        steps(worker, lambda: not worker._saving._open_lookups)
        freed |= worker.take_sent()
        most = max(most, len(held - freed))
        books.room += 1
        now[0] += 1.0
    assert most == 3
    assert worker.counts["saves_given_up"] + len(books.stored) + 8 * len(held - freed) >= 8 * 60
    books.room = 1000
    steps(worker, lambda: not len(worker._saving))
    assert freed | worker.take_sent() == held
    assert len(books.stored) >= 60, "as many as it takes are stored all the same"
