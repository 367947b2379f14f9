"""Passes client events to the engine: in few calls, within a budget of the engine's time.

The engine reads events on its scheduling thread, between two steps, so events cost generation time. The
intake makes one call at a time, with at most ``MAX_EVENTS_PER_CALL`` events. After each call it waits as long
as the engine asks (``EventTimeBudget``). Batches are served in the order of their arrival. A flood of events
fills the intake's queue, not the engine's, and is then refused.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec
from sojourn.wire_codec import (
    MAX_BATCH_BYTES,
    WIRE_VERSION,
    EventBatch,
    EventOutcome,
    Outcome,
    OutcomeBatch,
    WireError,
    decode_event,
    encode,
)

from ..core.event_limits import EVENT_SHARE, MAX_WAIT_S, undecodable_outcome
from .engine_rpc import EngineError, EngineRpc, EngineUnavailableError
from .response_merging import merge_event_answers

EVENT_BATCHES_OPERATION = "event_batches"
MAX_EVENTS_PER_CALL = 64
"""Maximum number of events per call to the engine. The engine takes about 10 µs for an event."""
MAX_BYTES_PER_CALL = 32 * 1024
"""Maximum bytes of events per call. An event may declare a workflow graph, and the engine's time for it grows
with the graph's size. A single event above this limit gets a call of its own."""
MAX_ENGINE_EVENT_BYTES = MAX_BATCH_BYTES - 1024
"""Maximum bytes of one event in a call. Each event is encoded again for the call, which may make it longer;
an event above the limit is rejected."""
MAX_WAITING = 16 * 1024
"""Maximum weight of the queue. Each event, each batch and each KiB weighs 1."""
CALL_TIMEOUT_S = 30.0
"""Seconds that the engine has to answer a call. After that the intake goes on without the answer."""
REFUSAL_DELAY_S = 1.0
"""Seconds by which a refusal is delayed, so that a client that retries at once does not load the server."""


class _Submission:
    """One batch of a client's events, with the outcomes that have arrived so far."""

    def __init__(self, batch: EventBatch) -> None:
        self.emitter = batch.emitter
        self.events = batch.events
        self.weight = 1 + len(batch.events) + sum(memoryview(one).nbytes for one in batch.events) // 1024
        self.taken = 0
        """Number of events sent to the engine so far."""
        self.outcomes: list[EventOutcome] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


_Part = tuple[_Submission, list[tuple[msgspec.Raw, EventOutcome | None]]]
"""A batch, and its events in one call to the engine. Each event is a result of ``_engine_event``: the text
for the engine, and the event's outcome if this server refuses it."""


