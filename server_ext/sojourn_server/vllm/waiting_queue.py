"""The engine's waiting queue in the order a policy gives, with a gate before it, and who is kept out."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

Key = tuple[Any, ...]


class _Heap:
    """Requests by key, lowest first; keys may change, and requests leave from anywhere."""

    def __init__(self, key: Callable[[Request], Key]) -> None:
        self._key = key
        self._heap: list[tuple[Key, int, Request]] = []
        self._entry: dict[Request, int] = {}
        """Number of the heap entry that counts, for each request."""
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._entry)

    def __contains__(self, request: Request) -> bool:
        return request in self._entry

    def push(self, request: Request) -> None:
        """File the request, or file it anew, by its key as it is now: O(log n)."""
        self._pushes += 1
        self._entry[request] = self._pushes
        heapq.heappush(self._heap, (self._key(request), self._pushes, request))
        if len(self._heap) > 4 * len(self._entry) + 64:
            self._heap = [entry for entry in self._heap if self._entry.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, request: Request) -> None:
        """Take the request out; its heap entry is skipped when met."""
        self._entry.pop(request, None)

    def head(self) -> tuple[Key, int, Request] | None:
        """The lowest entry."""
        while self._heap and self._entry.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def entries(self) -> list[tuple[Key, int, Request]]:
        """All live entries, in no order."""
        return [entry for entry in self._heap if self._entry.get(entry[2]) == entry[1]]


class PolicyQueue(RequestQueue):
    """A priority queue by ``key(request)``, lowest first.

    Requests for which ``gated(request)`` holds stand behind a gate: where
    ``may_pass`` keeps the first of them out, all of them wait, in order, and
    the others go past them, until ``holds_line`` says of the first that it has
    been passed long enough. The gate is asked once a step (``open_step``).
    Gated requests count in ``len`` but not in ``bool``: to the scheduler there
    is then nobody to admit, while the engine knows it has work left. The same
    holds for requests that are ``parked``: they are not handed out at all, and
    nothing is asked about them before they are filed anew (``rekey``).

    The scheduler peeks, then does things that may change keys, then pops and
    relies on getting the very request it saw: ``pop_request`` returns the
    peeked one.
    """

    def __init__(
        self,
        key: Callable[[Request], Key],
        *,
        parked: Callable[[Request], bool] | None = None,
        gated: Callable[[Request], bool] | None = None,
        may_pass: Callable[[Request], bool] | None = None,
        holds_line: Callable[[Request], bool] | None = None,
    ) -> None:
        self._open = _Heap(key)
        self._gated = _Heap(key)
        self._parked: dict[Request, None] = {}
        self._is_parked = parked
        self._belongs_behind_gate = gated
        self._may_pass = may_pass
        self._holds_line = holds_line
        self._shut = False
        self._step_is_full = False
        self._peeked: Request | None = None

    def open_step(self) -> None:
        """A new step begins: the gate may be asked again."""
        self._shut = False
        self._step_is_full = False
        self._peeked = None

    def fill_step(self) -> None:
        """To the scheduler there is nobody else to admit in this step."""
        self._step_is_full = True

    def add_request(self, request: Request) -> None:
        self._peeked = None
        if self._is_parked is not None and self._is_parked(request):
            self._parked[request] = None
            return
        behind = self._belongs_behind_gate is not None and self._belongs_behind_gate(request)
        (self._gated if behind else self._open).push(request)

    def prepend_request(self, request: Request) -> None:
        """File it by its key: a preempted request's key puts it in front."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.add_request(request)

    def peek_request(self) -> Request:
        if self._peeked is None:
            self._peeked = self._first()
            if self._peeked is None:
                raise IndexError("peek from a queue that has nobody to admit")
        return self._peeked

    def pop_request(self) -> Request:
        request = self.peek_request()
        self.remove_request(request)
        return request

    def remove_request(self, request: Request) -> None:
        self._open.discard(request)
        self._gated.discard(request)
        self._parked.pop(request, None)
        self._peeked = None

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.remove_request(request)

    def rekey(self, request: Request) -> None:
        """The request's key, or its side of the gate, may have changed; harmless where it is not here."""
        if request in self._open or request in self._gated or request in self._parked:
            peeked = self._peeked
            self.remove_request(request)
            self.add_request(request)
            self._peeked = peeked

    def __bool__(self) -> bool:
        if self._step_is_full:
            return False
        if self._peeked is None:
            self._peeked = self._first()
        return self._peeked is not None

    def __len__(self) -> int:
        return len(self._open) + len(self._gated) + len(self._parked)

    def __iter__(self) -> Iterator[Request]:
        entries = self._open.entries() + self._gated.entries()
        yield from (entry[2] for entry in sorted(entries, key=lambda entry: entry[:2]))
        yield from tuple(self._parked)

    def _first(self) -> Request | None:
        free = self._open.head()
        kept = None if self._shut else self._gated.head()
        if kept is not None and (free is None or kept[:2] < free[:2]):
            assert self._may_pass is not None
            if self._may_pass(kept[2]):
                return kept[2]
            if self._holds_line is not None and self._holds_line(kept[2]):
                return None
            self._shut = True
        return free[2] if free is not None else None
