"""The gateway's interface to a routing core, and the queue of decisions about each request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from ...metrics.rate_limited_log import RateLimitedLog
from ...routing import routing_events
from ...routing.routing_core import RoutingCore
from ...routing.routing_events import AbortStream, RecallRequest, RejectRequest, SendRequest
from ...routing.routing_status import LinkStats, PairEngineStatus, ProgramRouteStatus, ReplicaStatus
from .cancel_scope import CancelScope
from .policy_failure_log import PolicyFailureLog

logger = logging.getLogger(__name__)

T = TypeVar("T")

RequestDecision = SendRequest | RejectRequest | AbortStream | RecallRequest
"""An action of the routing core that concerns one request."""


class ClientDisconnected(Exception):
    """The client of this request has disconnected."""


class RequestDecisionQueue:
    """The routing decisions about one request that are still to be carried out, in order. For use in one
    event loop."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.on_change: Callable[[], None] | None = None
        """Function to call at a new decision, or when the client disconnects. ``None``: no function is
        called."""
        self._decisions: deque[RequestDecision] = deque()
        self.client_gone = False
        """Whether the client has disconnected."""
        self.superseded = False
        """Whether a ``SendRequest`` was ignored because the answer had begun. The core then believes that the
        request is at another replica."""
        self._answered = False
        """Whether the first byte of the answer has arrived. From then on, only ``AbortStream`` is queued."""
        self._waiter: asyncio.Future[None] | None = None

    def add_decision(self, decision: RequestDecision) -> None:
        """Add a decision of the core. After the first byte of the answer, only ``AbortStream`` is added."""
        if self._answered and not isinstance(decision, AbortStream):
            self.superseded = self.superseded or isinstance(decision, SendRequest)
            return
        self._decisions.append(decision)
        self._wake()

    def mark_answered(self) -> None:
        """Record that the first byte of the answer has arrived. Pending and later decisions other than
        ``AbortStream`` are ignored."""
        self._answered = True
        late, self._decisions = self._decisions, deque()
        for decision in late:
            self.add_decision(decision)

    def mark_client_disconnected(self) -> None:
        """Record that the client has disconnected. From now on ``next`` raises ``ClientDisconnected``."""
        self.client_gone = True
        self._wake()

    @property
    def has_decision(self) -> bool:
        """Whether ``next`` would return or raise at once."""
        return bool(self._decisions) or self.client_gone

    async def next(self) -> RequestDecision:
        """Wait for the next decision, and remove it from the queue. Raises ``ClientDisconnected``."""
        while True:
            if self.client_gone:
                raise ClientDisconnected
            if self._decisions:
                return self._decisions.popleft()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def run_unless_decided(self, doing: Coroutine[Any, Any, T]) -> T | None:
        """Await ``doing`` and return its result. Raises the exceptions of ``doing``.

        If a routing decision arrives first, or the client disconnects, cancel ``doing`` and return ``None``.
        """
        if self.has_decision:
            doing.close()
            return None
        with CancelScope() as leave:
            self.on_change = leave.end_now
            try:
                return await doing
            finally:
                self.on_change = None
        return None

    def _wake(self) -> None:
        """Wake ``next``, so that it checks the queue again, and call ``on_change``."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self.on_change is not None:
            self.on_change()


TICK_S = 0.1
"""Seconds between two ``Tick`` events. Tenants' shares are computed at this interval (SAGA §6.1). No other
work of the core needs a shorter one."""

ControlAction = routing_events.ReleaseProgramKv | routing_events.YieldPrograms | routing_events.ProbeReplica
"""An action of the routing core that concerns no single request."""


class RoutingBackend(Protocol):
    """Decides where requests go. It is a routing core in this process, or a connection to one. All calls come
    from one event loop and never block it."""

    on_control_action: Callable[[ControlAction], None]
    """Function that is called with each ``ControlAction``. The gateway sets it."""

    def open(self, asked: routing_events.RequestReceived) -> RequestDecisionQueue:
        """Submit a request. The returned queue receives the core's decisions until ``close``."""
        ...

    def close(self, decisions: RequestDecisionQueue) -> None:
        """Stop adding decisions to a request's queue."""
        ...

    def tell(self, event: routing_events.AnyRoutingEvent) -> None:
        """Report an event to the routing core."""
        ...

    def home(self, tenant: str, program_id: str) -> str | None:
        """Return the id of the replica that is a program's home; ``None``: unknown."""
        ...

    def answered_by(self, tenant: str, program_id: str) -> str | None:
        """Return the id of the engine that gave a program's last answer; ``None``: unknown. For programs
        without a home."""
        ...

    async def programs(self) -> Sequence[ProgramRouteStatus]:
        """Return the statuses of all programs that have not ended."""
        ...

    async def replicas(self) -> Sequence[ReplicaStatus]:
        """Return the statuses of all known replicas."""
        ...

    def shares_used(self) -> dict[str, float]:
        """Return, by tenant, the fraction of the capacity that its requests in flight use ÷ its share of the
        capacity. Empty if tenants do not share capacity."""
        ...


