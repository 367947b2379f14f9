"""Fetches the outcome of each request on a separate thread. The outcome is the request's entry in the
server's ledger of turns.

One call to the server fetches the outcomes of one program. The call is made at the first of these times:

- the program ends;
- ``EVERY_REQUESTS`` of the program's requests wait for their outcomes;
- one request has waited for ``IDLE_S``.

After an error the requests are finished without outcomes.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
from sojourn.config import Config
from sojourn.http_transport import HttpTransport
from sojourn.process_hooks import register_at_fork

from sojourn_integrations.safe_scope import count_error

PROGRAM_PATH = "/sojourn/v1/programs/"
EVERY_REQUESTS = 8
"""Number of waiting requests of one program after which their outcomes are fetched."""
MAX_PENDING = 2_000
"""Approximate maximum number of waiting requests of all programs. Further requests are finished at once,
without outcome (``otel_outcomes_skipped``)."""
IDLE_S = 5.0
"""Longest time from a request's end until its outcome is fetched, in seconds. It is short, so that the spans
of a long run arrive during the run."""
RETRY_S = 0.7
"""Delay before the only retry, for a request that the server's ledger did not have yet."""
PAUSE_S = 5.0
"""Seconds after a server error during which no outcome is fetched. Requests that end meanwhile are finished
without outcome."""
FETCH_TIMEOUT_S = 2.0

Turn = Mapping[str, Any]
Finish = Callable[["Turn | None"], None]
"""Function that is called once per request, with the request's entry in the server's ledger. If the entry
could not be fetched, the argument is ``None``."""


@dataclass(slots=True)
class _PendingOutcome:
    """One request that waits for its outcome."""

    config: Config
    program_id: str
    request_id: str
    finish: Finish
    tried: bool = False
    """True once the server had no outcome for the request."""


@dataclass(slots=True)
class _Group:
    """Waiting requests of one program, and when to fetch their outcomes (monotonic seconds)."""

    due_s: float
    waiting: list[_PendingOutcome] = field(default_factory=list)


class _Flush(NamedTuple):
    """Message to the fetching thread: fetch all outcomes now, then set ``done``. If ``last`` is true, the
    thread then stops."""

    done: threading.Event
    last: bool


