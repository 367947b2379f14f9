"""Sends events to one engine in order, in batches of a size that the engine accepts."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
from sojourn.wire_codec import (
    MAX_BATCH_BYTES,
    MAX_BATCH_EVENTS,
    WIRE_VERSION,
    EventBatch,
    EventOutcome,
    Outcome,
    encode,
)

ANSWER_TIMEOUT_S = 5.0
"""Maximum seconds that a batch of events waits for the engine's answer."""
MAX_QUEUED_SENDS = 4096
"""Maximum number of queued calls of ``OrderedSender.send`` per engine and tenant. The events of further calls
are dropped."""
STALE_S = 2 * ANSWER_TIMEOUT_S
"""Maximum seconds that events wait in the queue. Older events are dropped, because the engine seems to accept
none at present."""
_ENVELOPE_BYTES = 64

PostEvents = Callable[[str, EventBatch, str | None], Awaitable[Sequence[EventOutcome] | None]]
"""Function that posts a batch to a URL with an ``Authorization`` header; ``None``: without this header. It
returns one outcome per event; ``None``: there is no answer."""


def split_batch(batch: EventBatch) -> Iterator[EventBatch]:
    """Split a batch into batches that are small enough for an engine. An event that is too long for any batch
    gets a batch of its own."""
    room_bytes = MAX_BATCH_BYTES - len(encode(batch.emitter)) - _ENVELOPE_BYTES
    part: list[msgspec.Raw] = []
    size = 0
    for raw in batch.events:
        length = len(bytes(raw)) + 1
        if part and (size + length > room_bytes or len(part) >= MAX_BATCH_EVENTS):
            yield msgspec.structs.replace(batch, events=part)
            part, size = [], 0
        part.append(raw)
        size += length
    if part:
        yield msgspec.structs.replace(batch, events=part)


async def post_all(
    post: PostEvents, url: str, batch: EventBatch, authorization: str | None
) -> list[EventOutcome | None]:
    """Post a batch in parts that are small enough for an engine. Stop after a part without an answer. Return
    one outcome per event; ``None``: the event got no answer."""
    outcomes: list[EventOutcome | None] = []
    for part in split_batch(batch):
        answered = await post(url, part, authorization)
        if answered is None or len(answered) != len(part.events):
            break
        outcomes += answered
    return outcomes + [None] * (len(batch.events) - len(outcomes))


@dataclass(slots=True)
class _QueuedEvents:
    """The events of one call of ``OrderedSender.send``."""

    events: list[msgspec.Raw]
    authorization: str | None
    at_s: float
    """Time of the call."""
    answered: asyncio.Future[list[EventOutcome]]
    """Future of the events' outcomes. They are empty if the engine did not accept all events."""


class OrderedSender:
    """Queue of the gateway's own events for one engine, about the programs of one tenant."""

    def __init__(
        self, url: str, emitter: str, post: PostEvents, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._url = url
        self._emitter = emitter
        self._post = post
        self._clock = clock
        self._queue: deque[_QueuedEvents] = deque()
        self._last: asyncio.Future[list[EventOutcome]] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        """Whether no events are queued or being sent."""
        return self._task is None

    def send(
        self, events: list[msgspec.Raw], authorization: str | None
    ) -> asyncio.Future[list[EventOutcome]]:
        """Queue events for sending. Return a future of one outcome per event. None of the outcomes is
        ``rejected``.

        The outcomes are empty if the engine rejected an event or did not answer, or if the events were
        dropped.
        """
        answered: asyncio.Future[list[EventOutcome]] = asyncio.get_running_loop().create_future()
        if len(self._queue) >= MAX_QUEUED_SENDS:
            answered.set_result([])
            return answered
        self._queue.append(_QueuedEvents(events, authorization, self._clock(), answered))
        self._last = answered
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())
        return answered

    async def wait_until_sent(self) -> None:
        """Wait until all events that are queued now were sent or dropped. Wait at most
        ``ANSWER_TIMEOUT_S``."""
        if self._last is not None and not self._last.done():
            await asyncio.wait({self._last}, timeout=ANSWER_TIMEOUT_S)

    async def _run(self) -> None:
        """Send the queued events, one call of ``send`` after the other, until the queue is empty."""
        try:
            while self._queue:
                queued = self._queue.popleft()
                accepted: list[EventOutcome] = []
                try:
                    if self._clock() - queued.at_s < STALE_S:
                        batch = EventBatch(v=WIRE_VERSION, emitter=self._emitter, events=queued.events)
                        outcomes = await post_all(self._post, self._url, batch, queued.authorization)
                        accepted = [
                            one for one in outcomes if one is not None and one.outcome is not Outcome.REJECTED
                        ]
                        if len(accepted) < len(outcomes):
                            accepted = []
                finally:
                    if not queued.answered.done():
                        queued.answered.set_result(accepted)
        finally:
            self._task = None
