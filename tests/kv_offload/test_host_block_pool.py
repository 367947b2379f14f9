"""The slots of host memory, method by method. Random lives of them are in the tests of planner and mover."""

from __future__ import annotations

from collections import Counter

import pytest
from sojourn_server.kv_offload.host_block_pool import HostBlockPool, HostEntry

A, B, C, D = (b"a", b"b", b"c", b"d")


def filled(host: HostBlockPool, *keys: bytes, rank: int = 1, on_disk: bool = False) -> list[HostEntry]:
    entries = []
    for key in keys:
        entry = host.begin(key, rank, None, on_disk=on_disk)
        assert entry is not None
        entries.append(entry)
    return entries


def order_of_reuse(host: HostBlockPool) -> list[bytes]:
    """Empties ``host`` of all that may be reused."""
    keys = []
    while (entry := host.reuse(at_most=9)) is not None:
        keys.append(entry.key)
    return keys


def not_on_disk(host: HostBlockPool, most: int = 100) -> list[bytes]:
    return [entry.key for entry in host.next_unspilled(most, above=-1)]


# -- begin, get, entry_in_slot


def test_each_block_gets_a_slot_of_its_own() -> None:
    host = HostBlockPool(3)
    assert (host.free, len(host)) == (3, 0)
    entries = filled(host, A, B, C)
    assert [entry.slot for entry in entries] == [0, 1, 2]
    assert (host.free, len(host)) == (0, 3)
    assert list(host) == entries
    for entry in entries:
        assert host.get(entry.key) is entry
        assert host.entry_in_slot(entry.slot) is entry
    assert host.get(D) is None


def test_what_is_full_begins_nothing_and_changes_nothing() -> None:
    host = HostBlockPool(1)
    filled(host, A)
    assert host.begin(B, 1, None) is None
    assert host.get(B) is None
    assert order_of_reuse(host) == [A]


def test_where_all_is_full_something_makes_way_that_is_worth_no_more_and_is_counted() -> None:
    counts: Counter[str] = Counter()
    host = HostBlockPool(2, counts)
    filled(host, A, on_disk=True)
    filled(host, B, rank=3)
    assert host.take(C, 0, None) is None, "it is worth less than either"
    taken = host.take(C, 2, None)
    assert taken is not None
    assert (taken.key, taken.rank, host.get(A)) == (C, 2, None)
    assert host.take(D, 4, None, at_most=1) is None
    assert host.take(D, 4, 7, on_disk=True) is not None
    assert [(entry.key, entry.job, entry.on_disk) for entry in host] == [(B, None, False), (D, 7, True)]
    assert counts == {"dropped": 1, "dropped_on_disk": 1}


def test_of_what_a_reader_releases_the_end_is_reused_first() -> None:
    host = HostBlockPool(3)
    entries = filled(host, A, B, C)
    for entry in entries:
        host.pin(entry)
    host.release(entries)
    assert order_of_reuse(host) == [C, B, A]


def test_no_slots_at_all() -> None:
    host = HostBlockPool(0)
    assert host.begin(A, 1, None) is None
    assert host.reuse(at_most=9) is None
    assert not_on_disk(host) == []


def test_what_is_being_filled_is_found_but_not_reused() -> None:
    host = HostBlockPool(2)
    entry = host.begin(A, 0, 7)
    filled(host, B)
    assert host.get(A) is entry
    assert order_of_reuse(host) == [B]
    assert entry is not None
    host.end_fill(entry)
    assert entry.job is None
    assert order_of_reuse(host) == [A]


# -- the order of reuse


def test_the_longest_unused_is_reused_first_and_its_slot_is_free() -> None:
    host = HostBlockPool(3)
    first, *_ = filled(host, A, B, C)
    assert host.reuse(at_most=9) is first
    assert host.get(A) is None
    assert host.entry_in_slot(first.slot) is None
    assert host.free == 1
    (again,) = filled(host, D)
    assert again.slot == first.slot
    assert order_of_reuse(host) == [B, C, D]


