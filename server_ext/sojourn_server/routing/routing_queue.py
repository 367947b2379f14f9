"""Requests, and their waiting queues: for any replica or for one replica."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from operator import attrgetter

from .routed_programs import Key, RoutedProgram

CHUNK = 128
"""Maximum number of requests in a chunk of a ``TenantQueue``. A search examines the requests of one chunk; a
queue of 10,000 has 80 to 160 chunks."""

_NUMBER = attrgetter("number")


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A request in progress."""

    request_id: str
    number: int
    tenant: str
    program: RoutedProgram | None
    context_tokens: int
    size_tokens: int
    since_s: float
    output_tokens: int = 0
    prefix: tuple[int, ...] = ()
    replica_id: str | None = None
    """The replica that the request waits for or was sent to; ``None``: it waits for any replica."""
    sent_s: float | None = None
    began: bool = False
    failures: int = 0
    """Number of replicas that did not answer the request."""
    failures_computing: int = 0
    """Number of replicas that accepted the request and did not answer it."""
    failed_at: tuple[str, ...] = ()
    """Ids of replicas that did not answer and still exist. The request is not sent there again."""
    failed_at_gone: tuple[tuple[str, str], ...] = ()
    """Ids and instances of replicas that did not answer and are gone. Such an instance may turn out to be
    alive."""
    lost_with: str | None = None
    """Id of the last replica that disappeared while it had the request. ``None`` again once a
    ``RequestFailed`` tells that the replica had accepted the request."""
    reason: str = ""
    moved_from: str | None = None
    left_because: str = ""
    needs_tokens: int = 0
    """KV capacity that the request waits for, as stated by its last routing decision; 0: it has to be routed
    first."""
    recalled_from: str | None = None
    """The replica from which the request was recalled; ``None`` again once any replica answers the
    request."""
    recalled: bool = False
    """Whether the request was recalled before. If so, it is not recalled again."""
    first_since: int | None = None
    """``CapacityQueue.admitted_count`` when the request became the first in its tenant's queue."""


def can_move(request: RoutedRequest) -> bool:
    """Whether a request and its program may go to another replica. A request that has failed at a replica may
    not. A program may not while another of its requests is sent, nor again in the turn in which it last
    moved."""
    program = request.program
    if request.failed_at:
        return False
    return program is None or (not program.in_flight and program.moved_at_turn != program.turns)


class _QueueChunk:
    """Consecutive requests of a ``TenantQueue``."""

    __slots__ = ("least", "requests")

    def __init__(self, requests: list[RoutedRequest]) -> None:
        self.requests = requests
        self.least = min(request.needs_tokens for request in requests)


class TenantQueue:
    """Requests of one tenant, in order of arrival, searchable by the KV capacity they need.

    The queue consists of chunks, and each chunk stores the smallest need in it. So a search reads one number
    per chunk, and the requests of one chunk only.
    """

    __slots__ = ("_chunks", "least")

    def __init__(self) -> None:
        self._chunks: list[_QueueChunk] = []
        self.least: float = math.inf
        """The smallest ``needs_tokens`` of all requests; ``inf`` if there are none."""

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __iter__(self) -> Iterator[RoutedRequest]:
        for chunk in self._chunks:
            yield from chunk.requests

    @property
    def first(self) -> RoutedRequest:
        """The request that arrived first."""
        return self._chunks[0].requests[0]

    def first_fitting(self, most_tokens: float) -> RoutedRequest | None:
        """The first request that needs at most ``most_tokens``; ``None``: there is none."""
        for chunk in self._chunks:
            if chunk.least <= most_tokens:
                return next(w for w in chunk.requests if w.needs_tokens <= most_tokens)
        return None

    def add(self, request: RoutedRequest) -> None:
        """Insert a request in order of arrival: at the end, unless it was sent before and failed."""
        self.least = min(self.least, request.needs_tokens)
        if not self._chunks:
            self._chunks.append(_QueueChunk([request]))
            return
        at = self._at(request.number)
        chunk = self._chunks[at]
        insort(chunk.requests, request, key=_NUMBER)
        chunk.least = min(chunk.least, request.needs_tokens)
        if len(chunk.requests) > CHUNK:
            half = CHUNK // 2
            self._chunks[at : at + 1] = [
                _QueueChunk(chunk.requests[:half]),
                _QueueChunk(chunk.requests[half:]),
            ]

    def remove(self, request: RoutedRequest) -> bool:
        """Remove a request. Returns False if it is not in this queue."""
        if not self._chunks:
            return False
        at = self._at(request.number)
        chunk = self._chunks[at]
        place = bisect_left(chunk.requests, request.number, key=_NUMBER)
        if place == len(chunk.requests) or chunk.requests[place] is not request:
            return False
        del chunk.requests[place]
        if not chunk.requests:
            del self._chunks[at]
        elif request.needs_tokens == chunk.least:
            chunk.least = min(other.needs_tokens for other in chunk.requests)
        if request.needs_tokens == self.least:
            self.least = min((chunk.least for chunk in self._chunks), default=math.inf)
        return True

    def _at(self, number: int) -> int:
        return max(0, bisect_right(self._chunks, number, key=lambda chunk: chunk.requests[0].number) - 1)


class WaitingQueue:
    """Requests that wait for the same replica, or for any replica, in order of arrival. If tenants share
    capacity, each tenant has its own ``TenantQueue`` in it."""

    def __init__(self, *, by_tenant: bool) -> None:
        self._by_tenant = by_tenant
        self._rows: dict[str, TenantQueue] = {}
        self._programs: dict[Key, dict[str, RoutedRequest]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[RoutedRequest]:
        for row in self._rows.values():
            yield from row

    @property
    def rows(self) -> dict[str, TenantQueue]:
        """The non-empty queues by tenant. If tenants do not share capacity, there is one queue for all, under
        ``""``."""
        return self._rows

    def of(self, program: RoutedProgram) -> list[RoutedRequest]:
        """The waiting requests of one program."""
        return list(self._programs.get(program.key, {}).values())

    def oldest(self, count: int) -> list[RoutedRequest]:
        """The ``count`` requests that arrived first, of all tenants."""
        return list(islice(merge(*self._rows.values(), key=_NUMBER), count))

    def add(self, request: RoutedRequest) -> None:
        """Insert a request in order of arrival."""
        self._rows.setdefault(self._row(request), TenantQueue()).add(request)
        if request.program is not None:
            self._programs.setdefault(request.program.key, {})[request.request_id] = request
        self._count += 1

    def remove(self, request: RoutedRequest) -> bool:
        """Remove a request. Returns False if it is not in this queue."""
        name = self._row(request)
        row = self._rows.get(name)
        if row is None or not row.remove(request):
            return False
        self._count -= 1
        if not row:
            del self._rows[name]
        if request.program is not None:
            own = self._programs[request.program.key]
            del own[request.request_id]
            if not own:
                del self._programs[request.program.key]
        return True

    def waits_for(self, request: RoutedRequest, needs_tokens: int) -> None:
        """Set the KV capacity that a waiting request needs, in tokens."""
        row = self._rows[self._row(request)]
        row.remove(request)
        request.needs_tokens = needs_tokens
        row.add(request)

    def _row(self, request: RoutedRequest) -> str:
        return request.tenant if self._by_tenant else ""
