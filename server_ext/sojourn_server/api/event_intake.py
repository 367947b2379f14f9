"""Client events on their way to the engine: merged into few calls, and shared out fairly among clients.

The engine reads events on the thread that schedules, between two steps, so their cost is taken from
generation. The intake has one call in flight, with at most ``MAX_EVENTS_PER_CALL`` events, and gives events
``ENGINE_SHARE`` of the engine's time. A flood then fills the intake's queue and not the engine's.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable

import msgspec
from sojourn.wire_codec import (
    WIRE_VERSION,
    EventBatch,
    EventOutcome,
    Outcome,
    OutcomeBatch,
    WireError,
    decode_event,
    encode,
)

from .engine_rpc import EngineError, EngineRpc, EngineUnavailableError
from .response_merging import merge_event_answers

EVENT_BATCHES_OPERATION = "event_batches"
MAX_EVENTS_PER_CALL = 64
"""Most events of one call to the engine; an event takes it some 25 µs."""
MAX_BYTES_PER_CALL = 32 * 1024
"""Most bytes of events in one call, or one larger event: graphs cost by their size."""
ENGINE_SHARE = 0.1
"""Part of the engine's time that events may take once ``ENGINE_BURST_S`` is used up."""
ENGINE_BURST_S = 0.02
"""Engine time that events may take at once after a quiet second."""
EVENTS_PER_TURN = 16
"""Events of one client in a call while other clients wait."""
MAX_WAITING_EVENTS = 16 * 1024
"""Most events in the queue. Beyond that the client with the most waiting events is refused."""
REFUSAL_DELAY_S = 1.0
"""Time before a refusal is answered, so that a client that repeats at once does not keep the server busy."""

MAX_BRACKETS = 32
"""Most brackets of a bad event that the engine gets: a deeper one might stop it from reading the call."""
_NO_EVENT = msgspec.Raw(b"null")

ClientKey = tuple[str, str]
"""Host and connection of a client. Hosts share the engine's time equally, and the connections of a host
share the host's part."""


class _Submission:
    """One batch with the outcomes that have arrived."""

    def __init__(self, client: ClientKey, batch: EventBatch) -> None:
        self.client = client
        self.emitter = batch.emitter
        self.events = batch.events
        self.taken = 0
        """Events that are in the engine or were."""
        self.outcomes: list[EventOutcome] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def waiting(self) -> int:
        return len(self.events) - self.taken


