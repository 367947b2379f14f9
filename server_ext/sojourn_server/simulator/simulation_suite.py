"""Runs simulations in parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

from .fresh_processes import in_fresh_processes, report
from .report.run_metrics import summarize_run
from .report.run_row import RunRow
from .run_log import RunLog
from .simulation_run import RunSpec, run_simulation


@dataclass(slots=True)
class SuiteResult:
    """Metrics and logs of a suite, in the order of its specifications."""

    rows: list[RunRow]
    logs: list[RunLog]
    missing_runs: int = 0
    """Number of runs that an interrupt left out."""


def _run_in_process(spec: RunSpec) -> RunLog:
    return run_simulation(spec, report)


def run_suite(
    specs: Sequence[RunSpec],
    *,
    processes: int | None = None,
    since_s: float = 0.0,
    on_progress: Callable[[int, float, int], None] = lambda number, now, finished: None,
    on_done: Callable[[int], None] = lambda number: None,
) -> SuiteResult:
    """Run ``specs``, up to ``processes`` at a time. Equal ones are run once; callbacks get the index of a run
    in ``dict.fromkeys(specs)``. ``on_progress`` gets the virtual seconds so far and the number of finished
    programs too. Metrics leave out the first ``since_s`` virtual seconds. After Ctrl-C, the result has the
    finished runs.

    Raises the errors of ``run_simulation`` and ``summarize_run``, and ``BrokenProcessPool`` if a process
    dies. Any error ends the other runs.
    """
    done: dict[RunSpec, tuple[RunRow, RunLog]] = {}
    planned = list(dict.fromkeys(specs))
    ends = in_fresh_processes(_run_in_process, planned, processes, on_progress)
    with suppress(KeyboardInterrupt), closing(ends):
        for number, log in ends:
            done[planned[number]] = (summarize_run(log, since_s=since_s), log)
            on_done(number)
    finished = [done[spec] for spec in specs if spec in done]
    return SuiteResult([row for row, _ in finished], [log for _, log in finished], len(specs) - len(finished))
