"""Interface of routers in front of simulated engines, in the gateway's own events and actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sojourn_server.routing import routing_events as ev

UNLIMITED_S = 1e9
"""Value, in seconds, of settings that require a time limit. No simulation reaches this limit."""


class RequestRouter(Protocol):
    """Decides when a request enters an engine, and which. A router may keep state."""

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
        ...


class PassThroughRouter(RequestRouter):
    """Sends every request to the first engine at once."""

    def __init__(self) -> None:
        self._replica_id = ""

    def take(self, event: ev.AnyRoutingEvent, now: float) -> Sequence[ev.AnyRoutingAction]:
        if isinstance(event, ev.ReplicaRegistered):
            self._replica_id = self._replica_id or event.replica_id
        if isinstance(event, ev.RequestReceived):
            return [ev.SendRequest(event.request_id, self._replica_id, "only")]
        return ()
