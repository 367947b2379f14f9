"""A link's order, shares and speed, each against what a few lines would say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.kv_transfer.transfer_link import (
    LinkItem,
    TrafficClass,
    TrafficClassArbiter,
    TransferLink,
)

MODEL, KV = TrafficClass.MODEL, TrafficClass.KV


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
        link.put(f"{peer} {request}", 1, None, traffic_class, peer=peer).number
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
        assert link.finish(item.number, 0.0) is item
    assert sorted(item.number for item in begun) == numbers
    for request in {item.request for item in begun}:
        for each in TrafficClass:
            mine = [item.number for item in begun if (item.request, item.traffic_class) == (request, each)]
            assert mine == sorted(mine)
        link.close(request)
    assert (link.requests, link.waiting, link.in_flight) == (0, 0, 0)


def test_a_request_keeps_its_place_while_it_is_open_and_the_link_does_not_wait_for_it() -> None:
    link = TransferLink("x")
    first = link.put("a", 10, None)
    later = [link.put("b", 10, None), link.put("b", 10, None)]
    assert list(link.take(0.0)) == [first]
    link.finish(first.number, 0.1)
    assert list(link.take(0.1)) == later[:1]
    again = link.put("a", 10, None)  # its next layer
    link.finish(later[0].number, 0.2)
    assert list(link.take(0.2)) == [again]
    link.close("a")
    link.finish(again.number, 0.3)
    link.close("b")
    assert link.requests == 1  # it has something waiting
    assert list(link.take(0.3)) == later[1:]
    assert link.requests == 0


PUTS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 50), st.booleans(), st.integers(0, 3)), max_size=40
)


@given(PUTS, st.integers(1, 3))
def test_every_byte_goes_once_and_each_class_in_order_of_requests(
    puts: list[tuple[int, int, bool, int]], width: int
) -> None:
    """Requests come while others are served: after each, as many items end as it says."""
    link = TransferLink("x", width=width)
    place: dict[str, int] = {}
    waiting: dict[int, tuple[int, int, TrafficClass]] = {}
    flying: list[LinkItem] = []
    through: list[LinkItem] = []

    def begin() -> None:
        for item in link.take(0.0):
            mine = waiting.pop(item.number)
            older = [one for one in waiting.values() if one[2] is item.traffic_class and one[:2] < mine[:2]]
            assert not older, "something of an older request waited"
            flying.append(item)

    for request, size, is_model, ends in puts:
        item = link.put(str(request), size, None, MODEL if is_model else KV)
        place.setdefault(item.request, item.number)
        waiting[item.number] = place[item.request], item.number, item.traffic_class
        begin()
        for _ in range(min(ends, len(flying))):
            through.append(link.finish(flying.pop(0).number, 0.0))
            begin()
    assert link.queued_bytes == sum(size for _, size, _, _ in puts) - link.moved_bytes
    while flying:
        through.append(link.finish(flying.pop(0).number, 0.0))
        begin()
    assert sorted(item.number for item in through) == list(range(1, len(puts) + 1))
    assert link.moved_bytes == sum(size for _, size, _, _ in puts)
    assert (link.queued_bytes, link.waiting, link.in_flight) == (0, 0, 0)


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
