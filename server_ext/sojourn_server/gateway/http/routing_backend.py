"""The routing core in this process, and the queues of its decisions about each request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from ...core.engine_answers import LinkStats
from ...metrics.rate_limited_log import RateLimitedLog
from ...routing import routing_events
from ...routing.routing_core import RoutingCore
from ...routing.routing_events import AbortStream, RecallRequest, RejectRequest, SendRequest
from ...routing.routing_records import PairEngineStatus, ReplicaStatus
from .generation_request import ClientDisconnected

logger = logging.getLogger(__name__)

T = TypeVar("T")

RequestDecision = SendRequest | RejectRequest | AbortStream | RecallRequest
"""An action of the routing core that concerns one request."""


class RequestDecisions:
    """The decisions about one request that are still to be carried out, in order."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.client_gone = False
        self.superseded = False
        """Whether a ``SendRequest`` came after the answer had begun, so that the core is wrong about it."""
        self._decisions: deque[RequestDecision] = deque()
        self._answered = False
        self._limit: asyncio.Timeout | None = None
        """What ends ``_grace_s`` seconds after a decision; ``None``: nothing."""
        self._grace_s = 0.0

    def add_decision(self, decision: RequestDecision) -> None:
        """Add a decision of the core. After the first byte of the answer, only ``AbortStream`` is added."""
        if self._answered and not isinstance(decision, AbortStream):
            self.superseded = self.superseded or isinstance(decision, SendRequest)
            return
        self._decisions.append(decision)
        self._wake(self._grace_s)

    def mark_answered(self) -> None:
        """Record the first byte of the answer. Now only ``AbortStream`` counts."""
        self._answered = True
        late, self._decisions = self._decisions, deque()
        for decision in late:
            self.add_decision(decision)

    def mark_client_disconnected(self) -> None:
        """Have ``take`` raise ``ClientDisconnected`` from now on."""
        self.client_gone = True
        self._wake(0.0)

    @property
    def has_decision(self) -> bool:
        """Whether ``take`` would return a decision or raise."""
        return bool(self._decisions) or self.client_gone

    def take(self) -> RequestDecision | None:
        """Remove and return the next decision; ``None``: there is none yet. Raises ``ClientDisconnected``."""
        if self.client_gone:
            raise ClientDisconnected
        return self._decisions.popleft() if self._decisions else None

    @contextlib.asynccontextmanager
    async def interruptible(self, grace_s: float) -> AsyncIterator[asyncio.Timeout]:
        """Context manager whose block ends with ``TimeoutError`` at once if the client disconnects, and
        ``grace_s`` after a decision, unless the block moves this time."""
        try:
            async with asyncio.timeout(None) as limit:
                self._limit, self._grace_s = limit, grace_s
                if self.has_decision:
                    self._wake(0.0 if self.client_gone else grace_s)
                yield limit
        finally:
            self._limit = None

    async def unless_decided(self, doing: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of ``doing``; ``None``: a decision came first, or the client left."""
        if self._decisions or self.client_gone:
            doing.close()
            return None
        with contextlib.suppress(TimeoutError):
            async with self.interruptible(0.0):
                return await doing
        return None

    def _wake(self, grace_s: float) -> None:
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + grace_s)


TICK_S = 0.1
"""Seconds between two ``Tick`` events, at which tenants' shares are computed (SAGA §6.1)."""

GatewayAction = routing_events.ReleaseProgramKv | routing_events.ProbeReplica | RecallRequest
"""An action of the routing core that concerns more than the request itself."""


class RoutingBackend:
    """A routing core in this process, and the decisions about its requests. For use in one event loop."""

    def __init__(self, core: RoutingCore, clock: Callable[[], float] = time.monotonic) -> None:
        self.core = core
        self.on_action: Callable[[GatewayAction], None] = lambda action: None
        self.links_of: Callable[[str], Mapping[str, LinkStats]] = lambda replica_id: {}
        """The last report of an engine's links."""
        self._clock = clock
        self._open: dict[str, RequestDecisions] = {}
        self._pending_events: deque[routing_events.AnyRoutingEvent] = deque()
        self._is_reporting = False
        self._failures_logged = 0
        self._log = RateLimitedLog(logger, clock)

    def open(self, asked: routing_events.RequestReceived) -> RequestDecisions:
        """Submit a request. The returned queue receives the core's decisions until ``close``."""
        decisions = self._open[asked.request_id] = RequestDecisions(asked.request_id)
        self.tell(asked)
        return decisions

    def close(self, over: routing_events.RequestFinished) -> None:
        self.tell(over)
        self._open.pop(over.request_id, None)

    def tell(self, event: routing_events.AnyRoutingEvent) -> None:
        """Pass an event to the core, and deliver its actions. An error of the core is logged."""
        # The receiver of an action may report another event. It is handled after all actions of this one.
        self._pending_events.append(event)
        if self._is_reporting:
            return
        self._is_reporting = True
        try:
            while self._pending_events:
                for action in self._actions_of(self._pending_events.popleft()):
                    decisions = self._open.get(getattr(action, "request_id", ""))
                    if decisions is not None and isinstance(action, RequestDecision):
                        decisions.add_decision(action)
                    if isinstance(action, GatewayAction):
                        self.on_action(action)
        finally:
            self._is_reporting = False

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tell(routing_events.Tick())

    def is_waiting(self, tenant: str, program_id: str) -> bool:
        program = self.core.programs.get((tenant, program_id))
        return program is not None and program.waiting > 0

    def replicas(self) -> Sequence[ReplicaStatus]:
        """Return the statuses of all known replicas with their engines' links, as they were registered."""
        return [
            msgspec.structs.replace(status, links=self.links_of(status.replica))
            if isinstance(status, PairEngineStatus)
            else status
            for status in self.core.replica_statuses()
        ]

    def _actions_of(self, event: routing_events.AnyRoutingEvent) -> list[routing_events.AnyRoutingAction]:
        """Return the core's actions for an event. Log its errors, since the core itself writes no log."""
        now = self._clock()
        try:
            actions = self.core.take(event, now)
            if isinstance(event, routing_events.RequestFinished) and event.request_id in self.core.requests:
                # The core took this for the end of an earlier attempt, but the gateway makes no further one.
                over = routing_events.RequestFinished(event.request_id, answered=False)
                actions = [*actions, *self.core.take(over, now)]
        except Exception:
            what = f"the routing core failed at {type(event).__name__}; please report this"
            self._log.log(logging.ERROR, what, exc_info=True)
            actions = []
            if isinstance(event, (routing_events.RequestReceived, routing_events.RequestFailed)):
                message = "the gateway failed; see its log"
                actions = [RejectRequest(event.request_id, 500, "gateway_failed", message)]
        counts = self.core.counts
        if counts.policy_failures > self._failures_logged:
            self._failures_logged = counts.policy_failures
            reason = counts.newest_policy_failure or "no text"
            self._log.log(logging.ERROR, "the routing policy failed: %s; please report this", reason)
        return actions
