"""Sends the coordinator's actions to gateways. Each gateway has an outbox. Each request belongs to one
gateway.

A gateway polls for its actions, and the coordinator answers a poll when there is news. A gateway joins when
it starts, and again after it has lost the coordinator.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, KeysView, Sequence

from ...routing import routing_events
from ...routing.routing_core import RoutingCore
from ...routing.routing_events import AnyRoutingAction


class Outbox:
    """Actions for one gateway since it joined. They are numbered from 1 and kept until the gateway
    acknowledges them.

    The outbox also processes the gateway's batches of events in order, although calls to an actor may
    overtake each other. The batches are numbered from 0. A batch that arrives early waits for all earlier
    batches.
    """

    def __init__(self, now: float, join: int = 0) -> None:
        """``join``: number of this join; each gateway counts its joins."""
        self.heard_s = now
        """Time of the gateway's last message."""
        self.join = join
        self.requests: set[str] = set()
        """Ids of the gateway's requests in progress."""
        self.wake = asyncio.Event()
        """Set when the coordinator has to answer the gateway's running poll."""
        self._mail: deque[AnyRoutingAction] = deque()
        self._first = 1
        """Number of the first action in ``_mail``."""
        self._next_batch = 0
        """Number of the next batch to process."""
        self._waiting_batches: dict[int, asyncio.Future[None]] = {}
        """Batches that arrived early, by number; the future is set when it is the batch's turn."""

    def post(self, action: AnyRoutingAction) -> None:
        """Append an action and wake the gateway's open poll, which then gets its answer."""
        self._mail.append(action)
        self.wake.set()

    def since(self, acked: int) -> tuple[int, tuple[AnyRoutingAction, ...]]:
        """Drop the actions up to number ``acked``. Returns (number of the first remaining action, all
        remaining actions)."""
        while self._first <= acked and self._mail:
            self._mail.popleft()
            self._first += 1
        return self._first, tuple(self._mail)

    async def wait_for_batch(self, number: int) -> bool:
        """Wait until all batches before the batch ``number`` are processed. Returns False if this batch
        itself is already processed.

        Raises ``CancelledError`` if the gateway joins again or is lost during the wait.
        """
        if number > self._next_batch:
            came = self._waiting_batches.setdefault(number, asyncio.get_running_loop().create_future())
            await came
        return number == self._next_batch

    def finish_batch(self, number: int) -> None:
        """Record that the batch ``number`` was processed, and let the next batch proceed."""
        self._next_batch = number + 1
        following = self._waiting_batches.pop(self._next_batch, None)
        if following is not None and not following.done():
            following.set_result(None)

    def close(self) -> None:
        """Cancel waiting batches and answer the running poll, because the gateway is gone or has joined
        again."""
        for early in self._waiting_batches.values():
            early.cancel()
        self._waiting_batches.clear()
        self.wake.set()


GATEWAY_LEASE_S = 20.0
"""Seconds without a message of a gateway after which its requests count as ended."""


class MessageRouter:
    """The outboxes of all joined gateways."""

    def __init__(self) -> None:
        self._outboxes: dict[str, Outbox] = {}
        self._owner: dict[str, str] = {}
        """Id of the gateway to which each request belongs, by request id."""

    @property
    def gateways(self) -> KeysView[str]:
        """Ids of all joined gateways."""
        return self._outboxes.keys()

    def box(self, gateway_id: str) -> Outbox | None:
        """A gateway's outbox; ``None``: the gateway has not joined."""
        return self._outboxes.get(gateway_id)

    def join(
        self, gateway_id: str, requests: Iterable[str], now: float, number: int = 0
    ) -> tuple[Outbox, set[str]]:
        """Create a new outbox for a gateway that joins. Returns (outbox, ids of the gateway's earlier
        requests that are not among ``requests``).

        ``requests``: ids of all open requests of the gateway. ``number``: number of this join.
        """
        old = self._outboxes.get(gateway_id)
        box = self._outboxes[gateway_id] = Outbox(now, number)
        if old is None:
            return box, set()
        old.close()
        has = set(requests)
        box.requests = old.requests & has
        return box, old.requests - has

    def remove_silent_gateways(self, now: float) -> dict[str, list[str]]:
        """Remove the gateways that were silent for ``GATEWAY_LEASE_S``. Returns the ids of their requests, by
        gateway id."""
        found = {}
        for gateway_id, box in list(self._outboxes.items()):
            if now - box.heard_s >= GATEWAY_LEASE_S:
                del self._outboxes[gateway_id]
                box.close()
                found[gateway_id] = list(box.requests)
        return found

    def add_request(self, gateway_id: str, request_id: str) -> None:
        """Record that a joined gateway has a request."""
        self._owner[request_id] = gateway_id
        self._outboxes[gateway_id].requests.add(request_id)

    def remove_request(self, request_id: str) -> None:
        """Forget a request that has ended."""
        box = self._outboxes.get(self._owner.pop(request_id, ""))
        if box is not None:
            box.requests.discard(request_id)

    def send(
        self,
        action: routing_events.AnyRoutingAction,
        together: Sequence[routing_events.AnyRoutingAction],
        reported_by: str | None,
    ) -> None:
        """Send an action to the gateway to which the action's request belongs.

        A ``ProbeReplica`` goes to all gateways. A ``YieldPrograms`` goes to the gateway of the request for
        which the programs yield. A ``ReleaseProgramKv`` goes to the gateway that gets the ``SendRequest`` for
        the program's move, because the KV is released after the move. If ``together`` has no such
        ``SendRequest``, the ``ReleaseProgramKv`` goes to the gateway ``reported_by``, or else to any gateway.
        If the right gateway is gone, the action is dropped.

        ``together``: all actions that the same event caused. ``reported_by``: id of the gateway that reported
        the event; ``None``: no gateway reported it.
        """
        if isinstance(action, routing_events.ProbeReplica):
            for each in self._outboxes.values():
                each.post(action)
            return
        if isinstance(action, routing_events.YieldPrograms):
            box = self._outboxes.get(self._owner.get(action.to_request_id, ""))
        elif isinstance(action, routing_events.ReleaseProgramKv):
            owner = next(
                (
                    self._owner.get(one.request_id)
                    for one in together
                    if isinstance(one, routing_events.SendRequest) and one.moved_from == action.replica_id
                ),
                reported_by,
            )
            box = self._outboxes.get(owner or "") or next(iter(self._outboxes.values()), None)
        else:
            box = self._outboxes.get(self._owner.get(action.request_id, ""))
        if box is not None:
            box.post(action)

    def wake_all(self) -> None:
        """Answer the running polls of all gateways."""
        for box in self._outboxes.values():
            box.wake.set()

    def __len__(self) -> int:
        return len(self._outboxes)


class HomeChangeTimer:
    """Answers the running polls of all gateways when a batch of changed homes is due."""

    def __init__(self, core: RoutingCore, post: MessageRouter, clock: Callable[[], float]) -> None:
        self._core = core
        self._post = post
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None

    def schedule_flush(self) -> None:
        """Send changed homes to gateways when their batch is due: at once, or later by a timer."""
        now = self._clock()
        due_s = self._core.journal.due_s(now)
        if due_s is None or (due_s > 0 and self._timer is not None):
            return
        if due_s > 0:
            self._timer = asyncio.get_running_loop().call_later(due_s, self._flush)
        else:
            self._flush()

    def _flush(self) -> None:
        """Answer all running polls if a batch of changed homes is due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._core.journal.flush(self._clock()):
            self._post.wake_all()
        self.schedule_flush()
