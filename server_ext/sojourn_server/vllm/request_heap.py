"""Heaps of waiting requests, for ``waiting_queue.py``."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from .compat import Request, RequestStatus

QueueKey = tuple[Any, ...]
Entry = tuple[QueueKey, int, Request]
"""(Key of a request, number of its heap entry, the request). The lowest key comes first."""


class RequestHeap:
    """Heap of requests by key, lowest first. Any request may be removed, or pushed again with a new key."""

    def __init__(self, key: Callable[[Request], QueueKey]) -> None:
        self._key = key
        self._heap: list[tuple[QueueKey, int]] = []
        """(Key, number) of each entry, also of removed entries. The requests are not in this list, so that it
        does not keep removed requests alive."""
        self._numbers: dict[Request, int] = {}
        self.requests: dict[int, Request] = {}
        """Number of a valid entry → its request."""
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, request: Request) -> bool:
        return request in self._numbers

    def push(self, request: Request) -> tuple[QueueKey, int]:
        """Add the request, or move it to the position of its present key. Return (key, number of its entry).
        O(log n)."""
        key = self._key(request)
        self.discard(request)
        self._pushes += 1
        self._numbers[request] = self._pushes
        self.requests[self._pushes] = request
        heapq.heappush(self._heap, (key, self._pushes))
        if len(self._heap) > 4 * len(self._numbers) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self.requests]
            heapq.heapify(self._heap)
        return key, self._pushes

    def discard(self, request: Request) -> None:
        """Remove the request, if it is in the heap. Its key stays until ``head`` or ``push`` removes it."""
        number = self._numbers.pop(request, None)
        if number is not None:
            del self.requests[number]

    def head(self) -> Entry | None:
        """Return the entry with the lowest key; ``None`` if the heap is empty."""
        return _head(self._heap, self.requests)

    def entries(self) -> list[Entry]:
        """Return all entries, unordered."""
        return [(key, number, self.requests[number]) for key, number in self._heap if number in self.requests]


class RequestsBeforeOverdue:
    """Finds the requests of a ``RequestHeap`` that are served before an overdue request, lowest key first.

    An overdue request has waited too long (``PolicyRequestQueue``). The requests for which
    ``passes(overdue, other)`` is false are served before it: preempted requests, and requests that arrived
    earlier."""

    def __init__(
        self,
        heap: RequestHeap,
        arrival: Callable[[Request], int],
        passes: Callable[[Request, Request], bool],
    ) -> None:
        self._requests = heap.requests
        self._arrival = arrival
        self._passes = passes
        self._earlier: list[tuple[QueueKey, int]] = []
        """Heap of (key, number) of the entries served before the overdue request of the last ``head``."""
        self._later: list[tuple[int, int, QueueKey]] = []
        """Heap of (arrival, number, key) of the entries that are not in ``_earlier``. A preempted request has
        the arrival -1."""
        self._last_arrival = 0
        """Arrival of the overdue request of the last ``head`` call."""

    def push(self, key: QueueKey, number: int) -> None:
        """Add an entry of the heap. O(log n)."""
        request = self._requests[number]
        arrival = -1 if request.status == RequestStatus.PREEMPTED else self._arrival(request)
        heapq.heappush(self._later, (arrival, number, key))
        if len(self._earlier) + len(self._later) > 4 * len(self._requests) + 64:
            self._earlier = [entry for entry in self._earlier if entry[1] in self._requests]
            self._later = [entry for entry in self._later if entry[1] in self._requests]
            heapq.heapify(self._earlier)
            heapq.heapify(self._later)

    def head(self, overdue: Request) -> Entry | None:
        """Return the entry with the lowest key that is served before ``overdue``; ``None`` if there is none.
        Takes amortized O(log n). It takes longer if ``overdue`` arrived before the overdue request of the
        previous call."""
        arrival = self._arrival(overdue)
        if arrival < self._last_arrival:
            earlier, self._earlier = self._earlier, []
            for key, number in earlier:
                if number in self._requests:
                    self.push(key, number)
        self._last_arrival = arrival
        while self._later:
            _, number, key = self._later[0]
            request = self._requests.get(number)
            if request is not None:
                if self._passes(overdue, request):
                    break
                heapq.heappush(self._earlier, (key, number))
            heapq.heappop(self._later)
        return _head(self._earlier, self._requests)


def _head(heap: list[tuple[QueueKey, int]], requests: dict[int, Request]) -> Entry | None:
    """Return the first entry of ``heap`` whose request is in ``requests``. Removes the entries before it."""
    while heap and heap[0][1] not in requests:
        heapq.heappop(heap)
    if not heap:
        return None
    key, number = heap[0]
    return key, number, requests[number]