class EventIntake:
    """Queue of client events in one API server."""

    def __init__(
        self,
        engine: EngineRpc,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._sleep = sleep
        self._queue: deque[_Submission] = deque()
        self._waiting = 0
        """Weight of the queue."""
        self._pump: asyncio.Task[None] | None = None

    async def submit(self, batch: EventBatch, timeout_s: float) -> OutcomeBatch:
        """Send a batch to the engine. Return its outcomes, in the order of the batch's events.

        Raises ``EngineUnavailableError`` after ``timeout_s`` seconds or if the queue is full, and any other
        ``EngineError`` of the engine. The engine may have handled some events by then. If the client sends
        such events again, their outcome is ``duplicate``.
        """
        submission = _Submission(batch)
        if self._waiting + submission.weight > MAX_WAITING:
            del submission, batch  # free the body before the delay
            await self._sleep(REFUSAL_DELAY_S)
            raise EngineUnavailableError("events: the queue is full")
        self._queue.append(submission)
        self._waiting += submission.weight
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run(), name="sojourn-events")
        try:
            async with asyncio.timeout(timeout_s):
                await submission.done
        except TimeoutError:
            answered = len(submission.outcomes)
            raise EngineUnavailableError(
                f"events: {answered} of {len(batch.events)} were handled within {timeout_s:g} s"
            ) from None
        finally:
            self._forget(submission)
        return OutcomeBatch(outcomes=submission.outcomes)

    def _forget(self, submission: _Submission) -> None:
        """Remove a batch from the queue. Events already sent to the engine are not withdrawn."""
        if submission in self._queue:
            self._queue.remove(submission)
            self._waiting -= submission.weight

    def _next_call(self) -> list[_Part]:
        """Take the events of the next call from the queue. Return them by batch."""
        parts: list[_Part] = []
        events_left, bytes_left = MAX_EVENTS_PER_CALL, MAX_BYTES_PER_CALL
        while self._queue and events_left > 0 and bytes_left > 0:
            submission = self._queue[0]
            part: list[tuple[msgspec.Raw, EventOutcome | None]] = []
            for raw in submission.events[submission.taken : submission.taken + events_left]:
                event = _engine_event(raw)
                bytes_left -= memoryview(event[0]).nbytes
                if bytes_left < 0 and (parts or part):
                    break
                part.append(event)
            if not part and submission.events:
                break
            parts.append((submission, part))
            submission.taken += len(part)
            events_left -= max(len(part), 1)
            if submission.taken == len(submission.events):
                self._forget(submission)
        return parts

    async def _run(self) -> None:
        while self._queue:
            began = self._clock()
            parts = self._next_call()
            started = self._clock()
            try:
                wait_s = await self._call(parts)
            except Exception as error:
                for submission, _ in parts:
                    self._forget(submission)
                    if not submission.done.done():
                        submission.done.set_exception(error)
                # The engine did not say how long to wait, so the wait follows from the call's duration.
                wait_s = (self._clock() - started) / EVENT_SHARE
            # Reading events also takes time from this server's streams; limit it to the same share.
            wait_s = min(max(wait_s, (started - began) * (1 / EVENT_SHARE - 1)), MAX_WAIT_S)
            if wait_s > 0:
                await self._sleep(wait_s)

    async def _call(self, parts: list[_Part]) -> float:
        """Send one call. Return the seconds that the engine asks to wait before the next one."""
        batches = [
            EventBatch(v=WIRE_VERSION, emitter=submission.emitter, events=[event for event, _ in part])
            for submission, part in parts
        ]
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                answers = await self._engine.call(EVENT_BATCHES_OPERATION, encode(batches).decode("utf-8"))
        except TimeoutError:
            raise EngineUnavailableError(f"events: no answer within {CALL_TIMEOUT_S:g} s") from None
        outcomes, wait_s = merge_event_answers(answers)
        for (submission, part), found in zip(parts, outcomes, strict=True):
            if len(found) != len(part):
                raise EngineError(f"events: {len(found)} outcomes for {len(part)} events")
            submission.outcomes += [own or its for (_, own), its in zip(part, found, strict=True)]
            if len(submission.outcomes) == len(submission.events) and not submission.done.done():
                submission.done.set_result(None)
        return wait_s


def _engine_event(raw: msgspec.Raw) -> tuple[msgspec.Raw, EventOutcome | None]:
    """Return the text that the engine gets for ``raw``, and the outcome if this server refuses the event.

    A valid event is encoded again, so that it cannot make other events of the call unreadable. An event that
    is malformed, unknown or too long is refused here. In its place the engine gets the type alone, which it
    cannot decode and only counts.
    """
    try:
        again = msgspec.Raw(encode(decode_event(raw)))
        if memoryview(again).nbytes <= MAX_ENGINE_EVENT_BYTES:
            return again, None
        error = f"longer than {MAX_ENGINE_EVENT_BYTES} bytes"
    except WireError as problem:
        error = str(problem)
    kind, outcome = undecodable_outcome(raw, error)
    # The engine counts an unknown type as ``unsupported``, and an event without a type as ``rejected``.
    has_type = kind != "unknown" or outcome.outcome is Outcome.UNSUPPORTED
    return msgspec.Raw(encode({"type": kind} if has_type else {})), outcome