def test_a_lower_rank_goes_first_however_lately_used() -> None:
    host = HostBlockPool(4)
    filled(host, A, rank=2)
    filled(host, B, rank=1)
    filled(host, C, rank=0)
    filled(host, D, rank=1)
    assert order_of_reuse(host) == [C, B, D, A]


def test_a_touch_is_a_use() -> None:
    host = HostBlockPool(3)
    a, _, _ = filled(host, A, B, C)
    host.touch(a)
    assert order_of_reuse(host) == [B, C, A]


def test_the_end_of_filling_is_a_use() -> None:
    host = HostBlockPool(2)
    a = host.begin(A, 1, 7)
    filled(host, B)
    assert a is not None
    host.end_fill(a)
    assert order_of_reuse(host) == [B, A]


def test_a_new_rank_puts_it_behind_those_of_that_rank() -> None:
    host = HostBlockPool(4)
    a, b, _, _ = filled(host, A, B, C, D)
    host.set_rank(a, 0)
    host.set_rank(b, 0)
    assert order_of_reuse(host) == [A, B, C, D]


def test_the_same_rank_again_is_no_use() -> None:
    host = HostBlockPool(2)
    a, _ = filled(host, A, B)
    host.set_rank(a, 1)
    assert order_of_reuse(host) == [A, B]


@pytest.mark.parametrize("held", ["pinned", "being filled"])
def test_a_rank_given_while_it_is_held_counts_from_then_on(held: str) -> None:
    host = HostBlockPool(2)
    a = host.begin(A, 1, 7 if held == "being filled" else None)
    assert a is not None
    if held == "pinned":
        host.pin(a)
    filled(host, B)
    host.set_rank(a, 0)
    host.touch(a)  # no place to be moved within
    assert not_on_disk(host) == [B]
    if held == "pinned":
        host.unpin(a)
    else:
        host.end_fill(a)
    assert order_of_reuse(host) == [A, B]


# -- pins


def test_what_is_pinned_is_not_reused_before_its_last_reader_is_through() -> None:
    host = HostBlockPool(2)
    a, _ = filled(host, A, B)
    host.pin(a)
    host.pin(a)
    host.unpin(a)
    assert order_of_reuse(host) == [B]
    host.unpin(a)
    assert order_of_reuse(host) == [A]


def test_the_last_reader_is_its_newest_use() -> None:
    host = HostBlockPool(3)
    a, _, _ = filled(host, A, B, C)
    host.pin(a)
    host.unpin(a)
    assert order_of_reuse(host) == [B, C, A]


def test_what_is_being_filled_may_be_pinned_and_stays_when_it_is_filled() -> None:
    host = HostBlockPool(1)
    a = host.begin(A, 1, 7)
    assert a is not None
    host.pin(a)
    host.end_fill(a)
    assert host.reuse(at_most=9) is None
    assert host.idle_on_disk == 0
    host.unpin(a)
    assert order_of_reuse(host) == [A]


def test_what_is_unpinned_while_it_is_being_filled_is_not_reused() -> None:
    host = HostBlockPool(1)
    a = host.begin(A, 1, 7)
    assert a is not None
    host.pin(a)
    host.unpin(a)
    assert host.reuse(at_most=9) is None
    host.end_fill(a)
    assert host.reuse(at_most=9) is a


# -- removal


def test_what_is_removed_is_found_no_more_and_its_slot_is_free() -> None:
    host = HostBlockPool(2)
    a, _ = filled(host, A, B)
    host.remove(a)
    assert a.removal_pending
    assert host.get(A) is None
    assert host.entry_in_slot(a.slot) is None
    assert host.free == 1
    host.remove(a)  # nothing happens the second time
    assert host.free == 1
    assert order_of_reuse(host) == [B]


def test_a_slot_whose_content_is_removed_is_free_when_its_last_reader_is_through() -> None:
    host = HostBlockPool(1)
    (a,) = filled(host, A)
    host.pin(a)
    host.pin(a)
    host.remove(a)
    host.unpin(a)
    assert host.free == 0
    assert host.entry_in_slot(a.slot) is a
    assert host.reuse(at_most=9) is None
    assert not_on_disk(host) == []
    host.unpin(a)
    assert host.free == 1
    assert host.entry_in_slot(a.slot) is None


