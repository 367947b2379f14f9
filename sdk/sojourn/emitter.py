"""The bounded background sender. ``put`` never blocks, never raises; what cannot be sent is dropped and
counted.

    agent thread(s) ── put ──▶ inbox ──▶ queue per program ──▶ one daemon thread ── courier ──▶ server
                                               └── take ──▶ rides along on the program's next request

How a batch travels is the dialect's matter: its *courier* knows (``dialects/courier.py``).
An event leaves by one of the two doors, and comes back from the second where the
request failed. A batch that failed is dropped, not sent again: what happened
seconds ago helps nobody decide now, and the server copes with silence by leases.
Locks are re-entrant since a garbage collection inside ``take`` may close a
generator that ends a program, which puts an event.

What an agent's thread pays for is mostly what it has not touched for a while: the model answered, and
caches are cold. So ``put`` takes no lock and wakes nobody while the thread looks by itself, as it does for
some seconds after each event: waking it cost the agent more than all the rest, for both then want the
interpreter.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from .backlog import Backlog, Pending
from .dialects import Batch, Courier, Delivery, Road, SojournCourier
from .events import Event, Heartbeat
from .ids import EmitterId
from .stats import Counters
from .transport import Transport

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 30.0
MAX_BEATING_BACKOFF_S = 5.0
"""While a heartbeat is promised: leases end after 10 to 20 s of silence, so two tries must fit in."""
THREAD_RETRY_S = 1.0
"""A thread that could not be started is not tried again with every event."""
LOOK_EVERY_S = 0.02
"""How often the thread looks for events while it expects some: the longest that one waits to be noticed."""
LOOK_FOR_S = 5.0
"""After the last event; then the next one wakes it."""
_LOOKS = round(LOOK_FOR_S / LOOK_EVERY_S)


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
        delivered: Callable[[], object] | None = None,
        unsupported: Callable[[], Courier | None] | None = None,
    ) -> None:
        """``first`` runs once on the thread before anything is sent. ``promised()`` tells whether a server
        counts on heartbeats. ``beats(now)`` gives events that are due by the clock alone, and the seconds
        until it wants to be asked again. ``delivered`` and ``unsupported`` run on the thread when the server
        showed that it reads our batches, or turned out to have no place for one; the latter may give another
        courier to go on with. Events travel as sojourn's own until ``use`` says otherwise.
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
        self._courier: Courier = SojournCourier(Road(transport, counters))
        self._supported = True
        self._thread: threading.Thread | None = None
        self._fresh()

    def _fresh(self) -> None:
        self.id = EmitterId("e-" + os.urandom(8).hex())
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._drained = threading.Condition(self._lock)
        self._inbox: deque[Pending] = deque()
        """Put and not yet numbered. Whoever holds the lock takes them into ``_pending``; no order is lost."""
        self._pending = Backlog(self._queue_events)
        self._sending = 0
        self._seq = itertools.count()
        self._hurry = 0
        self._idle = False
        """The thread waits to be woken."""
        self._asleep = True
        """So it does, or there is none: ``put`` has to ring."""
        self._looks_left = 0
        self.backing_off = False
        """The thread leaves the server alone for a while."""
        self._starting = False
        self._no_start_before_s = float("-inf")
        self._closed = False
        self._thread = None
        self._open_door()

    def _open_door(self) -> None:
        """Which events are taken now."""
        shut = self._closed or not self._supported
        self._kinds: frozenset[type[Event]] = frozenset() if shut else self._courier.kinds

    # ---- the agent's side

    def put(self, source: Source, kind: type[Event], **fields: Any) -> bool:
        """Queue an event that happened now. False where it had to be dropped."""
        try:
            if kind not in self._kinds:
                closed = self._closed and self._supported
                self.counters.add("dropped_closed" if closed else "dropped_unsupported")
                return False
            inbox = self._inbox
            if len(inbox) + self._pending.size >= self._queue_events:
                self.counters.add("dropped_full")
                return False
            inbox.append(Pending(source.id, kind, -1, self._clock(), fields))
            # Looked at after the event is there; the thread looks for events after it says that it sleeps.
            if self._asleep:
                self._ring()
            return True
        except Exception:
            self.counters.add("internal_error")
            return False

    def _ring(self) -> None:
        with self._lock:
            if self._idle:
                self._asleep = False
                self._wake.notify()
            else:
                self._ensure_thread()

    def take(self, program_id: str, *, max_events: int, max_bytes: int | None = None) -> list[Pending]:
        """Remove and return the oldest unsent events of one program: they ride on its request.

        At most ``max_events`` of at most ``max_bytes`` of JSON together, with one byte each for the comma.
        Without that bound nothing is encoded here.
        """
        if not (self._inbox or self._pending.size):
            return []
        with self._lock:
            self._take_in()
            taken, unsayable = self._pending.take(
                program_id, self._clock, max_events=max_events, max_bytes=max_bytes
            )
            if self._hurry:
                self._drained.notify_all()
        if unsayable:
            self.counters.add("encode_error", unsayable)
        if taken:
            self.counters.add("events_piggybacked", len(taken))
        return taken

    def untake(self, taken: list[Pending]) -> None:
        """As if they had not been taken; nothing was sent meanwhile."""
        with self._lock:
            self._take_in()
            lost = self._pending.put_back(taken)
        self.counters.add("events_piggybacked", -len(taken))
        if lost:
            self.counters.add("dropped_full", lost)

    def put_back(self, emitter: EmitterId, taken: list[Pending]) -> None:
        """The request which took these events failed: they go first again. The server may have seen them
        though, and tells that by their numbers. ``emitter`` is the id under which they were taken: a fork's
        child must not send its parent's numbers as its own. Never raises.
        """
        try:
            with self._lock:
                if emitter != self.id or self._closed or not self._supported:
                    return
                self._take_in()
                lost = self._pending.put_back(taken)
                self.counters.add("events_returned", len(taken) - lost)
                if lost:
                    self.counters.add("dropped_full", lost)
                self._looks_left = _LOOKS
                if self._asleep:
                    self._ring()
        except Exception:
            self.counters.add("internal_error")

    def server_answered(self) -> None:
        """The server was just seen alive: a sender that waits because it was not may try again."""
        if self.backing_off:
            with self._lock:
                self.backing_off = False
                self._wake.notify_all()

    @property
    def lock(self) -> threading.RLock:
        """Held for short steps only. For what must be one step with a ``put`` inside."""
        return self._lock

    @property
    def pending(self) -> int:
        """Events queued or being sent right now; all of them are in the count ``events_queued`` by then."""
        with self._lock:
            self._take_in()  # a thread that hangs in a send numbers nothing
            return self._pending.size + self._sending

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
                while self._inbox or self._pending.size or self._sending:
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
                self._open_door()
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
        self._asleep = False

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
        try:
            self._work()
        finally:
            if self._thread is threading.current_thread():
                self._asleep = True

    def _work(self) -> None:
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
            self._courier.close()
        with contextlib.suppress(Exception):
            self._transport.close()

    def _back_off(self, longest_s: float) -> None:
        """Leave the server alone, with the lock held. ``flush``, ``close`` and signs of life cut it short;
        ``put`` does not, it wakes the idle only."""
        started_s = time.monotonic()
        self.backing_off = True
        while self.backing_off and not self._closed and not self._hurry:
            # Asked again and again: a program may open meanwhile and promise to be heard from.
            limit_s = min(longest_s, MAX_BEATING_BACKOFF_S) if self._promised() else longest_s
            left_s = started_s + limit_s - time.monotonic()
            if left_s <= 0:
                break
            self._wake.wait(min(left_s, MAX_BEATING_BACKOFF_S))
        self.backing_off = False

    def _wait_for_events(self) -> bool:
        """Sleep until there is something to send. False once closed and empty."""
        while True:
            due, wait_s = self._due()
            with self._lock:
                self._take_in()
                looks_left = self._looks_left
                for source, kind in due:
                    if source.is_open and not (self._pending.full or self._closed):
                        self._inbox.append(Pending(source.id, kind, -1, self._clock(), {}))
                        self._take_in()
                self._looks_left = looks_left  # a beat does not announce another event
                if self._pending.size:
                    if not self._closed and not self._hurry:
                        self._wake.wait(self._linger_s)  # cut short by flush() and close()
                    return True
                if self._closed:
                    return False
                if self._looks_left > 0:
                    self._looks_left -= 1
                    self._wake.wait(LOOK_EVERY_S if wait_s is None else min(LOOK_EVERY_S, wait_s))
                    continue
                self._idle = self._asleep = True
                try:
                    if not self._inbox:
                        self._wake.wait(wait_s)
                finally:
                    self._idle = self._asleep = False

    def _due(self) -> tuple[Iterable[tuple[Source, type[Event]]], float | None]:
        if self._beats is None or Heartbeat not in self._kinds:
            return (), None
        try:
            return self._beats(self._clock())
        except Exception:
            self.counters.add("internal_error")
            return (), None

    def _take_in(self) -> None:
        """Number what was put since. With the lock held."""
        if self._inbox:
            # One row of numbers for all programs: it grows within each too, whoever resumes one by its id.
            count = self._pending.take_in(self._inbox, self._seq)
            self._looks_left = _LOOKS
            self.counters.add("events_queued", count)

    def _pop(self) -> list[Pending]:
        with self._lock:
            self._take_in()
            batch = self._pending.batch(self._batch_events)
            self._sending = len(batch)
        return batch

    def _send(self, events: list[Pending]) -> bool:
        """Whether the server may be spoken to at once again."""
        if not self._supported:
            self.counters.add("dropped_unsupported", len(events))
            return True
        dropped = self.counters["dropped_full"] + self.counters["dropped_send"]
        delivery = self._courier.deliver(Batch(self.id, events, self._clock(), dropped))
        if delivery is Delivery.SHOWN and self._on_delivered is not None:
            self._on_delivered()
        elif delivery is Delivery.NO_PLACE:
            self.use(None if self._on_unsupported is None else self._on_unsupported())
        return delivery is not Delivery.FAILED

    def use(self, courier: Courier | None) -> None:
        """Let events travel with this one from now on; ``None``: this server takes none, so those queued are
        forgotten and later ones dropped. On the emitter's thread, or before it starts."""
        before = self._courier
        with self._lock:
            if courier is not None:
                self._courier, self._supported = courier, True
                self._open_door()
                unsent = 0
            else:
                self._supported = False
                self._open_door()
                self._take_in()
                unsent = self._pending.clear()
            self._drained.notify_all()
        if unsent:
            self.counters.add("dropped_unsupported", unsent)
        if before is not courier:
            with contextlib.suppress(Exception):
                before.close()

    # ---- processes

    def after_fork(self) -> None:
        """In the child: nothing of the parent's queue, connection or numbering is used again."""
        self._first = None
        self._courier.after_fork()
        self._transport.after_fork()
        self._fresh()
