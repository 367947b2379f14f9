"""Passes client events to the engine: merges them into few calls, and shares the engine's time fairly among
clients.

The engine reads events on its scheduling thread, between two steps, so events cost generation time. The
intake makes one call at a time, with at most ``MAX_EVENTS_PER_CALL`` events. After each call it waits as long
as the engine asks (``core/event_time_budget.py``). A flood of events fills the intake's queue, not the
engine's.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
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

from ..core.event_time_budget import EVENT_SHARE, MAX_WAIT_S
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
EVENTS_PER_TURN = 16
"""Maximum number of events taken from one client before the next client's turn."""
MAX_WAITING = 16 * 1024
"""Maximum weight of the queue. Each event, each batch and each KiB weighs 1. If the queue is full, batches of
the client with the highest weight are refused."""
CALL_TIMEOUT_S = 30.0
"""Seconds that the engine has to answer a call. After that the intake goes on without the answer."""
MAX_LATE_CALLS = 4
"""If this many calls have no answer after ``CALL_TIMEOUT_S``, the engine counts as unavailable and gets no
new call."""
REFUSAL_DELAY_S = 1.0
"""Seconds by which a refusal is delayed, so that a client that retries at once does not load the server."""
MAX_BRACKETS = 32
"""Maximum number of opening brackets in a malformed event that is sent to the engine. Deeper nesting might
make the whole call unreadable."""
_NO_EVENT = msgspec.Raw(b"null")

ClientKey = tuple[str, str]
"""Host and connection of a client. All hosts get equal shares of the engine's time. The connections of a host
divide its share equally."""


class _Submission:
    """One batch of a client's events, with the outcomes that have arrived so far."""

    def __init__(self, client: ClientKey, batch: EventBatch) -> None:
        self.client = client
        self.emitter = batch.emitter
        self.events = batch.events
        size_bytes = sum(memoryview(event).nbytes for event in batch.events)
        self.weight = 1 + len(batch.events) + size_bytes // 1024
        """Weight that counts towards ``MAX_WAITING`` until all events of the batch have been sent."""
        self.taken = 0
        """Number of events sent to the engine so far."""
        self.outcomes: list[EventOutcome] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, error: Exception) -> None:
        """End the batch with an error. Do nothing if it has ended already."""
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()


_Part = tuple[_Submission, list[tuple[msgspec.Raw, str]]]
"""A batch, and its events in one call to the engine. Each event is a result of ``_engine_event``: the text
for the engine, and the reason why this server rejects the event."""


