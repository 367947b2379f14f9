"""Progress of many simulations on stderr: bars in a terminal, one per running simulation and one for all.
Elsewhere, an occasional line is printed."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .console import console

if TYPE_CHECKING:
    from sojourn_server.simulator.run_cache import RunCache
    from sojourn_server.simulator.simulation_run import RunSpec
    from sojourn_server.simulator.simulation_suite import SuiteResult

LINE_INTERVAL_S = 15.0
"""Seconds between two lines of progress outside a terminal."""


def run_with_progress(
    specs: Sequence[RunSpec],
    *,
    processes: int | None = None,
    since_s: float = 0.0,
    cache: RunCache | None = None,
    name: Callable[[RunSpec], str] = lambda spec: spec.label,
) -> SuiteResult:
    """Call ``simulation_suite.run_suite`` with these arguments, show its progress meanwhile, and return its
    result. ``name`` returns the label of a run. SIGTERM, which ``timeout`` and supervisors send, interrupts
    the runs as Ctrl-C does. Raises the errors of ``run_suite``."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from sojourn_server.simulator.simulation_suite import planned_runs, run_suite

    planned = planned_runs(specs)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f}% {task.fields[finished]:>4} finished"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with _sigterm_interrupts(), bar as progress:
        whole = progress.add_task("all runs", total=len(planned), finished=0)
        bars: dict[int, Any] = {}
        parts: dict[int, float] = {}
        last_line_s = time.monotonic()

        def line() -> None:
            nonlocal last_line_s
            if console.is_terminal or time.monotonic() < last_line_s + LINE_INTERVAL_S:
                return
            last_line_s = time.monotonic()
            ended = sum(part == 1.0 for part in parts.values())
            percent = 100 * sum(parts.values()) / len(planned)
            console.print(f"{ended} of {len(planned)} runs finished, {percent:.0f}%", highlight=False)

        def begin(number: int, spec: RunSpec) -> None:
            bars[number] = progress.add_task(name(spec), total=1.0, finished=0)

        def move(number: int, now: float, finished: int) -> None:
            spec = planned[number]
            part = now / spec.until_s if spec.until_s is not None else finished / spec.programs
            parts[number] = min(1.0, part)
            progress.update(bars[number], completed=parts[number], finished=finished)
            progress.update(whole, completed=sum(parts.values()))
            line()

        def end(number: int) -> None:
            parts[number] = 1.0
            progress.update(bars[number], completed=1.0, visible=False)
            done = sum(part == 1.0 for part in parts.values())
            progress.update(whole, completed=sum(parts.values()), finished=done)
            line()

        return run_suite(
            specs,
            processes=processes,
            since_s=since_s,
            cache=cache,
            name=name,
            on_start=begin,
            on_progress=move,
            on_done=end,
        )


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Context in which SIGTERM raises ``KeyboardInterrupt`` in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