def test_a_slot_whose_content_is_removed_is_free_when_it_is_filled_and_not_read() -> None:
    host = HostBlockPool(1)
    a = host.begin(A, 1, 7)
    assert a is not None
    host.pin(a)
    host.remove(a)
    host.end_fill(a)
    assert host.free == 0
    host.unpin(a)
    assert host.free == 1


def test_the_same_content_may_come_again_while_the_removed_is_still_held() -> None:
    host = HostBlockPool(2)
    (a,) = filled(host, A)
    host.pin(a)
    host.remove(a)
    (again,) = filled(host, A)
    assert again.slot != a.slot
    host.touch(a)
    host.set_rank(a, 0)
    host.set_on_disk(a, True)  # of what is removed none of it is anybody's business
    host.unpin(a)
    assert host.get(A) is again
    assert host.idle_on_disk == 0
    assert not_on_disk(host) == [A]
    assert order_of_reuse(host) == [A]
    assert host.free == 2


# -- what is on disk


def test_what_a_reuse_would_lose_comes_in_the_order_of_reuse() -> None:
    host = HostBlockPool(6)
    filled(host, A, B, rank=1)
    filled(host, C, rank=0, on_disk=True)
    filled(host, D, rank=0)
    pinned, _ = filled(host, b"e", b"f", rank=2)
    host.pin(pinned)
    assert not_on_disk(host) == [D, A, B, b"f"]
    assert not_on_disk(host, 2) == [D, A]
    assert not_on_disk(host, 0) == []
    assert len(host) == 6


def test_idle_entries_that_are_on_disk_are_counted() -> None:
    host = HostBlockPool(3)
    a, b, c = filled(host, A, B, C)
    for entry in (a, b, c):
        host.set_on_disk(entry, True)
        host.set_on_disk(entry, True)  # known already
    assert host.idle_on_disk == 3
    assert not_on_disk(host) == []
    host.pin(a)
    assert host.idle_on_disk == 2
    host.set_on_disk(a, False)
    assert host.idle_on_disk == 2
    host.unpin(a)
    assert host.idle_on_disk == 2
    assert not_on_disk(host) == [A]
    host.set_on_disk(b, False)
    assert host.idle_on_disk == 1
    assert sorted(not_on_disk(host)) == [A, B]
    assert host.reuse(at_most=9) is b
    host.remove(c)
    assert host.idle_on_disk == 0


def test_being_written_to_disk_is_no_use() -> None:
    host = HostBlockPool(3)
    a, _, _ = filled(host, A, B, C)
    host.set_on_disk(a, True)
    assert order_of_reuse(host) == [A, B, C]


def test_what_has_lost_its_copy_on_disk_waits_for_its_turn_to_be_written() -> None:
    host = HostBlockPool(2)
    a, b = filled(host, A, B, on_disk=True)
    host.set_on_disk(a, False)
    host.set_on_disk(b, False)
    assert not_on_disk(host) == order_of_reuse(host) == [A, B]


def test_what_is_worth_more_does_not_make_way_for_what_is_worth_less() -> None:
    host = HostBlockPool(2)
    (a,) = filled(host, A, rank=1)
    filled(host, B, rank=2)
    assert host.reuse(at_most=0) is None
    assert host.reuse(at_most=1) is a
    assert host.reuse(at_most=1) is None
    assert len(host) == 1


# -- room


def test_room_is_what_is_free_and_what_would_make_way() -> None:
    host = HostBlockPool(6)
    low, _ = filled(host, A, B, rank=1)
    filled(host, C, rank=3)
    host.begin(D, 1, 7)
    assert [host.room(rank) for rank in (0, 1, 2, 3)] == [2, 4, 4, 5]
    host.pin(low)
    assert host.room(9) == 4
    host.remove(low)
    assert host.room(9) == 4, "it is read still"
    host.unpin(low)
    assert host.room(9) == 5