class EventIntake:
    """Queue of client events in one API server. It sends the events to the engine in few calls."""

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
        self._hosts: OrderedDict[str, OrderedDict[str, deque[_Submission]]] = OrderedDict()
        """Host → connection → batches with waiting events. The host and connection served next come first."""
        self._waiting = 0
        self._weights: Counter[str] = Counter()
        """Host → weight of its batches in the queue. The sum over all hosts is ``_waiting``."""
        self._pump: asyncio.Task[None] | None = None
        self._late: set[asyncio.Task[list[str]]] = set()

    async def submit(self, client: ClientKey, batch: EventBatch, timeout_s: float) -> OutcomeBatch:
        """Send a batch to the engine. Return its outcomes, in the order of the batch's events.

        Raises ``EngineUnavailableError`` after ``timeout_s`` seconds or if the queue is full, and any other
        ``EngineError`` of the engine. The engine may have handled some events by then. If the client sends
        such events again, their outcome is ``duplicate``.
        """
        submission = _Submission(client, batch)
        if not self._make_room(submission):
            del submission, batch  # free the body before the delay
            await self._sleep(REFUSAL_DELAY_S)
            raise _queue_full()
        self._enqueue(submission)
        try:
            await asyncio.wait_for(asyncio.shield(submission.done), timeout_s)
        except asyncio.TimeoutError:
            answered = len(submission.outcomes)
            raise EngineUnavailableError(
                f"events: {answered} of {len(batch.events)} were handled within {timeout_s:g} s"
            ) from None
        except _Shed:
            await self._sleep(REFUSAL_DELAY_S)
            raise _queue_full() from None
        finally:
            self._forget(submission)
        return OutcomeBatch(outcomes=submission.outcomes)

    # -- the queue --------------------------------------------------------------

    def _enqueue(self, submission: _Submission) -> None:
        host, connection = submission.client
        self._hosts.setdefault(host, OrderedDict()).setdefault(connection, deque()).append(submission)
        self._waiting += submission.weight
        self._weights[host] += submission.weight
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run(), name="sojourn-events")

    def _make_room(self, newcomer: _Submission) -> bool:
        """Refuse batches in the queue until ``newcomer`` fits. Return false if ``newcomer`` must be refused.

        The heaviest connection of the heaviest host loses its newest batch. ``newcomer`` counts for its own
        host and connection. If its own connection is the heaviest, ``newcomer`` is the batch to refuse.
        """
        own_host, own_connection = newcomer.client
        while self._waiting + newcomer.weight > MAX_WAITING:
            heaviest = max(self._weights, key=self._weights.__getitem__)
            if self._weights[own_host] + newcomer.weight >= self._weights[heaviest]:
                heaviest = own_host
            loads = {
                name: sum(submission.weight for submission in queue)
                for name, queue in self._hosts.get(heaviest, {}).items()
            }
            busiest = max(loads, key=loads.__getitem__, default=own_connection)
            own = loads.get(own_connection, 0) + newcomer.weight
            if heaviest == own_host and own >= loads.get(busiest, 0):
                return False
            victim = self._hosts[heaviest][busiest][-1]
            self._forget(victim)
            victim.fail(_Shed())
        return True

    def _forget(self, submission: _Submission) -> None:
        """Remove a batch from the queue. Events already sent to the engine are not withdrawn."""
        host, connection = submission.client
        connections = self._hosts.get(host)
        queue = connections.get(connection) if connections is not None else None
        if queue is None or submission not in queue:
            return
        queue.remove(submission)
        self._waiting -= submission.weight
        self._weights[host] -= submission.weight
        if not queue:
            del self._hosts[host][connection]
            if not self._hosts[host]:
                del self._hosts[host], self._weights[host]

    def _next_call(self) -> list[_Part]:
        """Take the events of the next call from the queue, some of each client in turn, until the call is
        full. Return them by batch."""
        parts: list[_Part] = []
        events_left, bytes_left = MAX_EVENTS_PER_CALL, MAX_BYTES_PER_CALL
        while self._hosts and events_left > 0 and bytes_left > 0:
            host, connections = next(iter(self._hosts.items()))
            connection, queue = next(iter(connections.items()))
            submission = queue[0]
            part: list[tuple[msgspec.Raw, str]] = []
            turn = min(EVENTS_PER_TURN, events_left)
            for raw in submission.events[submission.taken : submission.taken + turn]:
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
            if connection in connections:
                connections.move_to_end(connection)
            if host in self._hosts:
                self._hosts.move_to_end(host)
        return parts

    # -- the engine -------------------------------------------------------------

    async def _run(self) -> None:
        while self._hosts:
            began = self._clock()
            parts = self._next_call()
            started = self._clock()
            own_s = started - began
            try:
                wait_s = await self._call(parts)
            except Exception as error:
                for submission, _ in parts:
                    self._forget(submission)
                    submission.fail(error)
                # The engine did not say how long to wait, so the wait follows from the call's duration.
                wait_s = min((self._clock() - started) / EVENT_SHARE, MAX_WAIT_S)
            # Reading events also takes time from this server's streams; limit it to the same share.
            wait_s = max(wait_s, own_s * (1 / EVENT_SHARE - 1))
            if wait_s > 0:
                await self._sleep(min(wait_s, MAX_WAIT_S))

    async def _call(self, parts: list[_Part]) -> float:
        batches = [
            EventBatch(v=WIRE_VERSION, emitter=submission.emitter, events=[event for event, _ in part])
            for submission, part in parts
        ]
        outcomes, wait_s = merge_event_answers(await self._ask(encode(batches).decode("utf-8")))
        for (submission, part), found in zip(parts, outcomes, strict=True):
            if len(found) != len(part):
                raise EngineError(f"events: {len(found)} outcomes for {len(part)} events")
            submission.outcomes += [
                EventOutcome(outcome=Outcome.REJECTED, reason=problem) if problem else outcome
                for (_, problem), outcome in zip(part, found, strict=True)
            ]
            if len(submission.outcomes) == len(submission.events) and not submission.done.done():
                submission.done.set_result(None)
        return wait_s

    async def _ask(self, payload: str) -> list[str]:
        """Call the engines and return their answers. Raises ``EngineUnavailableError`` after
        ``CALL_TIMEOUT_S``, or if too many earlier calls have no answer."""
        if len(self._late) >= MAX_LATE_CALLS:
            raise EngineUnavailableError(f"events: {len(self._late)} calls are without an answer")
        task = asyncio.ensure_future(self._engine.call(EVENT_BATCHES_OPERATION, payload))
        done, _ = await asyncio.wait({task}, timeout=CALL_TIMEOUT_S)
        if not done:
            self._late.add(task)
            task.add_done_callback(self._answered_late)
            raise EngineUnavailableError(f"events: no answer within {CALL_TIMEOUT_S:g} s")
        return task.result()

    def _answered_late(self, task: asyncio.Task[list[str]]) -> None:
        self._late.discard(task)
        if not task.cancelled():
            task.exception()  # else asyncio reports it as never retrieved


class _Shed(Exception):
    """The queue was full, and the batch was removed in favour of clients with fewer waiting events."""


def _engine_event(raw: msgspec.Raw) -> tuple[msgspec.Raw, str]:
    """Return the text that the engine gets for ``raw``, and the reason why this server rejects the event
    (``""`` if it does not).

    - A valid event is encoded again, so that it cannot make other events of the call unreadable.
    - A malformed event is sent unchanged if it is harmless JSON. The engine then rejects the event and names
      its program.
    - Any other event, or one that is too long, is rejected here. The engine gets ``null`` in its place.
    """
    try:
        again = msgspec.Raw(encode(decode_event(raw)))
        if memoryview(again).nbytes <= MAX_ENGINE_EVENT_BYTES:
            return again, ""
        return _NO_EVENT, f"longer than {MAX_ENGINE_EVENT_BYTES} bytes"
    except WireError as error:
        sent = bytes(raw)
        try:
            msgspec.json.decode(sent)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _NO_EVENT, str(error)
        harmless = sent.count(b"[") + sent.count(b"{") <= MAX_BRACKETS
        return (raw, "") if harmless else (_NO_EVENT, str(error))


def _queue_full() -> EngineUnavailableError:
    return EngineUnavailableError("events: the queue is full, mostly with events of this client")
