"""Requests that wait for their program's placement, and how long they have waited.

A *parked* request is a waiting request that may not run, even if blocks are free. A request is parked while
its program is not on the device. A request is also parked if it arrived after its program was marked to leave
the device. The engine skips a parked request until the program is moved. Requests of unknown programs are not
parked.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from sojourn.ids import ProgramId

from ..policies.placement.placement_views import Tier
from .placed_programs import PlacedProgram
from .request_table import RequestState

ENGINE_PAUSE_S = 120.0
"""Seconds without a tick after which the engine counts as paused, for example because the machine was
suspended."""
RELEASE_GAP_S = 10.0
"""Seconds after a release when the next request may be released, even if the engine has not admitted the
first (see ``ParkedRequests.release_next``)."""
MAX_RELEASE_CANDIDATES = 16
"""Maximum number of longest-waiting requests that one tick considers for release."""
RETRY_S = 60.0
"""A program's next request counts as the retry of an aborted waiting request if it arrives within this many
seconds of the abort. OpenAI's clients retry after up to 8 s, or as ``Retry-After`` says."""
MAX_ABORTED_WAITS = 10_000
"""Maximum number of programs whose aborted request is remembered."""


class RequestWait(NamedTuple):
    """A waiting request. Instances compare by the start of the wait, then by arrival."""

    since_s: float
    """Start of the wait, or time of its last restart; seconds on the engine's monotonic clock."""
    arrival: int
    """Number of the request in order of arrival."""
    request_id: str
    program_id: ProgramId


class RequestWaits:
    """The waits of requests.

    A retry (see ``RETRY_S``) continues the wait of the aborted request. So a client that gives up and tries
    again keeps its place."""

    def __init__(self) -> None:
        self._by_arrival: dict[int, RequestWait] = {}
        """The waits by arrival number."""
        self._earliest_s = math.inf
        """A time before which no wait in ``_by_arrival`` began."""
        self._starts_s: dict[int, float] = {}
        """Arrival number → start of the request's wait, as it was before any ``restart``. Includes requests
        that ``drop`` took out of the order."""
        self._aborted: OrderedDict[ProgramId, tuple[float, float]] = OrderedDict()
        """Programs whose waiting request was aborted: the start of its wait, and the time of the abort; the
        oldest abort first."""

    def __iter__(self) -> Iterator[RequestWait]:
        return iter(self._by_arrival.values())

    def longest(self) -> Iterator[RequestWait]:
        """Yield each program's longest wait, in order of decreasing length."""
        seen: set[ProgramId] = set()
        for wait in sorted(self._by_arrival.values()):
            if wait.program_id not in seen:
                seen.add(wait.program_id)
                yield wait

    def begin(self, request_state: RequestState, program_id: ProgramId, now: float) -> float:
        """Add a request that has arrived. Sets and returns the start of its wait."""
        since_s, aborted_s = self._aborted.pop(program_id, (now, now))
        if not (since_s <= now and 0 <= now - aborted_s <= RETRY_S):
            since_s = now
        request_state.waits_since_s = self._starts_s[request_state.arrival] = since_s
        arrival = request_state.arrival
        self.restart(RequestWait(since_s, arrival, request_state.request_id, program_id), since_s)
        return since_s

    def end(self, arrival: int, now: float) -> float:
        """Remove a request. Returns the start of the request's wait, or ``now`` if the start is unknown."""
        self.drop(arrival)
        return self._starts_s.pop(arrival, now)

    def drop(self, arrival: int) -> None:
        """Take a request out of the order of waits, although it still waits."""
        self._by_arrival.pop(arrival, None)

    def restart(self, wait: RequestWait, now: float) -> RequestWait:
        """Restart a request's wait at ``now``. If the request is aborted later, its first wait still
        counts."""
        self._earliest_s = min(self._earliest_s, now)
        self._by_arrival[wait.arrival] = wait = wait._replace(since_s=now)
        return wait

    def due(self, limit_s: float, now: float, at_most: int | None = None) -> list[RequestWait]:
        """Return the requests that have waited for at least ``limit_s``, the longest wait first. ``at_most``:
        maximum number of requests to return; ``None``: all."""
        if now - self._earliest_s < limit_s:
            return []  # as in most steps
        self._earliest_s = min((wait.since_s for wait in self), default=math.inf)
        return sorted(wait for wait in self._by_arrival.values() if now - wait.since_s >= limit_s)[:at_most]

    def hand_over(self, since_s: float, aborted_s: float, to: RequestState) -> bool:
        """Give the wait of an aborted request to ``to``, a waiting request of the same program. Returns
        whether the wait was given.

        ``since_s``: start of the aborted request's wait. ``aborted_s``: time of the abort. A retry may reach
        the engine before the abort. So ``to`` counts as the retry if it arrived at most ``RETRY_S`` seconds
        before the abort, and its own wait began after ``since_s``. A parallel request can be taken for the
        retry."""
        if since_s >= to.waits_since_s or not 0 <= aborted_s - to.arrived_s <= RETRY_S:
            return False
        to.waits_since_s = self._starts_s[to.arrival] = since_s
        wait = self._by_arrival.get(to.arrival)
        if wait is not None:
            self.restart(wait, since_s)
        return True

    def remember(self, program_id: ProgramId, since_s: float, now: float) -> None:
        """Keep the wait of a request that is aborted now, for the request's retry."""
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
        self._earliest_s = min(self._earliest_s + shift_s, now)
        for arrival, wait in self._by_arrival.items():
            self._by_arrival[arrival] = wait._replace(since_s=min(wait.since_s + shift_s, now))
        for arrival, start_s in self._starts_s.items():
            self._starts_s[arrival] = min(start_s + shift_s, now)
        for program_id, (since_s, aborted_s) in self._aborted.items():
            self._aborted[program_id] = (min(since_s + shift_s, now), min(aborted_s + shift_s, now))

    def clear(self) -> None:
        """Forget everything."""
        self._by_arrival.clear()
        self._starts_s.clear()
        self._aborted.clear()


