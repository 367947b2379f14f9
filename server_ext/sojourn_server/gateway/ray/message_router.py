"""Sends the coordinator's messages to gateways. Each gateway has an outbox, each request belongs to one
gateway."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, KeysView, Sequence

from ...routing import routing_events
from ...routing.routing_events import AnyRoutingAction


class Outbox:
    """Actions for one gateway since it joined, numbered from 1 and kept until the gateway acknowledges them.

    The outbox also puts the gateway's batches of events in order: calls to an actor may overtake each other.
    So the batches are numbered, and one that arrives early waits for those before it.
    """

    def __init__(self, now: float, join: int = 0) -> None:
        """``join``: number of the gateway's join."""
        self.heard_s = now
        self.join = join
        self.requests: set[str] = set()
        """Ids of the gateway's requests in progress."""
        self.wake = asyncio.Event()
        self._mail: deque[AnyRoutingAction] = deque()
        self._first = 1
        self._next_batch = 0
        self._waiting_batches: dict[int, asyncio.Future[None]] = {}

    def post(self, action: AnyRoutingAction) -> None:
        """Append an action."""
        self._mail.append(action)
        self.wake.set()

    def since(self, acked: int) -> tuple[int, tuple[AnyRoutingAction, ...]]:
        """Drop actions up to number ``acked``. Returns the number of the first remaining action, and all
        remaining ones."""
        while self._first <= acked and self._mail:
            self._mail.popleft()
            self._first += 1
        return self._first, tuple(self._mail)

    async def turn(self, number: int) -> bool:
        """Wait for the turn of a batch: until all batches before ``number`` are processed. Returns False if
        the batch ``number`` itself was processed already.

        If the gateway joins again meanwhile, it has another outbox, and the wait is cancelled.
        """
        if number > self._next_batch:
            came = self._waiting_batches.setdefault(number, asyncio.get_running_loop().create_future())
            await came
        return number == self._next_batch

    def taken(self, number: int) -> None:
        """Record that a batch was processed."""
        self._next_batch = number + 1
        following = self._waiting_batches.pop(self._next_batch, None)
        if following is not None and not following.done():
            following.set_result(None)

    def close(self) -> None:
        """Cancel waiting batches: the gateway is gone or has joined again."""
        for early in self._waiting_batches.values():
            early.cancel()
        self._waiting_batches.clear()
        self.wake.set()


GATEWAY_LEASE_S = 20.0
"""If a gateway is silent for this long, its requests count as ended."""


class MessageRouter:
    """The outboxes of all joined gateways."""

    def __init__(self) -> None:
        self._outboxes: dict[str, Outbox] = {}
        self._owner: dict[str, str] = {}
        """Id of the gateway that has each request."""

    @property
    def gateways(self) -> KeysView[str]:
        """Ids of all joined gateways."""
        return self._outboxes.keys()

    def box(self, gateway_id: str) -> Outbox | None:
        """A gateway's outbox; ``None``: it has not joined."""
        return self._outboxes.get(gateway_id)

    def join(
        self, gateway_id: str, requests: Iterable[str], now: float, number: int = 0
    ) -> tuple[Outbox, set[str]]:
        """Let a gateway join with all of its requests. ``number``: number of the join. Returns its new
        outbox, and its earlier requests that are not among ``requests``."""
        old = self._outboxes.get(gateway_id)
        box = self._outboxes[gateway_id] = Outbox(now, number)
        if old is None:
            return box, set()
        old.close()
        has = set(requests)
        box.requests = old.requests & has
        return box, old.requests - has

    def silent(self, now: float) -> dict[str, list[str]]:
        """Remove the gateways that were silent for ``GATEWAY_LEASE_S``; returns them with their requests."""
        found = {}
        for gateway_id, box in list(self._outboxes.items()):
            if now - box.heard_s >= GATEWAY_LEASE_S:
                del self._outboxes[gateway_id]
                box.close()
                found[gateway_id] = list(box.requests)
        return found

    def has(self, gateway_id: str, request_id: str) -> None:
        """Record which gateway has a request."""
        self._owner[request_id] = gateway_id
        self._outboxes[gateway_id].requests.add(request_id)

    def over(self, request_id: str) -> None:
        """Forget a request that has ended."""
        box = self._outboxes.get(self._owner.pop(request_id, ""))
        if box is not None:
            box.requests.discard(request_id)

    def send(
        self,
        action: routing_events.AnyRoutingAction,
        together: Sequence[routing_events.AnyRoutingAction],
        told_by: str | None,
    ) -> None:
        """Send an action to the gateway that has its request. A ``ProbeReplica`` goes to all gateways. A
        ``ReleaseProgramKv`` goes to the gateway that moves the program according to ``together``, else to
        ``told_by``.

        ``together``: all actions caused by the same event. ``told_by``: the gateway that reported the event.
        """
        if isinstance(action, routing_events.ProbeReplica):
            for each in self._outboxes.values():
                each.post(action)
            return
        if isinstance(action, routing_events.ReleaseProgramKv):
            # The gateway that moves the program also releases it at its former replica, after the move.
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
