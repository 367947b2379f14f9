"""Running requests that yield to an *urgent* request: a waiting request of another program (SAGA §6.2).

Only the gateway knows how urgent each tenant is, so the gateway orders a request to yield. A running request
yields only if the urgent request really waits, and at most ``MAX_YIELDS`` times. So false or late orders cost
a request at most ``MAX_YIELDS`` pauses.

An order (``yield_to``) becomes due in ``tick`` once the urgent request has waited through a whole step. The
engine then preempts the running request and holds it, and the urgent request goes first. The hold ends when
the urgent request is admitted or leaves, at the latest after ``MAX_HOLD_S``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sojourn.ids import ProgramId
from sojourn.wire_codec import EventOutcome, Outcome

from .events_and_actions import RequestRequeued, RequestYields
from .request_table import RequestState
from .scheduler_state import SchedulerState

MAX_YIELDS = 2
"""Maximum number of times that one request yields."""
MIN_RUN_S = 1.0
"""Seconds that a request must have run since its last admission before it yields."""
MAX_HOLD_S = 30.0
"""Maximum number of seconds for which a request that has yielded is not admitted again."""
ORDER_VALID_S = 5.0
"""Seconds after which an order that is not due yet is dropped."""
MAX_ORDERS = 256
"""Maximum number of orders and holds at the same time. Further orders are rejected; an existing order may be
renewed."""
IDLE_TICKS = 2
"""A hold ends if nothing has run for this many steps, because the hold then does not help the urgent
request."""


@dataclass(slots=True)
class _Order:
    """An order by which a running request of one program yields to a request of another program."""

    until_s: float
    urgent: str | None = None
    """Id of the waiting request to which the running request will yield; ``None`` if no such request
    waits."""
    seen_at_step: int = 0
    """Number of completed engine steps when ``urgent`` was found waiting."""


@dataclass(slots=True)
class _Hold:
    """A request that yields to the request ``urgent``."""

    urgent: str
    until_s: float
    preempted: bool = False
    """Whether the engine has preempted the request. Until then, every step asks the engine to do so."""
    idle_ticks: int = 0


class RequestYielding:
    """Decides which running requests of one engine yield, and when they may run again. Times are seconds on
    the engine's monotonic clock."""

    def __init__(self, state: SchedulerState, is_parked: Callable[[RequestState], bool]) -> None:
        """``is_parked``: whether placement parks a waiting request. A yield would not help such a request."""
        self._state = state
        self._is_parked = is_parked
        self._states = state.requests.states
        self._orders: dict[tuple[ProgramId, ProgramId], _Order] = {}
        """(program that yields, program that it yields to) → order."""
        self._holds: dict[str, _Hold] = {}
        """Id of the request that yields → its hold."""
        self._steps = 0
        """Number of completed engine steps."""

    def yield_to(self, program_id: ProgramId, to_program_id: ProgramId, now: float) -> EventOutcome:
        """Order a program's running request to yield to a request of another program. The other request waits
        or has yet to arrive.

        ``applied`` means that the order is stored, not that a request yields."""
        if program_id == to_program_id:
            return EventOutcome(outcome=Outcome.REJECTED, reason="a program cannot yield to itself")
        program = self._state.programs.get(program_id)
        if program is None or not program.live_requests:
            return EventOutcome(outcome=Outcome.MISSING, reason="the program has no request here")
        pair = program_id, to_program_id
        if pair not in self._orders and len(self._orders) + len(self._holds) >= MAX_ORDERS:
            return EventOutcome(
                outcome=Outcome.REJECTED, reason=f"{MAX_ORDERS} orders and holds are already pending"
            )
        self._orders[pair] = _Order(now + ORDER_VALID_S)
        return EventOutcome(outcome=Outcome.APPLIED)

    def step_completed(self) -> None:
        """Count an engine step."""
        self._steps += 1

    def tick(self, now: float) -> None:
        """Find the orders that are due, and end holds that lasted too long. Called before each step is
        planned."""
        if self._orders:
            self._find_due(now)
        if self._holds:
            self._end_holds(now)

    def preempted(self, request_id: str, now: float) -> None:
        """Record that the engine preempted a request. If the request has a hold, the request that it yields
        to goes first."""
        hold = self._holds.get(request_id)
        if hold is None or hold.preempted:
            return
        hold.preempted, hold.until_s = True, now + MAX_HOLD_S
        self._states[request_id].yields += 1
        urgent = self._states.get(hold.urgent)
        if urgent is not None:
            urgent.goes_first = True
            self._state.actions.append(RequestRequeued(hold.urgent))

    def admitted(self, request_id: str) -> None:
        """Record that a request runs. The requests that have yielded to this request may run again."""
        self._holds.pop(request_id, None)
        self._release_for(request_id)

    def left(self, request_id: str) -> None:
        """Record that a request has left the engine. The requests that have yielded to it may run again."""
        self.admitted(request_id)

    def is_held(self, request_id: str) -> bool:
        """Whether a waiting request may not run, because it has yielded."""
        hold = self._holds.get(request_id)
        return hold is not None and hold.preempted

    def _find_due(self, now: float) -> None:
        # Several orders may name one program, and its requests are looked through once for all of them.
        waiting: dict[ProgramId, RequestState | None] = {}
        running: dict[ProgramId, Iterator[RequestState]] = {}
        for key, order in list(self._orders.items()):
            program_id, to_program_id = key
            if to_program_id not in waiting:
                waiting[to_program_id] = self._waiting_request(to_program_id)
            urgent = waiting[to_program_id]
            if now >= order.until_s:
                del self._orders[key]
            elif urgent is None or urgent.request_id != order.urgent:
                # The urgent request may have come after the last step was planned. Then the next step may
                # admit it.
                order.urgent = urgent.request_id if urgent is not None else None
                order.seen_at_step = self._steps
            elif self._steps > order.seen_at_step:
                if program_id not in running:
                    running[program_id] = self._running_requests(program_id, now)
                chosen = next(running[program_id], None)
                if chosen is not None:
                    del self._orders[key]
                    self._holds[chosen.request_id] = _Hold(urgent.request_id, now + ORDER_VALID_S)

    def _end_holds(self, now: float) -> None:
        nothing_runs = not any(state.running for state in self._states.values())
        for request_id, hold in list(self._holds.items()):
            hold.idle_ticks = hold.idle_ticks + 1 if nothing_runs and hold.preempted else 0
            if now >= hold.until_s or hold.idle_ticks >= IDLE_TICKS:
                self._release(request_id)
                urgent = self._states.get(hold.urgent)
                if urgent is not None and urgent.goes_first:
                    urgent.goes_first = False
                    self._state.actions.append(RequestRequeued(hold.urgent))
            elif not hold.preempted:
                self._state.actions.append(RequestYields(request_id, hold.urgent))

    def _release_for(self, urgent: str) -> None:
        """End the holds of all requests that yield to the request ``urgent``."""
        for request_id, hold in list(self._holds.items()):
            if hold.urgent == urgent:
                self._release(request_id)

    def _release(self, request_id: str) -> None:
        if self._holds.pop(request_id).preempted:
            self._state.actions.append(RequestRequeued(request_id))

    def _waiting_request(self, program_id: ProgramId) -> RequestState | None:
        """Return the program's longest-waiting request that was never admitted and is not parked; ``None``:
        there is none."""
        waiting = [
            state
            for state in self._requests_of(program_id)
            if not (state.running or state.admitted or self._is_parked(state))
        ]
        return min(waiting, key=lambda state: state.arrival, default=None)

    def _running_requests(self, program_id: ProgramId, now: float) -> Iterator[RequestState]:
        """Yield the running requests of a program that may yield. A request that others have yielded to does
        not yield itself, so two requests never yield to each other in turns."""
        for state in self._requests_of(program_id):
            if (
                state.running
                and state.yields < MAX_YIELDS
                and not state.goes_first
                and now - state.since_s >= MIN_RUN_S
                and state.request_id not in self._holds
            ):
                yield state

    def _requests_of(self, program_id: ProgramId) -> list[RequestState]:
        program = self._state.programs.get(program_id)
        ids = sorted(program.live_requests) if program is not None else ()
        return [self._states[request_id] for request_id in ids if request_id in self._states]
