"""Who hears what: one mailbox a gateway, and which gateway has which request."""

from __future__ import annotations

from collections.abc import Iterable, KeysView, Sequence

from ..core import facts
from .mailbox import Mailbox

GATEWAY_LEASE_S = 20.0
"""Requests of a gateway that has said nothing for so long are over."""


class Post:
    """Of all gateways that have joined."""

    def __init__(self) -> None:
        self._boxes: dict[str, Mailbox] = {}
        self._owner: dict[str, str] = {}
        """Gateway that has a request."""

    @property
    def gateways(self) -> KeysView[str]:
        """All that are there."""
        return self._boxes.keys()

    def box(self, gateway_id: str) -> Mailbox | None:
        """A gateway's; ``None``: it has not joined."""
        return self._boxes.get(gateway_id)

    def join(
        self, gateway_id: str, requests: Iterable[str], now: float, number: int = 0
    ) -> tuple[Mailbox, set[str]]:
        """A gateway begins, or begins anew, and names all requests that it has; ``number``: of its joins.
        Returns its new mailbox, and those of its requests that it no longer has."""
        old = self._boxes.get(gateway_id)
        box = self._boxes[gateway_id] = Mailbox(now, number)
        if old is None:
            return box, set()
        old.close()
        has = set(requests)
        box.requests = old.requests & has
        return box, old.requests - has

    def silent(self, now: float) -> dict[str, list[str]]:
        """Gateways that have said nothing for ``GATEWAY_LEASE_S``, and their requests. They are there no
        more."""
        found = {}
        for gateway_id, box in list(self._boxes.items()):
            if now - box.heard_s >= GATEWAY_LEASE_S:
                del self._boxes[gateway_id]
                box.close()
                found[gateway_id] = list(box.requests)
        return found

    def has(self, gateway_id: str, request_id: str) -> None:
        """A request is this gateway's, which has joined."""
        self._owner[request_id] = gateway_id
        self._boxes[gateway_id].requests.add(request_id)

    def over(self, request_id: str) -> None:
        """A request is nobody's any more."""
        box = self._boxes.get(self._owner.pop(request_id, ""))
        if box is not None:
            box.requests.discard(request_id)

    def send(self, action: facts.AnyAction, together: Sequence[facts.AnyAction], told_by: str | None) -> None:
        """To the gateway that has its request, if any; a ``Probe`` to all. ``together`` is all that was
        decided at once, ``told_by`` the gateway that told of the reason."""
        if isinstance(action, facts.Probe):
            for each in self._boxes.values():
                each.post(action)
            return
        if isinstance(action, facts.Left):
            # Whoever moves the program also tells its old replica, in that order.
            owner = next(
                (
                    self._owner.get(one.request_id)
                    for one in together
                    if isinstance(one, facts.Send) and one.moved_from == action.replica_id
                ),
                told_by,
            )
            box = self._boxes.get(owner or "") or next(iter(self._boxes.values()), None)
        else:
            box = self._boxes.get(self._owner.get(action.request_id, ""))
        if box is not None:
            box.post(action)

    def wake_all(self) -> None:
        """Whoever listens is answered now."""
        for box in self._boxes.values():
            box.wake.set()

    def __len__(self) -> int:
        return len(self._boxes)
