"""Counters of the SDK's work and of its failures, by name.

- events: ``events_queued``, ``events_sent`` (in a batch), ``events_piggybacked`` (carried by a request),
  ``events_returned`` (put back after a failed request), ``outcome_X`` (server's outcome X),
  ``fields_unsupported`` (event fields that the server's policy does not use), ``answer_unreadable``;
- lost events: ``dropped_full`` (queue full), ``dropped_send`` (failed batch), ``dropped_unsupported`` (the
  server does not accept them), ``dropped_closed`` (after the end), ``encode_error``;
- failed batches: ``http_NNN`` (status NNN), ``net_X`` (exception X);
- requests: ``requests_started``, then ``requests_ended``, ``requests_failed``, ``requests_cancelled``,
  ``requests_closed_early`` or ``requests_abandoned``; ``request_attempts``; ``ttft_count`` and
  ``ttft_ms_sum`` (time to first token);
- resume files: ``resume_busy`` (another run holds the file), ``resume_failed`` (file unusable);
- failures of the SDK, its user or a framework: ``internal_error``, ``listener_error``, ``resolver_error``,
  ``inject_error`` (nothing added to a request), ``attach_error`` (a framework not patched), ``hint_invalid``,
  ``context_reset_failed``, ``thread_start_failed``;
- export of spans: ``otel_outcomes_failed`` (no answer of the server), ``otel_outcomes_skipped``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from threading import get_ident


class Counters:
    """Counts, kept separately for each thread. So ``add`` needs no lock.

    A lock here could deadlock with the event sender's lock. Ending a program would need both locks, and
    garbage collection may end a program at any moment, even while a thread holds one of them.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Set all counts to zero, in a forked child."""
        self.of_thread: defaultdict[int, defaultdict[str, int]] = defaultdict(partial(defaultdict, int))
        """Counts by thread. Code that runs in each turn adds to ``of_thread[get_ident()]`` itself, which
        saves the call of a Python function."""

    def add(self, name: str, n: int = 1) -> None:
        """Add ``n`` to the count ``name``. Never waits."""
        self.of_thread[get_ident()][name] += n

    def __getitem__(self, name: str) -> int:
        return sum(counts.get(name, 0) for counts in self.of_thread.copy().values())

    def snapshot(self) -> Counter[str]:
        """Return all counts, summed over the threads."""
        total: Counter[str] = Counter()
        for counts in self.of_thread.copy().values():
            total.update(counts.copy())
        return total


class Stats(Counter[str]):
    """A snapshot of all counts, as a ``collections.Counter``, and of the session's state."""

    url: str | None = None
    """URL of the server, without user name and password; ``None`` if none was named."""
    disabled: bool = False
    """True if ``SOJOURN_DISABLED`` is set."""
    dialect: str | None = None
    """Name of the dialect in use; ``None`` if the session is offline."""
    dialect_known: bool = False
    """True if the dialect was given or detected, False if it is assumed."""
    instrumented: tuple[str, ...] = ()
    """Frameworks that are patched now."""
    events_pending: int = 0
    """Number of events not yet sent."""

    def __repr__(self) -> str:
        state = {name: getattr(self, name) for name in ("url", "dialect", "dialect_known", "instrumented")}
        text = ", ".join(f"{name}={value!r}" for name, value in state.items())
        return f"Stats({dict(self)!r}, {text})"
