"""A link to storage or to peers: a queue that serves requests in order.

Requests are served one after the other, because all would end late if all were served at once. A request
keeps its place in the queue until ``close``. If it queues another item later, such as the next layer of a
push, that item goes before the items of later requests. While a request has no item in the queue, the link
serves the next request.

The module has no clock and does no I/O. ``take`` returns items to start, and ``finish`` records the end of an
item's I/O.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class TrafficClass(Enum):
    """The purpose of a transfer, which sets its priority (DualPath §5.1).

    In this module the traffic class only orders this engine's own queue. Messages between engines carry it
    too, for networks that separate KV from the model's collectives with virtual lanes or hardware queues.
    Software cannot separate them, because bursts of collectives are shorter than a millisecond.
    """

    MODEL = "model"
    """Traffic that a forward pass waits for."""
    KV = "kv"
    """Traffic for which no forward pass waits."""


class TrafficClassArbiter:
    """Chooses the class that sends next: model traffic first, except for a small guaranteed share for KV.

    While items of both classes wait, KV gets ``kv_share`` of the bytes, to within one item of each class. If
    only one class waits, it gets the whole link. KV's share accumulates only while KV waits.
    """

    def __init__(self, kv_share: float) -> None:
        """Raises ``ValueError`` for a share outside [0, 1)."""
        if not (math.isfinite(kv_share) and 0 <= kv_share < 1):
            raise ValueError(f"KV's share of a link must be at least 0 and below 1, not {kv_share}")
        self._factor = kv_share / (1 - kv_share)
        self._owed = 0.0
        """Bytes of KV that may go before model traffic: KV's share, accumulated while KV waited."""

    def take(self, heads: Mapping[TrafficClass, int]) -> TrafficClass:
        """Return the class that sends next. ``heads``: bytes of the first waiting item of each class."""
        if TrafficClass.KV not in heads:
            self._owed = 0.0
            return TrafficClass.MODEL
        if TrafficClass.MODEL not in heads:
            return TrafficClass.KV
        if self._factor and self._owed >= heads[TrafficClass.KV]:
            self._owed -= heads[TrafficClass.KV]
            return TrafficClass.KV
        self._owed += heads[TrafficClass.MODEL] * self._factor
        return TrafficClass.MODEL


SPEED_SAMPLE_BYTES = 64 << 20
"""The speed of a link is measured over this many of its newest bytes."""


@dataclass(slots=True, eq=False)
class LinkItem:
    """One transfer on the link."""

    number: int
    request: str
    nbytes: int
    work: Any
    traffic_class: TrafficClass
    peer: int | None = None
    began_s: float = 0.0


_QueueKey = tuple[TrafficClass, int | None]
"""Key of a queue: traffic class, and connection of the peer, if any."""


@dataclass(slots=True, eq=False)
class _LinkRequest:
    number: int
    items: dict[_QueueKey, deque[LinkItem]] = field(default_factory=dict)
    is_closed: bool = False


