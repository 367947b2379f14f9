"""Sends events in the background, from a bounded queue. ``put`` never raises and never waits for the network.
Events that cannot be sent are dropped and counted.

    agent thread(s) ── put ──▶ inbox ──▶ queue per program ──▶ one daemon thread ── transport ──▶ server
                                               └── take ──▶ carried by the program's next request

An event leaves in a batch (``event_transport``) or with an LLM request. If a request fails, its events return
to the queue. A failed batch is not resent: old events no longer help decisions, and leases end by themselves
without events. (The only retry is in ``http_transport.py``, for a connection that the server had closed.)

The lock is re-entrant. Garbage collection inside ``take`` may close a generator and so end a program, which
calls ``put`` on the same thread.

The sender polls for some seconds after each event. During this time ``put`` takes no lock and wakes no
thread. Waking the sender was the largest cost for the agent, since both threads then compete for the
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
from typing import Any

from .dialect_probe import ServerDialect
from .event_queue import EventQueue, PendingEvent
from .event_transport import DeliveryResult, EventTransport, PendingBatch
from .heartbeats import Heartbeats, OpenProgram
from .http_transport import ServerTransport
from .ids import EmitterId
from .stats import Counters
from .wire_events import Event, Heartbeat

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 30.0
MAX_BEATING_BACKOFF_S = 5.0
"""Longest backoff while a program with heartbeats is open. Leases end after 10 to 20 s of silence, so two
tries must fit into that time."""
FIRST_RECOVERY_PAUSE_S = 1.0
MAX_RECOVERY_PAUSE_S = 60.0
"""Longest pause before a server that refused events is asked again. Each pause is twice as long as the one
before. The longest one must end within 90 s after a restart, as ``docs/promises.md`` promises."""
FIRST_STOCK_PAUSE_S = 30.0
MAX_STOCK_PAUSE_S = 300.0
"""Like ``MAX_RECOVERY_PAUSE_S``, for a server that was neither named nor recognised as one that accepts
events, such as stock vLLM."""
THREAD_RETRY_S = 1.0
"""Pause before another attempt to start the thread."""
POLL_EVERY_S = 0.02
"""Polling interval while more events are expected. Polling delays an event by at most this time."""
POLL_FOR_S = 5.0
"""How long the thread polls after the last event. After that it sleeps until the next event wakes it."""
_POLLS = round(POLL_FOR_S / POLL_EVERY_S)


class EventSender:
    """Queue and sender of one process. A forked child gets an empty queue and a new id."""

    def __init__(
        self,
        transport: ServerTransport,
        counters: Counters,
        server: ServerDialect | None = None,
        heartbeats: Heartbeats | None = None,
        *,
        queue_events: int = 10_000,
        batch_events: int = 256,
        linger_s: float = 0.005,
        close_timeout_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``transport`` is closed with the sender. ``server``: by default a sojourn server. ``heartbeats``
        tells which programs' heartbeats are due. The numbers are those of ``Config`` with the same names."""
        self.counters = counters
        self._transport = transport
        self._server = ServerDialect(transport, counters, "sojourn") if server is None else server
        self._heartbeats = Heartbeats() if heartbeats is None else heartbeats
        self._queue_events = queue_events
        self._batch_events = batch_events
        self._linger_s = linger_s
        self._close_timeout_s = close_timeout_s
        self._clock = clock
        self._asks_first = True
        """True until the thread has asked the server for its dialect. A forked child does not ask; its first
        batch shows what the server accepts."""
        self._event_transport: EventTransport | None = self._server.event_transport()
        """``None`` if the server accepts no events."""
        self._thread: threading.Thread | None = None
        self._fresh()

    def _fresh(self) -> None:
        self.id = EmitterId("e-" + os.urandom(8).hex())
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._queue_empty = threading.Condition(self._lock)
        self._inbox: deque[PendingEvent] = deque()
        """New events, without sequence numbers. A thread that holds the lock gives them numbers and moves
        them into ``_pending`` or a request's context."""
        self._pending = EventQueue(self._queue_events)
        self._sending = 0
        self._seq = itertools.count()
        self._flushes_waiting = 0
        self._idle = False
        """True while the thread waits to be woken."""
        self._asleep = True
        """True while the thread is idle or absent, so that ``put`` has to wake or start it."""
        self._polls_left = 0
        self._beats_changed = False
        """True if a heartbeat may be due earlier than the thread has last computed."""
        self.backing_off = False
        """True while the thread waits, after a failed batch, before it contacts the server again."""
        self._starting = False
        self._no_start_before_s = float("-inf")
        self._pause_s = 0.0
        """The last pause before a server that refused events was asked again."""
        self.ask_at_s: float | None = None
        """When to ask it next; ``None``: not planned."""
        self._closed = False
        self._leave_open: frozenset[str] = frozenset()
        self._thread = None
        self._update_accepted_kinds()

    def _update_accepted_kinds(self) -> None:
        """Set which kinds of events are accepted in the current state."""
        transport = None if self._closed else self._event_transport
        self._kinds: frozenset[type[Event]] = frozenset() if transport is None else transport.kinds
        self._takes_implicit = transport is not None and transport.takes_implicit

    # ---- the agent's side

    def put(self, program: OpenProgram, kind: type[Event], **fields: Any) -> bool:
        """Queue an event of ``program`` that happens now: an instance of ``kind`` with ``fields``. Returns
        False if the event is dropped, or if ``program`` is implicit and the server accepts no events of
        implicit programs. Never raises, and never waits for the network."""
        try:
            if not self._takes_implicit and program.implicit:
                self._recover_in_child()
                return False
            if kind not in self._kinds:
                closed = self._closed and self.supported
                self.counters.add("dropped_closed" if closed else "dropped_unsupported")
                self._recover_in_child()
                return False
            inbox = self._inbox
            if len(inbox) + self._pending.size >= self._queue_events:
                self.counters.add("dropped_full")
                return False
            inbox.append(PendingEvent(program.id, kind, -1, self._clock(), fields))
            # Read after the append, since the thread sets ``_asleep`` before its last check of the inbox.
            if self._asleep:
                self._ring()
            return True
        except Exception:
            self.counters.add("internal_error")
            return False

    def _recover_in_child(self) -> None:
        """In a forked child, start the thread that asks whether the server accepts events again."""
        if self._thread is None and not self.supported and self._server.may_recover:
            self._ring()

    def _ring(self) -> None:
        with self._lock:
            if self._idle:
                self._asleep = False
                self._wake.notify()
            else:
                self._ensure_thread()

    def take(self, program_id: str, *, max_events: int) -> list[PendingEvent]:
        """Remove and return the oldest unsent events of one program, to be carried by its next request."""
        if not (self._inbox or self._pending.size):
            return []
        with self._lock:
            self._take_in()
            taken = self._pending.take(program_id, max_events)
            if self._flushes_waiting:
                self._queue_empty.notify_all()
        self.counters.add("events_piggybacked", len(taken))
        return taken

    def put_back(self, emitter: EmitterId, taken: list[PendingEvent]) -> None:
        """Put the events of a failed request back, before their programs' other events. If the server
        received the events after all, it recognises the duplicates by their sequence numbers. ``emitter`` is
        the sender's id when the events were taken. If the id has changed since, which happens in a forked
        child, the events are dropped. Never raises."""
        try:
            with self._lock:
                if emitter != self.id or self._closed or not self.supported:
                    return
                self._take_in()
                lost = self._pending.put_back(taken)
                self.counters.add("events_returned", len(taken) - lost)
                if lost:
                    self.counters.add("dropped_full", lost)
                self._polls_left = _POLLS
                if self._asleep:
                    self._ring()
        except Exception:
            self.counters.add("internal_error")

    def heartbeats_changed(self) -> None:
        """Make the thread ask for the due heartbeats again. Call this if a program begins to send heartbeats
        without an event, since otherwise only events wake a sleeping thread. Takes the lock, so the caller
        must hold no lock that a finalizer takes. Never raises."""
        try:
            with self._lock:
                self._beats_changed = True
                self._ring()
        except Exception:
            self.counters.add("internal_error")

    def server_answered(self) -> None:
        """End the backoff, since the server has just answered a request."""
        if self.backing_off:
            with self._lock:
                self.backing_off = False
                self._wake.notify_all()

    @property
    def lock(self) -> threading.RLock:
        """The queue's lock, for code that does a ``put`` and another change in one short atomic step."""
        return self._lock

    @property
    def supported(self) -> bool:
        """Whether the server accepts events."""
        return self._event_transport is not None

    @property
    def pending(self) -> int:
        """Number of events that are queued or being sent. The counter ``events_queued`` includes all of
        them."""
        with self._lock:
            self._take_in()  # the thread may hang in a send and not do this
            return self._pending.size + self._sending

    def start(self) -> None:
        """Start the thread now instead of at the first event, so that the server
        is probed early. Raises ``RuntimeError`` if no thread can start."""
        with self._lock:
            if self._thread is None and not self._closed:
                self._start()

    def flush(self, timeout_s: float = 1.0) -> bool:
        """Wait at most ``timeout_s`` until no event is queued or being sent. Returns False if events are left
        after ``timeout_s``, or if a batch failed during the wait."""
        end_s = time.monotonic() + timeout_s
        with self._lock:
            dropped = self.counters["dropped_send"]
            self._flushes_waiting += 1
            self._ensure_thread()
            try:
                self._wake.notify_all()
                while self._inbox or self._pending.size or self._sending:
                    left_s = end_s - time.monotonic()
                    if left_s <= 0 or self._thread is None:
                        return False
                    self._queue_empty.wait(left_s)
            finally:
                self._flushes_waiting -= 1
            return self.counters["dropped_send"] == dropped

    def close(self, timeout_s: float | None = None, *, leave_open: frozenset[str] = frozenset()) -> None:
        """Make the thread send the queued events and then end. Waits for the thread at most ``timeout_s``, by
        default the constructor's ``close_timeout_s``. Later events are dropped. ``leave_open``: see
        ``EventTransport.close``. A second call is harmless. Never raises."""
        end_s = time.monotonic() + (self._close_timeout_s if timeout_s is None else timeout_s)
        try:
            with self._lock:
                self._closed, self._leave_open = True, leave_open
                self._update_accepted_kinds()
                self._wake.notify_all()
                thread = self._thread
            if thread is not None and thread is not threading.current_thread():
                thread.join(max(0.0, end_s - time.monotonic()))
        except Exception:
            self.counters.add("internal_error")

    # ---- the thread's side

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="sojourn-event-sender", daemon=True)
        # An empty context, since the thread must not keep the first caller's context variables alive.
        contextvars.Context().run(thread.start)
        self._thread = thread
        self._asleep = False

    def _ensure_thread(self) -> None:
        """Start the thread if there is none, or if it died. Called with the lock held."""
        thread = self._thread
        if self._closed or self._starting or (thread is not None and thread.is_alive()):
            return
        if self._clock() < self._no_start_before_s:
            return
        self._starting = True  # a garbage collection may put an event and so call this method
        self._sending = 0  # the batch of a dead thread is lost
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
        asks, self._asks_first = self._asks_first, False
        try:
            if asks and not self._server.known and self._server.ask():
                self.set_event_transport(self._server.event_transport())
        except Exception:
            self.counters.add("internal_error")
        while self._wait_for_events():
            try:
                batch = self._pop()
                if not batch:
                    continue  # a request took the events meanwhile
                delivered = self._send(batch)
            except Exception:
                self.counters.add("internal_error")
                delivered = False
            with self._lock:
                self._sending = 0
                self._queue_empty.notify_all()
                if delivered:
                    backoff_s = 0.0
                    continue
                backoff_s = min(MAX_BACKOFF_S, backoff_s * 2 or FIRST_BACKOFF_S)
                self._back_off(backoff_s)
        with contextlib.suppress(Exception):
            if self._event_transport is not None:
                self._event_transport.close(self._leave_open)
        with contextlib.suppress(Exception):
            self._transport.close()

    def _back_off(self, longest_s: float) -> None:
        """Wait up to ``longest_s`` before the next batch. ``flush``, ``close`` and ``server_answered`` end
        the wait early; ``put`` does not, since it only wakes an idle thread. Called with the lock held; the
        lock is free during the wait."""
        started_s = time.monotonic()
        self.backing_off = True
        while self.backing_off and not self._closed and not self._flushes_waiting:
            # Asked each time, since a program with heartbeats may open meanwhile.
            limit_s = min(longest_s, MAX_BEATING_BACKOFF_S) if self._heartbeats.promised else longest_s
            left_s = started_s + limit_s - time.monotonic()
            if left_s <= 0:
                break
            self._wake.wait(min(left_s, MAX_BEATING_BACKOFF_S))
        self.backing_off = False

    def _wait_for_events(self) -> bool:
        """Sleep until there are events to send, then return True. Queues the heartbeats that become due.
        Returns False once the event sender is closed and the queue is empty."""
        while True:
            self._beats_changed = False  # before the look, so that a change during it counts
            due, wait_s = self._due()
            with self._lock:
                self._take_in()
                polls_left = self._polls_left
                for program in due:
                    if program.is_open and not (self._pending.full or self._closed):
                        self._inbox.append(PendingEvent(program.id, Heartbeat, -1, self._clock(), {}))
                        self._take_in()
                self._polls_left = polls_left  # a beat does not announce another event
                if self._pending.size:
                    if not self._closed and not self._flushes_waiting:
                        self._wake.wait(self._linger_s)  # cut short by flush() and close()
                    return True
                if self._closed:
                    return False
                if self._polls_left > 0:
                    self._polls_left -= 1
                    self._wake.wait(POLL_EVERY_S if wait_s is None else min(POLL_EVERY_S, wait_s))
                    continue
                self._idle = self._asleep = True
                try:
                    if not self._inbox and not self._beats_changed:
                        self._wake.wait(wait_s)
                finally:
                    self._idle = self._asleep = False

    def _due(self) -> tuple[Iterable[OpenProgram], float | None]:
        try:
            if self._event_transport is None:
                return (), self._recover()
            return self._heartbeats.take_due(self._clock()) if Heartbeat in self._kinds else ((), None)
        except Exception:
            self.counters.add("internal_error")
            return (), None if self.supported else MAX_BEATING_BACKOFF_S

    def _recover(self) -> float | None:
        """Ask at growing intervals whether the server accepts events now. Return the seconds until the next
        call; ``None`` if no further call is needed."""
        if self._closed or not self._server.may_recover:
            return None
        if self.ask_at_s is not None and self._clock() >= self.ask_at_s:
            self.ask_at_s = None
            event_transport = self._server.recover()
            if event_transport is not None:
                self.set_event_transport(event_transport)
                return 0.0  # heartbeats may be due
        now = self._clock()
        if self.ask_at_s is None:
            first_s, longest_s = (
                (FIRST_RECOVERY_PAUSE_S, MAX_RECOVERY_PAUSE_S)
                if self._server.was_sojourn
                else (FIRST_STOCK_PAUSE_S, MAX_STOCK_PAUSE_S)
            )
            self._pause_s = min(longest_s, self._pause_s * 2 or first_s)
            self.ask_at_s = now + self._pause_s
        return self.ask_at_s - now

    def _take_in(self) -> None:
        """Number the events in the inbox and move them into the queue. Called with the lock held."""
        if self._inbox:
            # One sequence for all programs, so that it also grows within a program that is resumed by its id.
            count = self._pending.take_in(self._inbox, self._seq)
            self._polls_left = _POLLS
            self.counters.add("events_queued", count)

    def _pop(self) -> list[PendingEvent]:
        with self._lock:
            self._take_in()
            batch = self._pending.batch(self._batch_events)
            self._sending = len(batch)
        return batch

    def _send(self, events: list[PendingEvent]) -> bool:
        """Send a batch. Returns False if the thread must back off before the next batch."""
        if self._event_transport is None:
            self.counters.add("dropped_unsupported", len(events))
            return True
        dropped = self.counters["dropped_full"] + self.counters["dropped_send"]
        delivery = self._event_transport.deliver(PendingBatch(self.id, events, self._clock(), dropped))
        if delivery is DeliveryResult.UNSUPPORTED:
            self.set_event_transport(self._server.refused())
            return True
        if delivery is DeliveryResult.CONFIRMED:
            self._server.confirm()
        if delivery is not DeliveryResult.FAILED:
            self._pause_s = 0.0
        return delivery is not DeliveryResult.FAILED

    def set_event_transport(self, event_transport: EventTransport | None) -> None:
        """Send events by this transport from now on. ``None`` means that the server accepts no events; queued
        and later events are dropped. Call this on the event sender's thread, or before that thread starts."""
        with self._lock:
            before, self._event_transport = self._event_transport, event_transport
            self._update_accepted_kinds()
            unsent = 0
            if event_transport is None:
                self._take_in()
                unsent = self._pending.clear()
            self._queue_empty.notify_all()
        if unsent:
            self.counters.add("dropped_unsupported", unsent)
        if before is not None:
            with contextlib.suppress(Exception):
                before.close()

    # ---- processes

    def after_fork(self) -> None:
        """In a forked child, drop the parent's queue, connection and numbering."""
        self._asks_first = False
        self._server.after_fork()
        if self._event_transport is not None:
            self._event_transport.after_fork()
        self._transport.after_fork()
        self._fresh()
