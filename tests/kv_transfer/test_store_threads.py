"""Reads, lookups and writes of a store by threads: each has an end, whatever the store does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
from kv_blocks import BLOCK_BYTES, key, keys, payload
from sojourn_server.kv_transfer.staging_buffers import TransferLimits
from sojourn_server.kv_transfer.store_threads import StoreThreads
from transfer_manager_harness import PATIENCE_S, MemoryStore
from waiting import wait_until

LIMITS = TransferLimits(slots=8, max_waiting_writes=3, patience_s=0.05)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def threads(store: MemoryStore) -> Iterator[StoreThreads]:
    of: Any = store
    made = StoreThreads(of, LIMITS)
    yield made
    assert made.close()


@pytest.mark.parametrize(
    ("error", "why"), [(OSError("damaged"), "OSError: damaged"), (KeyError("x"), "KeyError: 'x'")]
)
async def test_a_failed_read_is_reported_with_its_error(
    threads: StoreThreads, store: MemoryStore, error: Exception, why: str
) -> None:
    def fail(what: str, one: bytes) -> None:
        raise error

    store.before = fail
    assert await threads.read(key(0), memoryview(bytearray(BLOCK_BYTES))) == why


def write(threads: StoreThreads, number: int) -> None:
    threads.write(key(number), b"", [memoryview(payload(key(number)))])


def test_writes_go_in_order_and_a_store_that_hangs_gets_no_more_than_may_wait(
    threads: StoreThreads, store: MemoryStore
) -> None:
    gate, seen = threading.Event(), list[bytes]()

    def hang(what: str, one: bytes) -> None:
        seen.append(one)
        if one == key(1):
            assert gate.wait(PATIENCE_S)
        if one == key(0):
            raise RuntimeError("broken")

    store.before = hang
    write(threads, 0)
    write(threads, 1)
    wait_until(lambda: len(seen) == 2)
    for number in (2, 3):
        assert threads.has_room
        write(threads, number)
    assert not threads.has_room
    assert not threads.knows(key(0)), "it is not there, so it may be written again"
    assert threads.knows(key(3)), "it will be there"
    gate.set()
    wait_until(lambda: threads.counts["write_stored"] == 3)
    assert threads.has_room
    assert threads.counts["write_failed"] == 1
    assert seen == keys(0, 1, 2, 3)
    assert list(store.blocks) == keys(1, 2, 3)


async def test_what_a_lookup_misses_is_not_known_any_more(threads: StoreThreads, store: MemoryStore) -> None:
    store.fill(*keys(*range(40)))
    assert await threads.look_up(keys(*range(50))) == 40
    assert [threads.knows(key(at)) for at in (0, 39, 40)] == [True, True, False]
    del store.blocks[key(20)]
    assert await threads.look_up(keys(*range(50))) == 20
    assert [threads.knows(key(at)) for at in (19, 20, 39)] == [True, False, False]


async def test_a_lookup_waits_for_one_that_nobody_wants_any_more(
    threads: StoreThreads, store: MemoryStore
) -> None:
    gate, leading = threading.Event(), store.leading
    store.leading = lambda wanted: gate.wait(PATIENCE_S) and leading(wanted)  # type: ignore[method-assign,assignment]
    store.fill(*keys(*range(40)))
    aborted = asyncio.ensure_future(threads.look_up(keys(0)))
    await asyncio.sleep(0.001)
    aborted.cancel()
    wanted = asyncio.ensure_future(threads.look_up(keys(*range(50))))
    await asyncio.sleep(0.001)
    gate.set()
    assert await wanted == 40


async def test_a_lookup_waits_in_the_queue_as_long_as_others_are_answered(store: MemoryStore) -> None:
    leading, of = store.leading, cast(Any, store)

    def slow(wanted: Sequence[bytes]) -> int:
        threading.Event().wait(0.4)
        return leading(wanted)

    store.leading = slow  # type: ignore[method-assign]
    store.fill(*keys(*range(8)))
    threads = StoreThreads(of, TransferLimits(slots=8, patience_s=2.0))  # shorter than all lookups together
    assert await asyncio.gather(*(threads.look_up(keys(at)) for at in range(8))) == [1] * 8
    assert threads.close()


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
