"""Progress display of a demo arm: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .demo_tasks import DemoTask

PLAIN_INTERVAL_S = 15.0
"""Seconds between two lines of progress if the console is not a terminal."""

_STATE_STYLES = {
    "waiting": "dim",
    "thinking": "cyan",
    "tool": "yellow",
    "done": "green",
    "failed": "bold red",
}


@dataclass(slots=True)
class _AgentRow:
    task: str
    turns: int
    turn: int = 0
    state: str = "waiting"
    text: str = ""
    since_s: float = field(default_factory=time.monotonic)


class LiveView:
    """Context manager that displays the progress of one arm. The programs' threads call ``update``."""

    def __init__(self, arm: str, tasks: Sequence[DemoTask], console: Console) -> None:
        self._arm = arm
        self._console = console
        self._rows = [_AgentRow(task.name, len(task.turns)) for task in tasks]
        self._first_s: float | None = None
        self._last_s = 0.0
        self._said_s = time.monotonic()
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._closed = False

    def __enter__(self) -> LiveView:
        self._said_s = time.monotonic()
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self.render, console=self._console, refresh_per_second=4, transient=True
            )
            self._live.__enter__()
        else:
            self._say(f"{len(self._rows)} programs start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True  # programs of an interrupted arm go on in their threads
        if self._live is not None:
            self._live.__exit__(kind, error, trace)
        self._say(self._totals())

    def update(self, index: int, state: str, turn: int, text: str) -> None:
        """Set the state of program ``index``: ``thinking``, ``tool``, ``done`` or ``failed``. ``turn`` counts
        from 1. ``text``: the turn's thought, its command, or how the program ended."""
        if self._closed:
            return
        with self._lock:
            row, now_s = self._rows[index], time.monotonic()
            row.state, row.turn, row.text, row.since_s = state, turn, " ".join(text.split()), now_s
            self._first_s, self._last_s = self._first_s or now_s, now_s
            plain = self._live is None
            due = now_s - self._said_s >= PLAIN_INTERVAL_S
        if plain and state in ("done", "failed"):
            self._say(f"{row.task}: {text}, turn {turn}")
        elif plain and due:
            self._said_s = time.monotonic()
            self._say(self._totals())

    def render(self) -> Group:
        """Return the table of all programs in their current state."""
        now_s = time.monotonic()
        made = Table(box=None, pad_edge=False)
        for header in ("program", "turn", "", "s", ""):
            made.add_column(header, no_wrap=True, justify="right" if header in ("turn", "s") else "left")
        with self._lock:
            for row in self._rows:
                seconds = "" if row.state in ("waiting", "done", "failed") else f"{now_s - row.since_s:.0f}"
                look = _STATE_STYLES[row.state]
                made.add_row(
                    row.task,
                    f"{row.turn}/{row.turns}",
                    Text(row.state, style=look),
                    seconds,
                    Text(row.text[:60]),
                )
        return Group(Text(f"arm {self._arm}: {self._totals()}", style="bold"), made)

    def _totals(self) -> str:
        """Return the elapsed seconds and the numbers of turns and programs by state, as text.

        The seconds run from the first program's start to the last program's end, as in the report. They leave
        out the copying and testing of repositories.
        """
        states = [row.state for row in self._rows]
        done = sum(row.turn - (row.state == "thinking") for row in self._rows)
        ended = states.count("done") + states.count("failed")
        thinking, tools = states.count("thinking"), states.count("tool")
        until_s = self._last_s if ended == len(states) else time.monotonic()
        elapsed_s = until_s - (self._first_s or until_s)
        return (
            f"{elapsed_s:.0f} s, {done}/{sum(row.turns for row in self._rows)} turns, "
            f"{thinking} thinking, {tools} in tools, {ended}/{len(states)} ended"
        )

    def _say(self, text: str) -> None:
        self._console.print(f"{self._arm}: {text}", highlight=False, soft_wrap=True, markup=False)
