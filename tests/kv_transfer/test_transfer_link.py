"""A link's order, pace and shares, each against what a few lines would say."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.kv_transfer.transfer_link import (
    MAX_LAG_S,
    LinkItem,
    TrafficClass,
    TrafficClassArbiter,
    TransferLink,
)

MODEL, KV = TrafficClass.MODEL, TrafficClass.KV


def run(link: TransferLink, now: float = 0.0) -> list[tuple[str, int, float]]:
    """Everything moved as soon as it may be: request, number, when it was through."""
    found: list[tuple[str, int, float]] = []
    while True:
        for item in link.take(now):
            link.end_io(item.number, now)
        through = link.take_finished(now)
        found += [(item.request, item.number, now) for item in through]
        if not through:
            now = link.wake_at()
            if math.isinf(now):
                return found


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([MODEL, KV]), st.integers(0, 2)), max_size=40),
    st.integers(1, 5),
    st.integers(1, 5),
    st.data(),
)
def test_all_is_moved_once_in_order_within_a_peer(
    puts: list[tuple[int, TrafficClass, int]], width: int, peer_width: int, data: st.DataObject
) -> None:
    link = TransferLink("x", width=width, peer_width=peer_width)
    numbers = [
        link.put(f"{peer} {request}", 1, None, 0.0, traffic_class, peer=peer)
        for peer, traffic_class, request in puts
    ]
    begun: list[LinkItem] = []
    flying: list[LinkItem] = []
    while True:
        flying += (new := list(link.take(0.0)))
        begun += new
        assert len(flying) <= width
        assert all(sum(item.peer == peer for item in flying) <= peer_width for peer in range(4))
        if not flying:
            break
        item = flying.pop(data.draw(st.integers(0, len(flying) - 1)))
        link.end_io(item.number, 0.0)
        assert link.take_finished(0.0) == [item]
    assert sorted(item.number for item in begun) == numbers
    for request in {item.request for item in begun}:
        for each in TrafficClass:
            mine = [item.number for item in begun if (item.request, item.traffic_class) == (request, each)]
            assert mine == sorted(mine)
        link.close(request)
    assert (link.requests, link.waiting, link.in_flight) == (0, 0, 0)


def test_a_request_keeps_its_place_while_it_is_open_and_the_link_does_not_wait_for_it() -> None:
    link = TransferLink("x", 100.0)
    first = link.put("a", 10, None, 0.0)
    later = [link.put("b", 10, None, 0.0), link.put("b", 10, None, 0.0)]
    (item,) = link.take(0.0)
    assert item.number == first
    link.end_io(first, 0.0)
    link.take_finished(0.1)
    (item,) = link.take(0.1)
    assert item.number == later[0]
    again = link.put("a", 10, None, 0.1)  # its next layer
    link.end_io(item.number, 0.1)
    link.take_finished(0.2)
    assert [item.number for item in link.take(0.2)] == [again]
    link.close("a")
    link.end_io(again, 0.31)
    link.take_finished(0.31)
    link.close("b")
    assert link.requests == 1  # it has something waiting
    ((request, number, at),) = run(link, 0.31)
    assert (request, number) == ("b", later[1])
    assert at == pytest.approx(0.4)
    assert link.requests == 0


def test_the_queue_is_told_in_bytes_and_seconds_and_progress_within_an_item() -> None:
    link = TransferLink("x", 100.0)
    assert link.queued_s(0.0) == 0.0
    link.put("a", 100, None, 0.0)
    link.put("b", 200, None, 0.0)
    assert link.queued_s(0.0) == pytest.approx(3.0)
    list(link.take(0.0))
    assert link.queued_s(0.25) == pytest.approx(2.75)
    assert link.queued_bytes(0.25) == 275
    assert link.moved(0.25) == 25
    assert link.moved(9.0) == 100, "an item whose I/O is late shows no more progress than it can have made"


PUTS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 50), st.booleans(), st.integers(0, 3)), max_size=40
)


@given(PUTS, st.sampled_from([None, 10.0, 1000.0]), st.integers(1, 3), st.booleans())
def test_every_byte_goes_once_and_each_class_in_order_of_requests(
    puts: list[tuple[int, int, bool, int]], rate: float | None, width: int, sends: bool
) -> None:
    link = TransferLink("x", rate, width=width, sends=sends)
    now, place, began = 0.0, {}, []  # type: ignore[var-annotated]
    asked: dict[int, tuple[int, int]] = {}
    waiting: dict[int, tuple[int, int, TrafficClass]] = {}

    def begin(item: LinkItem) -> None:
        mine = waiting.pop(item.number)
        older = [
            one
            for one in waiting.values()
            if one[2] is item.traffic_class
            and one[:2] < mine[:2]
            # What is sent late has had its turn before it begins: what came in between is not passed by.
            and not (sends and one[1] > mine[1])
        ]
        assert not older, "something of an older request waited"
        began.append(item.number)
        link.end_io(item.number, now)

    through = []
    for request, size, is_model, pause in puts:
        number = link.put(str(request), size, None, now, MODEL if is_model else KV)
        place.setdefault(request, number)
        asked[number] = request, size
        waiting[number] = place[request], number, MODEL if is_model else KV
        for item in link.take(now):
            begin(item)
        now += pause * 0.5
        through += link.take_finished(now)
    while waiting or link.in_flight:
        for item in link.take(now):
            begin(item)
        through += link.take_finished(now)
        if not math.isinf(link.wake_at()):
            now = max(now, link.wake_at())
    assert sorted(item.number for item in through) == sorted(asked)
    assert link.moved_bytes == sum(size for _, size in asked.values())
    assert link.queued_bytes(now) == 0
    if rate is not None:  # no more than its rate, from the first to the last
        assert sum(size for _, size in asked.values()) <= rate * (now + MAX_LAG_S) + 1e-6


@given(
    st.lists(st.tuples(st.sampled_from([MODEL, KV]), st.integers(1, 100)), min_size=1, max_size=200),
    st.sampled_from([0.0, 0.01, 0.1, 0.5]),
)
def test_while_both_wait_kv_has_its_share_to_within_an_item(
    items: list[tuple[TrafficClass, int]], share: float
) -> None:
    lane = TrafficClassArbiter(share)
    lines = {each: [size for one, size in items if one is each] for each in TrafficClass}
    together = {MODEL: 0, KV: 0}
    largest = max(size for _, size in items)
    sent = {MODEL: 0, KV: 0}
    while any(lines.values()):
        heads = {each: line[0] for each, line in lines.items() if line}
        chosen = lane.take(heads)
        size = lines[chosen].pop(0)
        sent[chosen] += size
        if len(heads) == 2:
            together[chosen] += size
            both = sum(together.values())
            assert together[KV] <= share * both + largest
            assert together[KV] >= share * both - 2 * largest
    assert sent == {each: sum(size for one, size in items if one is each) for each in TrafficClass}


def test_kv_has_all_that_is_idle_and_saves_nothing_up() -> None:
    lane = TrafficClassArbiter(0.01)
    assert [lane.take({KV: 1000}) for _ in range(50)] == [KV] * 50
    assert [lane.take({MODEL: 1000}) for _ in range(500)] == [MODEL] * 500
    assert lane.take({MODEL: 1000, KV: 1000}) is MODEL, "what it did not ask for is not owed to it"


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("stagger_s", [0.0, 0.125])
def test_the_queue_of_a_link_that_moves_several_at_a_time_is_as_long_as_it_takes(
    width: int, stagger_s: float
) -> None:
    link, ends = TransferLink("x", width=width), list[tuple[float, int]]()

    def serve(items: int, now: float) -> float:
        """Move items that take a second each. Returns the time of the last end."""
        for _ in range(items):
            link.put("r", 100, None, now)
        while link.waiting or link.in_flight:
            began = [item.number for item in link.take(now)]
            ends.extend((now + 1.0 + place * stagger_s, number) for place, number in enumerate(began))
            ends.sort()
            now, number = ends.pop(0)
            link.end_io(number, now)
            link.take_finished(now)
        return now

    now = serve(40, 100.0)
    for _ in range(40):
        link.put("q", 100, None, now)
    told = link.queued_s(now)
    assert told is not None
    link.close("q")
    assert serve(0, now) - now == pytest.approx(told, rel=0.1)
