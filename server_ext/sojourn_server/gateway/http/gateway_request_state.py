"""The routing decisions of one request that have not been carried out yet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ...routing.routing_events import AbortStream, RecallRequest, RejectRequest, SendRequest
from .cancel_scope import CancelScope

T = TypeVar("T")

RequestDecision = SendRequest | RejectRequest | AbortStream | RecallRequest


class ClientDisconnected(Exception):
    """The client of this request has disconnected."""


class GatewayRequestState:
    """Queue of decisions, in order. Used in one event loop."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.on_change: Callable[[], None] | None = None
        """Called for a new decision while the request waits for something else."""
        self._decisions: deque[RequestDecision] = deque()
        self.client_gone = False
        self.superseded = False
        """A later decision sends the request elsewhere although its answer has begun."""
        self._answered = False
        self._waiter: asyncio.Future[None] | None = None

    def take(self, decision: RequestDecision) -> None:
        """Add a decision."""
        if self._answered and not isinstance(decision, AbortStream):
            self.superseded = self.superseded or isinstance(decision, SendRequest)
            return
        self._decisions.append(decision)
        self._wake()

    def answered(self) -> None:
        """The first byte arrived: pending decisions came too late."""
        self._answered = True
        late, self._decisions = self._decisions, deque()
        for decision in late:
            self.take(decision)

    def mark_client_disconnected(self) -> None:
        """From now on ``next`` raises ``ClientDisconnected``."""
        self.client_gone = True
        self._wake()

    @property
    def has_decision(self) -> bool:
        """Whether ``next`` would return at once."""
        return bool(self._decisions) or self.client_gone

    async def next(self) -> RequestDecision:
        """Wait for the next decision. Raises ``ClientDisconnected``."""
        while True:
            if self.client_gone:
                raise ClientDisconnected
            if self._decisions:
                return self._decisions.popleft()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def run_unless_decided(self, doing: Coroutine[Any, Any, T]) -> T | None:
        """The result of ``doing``, with its exceptions; ``None``: a decision came first and cancelled it."""
        if self.has_decision:
            doing.close()
            return None
        with CancelScope() as leave:
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
