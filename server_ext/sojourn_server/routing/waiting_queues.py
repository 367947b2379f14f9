"""Queues in which requests wait for one replica, or for any replica."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import merge
from itertools import islice
from operator import attrgetter

from .routing_records import RoutedProgram, RoutedRequest

_NUMBER = attrgetter("number")
_KEY = attrgetter("queue_key")


class TenantQueue:
    """Waiting requests of one tenant, in the order of ``queue_key``. ``by_arrival``: whether this is the
    order of arrival."""

    def __init__(self, *, by_arrival: bool) -> None:
        self.requests: list[RoutedRequest] = []
        self._by_arrival = by_arrival
        self._least: float | None = math.inf
        """Value of ``least``; ``None``: to be computed again."""

    @property
    def least(self) -> float:
        """The smallest ``needs_tokens`` of all requests; ``inf`` if there are none."""
        if self._least is None:
            self._least = min((one.needs_tokens for one in self.requests), default=math.inf)
        return self._least

    @property
    def oldest(self) -> RoutedRequest:
        """The request that arrived first."""
        return self.requests[0] if self._by_arrival else min(self.requests, key=_NUMBER)

    def first_fitting(self, most_tokens: float) -> RoutedRequest | None:
        """Return the first request that needs at most ``most_tokens``; ``None``: there is none."""
        if self.least > most_tokens:
            return None
        return next(one for one in self.requests if one.needs_tokens <= most_tokens)

    def add(self, request: RoutedRequest) -> None:
        """Insert a request by its key."""
        insort(self.requests, request, key=_KEY)
        if self._least is not None:
            self._least = min(self._least, request.needs_tokens)

    def remove(self, request: RoutedRequest) -> bool:
        """Remove a request. Returns False if it is not in this queue."""
        place = bisect_left(self.requests, request.queue_key, key=_KEY)
        if place == len(self.requests) or self.requests[place] is not request:
            return False
        del self.requests[place]
        if request.needs_tokens == self._least:
            self._least = None
        return True


class WaitingQueue:
    """Requests that wait for the same replica, or for any replica.

    ``by_tenant``: whether each tenant has its own ``TenantQueue``. If not, one has the requests of all
    tenants. ``by_arrival``: whether the order of ``queue_key`` is the order of arrival."""

    def __init__(self, *, by_tenant: bool, by_arrival: bool = True) -> None:
        self._by_tenant = by_tenant
        self._by_arrival = by_arrival
        self.tenants: dict[str, TenantQueue] = {}
        """The non-empty ``TenantQueue`` of each tenant. Without ``by_tenant``, the only key is ``""``."""

    def __bool__(self) -> bool:
        return bool(self.tenants)

    def __iter__(self) -> Iterator[RoutedRequest]:
        for queue in self.tenants.values():
            yield from queue.requests

    def of(self, program: RoutedProgram) -> list[RoutedRequest]:
        """Return the waiting requests of one program."""
        queue = self.tenants.get(program.tenant if self._by_tenant else "")
        return [one for one in queue.requests if one.program is program] if queue is not None else []

    def oldest(self, count: int) -> list[RoutedRequest]:
        """Return the ``count`` requests that arrived first, of all tenants, or all if there are fewer.
        Only for a queue in order of arrival."""
        return list(islice(merge(*(one.requests for one in self.tenants.values()), key=_NUMBER), count))

    def add(self, request: RoutedRequest) -> None:
        """Insert a request by its key."""
        key = request.tenant if self._by_tenant else ""
        queue = self.tenants.get(key)
        if queue is None:
            queue = self.tenants[key] = TenantQueue(by_arrival=self._by_arrival)
        queue.add(request)

    def remove(self, request: RoutedRequest) -> bool:
        """Remove a request. Returns False if it is not in this queue."""
        key = request.tenant if self._by_tenant else ""
        queue = self.tenants.get(key)
        if queue is None or not queue.remove(request):
            return False
        if not queue.requests:
            del self.tenants[key]
        return True

    def set_needs_tokens(self, request: RoutedRequest, needs_tokens: int) -> None:
        """Set ``RoutedRequest.needs_tokens`` of a request in this queue."""
        queue = self.tenants[request.tenant if self._by_tenant else ""]
        queue.remove(request)
        request.needs_tokens = needs_tokens
        queue.add(request)
