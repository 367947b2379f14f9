"""One link as a queue: by request, first come first served, at a rate.

Unordered threads on a device serve all requests at once, and all end late; in order, the first is done after
its own bytes only. So there is one queue a link. What belongs to a request goes before what belongs to one
that came later, also where it is put in later, as a push is that goes layer by layer; the link does not
wait for it meanwhile.

A rate makes a link as slow as the one it stands for, so that one machine can show what several links do.
Bytes are paced by the clock of the link, not by sleeps: what is late is caught up with, up to ``MAX_LAG_S``.

No clock and no I/O: ``take`` says what may begin, ``over`` is told what came back, ``finished`` says what the
rate lets be done by now.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .transfer_limits import check_rate


class TrafficClass(Enum):
    """What a transfer is for."""

    MODEL = "model"
    """What a forward pass waits for."""
    KV = "kv"
    """What can wait."""


class TrafficClassArbiter:
    """Strict priority for the model, but for a small share of bytes for KV so that it does not starve.

    While both wait, KV's bytes are ``kv_share`` of all, to within one item of each. What one leaves idle is
    the other's. KV that did not wait has no claim on what it could have had.
    """

    def __init__(self, kv_share: float) -> None:
        """Raises ``ValueError`` for a share outside [0, 1)."""
        if not (math.isfinite(kv_share) and 0 <= kv_share < 1):
            raise ValueError(f"KV's share of a link must be at least 0 and below 1, not {kv_share}")
        self._factor = kv_share / (1 - kv_share)
        self._owed = 0.0
        """Bytes that KV has earned while it waited."""

    def take(self, heads: Mapping[TrafficClass, int]) -> TrafficClass:
        """Who sends next; ``heads`` has the bytes of the first item of each class that waits."""
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


MAX_LAG_S = 0.1
"""Of a link that was kept from working, how much time is made up for."""

SPEED_SAMPLE_BYTES = 64 << 20
"""Over how many of the newest bytes the speed of a link without a rate is told."""


@dataclass(slots=True, eq=False)
class LinkItem:
    """Something to be moved."""

    number: int
    request: str
    nbytes: int
    work: Any
    traffic_class: TrafficClass
    queued_at_s: float
    peer: int | None = None
    began_s: float = 0.0
    until_s: float = 0.0
    """Not finished before, by the rate."""
    is_held: bool = False
    """Its turn has come, and by the rate it is not through yet: it begins when it would be."""
    is_over: bool = False
    """Its I/O has come back, well or not."""


_QueueKey = tuple[TrafficClass, int | None]
"""What of one class goes to one peer."""


@dataclass(slots=True, eq=False)
class _LinkRequest:
    number: int
    items: dict[_QueueKey, deque[LinkItem]] = field(default_factory=dict)
    is_closed: bool = False


class TransferLink:
    """Items of requests, moved ``width`` at a time."""

    def __init__(
        self,
        name: str,
        rate: float | None = None,
        *,
        width: int = 1,
        kv_share: float = 0.01,
        sends: bool = False,
        peer_width: int | None = None,
        late_s: float = float("inf"),
    ) -> None:
        """``rate`` in bytes a second, ``None``: as fast as it goes. Raises ``ValueError`` for 0 or less.

        ``sends``: what begins is at its other end at once, so that with a rate it has to begin late. No more
        than ``peer_width`` are under way to one peer, and what has not come back ``late_s`` after it should
        have is not counted in ``width``: whoever takes nothing keeps nobody else waiting.
        """
        check_rate(name, rate)
        if width < 1:
            raise ValueError(f"the width of {name} must be at least 1, not {width}")
        self.name = name
        self.rate = rate
        self._width = width
        self._peer_width = peer_width or width
        self._late_s = late_s
        self._sends = sends and rate is not None
        self._share = TrafficClassArbiter(kv_share)
        self._numbers = 0
        self._requests: dict[str, _LinkRequest] = {}
        self._lines: dict[_QueueKey, list[tuple[int, str]]] = {}
        """Heaps of requests that may have something waiting."""
        self._waiting: dict[int, LinkItem] = {}
        self._waiting_bytes = 0
        self._in_flight: dict[int, LinkItem] = {}
        self._busy_until_s = float("-inf")
        self._newest: deque[tuple[float, int]] = deque()
        """Seconds and bytes of the newest items, of a link without a rate; and what they come to."""
        self._newest_s, self._newest_bytes = 0.0, 0
        self.moved_bytes = 0
        """Of what was finished."""

    def put(
        self,
        request: str,
        nbytes: int,
        work: Any,
        now: float,
        traffic_class: TrafficClass = TrafficClass.KV,
        peer: int | None = None,
    ) -> int:
        """Line something up for a request, whose place is that of its first item; returns its number.
        ``peer``: to whom it is sent."""
        if nbytes < 0:
            raise ValueError(f"{nbytes} bytes cannot be moved")
        self._numbers += 1
        item = LinkItem(self._numbers, request, nbytes, work, traffic_class, now, peer)
        of = self._requests.get(request)
        if of is None:
            of = self._requests[request] = _LinkRequest(self._numbers)
        of.is_closed = False
        line = traffic_class, peer
        items = of.items.setdefault(line, deque())
        if not items:
            heapq.heappush(self._lines.setdefault(line, []), (of.number, request))
        items.append(item)
        self._waiting[item.number] = item
        self._waiting_bytes += nbytes
        return item.number

    def take(self, now: float) -> Iterator[LinkItem]:
        """What may begin now; each must come back by ``over``."""
        while self._under_way(now) < self._width and (item := self._next()) is not None:
            start_s = max(self._busy_until_s, item.queued_at_s, now - MAX_LAG_S)
            item.until_s = start_s + item.nbytes / self.rate if self.rate else now
            self._busy_until_s = item.until_s
            item.began_s = now
            item.is_held = self._sends
            self._in_flight[item.number] = item
            if not item.is_held:
                yield item
        for item in [item for item in self._in_flight.values() if item.is_held and item.until_s <= now]:
            item.began_s = now
            item.is_held = False
            yield item

    def over(self, number: int, now: float) -> None:
        """The I/O of an item has come back."""
        item = self._in_flight[number]
        item.is_over = True
        if self.rate is None:
            self._note_speed(now - item.began_s, item.nbytes)

    def finished(self, now: float) -> list[LinkItem]:
        """Items that have come back and are through by the rate, in the order in which they began."""
        found = [item for item in self._in_flight.values() if item.is_over and item.until_s <= now]
        for item in found:
            del self._in_flight[item.number]
            self.moved_bytes += item.nbytes
        return found

    def wake_at(self) -> float:
        """When ``take`` or ``finished`` will next have something for which nothing has to happen before."""
        flying = self._in_flight.values()
        return min((item.until_s for item in flying if item.is_over or item.is_held), default=float("inf"))

    def stuck(self, now: float, patience_s: float) -> list[LinkItem]:
        """Items whose I/O should have come back so long ago. They stay in flight: their threads do too."""
        return [
            item
            for item in self._in_flight.values()
            if not item.is_over and not item.is_held and self._hangs_s(item, now) >= patience_s
        ]

    def in_queue(self) -> list[LinkItem]:
        """Items whose turn has not come, in the order in which they were put in."""
        return list(self._waiting.values())

    def cancel(self, number: int) -> bool:
        """Take back an item that has not begun; whether it was one."""
        held = self._in_flight.get(number)
        if held is not None and held.is_held:
            del self._in_flight[number]
            return True
        item = self._waiting.get(number)
        if item is None:
            return False
        self._requests[item.request].items[item.traffic_class, item.peer].remove(item)
        self._leave_line(item)
        self._forget_if_done(item.request)
        return True

    def close(self, request: str) -> None:
        """Nothing more is put in for a request: its place is given up once what waits has begun."""
        of = self._requests.get(request)
        if of is not None:
            of.is_closed = True
            self._forget_if_done(request)

    @property
    def waiting(self) -> int:
        """Items that have not begun."""
        return len(self._waiting)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def requests(self) -> int:
        """Requests that have a place."""
        return len(self._requests)

    def queued_bytes(self, now: float) -> int:
        """Bytes that wait or are under way."""
        return self._waiting_bytes + sum(
            item.nbytes - self._done(item, now) for item in self._in_flight.values()
        )

    def queued_s(self, now: float) -> float | None:
        """Seconds until what is put in now would begin; ``None``: there is a queue, and no speed is known."""
        queued = self.queued_bytes(now)
        if not queued:
            return 0.0
        if self.rate is not None:
            return max(0.0, self._busy_until_s - now) + self._waiting_bytes / self.rate
        return self.seconds_for(queued)

    def hung_s(self, now: float, patience_s: float) -> float:
        """Seconds that I/O which should have come back keeps the link from anything: where all of it is
        stuck, as long as that has lasted, and at least ``patience_s`` where some is. 0: none is."""
        stuck = self.stuck(now, patience_s)
        if len(stuck) < self._width:
            return patience_s if stuck else 0.0
        return max(self._hangs_s(item, now) for item in stuck)

    def seconds_for(self, nbytes: int) -> float | None:
        """How long it takes for so many bytes, by its rate, else by the newest items; ``None``: not known."""
        if self.rate is not None:
            return nbytes / self.rate
        if self._newest_s <= 0 or not self._newest_bytes:
            return None
        return nbytes * self._newest_s / self._newest_bytes

    def moved(self, now: float) -> int:
        """Bytes moved so far, those of items under way counted as the rate says: a number that shows progress
        though one item may take seconds. It does not grow for an item whose I/O is late."""
        return self.moved_bytes + sum(self._done(item, now) for item in self._in_flight.values())

    def _done(self, item: LinkItem, now: float) -> int:
        if self.rate is None or not item.nbytes:
            return 0
        took_s = item.nbytes / self.rate
        return int(item.nbytes * min(1.0, max(0.0, 1.0 - (item.until_s - now) / took_s)))

    def _next(self) -> LinkItem | None:
        """Take the first of what waits out of its line."""
        heads = {each: head for each in TrafficClass if (head := self._head(each)) is not None}
        if not heads:
            return None
        item = heads[self._share.take({each: head.nbytes for each, head in heads.items()})]
        self._requests[item.request].items[item.traffic_class, item.peer].popleft()
        self._leave_line(item)
        self._forget_if_done(item.request)
        return item

    def _head(self, traffic_class: TrafficClass) -> LinkItem | None:
        """The first of a class that may go to its peer now."""
        found: tuple[int, LinkItem] | None = None
        for line in [line for line in self._lines if line[0] is traffic_class]:
            first = self._first(line)
            if first is None or (found is not None and found[0] <= first[0]):
                continue
            if line[1] is None or self._under_way_to(line[1]) < self._peer_width:
                found = first
        return found[1] if found is not None else None

    def _first(self, line: _QueueKey) -> tuple[int, LinkItem] | None:
        """The first of a line and the place of its request; forgets a line in which nothing waits."""
        heap = self._lines[line]
        while heap:
            number, request = heap[0]
            of = self._requests.get(request)
            if of is not None and of.number == number and (items := of.items.get(line)):
                return number, items[0]
            heapq.heappop(heap)
        del self._lines[line]
        return None

    def _under_way(self, now: float) -> int:
        """Items in flight, without those that are late."""
        return sum(
            item.is_over or self._hangs_s(item, now) < self._late_s for item in self._in_flight.values()
        )

    def _under_way_to(self, peer: int) -> int:
        return sum(item.peer == peer for item in self._in_flight.values())

    @staticmethod
    def _hangs_s(item: LinkItem, now: float) -> float:
        """For how long an item should have come back."""
        return now - max(item.began_s, item.until_s)

    def _leave_line(self, item: LinkItem) -> None:
        del self._waiting[item.number]
        self._waiting_bytes -= item.nbytes

    def _forget_if_done(self, request: str) -> None:
        of = self._requests[request]
        if of.is_closed and not any(of.items.values()):
            del self._requests[request]

    def _note_speed(self, took_s: float, nbytes: int) -> None:
        self._newest.append((max(0.0, took_s), nbytes))
        self._newest_s += max(0.0, took_s)
        self._newest_bytes += nbytes
        while len(self._newest) > 1 and self._newest_bytes > SPEED_SAMPLE_BYTES:
            old_s, old_bytes = self._newest.popleft()
            self._newest_s -= old_s
            self._newest_bytes -= old_bytes