class TransferLink:
    """A queue of items to transfer. At most ``width`` items are in flight at a time."""

    def __init__(
        self,
        name: str,
        *,
        width: int = 1,
        kv_share: float = 0.01,
        peer_width: int | None = None,
        late_s: float = float("inf"),
    ) -> None:
        """``width``: maximum number of items in flight. ``kv_share``: share of the bytes that KV gets while
        model traffic waits too. ``peer_width``: maximum number of items in flight to one peer. ``late_s``:
        items late by this many seconds do not count towards ``width``, so that a hanging peer does not block
        others."""
        if width < 1:
            raise ValueError(f"the width of {name} must be at least 1, not {width}")
        self.name = name
        self._width = width
        self._peer_width = peer_width or width
        self._late_s = late_s
        self._share = TrafficClassArbiter(kv_share)
        self._numbers = 0
        self._requests: dict[str, _LinkRequest] = {}
        self._queues: dict[_QueueKey, list[tuple[int, str]]] = {}
        """Class and peer → heap of (number, id) of the requests that may have queued items."""
        self._waiting: dict[int, LinkItem] = {}
        self._waiting_bytes = 0
        self._in_flight: dict[int, LinkItem] = {}
        self._newest: deque[tuple[float, int]] = deque()
        """(seconds, bytes) of each of the newest items. An item's seconds count from the end of the previous
        item, if that is later than its own start. So time with several items in flight counts once."""
        self._ended_s = float("-inf")
        self._newest_s, self._newest_bytes = 0.0, 0
        self.moved_bytes = 0
        """Bytes of finished items."""

    def put(
        self,
        request: str,
        nbytes: int,
        work: Any,
        traffic_class: TrafficClass = TrafficClass.KV,
        peer: int | None = None,
    ) -> LinkItem:
        """Queue an item and return it. Requests are served in the order of their first items.
        ``work``: the caller's data, which the link only keeps. ``peer``: connection of the destination peer,
        if any. Raises ``ValueError`` for a negative ``nbytes``."""
        if nbytes < 0:
            raise ValueError(f"an item of {nbytes} bytes; expected 0 or more")
        self._numbers += 1
        item = LinkItem(self._numbers, request, nbytes, work, traffic_class, peer)
        entry = self._requests.get(request)
        if entry is None:
            entry = self._requests[request] = _LinkRequest(self._numbers)
        entry.is_closed = False
        line = traffic_class, peer
        items = entry.items.setdefault(line, deque())
        if not items:
            heapq.heappush(self._queues.setdefault(line, []), (entry.number, request))
        items.append(item)
        self._waiting[item.number] = item
        self._waiting_bytes += nbytes
        return item

    def take(self, now: float) -> Iterator[LinkItem]:
        """Yield the items to start now. The caller must call ``finish`` for each when its I/O ends."""
        while self._under_way(now) < self._width and (item := self._next()) is not None:
            item.began_s = now
            self._in_flight[item.number] = item
            yield item

    def finish(self, number: int, now: float) -> LinkItem:
        """Remove and return item ``number``, whose I/O has ended, with or without an error."""
        item = self._in_flight.pop(number)
        self.moved_bytes += item.nbytes
        self._note_speed(now - max(item.began_s, self._ended_s), item.nbytes)
        self._ended_s = now
        return item

    def stuck(self, now: float, patience_s: float) -> list[LinkItem]:
        """Return the items in flight whose I/O is late by ``patience_s`` seconds or more."""
        return [item for item in self._in_flight.values() if now - item.began_s >= patience_s]

    def in_queue(self) -> list[LinkItem]:
        """Return the items that have not started, in the order in which they were queued."""
        return list(self._waiting.values())

    def cancel(self, number: int) -> bool:
        """Remove an item if it has not started. Returns whether it was removed."""
        item = self._waiting.get(number)
        if item is None:
            return False
        self._unqueue(item)
        return True

    def close(self, request: str) -> None:
        """Declare that a request queues no more items. It loses its place once all its items have started."""
        entry = self._requests.get(request)
        if entry is not None:
            entry.is_closed = True
            self._forget_if_done(request)

    @property
    def waiting(self) -> int:
        """Number of items that have not started."""
        return len(self._waiting)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def requests(self) -> int:
        """Number of requests that have a place in the queue."""
        return len(self._requests)

    @property
    def queued_bytes(self) -> int:
        """Number of bytes, queued or in flight, that are not transferred yet."""
        return self._waiting_bytes + sum(item.nbytes for item in self._in_flight.values())

    @property
    def queued_s(self) -> float | None:
        """Estimated seconds until a new item would start; ``None`` if the speed is unknown."""
        queued = self.queued_bytes
        return self.seconds_for(queued) if queued else 0.0

    def hung_s(self, now: float, patience_s: float) -> float:
        """Return for how many seconds the link has hung: the longest delay if ``width`` items hang,
        ``patience_s`` if fewer hang, 0 if none hangs. An item hangs if it is late by ``patience_s`` or
        more."""
        stuck = self.stuck(now, patience_s)
        if len(stuck) < self._width:
            return patience_s if stuck else 0.0
        return max(now - item.began_s for item in stuck)

    def seconds_for(self, nbytes: int) -> float | None:
        """Return the seconds to transfer ``nbytes`` at the mean speed of the items that ended last; ``None``
        if no speed has been measured."""
        if self._newest_s <= 0 or not self._newest_bytes:
            return None
        return nbytes * self._newest_s / self._newest_bytes

    def _next(self) -> LinkItem | None:
        """Remove the next item from the queue and return it."""
        heads = {each: head for each in TrafficClass if (head := self._head(each)) is not None}
        if not heads:
            return None
        item = heads[self._share.take({each: head.nbytes for each, head in heads.items()})]
        self._unqueue(item)
        return item

    def _head(self, traffic_class: TrafficClass) -> LinkItem | None:
        """Return the first waiting item of a class; ``None`` if there is none. Items to peers that already
        have ``peer_width`` items in flight are skipped."""
        found: tuple[int, LinkItem] | None = None
        for line in [line for line in self._queues if line[0] is traffic_class]:
            first = self._first(line)
            if first is None or (found is not None and found[0] <= first[0]):
                continue
            to_peer = sum(item.peer == line[1] for item in self._in_flight.values())
            if line[1] is None or to_peer < self._peer_width:
                found = first
        return found[1] if found is not None else None

    def _first(self, line: _QueueKey) -> tuple[int, LinkItem] | None:
        """Return the number of the first request in a queue, and the request's first item. If the queue is
        empty, remove the queue and return ``None``."""
        heap = self._queues[line]
        while heap:
            number, request = heap[0]
            entry = self._requests.get(request)
            if entry is not None and entry.number == number and (items := entry.items.get(line)):
                return number, items[0]
            heapq.heappop(heap)
        del self._queues[line]
        return None

    def _under_way(self, now: float) -> int:
        """Return the number of items in flight that are not late."""
        return sum(now - item.began_s < self._late_s for item in self._in_flight.values())

    def _unqueue(self, item: LinkItem) -> None:
        """Remove an item that has not started from its queue."""
        self._requests[item.request].items[item.traffic_class, item.peer].remove(item)
        del self._waiting[item.number]
        self._waiting_bytes -= item.nbytes
        self._forget_if_done(item.request)

    def _forget_if_done(self, request: str) -> None:
        entry = self._requests[request]
        if entry.is_closed and not any(entry.items.values()):
            del self._requests[request]

    def _note_speed(self, took_s: float, nbytes: int) -> None:
        self._newest.append((max(0.0, took_s), nbytes))
        self._newest_s += max(0.0, took_s)
        self._newest_bytes += nbytes
        while len(self._newest) > 1 and self._newest_bytes > SPEED_SAMPLE_BYTES:
            old_s, old_bytes = self._newest.popleft()
            self._newest_s -= old_s
            self._newest_bytes -= old_bytes
