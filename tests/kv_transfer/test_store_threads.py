"""Reads and writes of a store by threads: width, order, and one report each, whatever the store raises."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from kv_blocks import BLOCK_BYTES, key, keys, payload
from sojourn_server.kv_offload.block_file import OffloadError
from sojourn_server.kv_transfer.store_threads import StoreThreads
from sojourn_server.kv_transfer.transfer_limits import TransferLimits
from transfer_manager_harness import PATIENCE_S, MemoryStore, eventually

LIMITS = TransferLimits(slots=8, read_width=2, max_waiting_writes=3, patience_s=0.05)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def threads(store: MemoryStore, now: list[float]) -> Iterator[StoreThreads]:
    of: Any = store
    made = StoreThreads(of, LIMITS, clock=lambda: now[0])
    yield made
    assert made.close()


async def read(threads: StoreThreads, *numbers: int) -> tuple[list[bytearray], list[str | None]]:
    contents = [bytearray(BLOCK_BYTES) for _ in numbers]
    results: asyncio.Queue[str | None] = asyncio.Queue()
    blocks = [(key(number), memoryview(content)) for number, content in zip(numbers, contents, strict=True)]
    threads.read(blocks, results.put_nowait)
    return contents, [await results.get() for _ in numbers]


async def test_as_many_reads_run_at_a_time_as_there_are_readers(
    threads: StoreThreads, store: MemoryStore
) -> None:
    both_run = threading.Barrier(2)
    store.before = lambda what, one: both_run.wait(PATIENCE_S) and None
    store.fill(*keys(*range(4)))
    for _ in range(10):  # a reader is free again when its last read is reported
        found = await asyncio.gather(read(threads, 0, 1), read(threads, 2, 3))
        contents = [content for contents, _ in found for content in contents]
        assert contents == [payload(one) for one in keys(*range(4))]


@pytest.mark.parametrize(
    ("error", "why"), [(OffloadError("damaged"), "damaged"), (KeyError("x"), "KeyError: 'x'")]
)
async def test_a_failed_read_is_reported_with_its_error(
    threads: StoreThreads, store: MemoryStore, error: Exception, why: str
) -> None:
    def fail(what: str, one: bytes) -> None:
        if one == key(0):
            raise error

    store.before = fail
    store.fill(key(1))
    contents, whys = await read(threads, 0, 1)
    assert whys == [why, None]
    assert contents[1] == payload(key(1))


def write(threads: StoreThreads, number: int) -> bool:
    return threads.write(key(number), b"", [memoryview(payload(key(number)))])


def test_writes_go_in_order_and_a_store_that_hangs_drops_those_that_wait(
    threads: StoreThreads, store: MemoryStore, now: list[float]
) -> None:
    gate, seen = threading.Event(), list[bytes]()

    def hang(what: str, one: bytes) -> None:
        seen.append(one)
        if one == key(1):
            assert gate.wait(PATIENCE_S)
        if one == key(0):
            raise RuntimeError("broken")

    store.before = hang
    assert write(threads, 0)
    assert write(threads, 1)
    eventually(lambda: len(seen) == 2)
    assert [write(threads, number) for number in range(2, 6)] == [True, True, True, False], "three may wait"
    now[0] += LIMITS.patience_s
    assert not write(threads, 6)
    assert threads.counts["write_stalled"] == 3
    gate.set()
    eventually(lambda: threads.counts["write_stored"] == 1)
    assert seen == keys(0, 1)
    assert write(threads, 9)
    eventually(lambda: threads.writes.queued_bytes == 0)
    assert threads.counts["write_failed"] == 1
    assert list(store.blocks) == keys(1, 9)


async def test_one_lookup_that_hangs_costs_patience_once(threads: StoreThreads, store: MemoryStore) -> None:
    gate, asked, leading = threading.Event(), list[bytes](), store.leading

    def look_up(wanted: Sequence[bytes]) -> int:
        asked.extend(wanted)
        assert gate.wait(PATIENCE_S)
        return leading(wanted)

    store.leading = look_up  # type: ignore[method-assign]
    store.fill(*keys(*range(40)))
    behind = [threads.look_up(keys(at)) for at in range(3)]
    assert await asyncio.gather(*behind) == [0, 0, 0], "who stands behind it does not wait as long again"
    assert threads.counts["looks_given_up"] == 3
    assert asked == keys(0)
    gate.set()
    while not await threads.look_up(keys(*range(50))):
        await asyncio.sleep(0.001)
    assert await threads.look_up(keys(*range(50))) == 40
