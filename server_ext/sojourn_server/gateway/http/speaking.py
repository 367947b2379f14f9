"""Telling one engine things in their order, as many at a time as it takes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
from sojourn.wire import (
    MAX_BATCH_BYTES,
    MAX_BATCH_EVENTS,
    WIRE_VERSION,
    EventBatch,
    EventOutcome,
    Outcome,
    encode,
)

ANSWER_TIMEOUT_S = 5.0
MOST_WORDS = 4096
"""Waiting for one engine; more are not taken."""
STALE_S = 2 * ANSWER_TIMEOUT_S
"""What has waited so long is not said any more: the engine does not listen."""
_ENVELOPE_BYTES = 64

Post = Callable[[str, EventBatch, str | None], Awaitable[Sequence[EventOutcome] | None]]
"""Of a URL, a batch and what to show; ``None``: no answer."""


def batches(batch: EventBatch) -> Iterator[EventBatch]:
    """The same events in batches that an engine takes. One that is too long by itself is in one alone."""
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
    post: Post, url: str, batch: EventBatch, authorization: str | None
) -> list[EventOutcome | None]:
    """One outcome for each event, ``None`` where there was no answer; after none, no more is asked."""
    outcomes: list[EventOutcome | None] = []
    for part in batches(batch):
        answered = await post(url, part, authorization)
        if answered is None or len(answered) != len(part.events):
            break
        outcomes += answered
    return outcomes + [None] * (len(batch.events) - len(outcomes))


@dataclass(slots=True)
class _Word:
    events: list[msgspec.Raw]
    authorization: str | None
    at_s: float
    said: asyncio.Future[bool]


class Speaker:
    """The gateway's own words for one engine. One follows the other."""

    def __init__(
        self, url: str, emitter: str, post: Post, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._url = url
        self._emitter = emitter
        self._post = post
        self._clock = clock
        self._words: deque[_Word] = deque()
        self._last: asyncio.Future[bool] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        """Nothing is left to say."""
        return self._task is None

    def say(self, events: list[msgspec.Raw], authorization: str | None) -> asyncio.Future[bool]:
        """Say it after all that was said before; whether the engine has heard it."""
        said: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if len(self._words) >= MOST_WORDS:
            said.set_result(False)
            return said
        self._words.append(_Word(events, authorization, self._clock(), said))
        self._last = said
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())
        return said

    async def silence(self) -> None:
        """Until what was to be said so far is said, or the engine does not listen."""
        if self._last is not None and not self._last.done():
            await asyncio.wait({self._last}, timeout=ANSWER_TIMEOUT_S)

    async def _run(self) -> None:
        try:
            while self._words:
                word = self._words.popleft()
                heard = False
                try:
                    if self._clock() - word.at_s < STALE_S:
                        batch = EventBatch(v=WIRE_VERSION, emitter=self._emitter, events=word.events)
                        outcomes = await post_all(self._post, self._url, batch, word.authorization)
                        heard = all(
                            one is not None and one.outcome is not Outcome.REJECTED for one in outcomes
                        )
                finally:
                    if not word.said.done():
                        word.said.set_result(heard)
        finally:
            self._task = None
