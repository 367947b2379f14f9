"""The slots of host memory, method by method. Random lives of them are in the tests of planner and mover."""

from __future__ import annotations

import sys
from collections import Counter

from sojourn_server.kv_offload.host_block_pool import HostBlockPool, HostEntry

A, B, C, D = (b"a", b"b", b"c", b"d")


def filled(host: HostBlockPool, *keys: bytes, rank: int = 1) -> list[HostEntry]:
    entries = []
    for key in keys:
        entry = host.take(key, rank, None)
        assert entry is not None
        entries.append(entry)
    return entries


def order_of_reuse(host: HostBlockPool) -> list[bytes]:
    """Empties ``host`` of all that may be reused."""
    keys = []
    for number in range(host.slots):
        left = list(host)
        assert host.take(b"new%d" % number, 9, 1) is not None
        keys += [entry.key for entry in left if entry.removal_pending]
    return keys


def not_on_disk(host: HostBlockPool, most: int = 100) -> list[bytes]:
    return [entry.key for entry in host.next_unspilled(most)]


def test_where_all_is_full_something_makes_way_that_is_worth_no_more_and_is_counted() -> None:
    host = HostBlockPool(2)
    host.on_disk = {A, D}
    filled(host, A)
    filled(host, B, rank=3)
    assert host.take(C, 0, None) is None, "it is worth less than either"
    taken = host.take(C, 2, None)
    assert taken is not None
    assert (taken.key, taken.rank, host.get(A)) == (C, 2, None)
    assert host.take(D, 4, None, at_most=1) is None
    assert host.take(D, 4, 7) is not None
    assert [(entry.key, entry.job, entry.dirty) for entry in host] == [(B, None, True), (D, 7, False)]
    assert host.counts == {"dropped": 1, "dropped_on_disk": 1}


def test_what_belongs_on_disk_goes_late_until_it_is_there() -> None:
    cold, idle = 1, 3
    host = HostBlockPool(4)
    _, written = filled(host, A, B, rank=cold)
    filled(host, C, rank=idle)
    filled(host, D, rank=2)
    host.set_dirty(written, False)
    assert [entry.key for entry in host.unwritten.values()] == [A]
    assert order_of_reuse(host) == [B, D, A, C]
    host = HostBlockPool(2)
    (failed, _) = filled(host, A, B, rank=cold)
    host.set_dirty(failed, False)
    host.set_rank(failed, cold)
    assert [*host.unwritten] == [B, A], "what is ordered again is written again"


def test_what_a_reuse_would_lose_comes_in_the_order_of_reuse() -> None:
    host = HostBlockPool(6)
    filled(host, A, B, rank=1)
    host.on_disk = {C}
    filled(host, C, rank=0)
    filled(host, D, rank=0)
    pinned, _ = filled(host, b"e", b"f", rank=2)
    host.pin(pinned)
    assert not_on_disk(host) == [A, B, b"f"], "D is worthless"
    assert not_on_disk(host, 2) == [A, B]
    assert host.unspilled == 3
    assert not_on_disk(host, 0) == []
    assert len(host) == 6


def test_what_is_not_on_disk_is_found_without_a_look_at_what_is() -> None:
    host = HostBlockPool(2_000)
    host.on_disk = {*map(str.encode, map(str, range(1_999)))}
    filled(host, *map(str.encode, map(str, range(2_000))))
    calls = Counter[str]()
    sys.setprofile(lambda frame, event, _: calls.update([event]))
    found = not_on_disk(host)
    sys.setprofile(None)
    assert found == [b"1999"]
    assert calls["call"] < 100
