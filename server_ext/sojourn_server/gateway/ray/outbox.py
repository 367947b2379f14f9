"""Messages for one gateway, and the order of messages from it."""

from __future__ import annotations

import asyncio
from collections import deque

from ...routing.routing_events import AnyRoutingAction


class Outbox:
    """Outbox of one gateway since it joined.

    Actions are numbered from 1 and kept until the gateway acknowledges them. Calls to an actor may overtake
    each other, so the gateway's batches are numbered too, and an early batch waits for those before it.
    """

    def __init__(self, now: float, join: int = 0) -> None:
        """``join``: number of the gateway's join."""
        self.heard_s = now
        self.join = join
        self.requests: set[str] = set()
        """Its requests in progress."""
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
        """Number of the first unacknowledged action, and all of them."""
        while self._first <= acked and self._mail:
            self._mail.popleft()
            self._first += 1
        return self._first, tuple(self._mail)

    async def turn(self, number: int) -> bool:
        """Wait until all batches before this one were processed; False: it was processed itself.

        The gateway may have joined again meanwhile, with another outbox.
        """
        if number > self._next_batch:
            came = self._waiting_batches.setdefault(number, asyncio.get_running_loop().create_future())
            await came
        return number == self._next_batch

    def taken(self, number: int) -> None:
        """A batch was processed."""
        self._next_batch = number + 1
        following = self._waiting_batches.pop(self._next_batch, None)
        if following is not None and not following.done():
            following.set_result(None)

    def close(self) -> None:
        """The gateway is gone or has joined again: cancel waiting batches."""
        for early in self._waiting_batches.values():
            early.cancel()
        self._waiting_batches.clear()
        self.wake.set()
