"""Counts of what the SDK did and what it had to leave undone.

Names: ``events_queued``, ``events_sent``, ``events_piggybacked``, ``dropped_full``,
``dropped_send``, ``dropped_unsupported``, ``http_NNN`` and ``net_X`` (failed batches),
``outcome_X`` (the server's answers), ``encode_error``, ``internal_error``, ``inject_error``,
``resolver_error``, ``context_reset_failed``, ``hint_invalid``, ``requests_started``,
``requests_ended``, ``requests_failed``, ``requests_cancelled``, ``requests_closed_early``,
``requests_abandoned``, ``request_attempts``, ``ttft_count`` and ``ttft_ms_sum``.
"""

from __future__ import annotations

import threading
from collections import Counter


class Counters:
    """Thread-safe counts. ``add`` never raises and never waits on I/O."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        # Re-entrant: a garbage collection inside add() may close a generator whose end is counted here too.
        self._lock = threading.RLock()

    def add(self, name: str, n: int = 1) -> None:
        """Count ``n`` more of ``name``."""
        with self._lock:
            self._counts[name] += n

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def snapshot(self) -> Counter[str]:
        """A copy of all counts."""
        with self._lock:
            return Counter(self._counts)

    def after_fork(self) -> None:
        """Start again in a forked child: the lock may be held by a thread that is not there."""
        self._lock = threading.RLock()
        self._counts = Counter()


class Stats(Counter[str]):
    """A snapshot: a ``collections.Counter`` of all counts, and the state they belong to."""

    url: str | None = None
    """The server named by ``init()``."""
    disabled: bool = False
    """``SOJOURN_DISABLED`` is set."""
    dialect: str | None = None
    """What the server is spoken to in; ``None`` before ``init()``."""
    dialect_known: bool = False
    """The dialect was given or answered by the server, not assumed."""
    instrumented: tuple[str, ...] = ()
    """Frameworks that are patched now."""
    events_pending: int = 0
    """Events not yet sent."""
