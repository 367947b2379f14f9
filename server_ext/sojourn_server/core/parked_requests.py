"""The waits of placed programs' requests in the queue, the longest wait first."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice, takewhile
from typing import NamedTuple

from sojourn.ids import ProgramId

from .request_table import RequestState

RETRY_S = 60.0
"""A program's request counts as the retry of its aborted waiting request if it arrives at most this many
seconds after the abort. OpenAI's clients wait up to 8 s, or as ``Retry-After`` says."""
MAX_ABORTED_WAITS = 10_000
"""Maximum number of programs whose aborted request is remembered."""


class RequestWait(NamedTuple):
    """A waiting request. Instances compare by the start of the wait, then by arrival."""

    since_s: float
    """Start of the wait, or time at which it began anew; seconds on the engine's monotonic clock."""
    arrival: int
    """Number of the request in order of arrival."""
    request_id: str
    program_id: ProgramId


class RequestWaits:
    """The waits of requests, by length.

    A retry (see ``RETRY_S``) continues the wait of the aborted request. So a client that gives up and tries
    again keeps its place."""

    def __init__(self) -> None:
        self._by_length: list[RequestWait] = []
        """The longest wait first."""
        self._by_arrival: dict[int, RequestWait] = {}
        """The same waits by arrival number."""
        self._starts_s: dict[int, float] = {}
        """Start of each waiting request's first wait, by arrival number; also of dropped requests."""
        self._aborted: OrderedDict[ProgramId, tuple[float, float]] = OrderedDict()
        """Programs whose waiting request was aborted: the start of its wait, and the time of the abort; the
        oldest abort first."""

    def __iter__(self) -> Iterator[RequestWait]:
        return iter(self._by_length)

    def begin(self, request_state: RequestState, program_id: ProgramId, now: float) -> float:
        """Add a request that has arrived. Sets and returns the start of its wait."""
        since_s, aborted_s = self._aborted.pop(program_id, (now, now))
        if not (since_s <= now and 0 <= now - aborted_s <= RETRY_S):
            since_s = now
        request_state.waits_since_s = self._starts_s[request_state.arrival] = since_s
        self._add(RequestWait(since_s, request_state.arrival, request_state.request_id, program_id))
        return since_s

    def end(self, arrival: int, now: float) -> float:
        """Remove a request. Returns the start of its wait; ``now`` if it is unknown."""
        self.drop(arrival)
        return self._starts_s.pop(arrival, now)

    def drop(self, arrival: int) -> None:
        """Leave a request out of the order, although it still waits."""
        wait = self._by_arrival.pop(arrival, None)
        if wait is not None:
            del self._by_length[bisect.bisect_left(self._by_length, wait)]

    def restart(self, wait: RequestWait, now: float) -> RequestWait:
        """Restart a request's wait at ``now``. If the request is aborted later, its first wait still
        counts."""
        self.drop(wait.arrival)
        wait = wait._replace(since_s=now)
        self._add(wait)
        return wait

    def due(self, limit_s: float, now: float, at_most: int | None = None) -> list[RequestWait]:
        """Return the requests that have waited for at least ``limit_s``, the longest wait first. ``at_most``:
        maximum number of requests to return; ``None``: all."""
        waited = takewhile(lambda wait: now - wait.since_s >= limit_s, self._by_length)
        return list(islice(waited, at_most))

    def hand_over(self, since_s: float, aborted_s: float, to: RequestState) -> bool:
        """Give the wait of an aborted request to ``to``, a waiting request of the same program that may be
        its retry. Returns whether the wait was given.

        ``since_s``: start of the aborted request's wait. ``aborted_s``: time of the abort. ``to`` may be the
        retry if it arrived at most ``RETRY_S`` before the abort, and if its own wait began later than
        ``since_s``. A parallel request looks the same."""
        if since_s >= to.waits_since_s or not 0 <= aborted_s - to.arrived_s <= RETRY_S:
            return False
        to.waits_since_s = self._starts_s[to.arrival] = since_s
        wait = self._by_arrival.get(to.arrival)
        if wait is not None:
            self.restart(wait, since_s)
        return True

    def remember(self, program_id: ProgramId, since_s: float, now: float) -> None:
        """Keep the wait of a request that is aborted now, for the request that repeats it."""
        before_s, aborted_s = self._aborted.pop(program_id, (since_s, now))
        if 0 <= now - aborted_s <= RETRY_S:
            since_s = min(since_s, before_s)
        self._aborted[program_id] = (since_s, now)
        while len(self._aborted) > 1 and (
            len(self._aborted) > MAX_ABORTED_WAITS
            or not 0 <= now - next(iter(self._aborted.values()))[1] <= RETRY_S
        ):
            self._aborted.popitem(last=False)

    def forget(self, program_id: ProgramId) -> None:
        """Forget the wait of the program's aborted request, if any."""
        self._aborted.pop(program_id, None)

    def shift(self, shift_s: float, now: float) -> None:
        """Move the start of all waits later by ``shift_s``, but not beyond ``now``."""
        self._by_length = sorted(
            wait._replace(since_s=min(wait.since_s + shift_s, now)) for wait in self._by_length
        )
        self._by_arrival = {wait.arrival: wait for wait in self._by_length}
        for arrival, start_s in self._starts_s.items():
            self._starts_s[arrival] = min(start_s + shift_s, now)
        for program_id, (since_s, aborted_s) in self._aborted.items():
            self._aborted[program_id] = (min(since_s + shift_s, now), min(aborted_s + shift_s, now))

    def clear(self) -> None:
        """Forget everything."""
        self._by_length.clear()
        self._by_arrival.clear()
        self._starts_s.clear()
        self._aborted.clear()

    def _add(self, wait: RequestWait) -> None:
        self._by_arrival[wait.arrival] = wait
        bisect.insort(self._by_length, wait)
