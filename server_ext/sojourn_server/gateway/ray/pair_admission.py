"""Decides which prefill and decode engines get requests: only engines that serve the same model with the same
kind of KV. A *kind* here is an ``EngineCompatibility``: the model and the format of its KV."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...routing import routing_events
from ...routing.pair_core import PairCore
from ...routing.routing_events import PairRole
from ...routing.routing_status import LinkStats
from ..http.engine_descriptions import (
    EngineCompatibility,
    dominant_compatibility,
    engine_compatibility,
    incompatibility,
    nic_queue_event,
)
from ..http.replica_addresses import rank_addresses
from .coordinator_messages import EngineRegistration

logger = logging.getLogger(__name__)

KIND_COUNT_INTERVAL_S = 1.0
"""Seconds between two computations of the kind to serve. If an engine has a new kind or role, the kind to
serve is computed at once. A computation at each registration would cost too much, since each engine registers
twice a second."""

DrainEvent = routing_events.ReplicaDrainStarted | routing_events.ReplicaDrainCancelled
"""An event that starts or ends a drain."""


@dataclass(slots=True)
class _RegisteredEngine:
    """An engine that registers regularly, admitted or not."""

    kind: EngineCompatibility
    role: PairRole
    heard_s: float
    """Time of the last registration."""
    fits: bool = False
    """Whether the engine is of the served kind."""


class PairAdmission:
    """Admits engines of a single kind to a ``PairCore``, which routes each request to a prefill and a decode
    engine. Only engines of one kind can exchange KV.

    ``dominant_compatibility`` chooses the served kind: the kind with the most registered engines, among kinds
    with engines of both roles. The order of registration does not matter. An engine whose kind is no longer
    served is drained: it finishes its requests and gets no more.
    """

    def __init__(self, core: PairCore, clock: Callable[[], float]) -> None:
        self._core = core
        self._clock = clock
        self._links: dict[str, Mapping[str, LinkStats]] = {}
        """Last report of each engine's links, by replica id and link name."""
        self._known: dict[str, _RegisteredEngine] = {}
        """Engines that register, by replica id."""
        self._kind: EngineCompatibility | None = None
        """The kind that is served; ``None``: no engine has registered."""
        self._kind_changed = False
        """Whether the served kind has changed since the last call of ``take_drain_events``."""
        self._minority_replicas: set[str] = set()
        """Ids of replicas that drain only because their kind is not served."""
        self._last_count_s = -math.inf
        """Time of the last computation of the kind to serve."""
        self._logged_rejections: dict[str, str] = {}
        """Last logged reason why an engine gets no requests, by engine id."""

    def links_of(self, replica_id: str) -> Mapping[str, LinkStats]:
        """Return an engine's last report of its links, by link name; empty: there is no report."""
        return self._links.get(replica_id, {})

    def process_registration(self, registration: EngineRegistration) -> str:
        """Process an engine's registration. Returns why the engine is not admitted; empty: it is admitted.
        The result is also empty for an engine that drains and still has requests. A new reason is logged."""
        [address] = rank_addresses(registration.url, 1)
        why = self._record_registration(registration, address.replica_id)
        if not why:
            self._logged_rejections.pop(registration.engine_id, None)
        elif self._logged_rejections.get(registration.engine_id) != why:
            logger.warning("engine %s gets no requests: %s", registration.engine_id, why)
            self._logged_rejections[registration.engine_id] = why
        lease = self._core.lease(address.replica_id)
        if not why:
            self._clear_drained_mark(address.replica_id, registration.description.instance)
        elif (
            registration.paths is not None
            and lease is not None
            and lease[0] == registration.description.instance
            and self._core.in_flight(address.replica_id)
        ):
            return ""  # it drains, and its requests end there
        return why

    def _record_registration(self, registration: EngineRegistration, replica_id: str) -> str:
        """Record an engine's registration. Returns why the engine's kind is not served; empty: it is served.
        May change the served kind."""
        if registration.paths is None:
            self._known.pop(replica_id, None)
            return "it reports no KV paths; expected an engine started with --role"
        now, role = self._clock(), registration.paths.role
        kind = engine_compatibility(registration.description, registration.paths)
        one = self._known.get(replica_id)
        is_new = one is None or (one.kind, one.role) != (kind, role)
        if one is None or is_new:
            one = self._known[replica_id] = _RegisteredEngine(kind, role, now)
        one.heard_s = now
        if is_new or now - self._last_count_s >= KIND_COUNT_INTERVAL_S:
            self._update_served_kind(replica_id, now)
        why = incompatibility(kind, self._kind) if self._kind is not None else ""
        one.fits = not why
        return why

    def _update_served_kind(self, replica_id: str, now: float) -> None:
        """Compute the kind to serve from the engines that still register. ``replica_id``: the replica that
        has just registered, and so counts in any case."""
        self._last_count_s = now
        engines, silent_s = self._core.engines, self._core.limits.lease_s
        self._known = {
            name: one
            for name, one in self._known.items()
            # No event reports the loss of an engine that is not admitted.
            if name == replica_id or (name in engines if one.fits else now - one.heard_s < silent_s)
        }
        kind = dominant_compatibility(((one.kind, one.role) for one in self._known.values()), self._kind)
        if kind != self._kind:
            self._kind_changed = self._kind is not None
            self._kind = kind

    def take_drain_events(self) -> Sequence[DrainEvent]:
        """Return the events that start or end drains because the served kind has changed since the last
        call; empty if it has not changed."""
        if not self._kind_changed or self._kind is None:
            return ()
        self._kind_changed = False
        found: list[DrainEvent] = []
        for name, engine in self._core.engines.items():
            one = self._known.get(name)
            if one is None:
                continue
            why = incompatibility(one.kind, self._kind)
            one.fits = not why
            if why and not engine.is_draining:
                self._minority_replicas.add(name)
                found.append(routing_events.ReplicaDrainStarted(name))
            elif not why and name in self._minority_replicas:
                self._minority_replicas.discard(name)
                found.append(routing_events.ReplicaDrainCancelled(name))
        return found

    def _clear_drained_mark(self, replica_id: str, instance: str) -> None:
        """Remove the mark that an engine drained because of its kind. Called when the engine registers with
        the served kind. No effect if the drain had another reason, or if the core still has the engine."""
        if replica_id in self._minority_replicas and replica_id not in self._core.engines:
            self._minority_replicas.discard(replica_id)
            if self._core.drained.get(replica_id) == instance:
                del self._core.drained[replica_id]

    def record_links(self, registration: EngineRegistration) -> routing_events.NicQueueReported | None:
        """Record an engine's report of its links. Returns the event that reports the storage NIC queue of the
        engine's node; ``None``: there is no report, or the queue's length is unknown."""
        if not registration.links or registration.paths is None:
            return None
        self._links = {name: links for name, links in self._links.items() if name in self._core.engines}
        [address] = rank_addresses(registration.url, 1)
        self._links[address.replica_id] = registration.links
        node = registration.paths.node
        at_node = [name for name, engine in self._core.engines.items() if engine.seen.node == node]
        return nic_queue_event(node, [self._links.get(name, {}) for name in at_node])
