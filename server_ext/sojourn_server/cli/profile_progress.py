"""Progress of ``sojourn profile`` on stderr: a bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from .console import console, print_line

if TYPE_CHECKING:
    from types import TracebackType

LINE_EVERY_S = 10.0
"""Seconds between two lines of progress if stderr is not a terminal."""


class ProfileProgress:
    """Context manager that displays the progress of a measurement; ``show`` displays the next step.
    ``clock`` returns monotonic seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._clock = clock
        self._started = clock()
        self._total_shown = False
        self._last_line_s = -LINE_EVERY_S
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False),
        )
        self._progress = Progress(*columns, console=console, transient=True)
        self._bar = self._progress.add_task("prefill", total=None, left="")

    def __enter__(self) -> ProfileProgress:
        if console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if console.is_terminal:
            self._progress.stop()

    def show(self, what: str, left_s: float | None) -> None:
        """Show that the step ``what`` begins. ``left_s``: expected seconds until the measurement ends;
        ``None`` if unknown."""
        passed_s = self._clock() - self._started
        left = "" if left_s is None else f"about {duration_text(left_s)} left"
        if left_s is not None and not self._total_shown:
            self._total_shown = True
            print_line(f"about {duration_text(passed_s + left_s)} in all")
        if console.is_terminal:
            whole_s = None if left_s is None else max(passed_s + left_s, 1e-9)
            self._progress.update(
                self._bar, description=what, total=whole_s, completed=passed_s if whole_s else 0, left=left
            )
        elif passed_s - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = passed_s
            print_line(f"{what}, {left}" if left else what)


def duration_text(seconds: float) -> str:
    """Return an estimated duration as text: whole seconds below 100 s, else whole minutes."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min"