class OutcomeFetcher:
    """The fetching thread and its queue. No method raises.

    There is no lock, since garbage collection may end a request on a thread that holds the lock.
    ``SimpleQueue.put`` is reentrant, so a finalizer that calls ``put`` cannot deadlock. Without a lock, a
    thread may read an old value of the flags and counters. So ``MAX_PENDING`` is approximate.
    """

    def __init__(self, *, idle_s: float = IDLE_S, retry_s: float = RETRY_S) -> None:
        self._idle_s = idle_s
        self._retry_s = retry_s
        self._reset()
        forget = weakref.WeakMethod(self._reset)
        register_at_fork(after_in_child=lambda: (reset := forget()) and reset())

    def _reset(self) -> None:
        # Also runs in a forked child. The parent finishes the requests.
        self._inbox: SimpleQueue[_PendingOutcome | _Flush | str] = SimpleQueue()
        self._starts = itertools.count()
        self._running = False
        self._closed = False
        self._stopped = False
        """True once the fetching thread has stopped reading the queue."""
        self._quiet_until_s = 0.0
        self._count = 0
        self._groups: dict[str, _Group] = {}
        self._flushes: list[_Flush] = []
        self._transport: tuple[Config, HttpTransport] | None = None

    # ---- the agent's side

    def put(self, config: Config, program_id: str, request_id: str, finish: Finish) -> None:
        """Queue a request that has ended. The fetching thread then calls ``finish``, with the outcome or with
        ``None``. If the request cannot be queued, ``finish(None)`` is called at once. Does not wait."""
        try:
            full = self._count + self._inbox.qsize() >= MAX_PENDING
            if not (self._closed or full or time.monotonic() < self._quiet_until_s) and self._start():
                self._inbox.put(_PendingOutcome(config, program_id, request_id, finish))
                # Another thread may have called ``close`` after the check above.
                if self._stopped:
                    self._finish_unread()
                elif self._closed:
                    self._inbox.put(_Flush(threading.Event(), last=True))
                return
            count_error("otel_outcomes_skipped")
        except Exception:
            count_error("internal_error")
        _finish(finish, None)

    def program_ended(self, program_id: str) -> None:
        """Make the thread fetch the program's outcomes now, since no further request follows. Does not
        wait."""
        if self._running:
            self._inbox.put(program_id)

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Make the thread fetch all outcomes now. Waits at most ``timeout_s``. Returns whether all requests
        were finished in time."""
        return self._send_flush(timeout_s, last=False)

    def close(self, timeout_s: float = 3.0) -> None:
        """Make the thread fetch all outcomes and then end. Waits for the thread at most ``timeout_s``. Later
        calls of ``put`` call ``finish(None)`` at once."""
        self._closed = True
        self._send_flush(timeout_s, last=True)

    def _send_flush(self, timeout_s: float, *, last: bool) -> bool:
        if not self._running:
            return True
        flush = _Flush(threading.Event(), last)
        self._inbox.put(flush)
        if self._stopped:  # meanwhile, by a ``close`` on another thread
            self._finish_unread()
        return flush.done.wait(timeout_s)

    def _start(self) -> bool:
        if not self._running and next(self._starts) == 0:
            thread = threading.Thread(target=self._run, name="sojourn-otel-outcomes", daemon=True)
            self._running = True  # before the start, so that a ``flush`` waits for the thread's work
            try:
                thread.start()
            except RuntimeError:  # the interpreter is shutting down
                self._closed = True
                self._running = False
                self._stopped = True
                self._finish_unread()
                return False
        return True

    def _finish_unread(self) -> None:
        """Finish the queued requests without outcomes, since no thread reads the queue."""
        with suppress(Empty):
            while True:
                message = self._inbox.get_nowait()
                if isinstance(message, _PendingOutcome):
                    _finish(message.finish, None)
                elif isinstance(message, _Flush):
                    message.done.set()

    # ---- the thread's side

    def _run(self) -> None:
        _suppress_instrumentation()
        while True:
            try:
                if self._fetch_due():
                    return
            except Exception:
                count_error("internal_error")

    def _fetch_due(self) -> bool:
        """Read the queue and fetch the outcomes that are due. Returns True when the thread should stop."""
        for message in self._messages():
            self._take(message)
        self._count = self._waiting()
        hurry = bool(self._flushes)
        for program_id, group in list(self._groups.items()):
            if group.due_s <= time.monotonic() or (hurry and not group.waiting[0].tried):
                del self._groups[program_id]
                self._serve(program_id, group.waiting)
        self._count = self._waiting()
        if not self._groups and self._inbox.empty():
            flushes, self._flushes = self._flushes, []
            last = any(flush.last for flush in flushes)
            if last:
                self._running = False
                self._stopped = True
                self._finish_unread()
                if self._transport is not None:
                    self._transport[1].close()
            for flush in flushes:
                flush.done.set()
            return last
        return False

    def _waiting(self) -> int:
        return sum(len(group.waiting) for group in self._groups.values())

    def _messages(self) -> Iterator[_PendingOutcome | _Flush | str]:
        due_s = min((group.due_s for group in self._groups.values()), default=None)
        wait_s = None if due_s is None else max(0.0, due_s - time.monotonic())
        try:
            yield self._inbox.get(timeout=wait_s)
            while True:
                yield self._inbox.get_nowait()
        except Empty:
            return

    def _take(self, message: _PendingOutcome | _Flush | str) -> None:
        if isinstance(message, _Flush):
            self._flushes.append(message)
        elif isinstance(message, str):
            if message in self._groups:
                self._groups[message].due_s = 0.0
        else:
            group = self._groups.get(message.program_id)
            if group is None:
                group = self._groups[message.program_id] = _Group(time.monotonic() + self._idle_s)
            group.waiting.append(message)
            if len(group.waiting) >= EVERY_REQUESTS:
                group.due_s = 0.0

    def _serve(self, program_id: str, waiting: list[_PendingOutcome]) -> None:
        turns: dict[str, Turn] = {}
        asked = time.monotonic() >= self._quiet_until_s
        if asked:
            try:
                turns = self._fetch(waiting[-1].config, program_id)
            except Exception:
                self._quiet_until_s = time.monotonic() + PAUSE_S
                count_error("otel_outcomes_failed")
                asked = False
        again = []
        for each in waiting:
            turn = turns.get(each.request_id)
            if turn is None and asked and not each.tried:
                each.tried = True
                again.append(each)
            else:
                _finish(each.finish, turn)
        if again:
            later = self._groups.setdefault(program_id, _Group(0.0))
            later.due_s = time.monotonic() + self._retry_s
            later.waiting[:0] = again

    def _fetch(self, config: Config, program_id: str) -> dict[str, Turn]:
        """Return the program's turns in the server's ledger, by the client's request id. Raises on a server
        error."""
        if self._transport is None or self._transport[0] is not config:
            if self._transport is not None:
                self._transport[1].close()
            transport = HttpTransport(config.url, api_key=config.api_key, timeout_s=FETCH_TIMEOUT_S)
            self._transport = config, transport
        answer = self._transport[1].get(PROGRAM_PATH + quote(program_id, safe=""), FETCH_TIMEOUT_S)
        if answer.status in (404, 429):
            return {}  # unknown by now, or rate-limited
        if answer.status != 200:
            raise ConnectionError(f"status {answer.status}")
        document = msgspec.json.decode(answer.body)
        turns = [turn for turn in document.get("ledger") or () if isinstance(turn, dict)]
        _add_decisions(turns, document.get("decisions"))
        return {turn["request_id"]: turn for turn in turns if isinstance(turn.get("request_id"), str)}


def _add_decisions(turns: list[dict[str, Any]], decisions: Any) -> None:
    """Add to each turn the list ``decisions``. It holds the server's decisions from the turn's arrival to the
    next turn's arrival. A turn without decisions gets no list."""
    starts = sorted(
        (turn["arrived_s"], place)
        for place, turn in enumerate(turns)
        if isinstance(turn.get("arrived_s"), (int, float))
    )
    times = [arrived_s for arrived_s, _ in starts]
    for decision in decisions if isinstance(decisions, list) else ():
        if isinstance(decision, dict) and isinstance(at_s := decision.get("at_s"), (int, float)):
            place = bisect_right(times, at_s) - 1
            if place >= 0:
                turns[starts[place][1]].setdefault("decisions", []).append(decision)


def _finish(finish: Finish, turn: Turn | None) -> None:
    try:
        finish(turn)
    except Exception:
        count_error("internal_error")


def _suppress_instrumentation() -> None:
    """Keep the fetcher's own HTTP requests out of the user's traces."""
    try:
        from opentelemetry import context

        inside = context.set_value("suppress_instrumentation", True)
        context.attach(context.set_value("suppress_http_instrumentation", True, inside))
    except Exception:
        count_error("internal_error")
