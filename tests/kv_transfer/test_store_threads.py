"""Reads and writes of a store by threads: width, order, and one report each, whatever the store raises."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from sojourn_server.kv_offload.disk_store import BlockNotFound, PutOutcome
from sojourn_server.kv_transfer.store_threads import StoreThreads
from sojourn_server.kv_transfer.transfer_actions import ReadBlock, WriteBlock

TIMEOUT_S = 10.0


class FakeStore:
    """Calls ``on_read`` and ``on_write``, which a test sets."""

    def __init__(self) -> None:
        self.on_read: Callable[[bytes], None] = lambda key: None
        self.on_write: Callable[[bytes], None] = lambda key: None

    def get_into(self, key: bytes, buffers: Sequence[memoryview]) -> None:
        self.on_read(key)
        buffers[0][:] = key

    def put(self, key: bytes, buffers: Sequence[memoryview], *, parent: bytes = b"") -> PutOutcome:
        self.on_write(key)
        return PutOutcome.STORED


class Harness:
    def __init__(self) -> None:
        self.store = FakeStore()
        self.reads: queue.Queue[tuple[int, str | None]] = queue.Queue()
        self.writes: queue.Queue[tuple[int, str]] = queue.Queue()
        store: Any = self.store
        self.threads = StoreThreads(
            store,
            2,
            read_done=lambda item, why: self.reads.put((item, why)),
            write_done=lambda item, outcome: self.writes.put((item, outcome)),
        )

    def read(self, item: int, key: bytes) -> bytearray:
        content = bytearray(len(key))
        self.threads.read(ReadBlock(item, key, [memoryview(content)]))
        return content

    def write(self, item: int, key: bytes) -> None:
        self.threads.write(WriteBlock(item, key, b"", [memoryview(key)]))


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    assert made.threads.close()


def test_as_many_reads_run_at_a_time_as_there_are_readers(harness: Harness) -> None:
    both_run = threading.Barrier(2)

    def meet(key: bytes) -> None:
        both_run.wait(TIMEOUT_S)

    harness.store.on_read = meet
    contents = [harness.read(1, b"a"), harness.read(2, b"b")]
    assert {harness.reads.get(timeout=TIMEOUT_S) for _ in contents} == {(1, None), (2, None)}
    assert contents == [b"a", b"b"]


def test_a_reader_is_free_again_when_its_read_is_reported(harness: Harness) -> None:
    for item in range(10):
        harness.read(item, b"a")
        harness.read(item + 100, b"b")
        for _ in range(2):
            harness.reads.get(timeout=TIMEOUT_S)


def fail(error: Exception) -> Callable[[bytes], None]:
    def call(key: bytes) -> None:
        raise error

    return call


@pytest.mark.parametrize(
    ("error", "why"),
    [(BlockNotFound(b"a"), "no block 61 in this store"), (KeyError("x"), "KeyError: 'x'")],
)
def test_a_failed_read_is_reported_with_its_error(harness: Harness, error: Exception, why: str) -> None:
    harness.store.on_read = fail(error)
    harness.read(1, b"a")
    assert harness.reads.get(timeout=TIMEOUT_S) == (1, why)


def test_writes_are_reported_in_order_also_failed_ones(harness: Harness) -> None:
    harness.store.on_write = lambda key: fail(RuntimeError("broken"))(key) if key == b"b" else None
    for item, key in enumerate((b"a", b"b", b"c")):
        harness.write(item, key)
    done = [harness.writes.get(timeout=TIMEOUT_S) for _ in range(3)]
    assert done == [(0, "stored"), (1, "failed"), (2, "stored")]
