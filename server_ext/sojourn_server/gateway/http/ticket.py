"""One request's conversation with whoever decides where it goes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ..core.facts import Cut, Recall, Refuse, Send
from .leaving import Leave

T = TypeVar("T")

Decision = Send | Refuse | Cut | Recall


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Ticket:
    """What was decided about a request and has not been done yet, in order. Used in one event loop."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.on_change: Callable[[], None] | None = None
        """Called when there is something new, while whoever holds the ticket waits for something else."""
        self._decisions: deque[Decision] = deque()
        self.client_gone = False
        self.superseded = False
        """It was decided to send the request elsewhere after its answer had begun."""
        self._answered = False
        self._waiter: asyncio.Future[None] | None = None

    def take(self, decision: Decision) -> None:
        """Something was decided."""
        if self._answered and not isinstance(decision, Cut):
            self.superseded = self.superseded or isinstance(decision, Send)
            return
        self._decisions.append(decision)
        self._wake()

    def answered(self) -> None:
        """The first byte has come: what was decided about where else to go came too late."""
        self._answered = True
        late, self._decisions = self._decisions, deque()
        for decision in late:
            self.take(decision)

    def client_is_gone(self) -> None:
        """From now on ``next`` raises ``ClientGone``."""
        self.client_gone = True
        self._wake()

    @property
    def has_news(self) -> bool:
        """``next`` would not wait."""
        return bool(self._decisions) or self.client_gone

    async def next(self) -> Decision:
        """The next decision, once there is one. Raises ``ClientGone``."""
        while True:
            if self.client_gone:
                raise ClientGone
            if self._decisions:
                return self._decisions.popleft()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def unless_news(self, doing: Coroutine[Any, Any, T]) -> T | None:
        """What ``doing`` comes to; ``None``: there was news, and it was broken off. Raises what it raises."""
        if self.has_news:
            doing.close()
            return None
        with Leave() as leave:
            self.on_change = leave.now
            try:
                return await doing
            finally:
                self.on_change = None
        return None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self.on_change is not None:
            self.on_change()