class ParkedRequests:
    """The parked requests of one engine. Times are seconds on the engine's monotonic clock."""

    def __init__(self, placed: Mapping[ProgramId, PlacedProgram], *, places: bool) -> None:
        """``placed``: the programs in a tier's queue, which the caller keeps up to date. ``places``: whether
        programs are placed."""
        self._placed = placed
        self._places = places
        self.waits = RequestWaits()
        """Waits of waiting requests, except those that were refused."""
        self._released: RequestWait | None = None
        """The request that ``release_next`` released last; its ``since_s`` is the time of the release."""
        self._last_tick_s = -math.inf

    def is_parked(self, request_state: RequestState) -> bool:
        """Whether a waiting request may not run because its program is not on the device, or will leave the
        device."""
        if not self._places or request_state.program is None:
            return False
        place = self._placed.get(request_state.program.id)
        if place is None or request_state.request_id not in place.waiting:
            return False
        if place.tier is not Tier.DEVICE:
            return True
        return place.leaves_after is not None and request_state.arrival > place.leaves_after

    def any_of(self, program_id: ProgramId) -> bool:
        """Whether any waiting request of the program is parked. Only the newest request is checked: if it is
        not parked, no other request of the program is parked."""
        place = self._placed.get(program_id)
        newest = next(reversed(place.waiting.values()), None) if place is not None else None
        return newest is not None and self.is_parked(newest)

    def waiting_program(self, wait: RequestWait) -> PlacedProgram | None:
        """Return the state of a request's program; ``None`` if the request no longer waits. A newer request
        may have the same id, so the arrival number is compared too."""
        place = self._placed.get(wait.program_id)
        request_state = place.waiting.get(wait.request_id) if place is not None else None
        return place if request_state is not None and request_state.arrival == wait.arrival else None

    def exclude_pause(self, now: float) -> None:
        """Detect a pause of the engine, and leave the paused time out of all waits. Call this method in every
        tick."""
        paused_s = now - self._last_tick_s
        self._last_tick_s = now
        if not 0 <= paused_s < ENGINE_PAUSE_S:
            # The engine was paused, or its clock was set, and that time does not count.
            shift_s = paused_s if 0 < paused_s < math.inf else 0.0
            self.waits.shift(shift_s, now)
            if self._released is not None:
                self._released = self._released._replace(since_s=min(self._released.since_s + shift_s, now))

    def take_overdue(self, limit_s: float, now: float) -> Iterator[RequestState]:
        """Yield the parked requests that have waited for ``limit_s`` seconds, each once."""
        for wait in self.waits.due(limit_s, now):
            self.waits.drop(wait.arrival)
            place = self.waiting_program(wait)
            if place is not None and self.is_parked(place.waiting[wait.request_id]):
                yield place.waiting[wait.request_id]

    def release_next(self, limit_s: float, now: float) -> ProgramId | None:
        """Choose a parked request to *release*, and return its program, which the caller places on the
        device. ``None``: no request is released now.

        The request with the longest wait is released, if this wait is at least ``limit_s`` seconds. The next
        request is released after the released request was admitted or has ended, or after ``RELEASE_GAP_S``.
        A released request that is parked again is released again after another ``limit_s`` seconds."""
        released = self._released
        if released is not None and 0 <= now - released.since_s < RELEASE_GAP_S:
            place = self.waiting_program(released)
            if place is not None and not self.is_parked(place.waiting[released.request_id]):
                return None  # the engine has not admitted the released request yet
        # Only a few candidates per step, since one request is released and thousands may be due.
        for wait in self.waits.due(limit_s, now, MAX_RELEASE_CANDIDATES):
            place = self.waiting_program(wait)
            if place is None:
                self.waits.drop(wait.arrival)
                continue
            restarted = self.waits.restart(wait, now)
            if self.is_parked(place.waiting[wait.request_id]):
                self._released = restarted
                return wait.program_id
        return None

    def turn_off(self) -> None:
        """Forget everything. From then on no request is parked."""
        self._places = False
        self.waits.clear()
        self._released = None
