"""The gateway's view of a routing core: in this process, or in a coordinator elsewhere."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from ...routing import routing_events
from ...routing.routing_core import RoutingCore
from ...routing.routing_status import LinkStats, PairEngineStatus, ProgramRouteStatus, ReplicaStatus
from .gateway_request_state import GatewayRequestState
from .policy_failure_log import PolicyFailureLog

logger = logging.getLogger(__name__)

TICK_S = 0.1
"""One epoch of tenants' shares (SAGA §6.1); nothing in the core is due more often."""

ControlAction = routing_events.ReleaseProgramKv | routing_events.ProbeReplica


class RoutingBackend(Protocol):
    """Decides where requests go. All calls come from one event loop and never block it."""

    on_control_action: Callable[[ControlAction], None]
    """Called with actions that concern no single request."""

    def open(self, asked: routing_events.RequestReceived) -> GatewayRequestState:
        """Submit a request. The returned state receives decisions until ``close``."""
        ...

    def close(self, request_state: GatewayRequestState) -> None:
        """Stop sending decisions to a request's state."""
        ...

    def tell(self, event: routing_events.AnyRoutingEvent) -> None:
        """Report an event."""
        ...

    def home(self, tenant: str, program_id: str) -> str | None:
        """The replica that is a program's home."""
        ...

    def answered_by(self, tenant: str, program_id: str) -> str | None:
        """The engine of a program's last answer, of programs without a home; ``None``: unknown."""
        ...

    async def programs(self) -> Sequence[ProgramRouteStatus]:
        """All live programs."""
        ...

    async def replicas(self) -> Sequence[ReplicaStatus]:
        """All known replicas."""
        ...

    def shares_used(self) -> dict[str, float]:
        """By tenant, usage of its requests in flight ÷ its share; empty where capacity is not shared."""
        ...


class LocalRoutingBackend:
    """A routing core in this process, and the states of its requests. Used in one event loop."""

    def __init__(self, core: RoutingCore, clock: Callable[[], float] = time.monotonic) -> None:
        self.core = core
        self.on_control_action: Callable[[ControlAction], None] = lambda action: None
        self.on_request_decision: Callable[[routing_events.AnyRoutingAction], None] = lambda action: None
        """Called with every action, for metrics."""
        self.links_of: Callable[[str], Mapping[str, LinkStats]] = lambda replica_id: {}
        """Returns an engine's last report of its links; set by the monitor of the engines."""
        self._clock = clock
        self._request_states: dict[str, GatewayRequestState] = {}
        self._pending_events: deque[routing_events.AnyRoutingEvent] = deque()
        self._is_reporting = False
        self._policy_log = PolicyFailureLog(core.counts)

    def open(self, asked: routing_events.RequestReceived) -> GatewayRequestState:
        """Submit a request."""
        request_state = self._request_states[asked.request_id] = GatewayRequestState(asked.request_id)
        self.tell(asked)
        return request_state

    def close(self, request_state: GatewayRequestState) -> None:
        """Stop sending decisions to a request's state."""
        self._request_states.pop(request_state.request_id, None)

    def tell(self, event: routing_events.AnyRoutingEvent) -> None:
        """Report an event. An error of the core is logged: it must not end a client's connection."""
        # A receiver of an action may report an event itself: it follows after all actions of this one.
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
        """The replica that is a program's home."""
        return self.core.home(tenant, program_id)

    def answered_by(self, tenant: str, program_id: str) -> str | None:
        """The engine of a program's last answer, of programs without a home."""
        return self.core.answered_by(tenant, program_id)

    async def programs(self) -> Sequence[ProgramRouteStatus]:
        """All live programs, latest first."""
        return self.core.program_statuses()

    async def replicas(self) -> Sequence[ReplicaStatus]:
        """All known replicas, in the order of registration."""
        return with_links(self.core.replica_statuses(), self.links_of)

    def shares_used(self) -> dict[str, float]:
        """By tenant, usage of its requests in flight ÷ its share."""
        return self.core.shares_used()

    def _take(self, event: routing_events.AnyRoutingEvent) -> None:
        actions: Sequence[routing_events.AnyRoutingAction]
        now = self._clock()
        try:
            actions = self.core.take(event, now)
        except Exception:
            logger.exception("the routing core failed at %s; please report this", type(event).__name__)
            if not isinstance(event, routing_events.RequestReceived):
                return
            actions = [
                routing_events.RejectRequest(
                    event.request_id, 500, "gateway_failed", "the gateway failed; see its log"
                )
            ]
        self._policy_log.look(now)
        for action in actions:
            # The waiting request first, then metrics: their errors must keep no request waiting.
            try:
                if isinstance(action, (routing_events.ReleaseProgramKv, routing_events.ProbeReplica)):
                    self.on_control_action(action)
                elif (request_state := self._request_states.get(action.request_id)) is not None:
                    request_state.take(action)
                self.on_request_decision(action)
            except Exception:
                logger.exception("an action could not be delivered; please report this")


def with_links(
    statuses: Sequence[ReplicaStatus], links_of: Callable[[str], Mapping[str, LinkStats]]
) -> list[ReplicaStatus]:
    """Adds engines' links to the statuses of prefill and decode engines."""
    return [
        msgspec.structs.replace(status, links=links_of(status.replica))
        if isinstance(status, PairEngineStatus)
        else status
        for status in statuses
    ]
