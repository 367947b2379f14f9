"""Routers in front of simulated engines, in the gateway's own events and actions."""

from __future__ import annotations

from collections.abc import Sequence

from sojourn_server.policies.cluster_preset import ClusterPreset
from sojourn_server.routing import routing_events as ev
from sojourn_server.routing.routing_from_preset import build_routing_core
from sojourn_server.routing.routing_limits import RoutingLimits

UNLIMITED_S = 1e9
"""Value, in seconds, of settings that require a time limit. No simulation reaches this limit."""


class RequestRouter:
    """Decides when a request enters an engine, and which. This one sends every request to the first engine at
    once; others may keep state."""

    tick_s: float = float("inf")
    """Virtual seconds between two ``Tick`` events; ``inf`` for no ticks."""
    reads_prefixes: bool = False
    """Whether ``RequestReceived`` has the hashes of the prompt's pieces."""
    reads_residency: bool = False
    """Whether the router gets ``KvReported`` events of engines with sojourn's adapter."""

    def take(self, event: ev.AnyRoutingEvent, now: float) -> Sequence[ev.AnyRoutingAction]:
        """Take one event at ``now`` virtual seconds, and return the actions that follow. The events are
        ``ReplicaRegistered`` (for every engine, before all others), ``RequestReceived``, ``FirstByteSent``,
        ``RequestFinished``, ``ProgramEnded``, ``Tick`` and ``KvReported``. The actions are ``SendRequest``,
        ``RecallRequest``, ``RejectRequest`` and ``ReleaseProgramKv``."""
        if isinstance(event, ev.RequestReceived):
            return [ev.SendRequest(event.request_id, "r0", "only")]
        return ()


TICK_INTERVAL_S = 0.1
"""Virtual seconds between two ticks of the routing core. Ticks occur only with presets whose decisions depend
on time: those that move waiting requests to other engines (work stealing, SAGA §5.2), divide capacity between
tenants, or make requests yield (SAGA §6.2)."""
MAX_WAITING_REQUESTS = 1_000_000


class SimulatedGateway(RequestRouter):
    """The gateway's routing core (``sojourn_server.routing``: its decisions, without HTTP).

    Its limits are so high that it rejects no request for lack of capacity or after a long wait, since
    baselines reject no requests either.
    """

    reads_residency = True

    def __init__(self, preset: ClusterPreset) -> None:
        self.core = build_routing_core(
            preset,
            RoutingLimits(
                most_waiting=MAX_WAITING_REQUESTS,
                wait_s=UNLIMITED_S,
                lease_s=UNLIMITED_S,
                silent_program_s=UNLIMITED_S,
            ),
        )
        needs_time = (
            preset.stealing.is_used or preset.sharing.divides_capacity or preset.tenant_preemption.is_used
        )
        self.tick_s = TICK_INTERVAL_S if needs_time else float("inf")
        self.reads_prefixes = preset.routing.reads_prefixes

    def take(self, event: ev.AnyRoutingEvent, now: float) -> Sequence[ev.AnyRoutingAction]:
        return self.core.take(event, now)
