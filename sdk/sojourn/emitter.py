"""The bounded background sender. ``put`` never blocks, never raises; what cannot be sent is dropped and
counted.

    agent thread(s) ── put ──▶ queue per program ──▶ one daemon thread ── POST batch ──▶ server
                                     └── take ──▶ rides along on the program's next request

An event leaves by one of the two doors, and comes back from the second where the
request failed. A batch that failed is dropped, not sent again: what happened
seconds ago helps nobody decide now, and the server copes with silence by leases.
Locks are re-entrant since a garbage collection inside ``put`` may close a
generator that ends a program, which puts an event.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from .backlog import Backlog, Pending
from .events import Event
from .ids import EmitterId
from .stats import Counters
from .transport import Transport
from .wire import (
    EVENTS_PATH,
    MAX_BATCH_BYTES,
    WIRE_VERSION,
    EventBatch,
    WireError,
    decode_outcomes,
    encode,
)

logger = logging.getLogger("sojourn")

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 30.0
MAX_BEATING_BACKOFF_S = 5.0
"""While a heartbeat is promised: leases end after 10 to 20 s of silence, so two tries must fit in."""
THREAD_RETRY_S = 1.0
"""A thread that could not be started is not tried again with every event."""
_ENVELOPE_BYTES = 1024
"""Room left in a batch for everything that is not an event."""
_NOT_OURS = frozenset({404, 405, 501})
"""Answers of a server that has no such endpoint."""


class Source(Protocol):
    """Who an event is about: a ``Program``."""

    @property
    def id(self) -> str: ...

    @property
    def is_open(self) -> bool:
        """Not ended: a beat may still be sent for it."""


class Emitter:
    """Queue and sender of one process. A fork gives the child an empty one with a new id."""

    def __init__(
        self,
        transport: Transport,
        counters: Counters,
        *,
        queue_events: int = 10_000,
        batch_events: int = 256,
        linger_s: float = 0.005,
        close_timeout_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        first: Callable[[], None] | None = None,
        promised: Callable[[], bool] = lambda: False,
        beats: Callable[[float], tuple[Iterable[tuple[Source, type[Event]]], float | None]] | None = None,
        delivered: Callable[[], None] | None = None,
        unsupported: Callable[[], None] | None = None,
    ) -> None:
        """``first`` runs once on the thread before anything is sent. ``promised()`` tells whether a server
        counts on heartbeats. ``beats(now)`` gives events that are due by the clock alone, and the seconds
        until it wants to be asked again. ``delivered`` and ``unsupported`` run on the thread when the server
        took a batch, or turned out to have no place for one.
        """
        self.counters = counters
        self._transport = transport
        self._queue_events = queue_events
        self._batch_events = batch_events
        self._linger_s = linger_s
        self._close_timeout_s = close_timeout_s
        self._clock = clock
        self._first = first
        self._promised = promised
        self._beats = beats
        self._on_delivered = delivered
        self._on_unsupported = unsupported
        self._supported = True
        self._thread: threading.Thread | None = None
        self._fresh()

    def _fresh(self) -> None:
        self.id = EmitterId("e-" + os.urandom(8).hex())
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._drained = threading.Condition(self._lock)
        self._pending = Backlog(self._queue_events)
        self._sending = 0
        self._seq = itertools.count()
        self._hurry = 0
        self._idle = False
        self._backing_off = False
        self._starting = False
        self._no_start_before_s = float("-inf")
        self._closed = False
        self._thread = None

    # ---- the agent's side

    def put(self, source: Source, kind: type[Event], **fields: Any) -> bool:
        """Queue an event that happened now. False where it had to be dropped."""
        try:
            with self._lock:
                if not self._supported or self._closed:
                    self.counters.add("dropped_unsupported" if not self._supported else "dropped_closed")
                    return False
                if self._pending.full:
                    self.counters.add("dropped_full")
                    return False
                self._append(source, kind, fields)
                if self._idle:
                    self._wake.notify()
                else:
                    self._ensure_thread()
            return True
        except Exception:
            self.counters.add("internal_error")
            return False

    def take(self, program_id: str, *, max_events: int, max_bytes: int) -> list[Pending]:
        """Remove and return the oldest unsent events of one program: they ride on its request.

        At most ``max_events`` of at most ``max_bytes`` of JSON together, with one byte each for the comma.
        """
        with self._lock:
            taken, unsayable = self._pending.take(
                program_id, self._clock(), max_events=max_events, max_bytes=max_bytes
            )
            if taken:
                self._drained.notify_all()
        if unsayable:
            self.counters.add("encode_error", unsayable)
        if taken:
            self.counters.add("events_piggybacked", len(taken))
        return taken

    def put_back(self, emitter: EmitterId, taken: list[Pending]) -> None:
        """The request which took these events failed: they go first again. The server may have seen them
        though, and tells that by their numbers. ``emitter`` is the id under which they were taken: a fork's
        child must not send its parent's numbers as its own. Never raises.
        """
        try:
            with self._lock:
                if emitter != self.id or self._closed or not self._supported:
                    return
                lost = self._pending.put_back(taken)
                self.counters.add("events_returned", len(taken) - lost)
                if lost:
                    self.counters.add("dropped_full", lost)
                if self._idle:
                    self._wake.notify()
                else:
                    self._ensure_thread()
        except Exception:
            self.counters.add("internal_error")

    def server_answered(self) -> None:
        """The server was just seen alive: a sender that waits because it was not may try again."""
        if self._backing_off:
            with self._lock:
                self._backing_off = False
                self._wake.notify_all()

    @property
    def lock(self) -> threading.RLock:
        """Held for short steps only. For what must be one step with a ``put`` inside."""
        return self._lock

    @property
    def pending(self) -> int:
        """Events queued or being sent right now."""
        with self._lock:
            return len(self._pending) + self._sending

    def start(self) -> None:
        """Start the thread before the first event, for ``first``. Raises ``RuntimeError`` where it cannot."""
        with self._lock:
            if self._thread is None and not self._closed:
                self._start()

    def flush(self, timeout_s: float = 1.0) -> bool:
        """Wait until nothing is unsent. True if so within ``timeout_s`` and no batch failed meanwhile."""
        end_s = time.monotonic() + timeout_s
        with self._lock:
            dropped = self.counters["dropped_send"]
            self._hurry += 1
            self._ensure_thread()
            try:
                self._wake.notify_all()
                while self._pending or self._sending:
                    left_s = end_s - time.monotonic()
                    if left_s <= 0 or self._thread is None:
                        return False
                    self._drained.wait(left_s)
            finally:
                self._hurry -= 1
            return self.counters["dropped_send"] == dropped

    def close(self, timeout_s: float | None = None) -> None:
        """Send what is left within the bound, then stop. Later events are dropped. Repeating it is
        harmless."""
        end_s = time.monotonic() + (self._close_timeout_s if timeout_s is None else timeout_s)
        try:
            with self._lock:
                self._closed = True
                self._wake.notify_all()
                thread = self._thread
            if thread is not None and thread is not threading.current_thread():
                thread.join(max(0.0, end_s - time.monotonic()))
        except Exception:
            self.counters.add("internal_error")

    # ---- the thread's side

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="sojourn-emitter", daemon=True)
        # An empty context: else the thread would hold the first caller's context variables for ever.
        contextvars.Context().run(thread.start)
        self._thread = thread

    def _ensure_thread(self) -> None:
        """Start the thread where there is none, or none alive. Called with the lock held."""
        thread = self._thread
        if self._closed or self._starting or (thread is not None and thread.is_alive()):
            return
        if self._clock() < self._no_start_before_s:
            return
        self._starting = True  # a garbage collection meanwhile may put an event, and end up here
        self._sending = 0  # what a thread had in hand when it died is lost
        try:
            self._start()
        except Exception:  # RuntimeError: can't start new thread
            self._no_start_before_s = self._clock() + THREAD_RETRY_S
            self.counters.add("thread_start_failed")
        finally:
            self._starting = False

    def _run(self) -> None:
        backoff_s = 0.0
        first, self._first = self._first, None
        try:
            if first is not None:
                first()
        except Exception:
            self.counters.add("internal_error")
        while self._wait_for_events():
            try:
                batch = self._pop()
                if not batch:
                    continue  # a request took them along meanwhile
                delivered = self._send(batch)
            except Exception:
                self.counters.add("internal_error")
                delivered = False
            with self._lock:
                self._sending = 0
                self._drained.notify_all()
                if delivered:
                    backoff_s = 0.0
                    continue
                backoff_s = min(MAX_BACKOFF_S, backoff_s * 2 or FIRST_BACKOFF_S)
                self._back_off(backoff_s)
        with contextlib.suppress(Exception):
            self._transport.close()

    def _back_off(self, longest_s: float) -> None:
        """Leave the server alone, with the lock held. ``flush``, ``close`` and signs of life cut it short;
        ``put`` does not, it wakes the idle only."""
        started_s = time.monotonic()
        self._backing_off = True
        while self._backing_off and not self._closed and not self._hurry:
            # Asked again and again: a program may open meanwhile and promise to be heard from.
            limit_s = min(longest_s, MAX_BEATING_BACKOFF_S) if self._promised() else longest_s
            left_s = started_s + limit_s - time.monotonic()
            if left_s <= 0:
                break
            self._wake.wait(min(left_s, MAX_BEATING_BACKOFF_S))
        self._backing_off = False

    def _wait_for_events(self) -> bool:
        """Sleep until there is something to send. False once closed and empty."""
        while True:
            due, wait_s = self._due()
            with self._lock:
                for source, kind in due:
                    if source.is_open and not self._pending.full:
                        self._append(source, kind, {})
                if self._pending:
                    if not self._closed and not self._hurry:
                        self._wake.wait(self._linger_s)  # cut short by flush() and close()
                    return True
                if self._closed:
                    return False
                self._idle = True
                try:
                    self._wake.wait(wait_s)
                finally:
                    self._idle = False

    def _due(self) -> tuple[Iterable[tuple[Source, type[Event]]], float | None]:
        if self._beats is None or not self._supported:
            return (), None
        try:
            return self._beats(self._clock())
        except Exception:
            self.counters.add("internal_error")
            return (), None

    def _append(self, source: Source, kind: type[Event], fields: dict[str, Any]) -> None:
        # One row of numbers for all programs: it also grows within each, whoever resumes one under its id.
        pending = Pending(source.id, kind, next(self._seq), self._clock(), fields)
        self._pending.append(pending)
        self.counters.add("events_queued")

    def _pop(self) -> list[Pending]:
        with self._lock:
            batch = self._pending.batch(self._batch_events)
            self._sending = len(batch)
        return batch

    def _send(self, batch: list[Pending]) -> bool:
        now = self._clock()
        bodies: list[list[msgspec.Raw]] = [[]]
        used = 0
        for pending in batch:
            try:
                raw = pending.encode(now)
            except Exception:  # one event that cannot be said must not spoil the others
                self.counters.add("encode_error")
                continue
            used += len(raw) + 1
            if used > MAX_BATCH_BYTES - _ENVELOPE_BYTES:
                bodies.append([])
                used = len(raw) + 1
            bodies[-1].append(msgspec.Raw(raw))
        for sent, events in enumerate(bodies):
            if events and not self._post(events):
                self.counters.add("dropped_send", sum(map(len, bodies[sent:])))
                return False
        return True

    def _post(self, events: list[msgspec.Raw]) -> bool:
        if not self._supported:
            self.counters.add("dropped_unsupported", len(events))
            return True
        dropped = self.counters["dropped_full"] + self.counters["dropped_send"]
        body = encode(EventBatch(v=WIRE_VERSION, emitter=self.id, events=events, dropped=dropped))
        try:
            answer = self._transport.post(EVENTS_PATH, body)
        except Exception as error:
            self.counters.add(f"net_{type(error).__name__}")
            return False
        if answer.status in _NOT_OURS:
            self.counters.add(f"http_{answer.status}")
            self.counters.add("dropped_unsupported", len(events))
            self.stop_sending()
            return True
        if not 200 <= answer.status < 300:
            if self.counters[f"http_{answer.status}"] == 0:
                logger.warning("the server answered %d to events; they are being dropped", answer.status)
            self.counters.add(f"http_{answer.status}")
            return False
        self.counters.add("events_sent", len(events))
        self._read_outcomes(answer.body, len(events))
        return True

    def _read_outcomes(self, body: bytes, expected: int) -> None:
        try:
            outcomes = decode_outcomes(body[: 2 * MAX_BATCH_BYTES]).outcomes
        except WireError:
            self.counters.add("answer_unreadable")
            return
        for outcome in outcomes:
            self.counters.add(f"outcome_{outcome.outcome.value}")
        # Some servers answer 200 to everything; only one answer per event shows that ours was read.
        if len(outcomes) == expected and self._on_delivered is not None:
            self._on_delivered()

    def stop_sending(self) -> None:
        """This server has no place for events: forget those queued and drop later ones."""
        with self._lock:
            self._supported = False
            unsent = self._pending.clear()
            self._drained.notify_all()
        if unsent:
            self.counters.add("dropped_unsupported", unsent)
        if self._on_unsupported is not None:
            self._on_unsupported()

    # ---- processes

    def after_fork(self) -> None:
        """In the child: nothing of the parent's queue, connection or numbering is used again."""
        self._first = None
        self._transport.after_fork()
        self._fresh()
