"""A link's order, pace and shares, each against what a few lines would say."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.kv_transfer.transfer_limits import LinkRates, TransferLimits
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


@pytest.mark.parametrize("rate", [0, 0.0, -1.0, math.nan, math.inf])
def test_a_rate_of_zero_or_of_nothing_sensible_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match=r"the rate of x is .* expected more than 0, or None"):
        TransferLink("x", rate)
    with pytest.raises(ValueError, match=r"the rate of storage_read"):
        LinkRates(storage_read=rate)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"slots": 0}, "slots must be at least 1"),
        ({"chunk_bytes": 0}, "chunk_bytes must be at least 1"),
        ({"read_width": 0}, "read_width must be at least 1"),
        ({"patience_s": 0.0}, "patience_s must be more than 0"),
        ({"patience_s": math.nan}, "patience_s must be more than 0"),
        ({"report_interval_s": 2.0}, "report_interval_s 2.0 must be below patience_s 1.5"),
        ({"lease_s": 1.0}, "lease_s 1.0 must be above patience_s 1.5"),
        ({"max_waiting_writes": -1}, "must not be negative"),
    ],
    ids=str,
)
def test_limits_that_cannot_be_kept_are_refused(changed: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        TransferLimits(**{"slots": 4, **changed})
    with pytest.raises(ValueError, match="width"):
        TransferLink("x", width=0)


def test_no_peer_takes_the_whole_width_and_order_is_kept_among_the_others() -> None:
    link = TransferLink("x", width=4, peer_width=2)
    for number, peer in enumerate([1, 1, 1, 1, 2, 3, 2, 2, 3]):
        link.put(f"{peer} {number}", 1, None, 0.0, peer=peer)
    taken = list(link.take(0.0))
    assert [item.peer for item in taken] == [1, 1, 2, 3]
    # Peer 1 takes nothing; the next turn is still not its own, though it came first.
    for item, then in [(taken[2], [2]), (taken[3], [2]), ([], [])]:
        if item:
            link.end_io(item.number, 0.0)
            assert link.take_finished(0.0) == [item]
        assert [item.peer for item in link.take(0.0)] == then
    link.end_io(taken[0].number, 0.0)
    assert [item.request for item in link.take_finished(0.0)] == ["1 0"]
    assert [item.request for item in link.take(0.0)] == ["1 2"]


def test_what_is_late_takes_no_place_of_the_width() -> None:
    link = TransferLink("x", width=2, peer_width=1, late_s=0.5)
    for peer in range(5):
        link.put(f"{peer}", 1, None, 0.0, peer=peer)
    assert [item.peer for item in link.take(0.0)] == [0, 1]
    assert list(link.take(0.4)) == []
    later = list(link.take(0.5))
    assert [item.peer for item in later] == [2, 3]
    link.end_io(later[0].number, 0.6)
    link.take_finished(0.6)
    assert [item.peer for item in link.take(0.6)] == [4]
    # To a peer that hangs no more goes, late or not.
    link.put("again", 1, None, 0.6, peer=0)
    assert list(link.take(10.0)) == []
    link.end_io(1, 10.0)
    assert [item.request for item in link.take_finished(10.0)] == ["0"]
    assert [item.request for item in link.take(10.0)] == ["again"]


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


def test_a_rate_paces_bytes_by_its_own_clock() -> None:
    link = TransferLink("x", 100.0)
    for size in (50, 100, 25):
        link.put("r", size, None, 0.0)
    assert [at for _, _, at in run(link)] == pytest.approx([0.5, 1.5, 1.75])
    assert link.moved_bytes == 175


def test_who_is_late_catches_up_but_not_with_idle_time() -> None:
    link = TransferLink("x", 100.0)
    link.put("r", 10, None, 0.0)
    (item,) = link.take(0.05)  # the clock came a little late
    assert item.until_s == pytest.approx(0.10)
    link.end_io(item.number, 0.1)
    assert link.take_finished(0.12) == [item]
    link.put("r", 10, None, 0.12)
    (item,) = link.take(5.0)  # it had been kept from working
    assert item.until_s == pytest.approx(5.0 - MAX_LAG_S + 0.1)


def test_what_is_sent_begins_when_by_the_rate_it_would_be_there() -> None:
    """Else a link of a peer would be as fast as the socket is."""
    link = TransferLink("x", 100.0, width=2, sends=True)
    numbers = [link.put("r", 50, None, 0.0) for _ in range(4)]
    assert list(link.take(0.0)) == []
    assert link.stuck(99.0, 1.5) == [], "what has not begun cannot be late"
    assert link.wake_at() == pytest.approx(0.5)
    (item,) = link.take(0.5)
    assert item.number == numbers[0]
    link.end_io(item.number, 0.5)
    assert link.take_finished(0.5) == [item]
    assert link.cancel(numbers[1])
    assert link.moved(0.75) == 50
    assert list(link.take(0.9)) == []
    assert [item.number for item in link.take(2.0)] == numbers[2:]


def test_without_a_rate_nothing_waits_for_a_clock() -> None:
    link = TransferLink("x", width=3)
    for _ in range(5):
        link.put("r", 10, None, 0.0)
    items = list(link.take(0.0))
    assert len(items) == 3
    for item in items:
        link.end_io(item.number, 0.25)
    assert link.take_finished(0.25) == items
    assert link.queued_s(0.25) == pytest.approx(20 * 0.25 / 30)


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


def test_what_is_taken_back_is_not_moved_and_leaves_no_place() -> None:
    link = TransferLink("x", 100.0)
    numbers = [link.put("a", 10, None, 0.0) for _ in range(3)]
    assert link.cancel(numbers[1])
    assert not link.cancel(numbers[1])
    link.close("a")
    assert [number for _, number, _ in run(link)] == [numbers[0], numbers[2]]
    assert (link.requests, link.waiting, link.in_flight, link.queued_bytes(9.0)) == (0, 0, 0, 0)


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


def test_what_does_not_come_back_is_seen() -> None:
    link = TransferLink("x", 100.0)
    link.put("a", 100, None, 0.0)
    (item,) = link.take(0.0)
    assert link.stuck(2.4, 1.5) == []  # it had a second coming
    assert link.stuck(2.6, 1.5) == [item]
    link.end_io(item.number, 2.7)
    assert link.stuck(9.0, 1.5) == []


def test_nothing_negative_is_moved() -> None:
    with pytest.raises(ValueError, match="an item of -1 bytes; expected 0 or more"):
        TransferLink("x").put("r", -1, None, 0.0)


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


def test_with_a_share_of_one_in_a_hundred_the_model_has_ninety_nine() -> None:
    lane = TrafficClassArbiter(0.01)
    taken = [lane.take({MODEL: 1000, KV: 1000}) for _ in range(10_000)]
    assert abs(taken.count(KV) - 100) <= 1
    assert taken[:99] == [MODEL] * 99, "the model goes first"


def test_kv_has_all_that_is_idle_and_saves_nothing_up() -> None:
    lane = TrafficClassArbiter(0.01)
    assert [lane.take({KV: 1000}) for _ in range(50)] == [KV] * 50
    assert [lane.take({MODEL: 1000}) for _ in range(500)] == [MODEL] * 500
    assert lane.take({MODEL: 1000, KV: 1000}) is MODEL, "what it did not ask for is not owed to it"


def test_a_share_of_zero_is_strict_priority() -> None:
    lane = TrafficClassArbiter(0.0)
    assert {lane.take({MODEL: 1, KV: 1}) for _ in range(1000)} == {MODEL}


@pytest.mark.parametrize("share", [-0.1, 1.0, math.nan])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share of a link"):
        TrafficClassArbiter(share)


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


@pytest.mark.parametrize("rate", [None, 50.0])
def test_a_link_knows_how_long_bytes_take(rate: float | None) -> None:
    link = TransferLink("x", rate)
    assert link.seconds_for(100) == (None if rate is None else 2.0)
    number = link.put("r", 200, None, 0.0)
    assert [item.number for item in link.take(0.0)] == [number]
    link.end_io(number, 8.0)
    assert link.seconds_for(100) == (4.0 if rate is None else 2.0)
