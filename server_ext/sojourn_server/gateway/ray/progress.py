"""While engines start, which takes minutes: what is up of what is wanted."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

EVERY_S = 15.0
"""Seconds without a change after which it is said again."""
LOOK_S = 1.0
MOST_SHOWN = 200
"""Characters of what somebody said."""


@dataclass(frozen=True, slots=True)
class Up:
    """How many replicas of each kind serve."""

    engines: int
    gateways: int
    trouble: str = ""
    """What was said of those that did not start, of many lines; empty: all goes well."""


class StartLines:
    """A line for each change, and one after 15 s without."""

    def __init__(self, engines: int, gateways: int, began_s: float) -> None:
        """How many of each are wanted."""
        self._engines, self._gateways = engines, gateways
        self._began_s = self._said_s = began_s
        self._before = Up(0, 0)

    def line(self, up: Up, now_s: float) -> str | None:
        """What to say; ``None``: nothing yet."""
        if up == self._before and now_s - self._said_s < EVERY_S:
            return None
        self._before, self._said_s = up, now_s
        line = (
            f"{up.engines} of {self._engines} engines and {up.gateways} of {self._gateways} gateways are up "
            f"after {now_s - self._began_s:.0f} s"
        )
        return f"{line}; {gist(up.trouble)}" if up.trouble else line


def gist(trouble: str) -> str:
    """One line of what Serve says of replicas that failed: what it does, and the last word of the error."""
    lines = [line.strip() for line in trouble.splitlines() if line.strip()]
    if not lines:
        return ""
    first = lines[0].removesuffix("Error:").strip()
    shown = [first] if len(lines) == 1 else [first, lines[-1]]
    return " ".join(part if len(part) <= MOST_SHOWN else f"{part[: MOST_SHOWN - 3]}..." for part in shown)


@contextlib.contextmanager
def told(
    lines: StartLines,
    look: Callable[[], Up],
    say: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    look_s: float = LOOK_S,
) -> Iterator[None]:
    """Says lines from a thread of its own until it is left: Ray waits without a word in the caller's.

    ``look`` may raise: then what it said last is said again, after as long as without a change.
    """
    over = threading.Event()
    last = Up(0, 0)

    def run() -> None:
        nonlocal last
        while not over.wait(look_s):
            silent = ""
            try:
                last = look()
            except Exception:
                # It is not quite there yet, is ending, or has lost its controller: no reason to fail a start.
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
        thread.join(LOOK_S)