class EventIntake:
    """The queue of client events of one API server, and its calls to the engine."""

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
        """Submissions with waiting events. Hosts and connections whose turn is next come first."""
        self._waiting = 0
        self._pump: asyncio.Task[None] | None = None
        self._credit_s = ENGINE_BURST_S
        self._credited_at = clock()

    async def submit(self, client: ClientKey, batch: EventBatch, timeout_s: float) -> OutcomeBatch:
        """Outcomes of a batch, in its order.

        Raises ``EngineUnavailableError`` after ``timeout_s`` seconds and where the queue is full, and other
        ``EngineError``s of the engine. Some events may then have been handled; sent again, those are
        answered as duplicates.
        """
        submission = _Submission(client, batch)
        if not batch.events:
            # Even an empty batch tells whether the engine reads events.
            self._enqueue(submission)
        elif self._make_room(submission):
            self._enqueue(submission)
            self._waiting += len(batch.events)
        else:
            await self._sleep(REFUSAL_DELAY_S)
            raise _queue_full()
        try:
            await asyncio.wait_for(asyncio.shield(submission.done), timeout_s)
        except asyncio.TimeoutError:
            raise EngineUnavailableError(
                f"events: {submission.waiting} of {len(batch.events)} still wait after {timeout_s:g} s"
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
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run(), name="sojourn-events")

    def _make_room(self, newcomer: _Submission) -> bool:
        """Refuse the newest batches of the clients with the most waiting events until the newcomer fits.

        Returns False if the newcomer is the one to refuse."""
        while self._waiting + newcomer.waiting > MAX_WAITING_EVENTS:
            host, connection = newcomer.client
            loads = {name: sum(map(_waiting, group.values())) for name, group in self._hosts.items()}
            loads[host] = loads.get(host, 0) + newcomer.waiting
            # Among equals the newcomer goes: the others have waited already.
            heaviest = max(loads, key=lambda name: (loads[name], name == host))
            connections = {name: _waiting(queue) for name, queue in self._hosts.get(heaviest, {}).items()}
            if heaviest == host:
                connections[connection] = connections.get(connection, 0) + newcomer.waiting
            busiest = max(
                connections, key=lambda name: (connections[name], (heaviest, name) == newcomer.client)
            )
            if (heaviest, busiest) == newcomer.client:
                return False
            victim = self._hosts[heaviest][busiest][-1]
            self._forget(victim)
            victim.done.set_exception(_Shed())
        return True

    def _forget(self, submission: _Submission) -> None:
        """Take a submission's waiting events out of the queue; what the engine has stays there."""
        host, connection = submission.client
        connections = self._hosts.get(host)
        queue = connections.get(connection) if connections is not None else None
        if queue is None or submission not in queue:
            return
        queue.remove(submission)
        self._waiting -= submission.waiting
        if not queue:
            del self._hosts[host][connection]
            if not self._hosts[host]:
                del self._hosts[host]

    def _next_call(self) -> list[tuple[_Submission, list[msgspec.Raw]]]:
        """Events of the next call: a turn of each client after the other until the call is full."""
        parts: list[tuple[_Submission, list[msgspec.Raw]]] = []
        events_left, bytes_left = MAX_EVENTS_PER_CALL, MAX_BYTES_PER_CALL
        while self._hosts and events_left > 0:
            host, connections = next(iter(self._hosts.items()))
            connection, queue = next(iter(connections.items()))
            submission = queue[0]
            part: list[msgspec.Raw] = []
            for event in submission.events[submission.taken :][: min(EVENTS_PER_TURN, events_left)]:
                bytes_left -= memoryview(event).nbytes
                if bytes_left < 0 and (parts or part):
                    break
                part.append(event)
            if not part and submission.events:
                break
            parts.append((submission, part))
            submission.taken += len(part)
            self._waiting -= len(part)
            events_left -= max(len(part), 1)
            if not submission.waiting:
                self._forget(submission)
            if connection in connections:
                connections.move_to_end(connection)
            if host in self._hosts:
                self._hosts.move_to_end(host)
            if bytes_left < 0:
                break
        return parts

    # -- the engine -------------------------------------------------------------

    async def _run(self) -> None:
        while self._hosts:
            parts = self._next_call()
            try:
                await self._call(parts)
            except Exception as error:
                for submission, _ in parts:
                    self._forget(submission)
                    if not submission.done.done():
                        submission.done.set_exception(error)
                        submission.done.exception()  # its client may be gone
            if (pause_s := self._pause_s()) > 0:
                await self._sleep(pause_s)

    async def _call(self, parts: list[tuple[_Submission, list[msgspec.Raw]]]) -> None:
        readable = [[_engine_event(raw) for raw in part] for _, part in parts]
        batches = [
            EventBatch(v=WIRE_VERSION, emitter=one.emitter, events=[event for event, _ in events])
            for (one, _), events in zip(parts, readable, strict=True)
        ]
        answers = await self._engine.call(EVENT_BATCHES_OPERATION, encode(batches).decode("utf-8"))
        outcomes, busy_s = merge_event_answers(answers)
        self._credit_s -= busy_s
        for (submission, part), events, found in zip(parts, readable, outcomes, strict=True):
            if len(found) != len(part):
                raise EngineError(f"events: {len(found)} outcomes for {len(part)} events")
            submission.outcomes += [
                EventOutcome(outcome=Outcome.REJECTED, reason=problem) if problem else outcome
                for (_, problem), outcome in zip(events, found, strict=True)
            ]
            if len(submission.outcomes) == len(submission.events) and not submission.done.done():
                submission.done.set_result(None)

    def _pause_s(self) -> float:
        """Seconds until events have earned the engine time that they used."""
        now = self._clock()
        earned_s = (now - self._credited_at) * ENGINE_SHARE
        self._credited_at = now
        self._credit_s = min(self._credit_s + earned_s, ENGINE_BURST_S)
        return max(-self._credit_s / ENGINE_SHARE, 0.0)


class _Shed(Exception):
    """The batch lost its place to those of clients with fewer events waiting."""


def _engine_event(raw: msgspec.Raw) -> tuple[msgspec.Raw, str]:
    """An event as the engine gets it, encoded anew so that it cannot spoil the call for other events.

    For an event that cannot be read the second value says why, where the engine gets a stand-in; a harmless
    one goes to the engine, whose outcome names its program.
    """
    try:
        return msgspec.Raw(encode(decode_event(raw))), ""
    except WireError as error:
        sent = bytes(raw)
        try:
            msgspec.json.decode(sent)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _NO_EVENT, str(error)
        harmless = sent.count(b"[") + sent.count(b"{") <= MAX_BRACKETS
        return (raw, "") if harmless else (_NO_EVENT, str(error))


def _waiting(queue: deque[_Submission]) -> int:
    return sum(submission.waiting for submission in queue)


def _queue_full() -> EngineUnavailableError:
    return EngineUnavailableError(f"events: {MAX_WAITING_EVENTS} are waiting, most of them from this client")
