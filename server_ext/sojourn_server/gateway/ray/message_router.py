"""Routes actions to gateways: one outbox per gateway, and the owner of each request."""

from __future__ import annotations

from collections.abc import Iterable, KeysView, Sequence

from ...routing import routing_events
from .outbox import Outbox

GATEWAY_LEASE_S = 20.0
"""Requests of a gateway that is silent for this long have ended."""


class MessageRouter:
    """Outboxes of all joined gateways."""

    def __init__(self) -> None:
        self._outboxes: dict[str, Outbox] = {}
        self._owner: dict[str, str] = {}
        """Gateway of each request."""

    @property
    def gateways(self) -> KeysView[str]:
        """All joined gateways."""
        return self._outboxes.keys()

    def box(self, gateway_id: str) -> Outbox | None:
        """A gateway's outbox; ``None``: it has not joined."""
        return self._outboxes.get(gateway_id)

    def join(
        self, gateway_id: str, requests: Iterable[str], now: float, number: int = 0
    ) -> tuple[Outbox, set[str]]:
        """A gateway joins with all of its requests; ``number``: of the join. Returns its new outbox, and its
        earlier requests that are not among them."""
        old = self._outboxes.get(gateway_id)
        box = self._outboxes[gateway_id] = Outbox(now, number)
        if old is None:
            return box, set()
        old.close()
        has = set(requests)
        box.requests = old.requests & has
        return box, old.requests - has

    def silent(self, now: float) -> dict[str, list[str]]:
        """Remove gateways that were silent for ``GATEWAY_LEASE_S``; returns them with their requests."""
        found = {}
        for gateway_id, box in list(self._outboxes.items()):
            if now - box.heard_s >= GATEWAY_LEASE_S:
                del self._outboxes[gateway_id]
                box.close()
                found[gateway_id] = list(box.requests)
        return found

    def has(self, gateway_id: str, request_id: str) -> None:
        """Set the owner of a request."""
        self._owner[request_id] = gateway_id
        self._outboxes[gateway_id].requests.add(request_id)

    def over(self, request_id: str) -> None:
        """Forget a request."""
        box = self._outboxes.get(self._owner.pop(request_id, ""))
        if box is not None:
            box.requests.discard(request_id)

    def send(
        self,
        action: routing_events.AnyRoutingAction,
        together: Sequence[routing_events.AnyRoutingAction],
        told_by: str | None,
    ) -> None:
        """Send an action to the gateway of its request; a ``ProbeReplica`` to all. ``together``: all actions
        of the same event; ``told_by``: the gateway that reported it."""
        if isinstance(action, routing_events.ProbeReplica):
            for each in self._outboxes.values():
                each.post(action)
            return
        if isinstance(action, routing_events.ReleaseProgramKv):
            # The gateway that moves the program also tells its former replica, in that order.
            owner = next(
                (
                    self._owner.get(one.request_id)
                    for one in together
                    if isinstance(one, routing_events.SendRequest) and one.moved_from == action.replica_id
                ),
                told_by,
            )
            box = self._outboxes.get(owner or "") or next(iter(self._outboxes.values()), None)
        else:
            box = self._outboxes.get(self._owner.get(action.request_id, ""))
        if box is not None:
            box.post(action)

    def wake_all(self) -> None:
        """Answer all running polls."""
        for box in self._outboxes.values():
            box.wake.set()

    def __len__(self) -> int:
        return len(self._outboxes)
