"""Progress while engines start, which takes minutes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

REPEAT_INTERVAL_S = 15.0
"""Seconds without a change after which the progress is repeated."""
STATUS_POLL_S = 1.0
MAX_SHOWN_CHARS = 200
"""Longest part of an error that is shown."""


@dataclass(frozen=True, slots=True)
class RunningReplicas:
    """Number of running replicas, by kind."""

    engines: int
    gateways: int
    trouble: str = ""
    """Serve's message about replicas that failed to start, with many lines; empty: none."""


class StartupProgress:
    """One line per change, and one after 15 s without a change."""

    def __init__(self, engines: int, gateways: int, began_s: float) -> None:
        """The expected number of each kind."""
        self._engines, self._gateways = engines, gateways
        self._began_s = self._said_s = began_s
        self._before = RunningReplicas(0, 0)

    def line(self, up: RunningReplicas, now_s: float) -> str | None:
        """The next line; ``None``: nothing to report yet."""
        if up == self._before and now_s - self._said_s < REPEAT_INTERVAL_S:
            return None
        self._before, self._said_s = up, now_s
        line = (
            f"{up.engines} of {self._engines} engines and {up.gateways} of {self._gateways} gateways are up "
            f"after {now_s - self._began_s:.0f} s"
        )
        return f"{line}; {summarize_error(up.trouble)}" if up.trouble else line


def summarize_error(trouble: str) -> str:
    """One line from Serve's message about failed replicas: its action, and the end of the error."""
    lines = [line.strip() for line in trouble.splitlines() if line.strip()]
    if not lines:
        return ""
    first = lines[0].removesuffix("Error:").strip()
    shown = [first] if len(lines) == 1 else [first, lines[-1]]
    return " ".join(
        part if len(part) <= MAX_SHOWN_CHARS else f"{part[: MAX_SHOWN_CHARS - 3]}..." for part in shown
    )


@contextlib.contextmanager
def report_progress(
    lines: StartupProgress,
    look: Callable[[], RunningReplicas],
    say: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    look_s: float = STATUS_POLL_S,
) -> Iterator[None]:
    """Reports progress in a thread until the context ends: Ray waits silently in the caller's.

    If ``look`` raises, the last line is repeated at the usual interval.
    """
    over = threading.Event()
    last = RunningReplicas(0, 0)

    def run() -> None:
        nonlocal last
        while not over.wait(look_s):
            silent = ""
            try:
                last = look()
            except Exception:
                # The application is not ready, ends, or lost its controller: no reason to fail the start.
                silent = "; Ray does not answer"
            line = lines.line(last, clock())
            if line is not None and not over.is_set():
                say(line + silent)

    thread = threading.Thread(target=run, name="start-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(STATUS_POLL_S)
