"""What one gateway is to hear, and the order in which it is heard."""

from __future__ import annotations

import asyncio
from collections import deque

from ..core.facts import AnyAction


class Mailbox:
    """One gateway's, since it joined.

    Mail is numbered from 1 and kept until the gateway says that it has come. Calls of one caller to an actor
    may overtake each other, so batches are numbered too, and one that comes early waits for those before it.
    """

    def __init__(self, now: float, join: int = 0) -> None:
        """``join``: which of the gateway's joins it is."""
        self.heard_s = now
        self.join = join
        self.requests: set[str] = set()
        """Of this gateway, not over."""
        self.wake = asyncio.Event()
        self._mail: deque[AnyAction] = deque()
        self._first = 1
        self._next_batch = 0
        self._early: dict[int, asyncio.Future[None]] = {}

    def post(self, action: AnyAction) -> None:
        """One more."""
        self._mail.append(action)
        self.wake.set()

    def since(self, acked: int) -> tuple[int, tuple[AnyAction, ...]]:
        """Number of the first of those that have not come, and all of them."""
        while self._first <= acked and self._mail:
            self._mail.popleft()
            self._first += 1
        return self._first, tuple(self._mail)

    async def turn(self, number: int) -> bool:
        """Wait until all batches before this one have been taken in; False: it has been itself.

        The gateway may have joined anew meanwhile: then this mailbox is its own no more.
        """
        if number > self._next_batch:
            came = self._early.setdefault(number, asyncio.get_running_loop().create_future())
            await came
        return number == self._next_batch

    def taken(self, number: int) -> None:
        """A batch has been taken in."""
        self._next_batch = number + 1
        following = self._early.pop(self._next_batch, None)
        if following is not None and not following.done():
            following.set_result(None)

    def close(self) -> None:
        """The gateway is gone, or has joined anew: who waits here goes on in vain."""
        for early in self._early.values():
            early.cancel()
        self._early.clear()
        self.wake.set()
