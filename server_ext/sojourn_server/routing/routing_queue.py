"""Requests of an affinity core, and the queues in which they wait for any replica or for one replica."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush, merge
from itertools import islice
from operator import attrgetter

from .bounded_program_table import Key
from .routed_programs import RoutedProgram

CHUNK = 128
"""Maximum number of requests in a chunk of a ``TenantQueue``. A queue of 10,000 requests has 80 to 160
chunks."""

_NUMBER = attrgetter("number")
_KEY = attrgetter("queue_key")


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A request in progress. Times are on the core's clock."""

    request_id: str
    number: int
    """Number of requests that arrived before this one."""
    tenant: str
    program: RoutedProgram | None
    context_tokens: int
    """Prompt length, at most the longest context that a replica can compute."""
    size_tokens: int
    """Longest context that the program is expected to reach. Without a program, it is the request's prompt
    plus its expected output."""
    since_s: float
    """Time at which the request arrived."""
    output_tokens: int = 0
    """Output length that the client expects; 0: the client stated none."""
    prefix: tuple[int, ...] = ()
    replica_id: str | None = None
    """The replica that the request waits for or was sent to; ``None``: the request waits for any replica."""
    sent_s: float | None = None
    """Time at which the request was sent to its replica; ``None``: the request waits."""
    began: bool = False
    """Whether the client has the first byte of the answer."""
    failures: int = 0
    """Number of replicas that did not answer the request."""
    failures_computing: int = 0
    """Number of replicas that accepted the request and did not answer it."""
    failed_at: tuple[str, ...] = ()
    """Ids of registered replicas that did not answer the request. The request is not sent to them again."""
    failed_at_gone: tuple[tuple[str, str], ...] = ()
    """(id, instance) of replicas that did not answer the request and have been removed since. If the same
    instance registers again, the request still avoids it."""
    lost_with: str | None = None
    """Id of the last replica that lost the request: it was removed, or it did not register in time. Set to
    ``None`` again when a ``RequestFailed`` reports that this replica had accepted the request."""
    reason: str = ""
    moved_from: str | None = None
    left_because: str = ""
    needs_tokens: int = 0
    """Free KV tokens that the request waits for, as stated by its last routing decision; 0: the request has
    to be routed again first."""
    recalled_from: str | None = None
    """Id of the replica from which the request was recalled; ``None``: it was not recalled, or a replica has
    answered since."""
    recalled: bool = False
    """Whether the request was recalled before. A request is recalled only once."""
    yields: int = 0
    """Number of times that the request yielded to another one while it ran."""
    ran_since_s: float = 0.0
    """Time at which the answer began, or at which the request went on after it had yielded."""
    displaced_others: bool = False
    """Whether other requests made way for this one. Then it never makes way itself."""
    first_since: int | None = None
    """Value of ``CapacityQueue.admitted_count`` at the time ``first_since_s``; ``None``: the request has not
    been the oldest in its tenant's queue."""
    first_since_s: float = 0.0
    """Time at which the request first became the oldest in its tenant's queue."""
    waiting_since_s: float = field(init=False)
    """Time at which the request last began to wait: when it arrived, or was taken from its replica."""
    queue_key: tuple[float, ...] = ()
    """Sort key of the request in its queue, lowest first; by default its ``number``. It changes only while
    the request is in no queue."""

    def __post_init__(self) -> None:
        self.waiting_since_s = self.since_s
        self.queue_key = self.queue_key or (self.number,)


def can_move(request: RoutedRequest) -> bool:
    """Whether stealing or preemption may move a waiting request, and its program, to another replica.

    False in three cases: the request failed at a replica, the program has another request in flight, or the
    program has not finished a turn since its last move.
    """
    program = request.program
    if request.failed_at:
        return False
    return program is None or (not program.in_flight and program.moved_at_turn != program.turns)


class _QueueChunk:
    """Consecutive requests of a ``TenantQueue``, and the smallest ``needs_tokens`` of them (``least``)."""

    __slots__ = ("least", "requests")

    def __init__(self, requests: list[RoutedRequest]) -> None:
        self.requests = requests
        self.least = min(request.needs_tokens for request in requests)


