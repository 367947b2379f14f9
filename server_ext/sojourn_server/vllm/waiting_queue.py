"""The engine's waiting queue in the order a policy gives."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

Key = tuple[Any, ...]


class PolicyQueue(RequestQueue):
    """A priority queue by ``key(request)``, lowest first.

    Keys change while requests wait (a lease is given up): ``rekey`` re-files one
    request in O(log n); stale heap entries are skipped when met. The scheduler
    peeks, then does things that may change keys, then pops and relies on getting
    the very request it saw: so ``pop_request`` returns the peeked one.
    """

    def __init__(self, key: Callable[[Request], Key]) -> None:
        self._key = key
        self._heap: list[tuple[Key, int, Request]] = []
        self._entry: dict[Request, int] = {}
        """Number of the heap entry that counts, for each request in the queue."""
        self._pushes = 0
        self._peeked: Request | None = None

    def add_request(self, request: Request) -> None:
        self._peeked = None
        self._push(request)

    def prepend_request(self, request: Request) -> None:
        """File it by its key: a preempted request's key puts it in front."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.add_request(request)

    def peek_request(self) -> Request:
        if self._peeked is None:
            self._drop_stale()
            if not self._heap:
                raise IndexError("peek from an empty queue")
            self._peeked = self._heap[0][2]
        return self._peeked

    def pop_request(self) -> Request:
        request = self.peek_request()
        del self._entry[request]
        self._peeked = None
        return request

    def remove_request(self, request: Request) -> None:
        del self._entry[request]
        self._peeked = None

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._entry.pop(request, None)
        self._peeked = None

    def rekey(self, request: Request) -> None:
        """The request's key may have changed; harmless where it is not in the queue."""
        if request in self._entry:
            self._push(request)

    def __bool__(self) -> bool:
        return bool(self._entry)

    def __len__(self) -> int:
        return len(self._entry)

    def __iter__(self) -> Iterator[Request]:
        live = [entry for entry in self._heap if self._entry.get(entry[2]) == entry[1]]
        return (entry[2] for entry in sorted(live, key=lambda entry: entry[:2]))

    def _push(self, request: Request) -> None:
        self._pushes += 1
        self._entry[request] = self._pushes
        heapq.heappush(self._heap, (self._key(request), self._pushes, request))
        if len(self._heap) > 4 * len(self._entry) + 64:
            self._heap = [entry for entry in self._heap if self._entry.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def _drop_stale(self) -> None:
        while self._heap and self._entry.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
