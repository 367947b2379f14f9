"""Limits the events that one tenant has sent to one engine without an answer yet.

An engine counts a gateway as one client, and divides that client's share of its time among the gateway's
connections. Without a limit, the tenant with the most connections would get the most time, and its events
would fill the engine's queue. So a gateway with several tenants sends an engine few events of each tenant at
a time. The other events wait here, in order of arrival.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

import msgspec
from sojourn.wire_codec import EventBatch, EventOutcome

from .ordered_sender import ANSWER_TIMEOUT_S, PostEvents, post_all

MAX_SENT_WEIGHT = 256
"""Maximum weight of a tenant's batches that an engine has not answered. A heavier batch is sent alone. A
batch weighs 1, and 1 more for each event and each KiB.

An engine handles 64 events in one call. The limit lets the events of at least two calls be sent, so that the
engine does not wait for the gateway between calls.
"""
MAX_WAITING_WEIGHT = 16 * 1024
"""Maximum weight of a tenant's batches that wait for one engine. It equals the maximum of an engine's own
queue."""
MAX_DELAYED_WEIGHT = 16 * 1024
"""Maximum weight of a tenant's refused batches whose refusal is delayed. Beyond it, a batch is refused at
once, so that refused batches use a bounded amount of memory."""
REFUSAL_DELAY_S = 1.0
"""Seconds by which a refusal is delayed. Without the delay, a client that retries at once would load the
gateway."""


class EventsRefusedError(Exception):
    """Too many events of the tenant wait for the engine. The text says how many, and what was expected."""


class EngineSilentError(Exception):
    """The engine has answered no batch of the tenant for ``ANSWER_TIMEOUT_S``."""


def batch_weight(events: Iterable[msgspec.Raw]) -> int:
    """Return the weight of a batch with these encoded events."""
    sizes = [memoryview(event).nbytes for event in events]
    return 1 + len(sizes) + sum(sizes) // 1024


class TenantEventQueue:
    """Queue of one tenant's batches for one engine. For use in one event loop."""

    def __init__(
        self,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sleep = sleep
        self._clock = clock
        self._answered_s = -math.inf
        """Time of the engine's last answer to a batch."""
        self._sent = 0
        """Weight of the batches that were sent and have no answer yet."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        """For each batch that waits: (weight, future that is done when the batch may be sent)."""
        self._waiting_weight = 0
        self._delayed_weight = 0

    @property
    def idle(self) -> bool:
        """Whether no batch waits, is being sent or is being refused."""
        return not (self._sent or self._waiting or self._delayed_weight)

    async def post_all(
        self, post: PostEvents, url: str, batch: EventBatch, authorization: str | None
    ) -> list[EventOutcome | None]:
        """Post a batch like ``ordered_sender.post_all``, when it is the batch's turn. Raises the errors of
        ``turn``."""

        async def noted(
            url: str, part: EventBatch, authorization: str | None
        ) -> Sequence[EventOutcome] | None:
            outcomes = await post(url, part, authorization)
            if outcomes is not None:
                self._answered_s = self._clock()
            return outcomes

        async with self.turn(batch_weight(batch.events)):
            return await post_all(noted, url, batch, authorization)

    @asynccontextmanager
    async def turn(self, weight: int) -> AsyncIterator[None]:
        """Context manager that waits until a batch may be sent. At its exit, the next batches may be sent. A
        batch keeps its place as long as the engine answers.

        Raises ``EventsRefusedError`` if the queue is full. Raises ``EngineSilentError`` if the engine has
        answered no batch for ``ANSWER_TIMEOUT_S``.
        """
        if self._waiting or not self._has_room(weight):
            await self._wait(weight)
        else:
            self._sent += weight
        try:
            yield
        finally:
            self._sent -= weight
            self._admit()

    async def _wait(self, weight: int) -> None:
        if self._waiting_weight + weight > MAX_WAITING_WEIGHT:
            await self._delay_refusal(weight)
            raise EventsRefusedError(
                f"the tenant's events, batches and KiB that wait for this engine would be more than "
                f"{MAX_WAITING_WEIGHT}; send fewer at a time, after {REFUSAL_DELAY_S:g} s"
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = (weight, turn)
        self._waiting.append(waiting)
        self._waiting_weight += weight
        arrived_s = self._clock()
        try:
            while not turn.done():
                left_s = max(arrived_s, self._answered_s) + ANSWER_TIMEOUT_S - self._clock()
                if left_s <= 0:
                    raise EngineSilentError
                await asyncio.wait({turn}, timeout=left_s)
        except BaseException:
            self._leave(waiting)
            raise

    async def _delay_refusal(self, weight: int) -> None:
        if self._delayed_weight + weight > MAX_DELAYED_WEIGHT:
            return
        self._delayed_weight += weight
        try:
            await self._sleep(REFUSAL_DELAY_S)
        finally:
            self._delayed_weight -= weight

    def _leave(self, waiting: tuple[int, asyncio.Future[None]]) -> None:
        """Remove a batch that will not be sent, waiting or already admitted."""
        weight, turn = waiting
        if turn.done():
            self._sent -= weight
        else:
            self._waiting.remove(waiting)
            self._waiting_weight -= weight
        self._admit()

    def _admit(self) -> None:
        """Admit the batches that may be sent now, the oldest first."""
        while self._waiting and self._has_room(self._waiting[0][0]):
            weight, turn = self._waiting.popleft()
            self._waiting_weight -= weight
            self._sent += weight
            turn.set_result(None)

    def _has_room(self, weight: int) -> bool:
        return self._sent == 0 or self._sent + weight <= MAX_SENT_WEIGHT