class TenantQueue:
    """Waiting requests of one tenant, in the order of ``queue_key``. ``by_arrival``: whether the order of
    ``queue_key`` is the order of arrival.

    The queue can be searched by the KV capacity that requests need. It consists of chunks, and each chunk
    stores the smallest ``needs_tokens`` of its requests. So a search reads one number per chunk, and then the
    requests of a single chunk.
    """

    __slots__ = ("_ages", "_by_arrival", "_chunks", "_numbers", "least")

    def __init__(self, *, by_arrival: bool = True) -> None:
        self._chunks: list[_QueueChunk] = []
        self._by_arrival = by_arrival
        self._numbers: dict[int, RoutedRequest] = {}
        """Requests by number; empty for a queue in order of arrival."""
        self._ages: list[int] = []
        """Heap of the requests' numbers. It may still have numbers of requests that have left."""
        self.least: float = math.inf
        """The smallest ``needs_tokens`` of all requests; ``inf`` if there are none."""

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __iter__(self) -> Iterator[RoutedRequest]:
        for chunk in self._chunks:
            yield from chunk.requests

    @property
    def first(self) -> RoutedRequest:
        """The request with the lowest key."""
        return self._chunks[0].requests[0]

    @property
    def oldest(self) -> RoutedRequest:
        """The request that arrived first."""
        if self._by_arrival:
            return self.first
        while self._ages[0] not in self._numbers:
            heappop(self._ages)
        return self._numbers[self._ages[0]]

    def since(self, before_s: float) -> Iterator[RoutedRequest]:
        """Yield the requests that began to wait at or before the time ``before_s``, in the order of
        arrival."""
        if self.oldest.since_s > before_s:
            return
        for request in self if self._by_arrival else sorted(self, key=_NUMBER):
            if request.since_s > before_s:
                return
            if request.waiting_since_s <= before_s:
                yield request

    def first_fitting(self, most_tokens: float) -> RoutedRequest | None:
        """Return the first request that needs at most ``most_tokens``; ``None``: there is none."""
        for chunk in self._chunks:
            if chunk.least <= most_tokens:
                return next(w for w in chunk.requests if w.needs_tokens <= most_tokens)
        return None

    def add(self, request: RoutedRequest) -> None:
        """Insert a request by its key. Even a queue in order of arrival gets requests before its end. For
        example, a request that failed at a replica is older than requests that arrived since."""
        if not self._by_arrival:
            self._numbers[request.number] = request
            heappush(self._ages, request.number)
            if len(self._ages) > 2 * len(self._numbers) + CHUNK:
                self._ages = sorted(self._numbers)
        self.least = min(self.least, request.needs_tokens)
        if not self._chunks:
            self._chunks.append(_QueueChunk([request]))
            return
        at = self._at(request.queue_key)
        chunk = self._chunks[at]
        insort(chunk.requests, request, key=_KEY)
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
        at = self._at(request.queue_key)
        chunk = self._chunks[at]
        place = bisect_left(chunk.requests, request.queue_key, key=_KEY)
        if place == len(chunk.requests) or chunk.requests[place] is not request:
            return False
        del chunk.requests[place]
        self._numbers.pop(request.number, None)
        if not chunk.requests:
            del self._chunks[at]
        elif request.needs_tokens == chunk.least:
            chunk.least = min(other.needs_tokens for other in chunk.requests)
        if request.needs_tokens == self.least:
            self.least = min((chunk.least for chunk in self._chunks), default=math.inf)
        return True

    def _at(self, key: tuple[float, ...]) -> int:
        """Return the index of the chunk to which a request with this ``queue_key`` belongs."""
        return max(0, bisect_right(self._chunks, key, key=lambda chunk: chunk.requests[0].queue_key) - 1)


class WaitingQueue:
    """Requests that wait for the same replica, or for any replica.

    ``by_tenant``: whether each tenant has its own ``TenantQueue``. If not, one ``TenantQueue`` has the
    requests of all tenants. ``by_arrival``: whether the order of ``queue_key`` is the order of arrival."""

    def __init__(self, *, by_tenant: bool, by_arrival: bool = True) -> None:
        self._by_tenant = by_tenant
        self._by_arrival = by_arrival
        self.tenant_queues: dict[str, TenantQueue] = {}
        """The non-empty ``TenantQueue`` of each tenant. Without ``by_tenant``, the only key is ``""``."""
        self._programs: dict[Key, dict[str, RoutedRequest]] = {}
        """Waiting requests by program and request id."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[RoutedRequest]:
        for tenant_queue in self.tenant_queues.values():
            yield from tenant_queue

    def of(self, program: RoutedProgram) -> list[RoutedRequest]:
        """The waiting requests of one program."""
        return list(self._programs.get(program.key, {}).values())

    def oldest(self, count: int) -> list[RoutedRequest]:
        """Return the ``count`` requests that arrived first, of all tenants, or all requests if there are
        fewer. Only for a queue in order of arrival."""
        return list(islice(merge(*self.tenant_queues.values(), key=_NUMBER), count))

    def add(self, request: RoutedRequest) -> None:
        """Insert a request by its key."""
        key = self._tenant_key(request)
        tenant_queue = self.tenant_queues.get(key)
        if tenant_queue is None:
            tenant_queue = self.tenant_queues[key] = TenantQueue(by_arrival=self._by_arrival)
        tenant_queue.add(request)
        if request.program is not None:
            self._programs.setdefault(request.program.key, {})[request.request_id] = request
        self._count += 1

    def remove(self, request: RoutedRequest) -> bool:
        """Remove a request. Returns False if it is not in this queue."""
        key = self._tenant_key(request)
        tenant_queue = self.tenant_queues.get(key)
        if tenant_queue is None or not tenant_queue.remove(request):
            return False
        self._count -= 1
        if not tenant_queue:
            del self.tenant_queues[key]
        if request.program is not None:
            own = self._programs[request.program.key]
            del own[request.request_id]
            if not own:
                del self._programs[request.program.key]
        return True

    def set_needs_tokens(self, request: RoutedRequest, needs_tokens: int) -> None:
        """Set ``RoutedRequest.needs_tokens`` of a request in this queue."""
        tenant_queue = self.tenant_queues[self._tenant_key(request)]
        tenant_queue.remove(request)
        request.needs_tokens = needs_tokens
        tenant_queue.add(request)

    def _tenant_key(self, request: RoutedRequest) -> str:
        """Return the key in ``tenant_queues`` of the queue to which a request belongs."""
        return request.tenant if self._by_tenant else ""
