"""Base class of routing cores. A core takes an event and ``now``, and returns actions. It has no I/O and no
clock.

The same code runs in a gateway on one machine, in the coordinator on Ray and in the simulator. This module
has what all cores share: checks of new requests, detection of silent replicas, rejections, counters, and
queries. ``AffinityCore`` chooses one replica per request, ``PairCore`` a prefill and a decode engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol

from . import routing_events
from .bounded_program_table import Key
from .home_change_log import Home, HomeChangeLog, HomeChanges
from .replica_fleet import remember_drain
from .routing_events import AbortStream, AnyRoutingAction, AnyRoutingEvent, ProbeReplica, RejectRequest
from .routing_limits import (
    NO_ROOM_RETRY_S,
    QUEUE_FULL_RETRY_S,
    REPLICAS_FAILED_RETRY_S,
    PolicyCallError,
    RoutingCounters,
    RoutingLimits,
)
from .routing_snapshot import RoutingState
from .routing_status import ProgramRouteStatus, ReplicaStatus

_UNSAVED_EVENTS = (
    routing_events.Tick,
    routing_events.ReplicaRegistered,
    routing_events.PairEngineRegistered,
    routing_events.NicQueueReported,
)
"""Events that rarely change the state that a snapshot contains. ``take`` counts them in
``RoutingCore.changes`` only if they cause actions. A handler that changes this state without an action
increases ``changes`` itself."""


class LeasedReplica(Protocol):
    """A registered replica or engine, which has to report every ``RoutingLimits.lease_s`` seconds."""

    heard_s: float
    """Time of the last report, on the core's clock."""
    probed_s: float | None
    """Time of the last probe since the last report; ``None``: there was none."""

    @property
    def replica_id(self) -> str: ...
    @property
    def instance(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def is_draining(self) -> bool: ...


class FailedRequest(Protocol):
    """Failure counts of a request. ``failures``: number of replicas or pairs that did not answer it.
    ``failures_computing``: how many of these had accepted the request."""

    failures: int
    failures_computing: int


class RoutingCore(ABC):
    """State machine that routes the requests of one gateway or one coordinator. Not thread-safe.

    ``life`` is an id of this core object. ``changes_since`` needs it, since the versions of two cores cannot
    be compared. ``limits``: ``None`` for the defaults.
    """

    def __init__(self, limits: RoutingLimits | None = None, life: str = "") -> None:
        self.limits = limits or RoutingLimits()
        self.counts = RoutingCounters()
        self.journal = HomeChangeLog(life)
        """Changes of programs' homes."""
        self.changes = 0
        """Counter that grows with each change of the state that ``snapshot`` returns. The caller compares two
        values to see whether a new snapshot is needed."""
        self.drained: OrderedDict[str, str] = OrderedDict()
        """Replicas to drain as soon as they register: replica id → instance. A replica that registers as
        another instance is not drained. The newest ``MAX_REMEMBERED_DRAINS`` entries are kept."""
        self._actions: list[AnyRoutingAction] = []
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            routing_events.RequestReceived: self._received,
            routing_events.RequestSent: self._sent,
            routing_events.FirstByteSent: self._began,
            routing_events.RequestFinished: self._ended,
            routing_events.RequestFailed: self._failed,
            routing_events.ReplicaGone: self._replica_gone,
            routing_events.ReplicaDrainStarted: self._drain_started,
            routing_events.ReplicaDrainCancelled: self._drain_cancelled,
            routing_events.ProgramEnded: self._program_ended,
            routing_events.Tick: self._tick,
        }

    def take(self, event: AnyRoutingEvent, now: float) -> list[AnyRoutingAction]:
        """Process an event; return the actions that it causes, in order. Raises ``ValueError`` if a
        registration is invalid. Ignores events that do not concern this core."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event, now)
        self._dispatch(now, epoch=isinstance(event, routing_events.Tick))
        actions = list(self._actions)
        self.changes += bool(actions) or not isinstance(event, _UNSAVED_EVENTS)
        self._actions.clear()
        return actions

    # -- questions ----------------------------------------------------------------

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Number of requests that have not been sent."""

    def home(self, tenant: str, program_id: str) -> str | None:
        """Id of the replica that is a program's home; ``None``: there is none."""
        return None

    def answered_by(self, tenant: str, program_id: str) -> str | None:
        """Id of the decode engine that gave a program's last answer; ``None``: unknown, or this core has no
        pairs."""
        return None

    @abstractmethod
    def is_open(self, request_id: str) -> bool:
        """Whether a request is in progress."""

    @abstractmethod
    def sent_request(self, request_id: str) -> routing_events.SendRequest | None:
        """Return the ``SendRequest`` with which a request was sent; ``None``: the request waits, is unknown,
        or was sent to a pair that this core did not choose."""

    @abstractmethod
    def replica(self, replica_id: str) -> LeasedReplica | None:
        """The replica or engine with this id; ``None``: unknown."""

    @abstractmethod
    def replicas(self) -> Iterable[LeasedReplica]:
        """All replicas or engines."""

    def lease(self, replica_id: str) -> tuple[str, float] | None:
        """Return (instance of a replica, time of its last report); ``None``: the replica is unknown."""
        replica = self.replica(replica_id)
        return (replica.instance, replica.heard_s) if replica is not None else None

    def health(self, replica_id: str) -> str | None:
        """``up``, ``draining`` or ``suspect``; ``None``: the replica is unknown."""
        replica = self.replica(replica_id)
        return replica.state if replica is not None else None

    @abstractmethod
    def in_flight(self, replica_id: str) -> int:
        """Return the number of requests that were sent to a replica and have not ended; 0 for an unknown
        replica. A prefill engine has a request only until the prompt is computed."""

    def drain_event(self, replica_id: str, instance: str) -> routing_events.ReplicaDrainStarted | None:
        """Return the event that drains a replica, for ``take``. ``None``: the replica drains already, or is
        not registered. The drain of an unregistered replica is noted in ``drained``, and begins when
        ``instance`` registers."""
        replica = self.replica(replica_id)
        if replica is None:
            # Note the drain before the replica registers, so that the replica gets no request in between.
            remember_drain(self.drained, replica_id, instance)
        elif not replica.is_draining:
            return routing_events.ReplicaDrainStarted(replica_id)
        return None

    @abstractmethod
    def program_statuses(self) -> list[ProgramRouteStatus]:
        """Statuses of all known programs, most recently active first."""

    @abstractmethod
    def replica_statuses(self) -> Sequence[ReplicaStatus]:
        """Statuses of all known replicas, in the order of registration."""

    def demand_tokens(self) -> tuple[int, int]:
        """Return (KV tokens that all programs need, KV capacity of all replicas in device and host memory);
        (0, 0): unknown."""
        return 0, 0

    def shares_used(self) -> dict[str, float]:
        """Return the used share of each tenant: fraction of the capacity that the tenant's requests in flight
        use ÷ the tenant's share of the capacity. Empty if tenants do not share capacity."""
        return {}

    # -- copies -------------------------------------------------------------------

    def changes_since(self, version: int, life: str) -> HomeChanges:
        """Return the changed homes that a gateway's copy of the homes lacks.

        ``version``: the copy's version. ``life``: id of the core that assigned this version. If ``life`` is
        the id of another core, or if the log has dropped some of the changes, the result has all homes.
        """
        return self.journal.since(version, life, self._all_homes)

    def snapshot(self, now: float) -> RoutingState | None:
        """Return the state for a successor; ``None``: this kind of core has no snapshots. The state contains
        no requests, since gateways report their requests to the successor."""
        steps = self.snapshot_steps(now)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                state: RoutingState | None = end.value
                return state

    def snapshot_steps(self, now: float) -> Generator[None, None, RoutingState | None]:
        """Return a generator whose result is that of ``snapshot``. Each step is short, and the core may take
        events between two steps. ``snapshot_routing_state`` says why the result is usable."""
        yield from ()
        return None

    def restore(self, state: RoutingState, now: float, elapsed_s: float | None = None) -> int:
        """Continue from a snapshot. Returns the number of programs with a home.

        If the snapshot's times are on another clock, ``elapsed_s`` is the number of seconds since the
        snapshot was taken. If ``elapsed_s`` is ``None``, the snapshot's times are on this core's clock.
        Raises ``ValueError`` for an invalid state, for a core that is already in use, and for a kind of core
        without snapshots.
        """
        raise ValueError(
            "this core serves prefill and decode engines and restores no state; expected a checkpoint "
            "without a core state"
        )

    @abstractmethod
    def suspect_all(self, now: float) -> None:
        """Mark all replicas as suspect, except those that drain. A suspect replica gets no new programs until
        it registers again. Called after ``restore``."""

    def _all_homes(self) -> Iterator[tuple[Key, Home]]:
        """Yield (program's key, home) for each program with a home."""
        yield from ()

    # -- requests -----------------------------------------------------------------

    def _received(self, event: routing_events.RequestReceived, now: float) -> None:
        """Check a new request. Reject it, or accept it by ``_open``."""
        request_id, longest = event.request_id, self._longest_tokens()
        if self.is_open(request_id):
            self._reject(request_id, 409, "duplicate_request", "a request with this id is in progress")
            return
        if self._reject_early(event):
            return
        if event.exact and longest and event.context_tokens > longest:
            message = (
                f"the prompt has {event.context_tokens:,} tokens; the longest that is served is {longest:,}"
            )
            self._reject(request_id, 400, "context_too_long", message)
            return
        if self._is_queue_full(event.tenant):
            message = f"{self.waiting} requests are waiting already; try again later"
            self._reject(request_id, 429, "too_many_waiting", message, QUEUE_FULL_RETRY_S)
            return
        try:
            self._open(event, now)
        except Exception as error:
            # No later event handles this request, so it has to be answered now.
            self._close_if_open(request_id, now)
            if not isinstance(error, PolicyCallError):
                raise  # a bug of ours; the caller rejects the request and logs the traceback
            self._reject_unrouted(request_id, error)

    def _reject_early(self, event: routing_events.RequestReceived) -> bool:
        """Reject the request if this core can serve no request now, for example because it has no decode
        engine. Return whether it was rejected. Called before the request's size and the queue are checked. By
        default, no request is rejected."""
        return False

    def _is_queue_full(self, tenant: str) -> bool:
        """Whether a new request of ``tenant`` must be rejected because too many requests wait."""
        return self.waiting >= self.limits.most_waiting

    @abstractmethod
    def _longest_tokens(self) -> int:
        """Longest context, in tokens, that any registered replica or pair can serve; 0: unknown."""

    @abstractmethod
    def _open(self, event: routing_events.RequestReceived, now: float) -> None:
        """Accept a request: send or queue it."""

    @abstractmethod
    def _close_if_open(self, request_id: str, now: float) -> None:
        """Forget a request if it is in progress."""

    @abstractmethod
    def _sent(self, event: routing_events.RequestSent, now: float) -> None: ...

    @abstractmethod
    def _began(self, event: routing_events.FirstByteSent, now: float) -> None: ...

    @abstractmethod
    def _ended(self, event: routing_events.RequestFinished, now: float) -> None: ...

    @abstractmethod
    def _failed(self, event: routing_events.RequestFailed, now: float) -> None: ...

    def _failed_too_often(self, request: FailedRequest) -> bool:
        """Whether a request has failed too often to be tried at another replica."""
        limits = self.limits
        return (
            request.failures >= limits.most_failures
            or request.failures_computing >= limits.most_failures_computing
        )

    @abstractmethod
    def _dispatch(self, now: float, *, epoch: bool) -> None:
        """Send the requests that can be sent now. On a ``Tick``, ``epoch`` is True, and work stealing and
        preemption run too if the core has them."""

    # -- replicas -----------------------------------------------------------------

    def _replica_gone(self, event: routing_events.ReplicaGone, now: float) -> None:
        lease = self.lease(event.replica_id)
        if lease is not None and lease[0] == event.instance:
            self._lose(event.replica_id, now)

    @abstractmethod
    def _lose(self, replica_id: str, now: float) -> None:
        """Remove a replica. Its requests are routed again, or aborted if the client has the first byte."""

    @abstractmethod
    def _drain_started(self, event: routing_events.ReplicaDrainStarted, now: float) -> None: ...

    @abstractmethod
    def _drain_cancelled(self, event: routing_events.ReplicaDrainCancelled, now: float) -> None: ...

    @abstractmethod
    def _suspect(self, replica_id: str, now: float) -> None:
        """Mark a silent or failed replica as suspect, and have it probed. A suspect replica gets no new
        programs."""

    @abstractmethod
    def _program_ended(self, event: routing_events.ProgramEnded, now: float) -> None: ...

    # -- time ---------------------------------------------------------------------

    def _tick(self, event: routing_events.Tick, now: float) -> None:
        """Suspect and probe each replica that has been silent for ``lease_s``. Then call ``_expire``."""
        lease_s = self.limits.lease_s
        for replica in self.replicas():
            silent = now - replica.heard_s >= lease_s
            if silent and (replica.probed_s is None or now - replica.probed_s >= lease_s):
                self._suspect(replica.replica_id, now)
        self._expire(now)

    @abstractmethod
    def _expire(self, now: float) -> None:
        """Reject requests that waited too long, and forget programs that were silent too long."""

    # -- actions ------------------------------------------------------------------

    def _probe(self, replica_id: str, instance: str) -> None:
        self._actions.append(ProbeReplica(replica_id, instance))

    def _abort(self, request_id: str, replica_id: str) -> None:
        self._actions.append(AbortStream(request_id, replica_id))
        self.counts.cut += 1

    def _reject(
        self, request_id: str, status: int, code: str, message: str, retry_after_s: float | None = None
    ) -> None:
        self.counts.refused += 1
        self._actions.append(RejectRequest(request_id, status, code, message, retry_after_s))

    def _reject_failed(self, request_id: str, message: str) -> None:
        self._reject(request_id, 502, "replicas_failed", message, REPLICAS_FAILED_RETRY_S)

    def _reject_timed_out(self, request_id: str, what: str) -> None:
        """Reject a request that has waited for ``wait_s``. ``what``: the replica or pair that it waited for,
        in words."""
        message = f"the request waited {self.limits.wait_s:g} s; no {what} had free KV capacity"
        self._reject(request_id, 503, "no_room", message, NO_ROOM_RETRY_S)

    def _reject_unrouted(self, request_id: str, error: PolicyCallError) -> None:
        self.counts.policy_failed(error)
        self._reject(request_id, 500, "policy_failed", "the routing policy failed; see the gateway's log")