class LocalRoutingBackend:
    """A routing core in this process, and the decision queues of its requests. For use in one event loop."""

    def __init__(self, core: RoutingCore, clock: Callable[[], float] = time.monotonic) -> None:
        self.core = core
        self.on_control_action: Callable[[ControlAction], None] = lambda action: None
        self.on_action: Callable[[routing_events.AnyRoutingAction], None] = lambda action: None
        """Function that is called with every action of the core, for metrics."""
        self.links_of: Callable[[str], Mapping[str, LinkStats]] = lambda replica_id: {}
        """Function that returns the last report of an engine's links, by replica id. The engine monitor sets
        it."""
        self._clock = clock
        self._queues: dict[str, RequestDecisionQueue] = {}
        """The queue of each open request, by request id."""
        self._pending_events: deque[routing_events.AnyRoutingEvent] = deque()
        self._is_reporting = False
        self._policy_log = PolicyFailureLog(core.counts)
        self._rate_limited_log = RateLimitedLog(logger, clock)

    def open(self, asked: routing_events.RequestReceived) -> RequestDecisionQueue:
        """Submit a request. The returned queue receives the core's decisions until ``close``."""
        decisions = self._queues[asked.request_id] = RequestDecisionQueue(asked.request_id)
        self.tell(asked)
        return decisions

    def close(self, decisions: RequestDecisionQueue) -> None:
        """Stop adding decisions to a request's queue."""
        self._queues.pop(decisions.request_id, None)

    def tell(self, event: routing_events.AnyRoutingEvent) -> None:
        """Pass an event to the core, and deliver the core's actions. An error of the core is logged, not
        raised, because it must not end a client's connection."""
        # The receiver of an action may report another event, which is handled after all actions of this
        # event.
        self._pending_events.append(event)
        if self._is_reporting:
            return
        self._is_reporting = True
        try:
            while self._pending_events:
                self._take(self._pending_events.popleft())
        finally:
            self._is_reporting = False

    async def run(self) -> None:
        """Send ticks to the core, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self.tell(routing_events.Tick())

    def home(self, tenant: str, program_id: str) -> str | None:
        """Return the id of the replica that is a program's home; ``None``: unknown."""
        return self.core.home(tenant, program_id)

    def answered_by(self, tenant: str, program_id: str) -> str | None:
        """Return the id of the engine that gave a program's last answer; ``None``: unknown. For programs
        without a home."""
        return self.core.answered_by(tenant, program_id)

    async def programs(self) -> Sequence[ProgramRouteStatus]:
        """Return the statuses of all programs that have not ended, most recently active first."""
        return self.core.program_statuses()

    async def replicas(self) -> Sequence[ReplicaStatus]:
        """Return the statuses of all known replicas with their engines' links, in the order of
        registration."""
        return with_links(self.core.replica_statuses(), self.links_of)

    def shares_used(self) -> dict[str, float]:
        """Return, by tenant, the fraction of the capacity that it uses ÷ its share of the capacity. Empty if
        tenants do not share capacity."""
        return self.core.shares_used()

    def _take(self, event: routing_events.AnyRoutingEvent) -> None:
        """Pass one event to the core. Deliver the core's actions to requests, gateway and metrics."""
        now = self._clock()
        actions = take_event(self.core, event, now, self._rate_limited_log)
        self._policy_log.log_new_failures(now)
        for action in actions:
            # Metrics come after the waiting request, so that their errors keep no request waiting.
            try:
                if isinstance(action, ControlAction):
                    self.on_control_action(action)
                elif (decisions := self._queues.get(action.request_id)) is not None:
                    decisions.add_decision(action)
                self.on_action(action)
            except Exception:
                logger.exception("an action could not be delivered; please report this")


def take_event(
    core: RoutingCore, event: routing_events.AnyRoutingEvent, now: float, log: RateLimitedLog
) -> Sequence[routing_events.AnyRoutingAction]:
    """Pass an event to the core and return the core's actions.

    A ``RequestFinished`` always ends its request. The core may meanwhile have lost the request's replica, or
    assigned the request to another one.

    If the core raises, the error is logged, and the returned actions depend on the event:

    - ``RequestReceived``: a ``RejectRequest``.
    - ``RequestFailed``: a ``RejectRequest`` and an ``AbortStream``. The first takes effect only before the
      first byte of the answer, the second only after it.
    - Other events: none.
    """
    try:
        actions = core.take(event, now)
        if isinstance(event, routing_events.RequestFinished) and core.is_open(event.request_id):
            # The core took this for the end of an earlier attempt, but the gateway makes no further attempt.
            over = routing_events.RequestFinished(event.request_id, answered=False)
            actions = [*actions, *core.take(over, now)]
        return actions
    except Exception:
        what = type(event).__name__
        log.log(logging.ERROR, f"the routing core failed at {what}; please report this", exc_info=True)
    if not isinstance(event, (routing_events.RequestReceived, routing_events.RequestFailed)):
        return []
    message = "the gateway failed; see its log"
    rejected = routing_events.RejectRequest(event.request_id, 500, "gateway_failed", message)
    if isinstance(event, routing_events.RequestReceived):
        return [rejected]
    return [rejected, routing_events.AbortStream(event.request_id, event.replica_id)]


def with_links(
    statuses: Sequence[ReplicaStatus], links_of: Callable[[str], Mapping[str, LinkStats]]
) -> list[ReplicaStatus]:
    """Return the statuses, with the state of the links of prefill and decode engines. ``links_of`` returns
    the last report of an engine's links, by replica id."""
    return [
        msgspec.structs.replace(status, links=links_of(status.replica))
        if isinstance(status, PairEngineStatus)
        else status
        for status in statuses
    ]
