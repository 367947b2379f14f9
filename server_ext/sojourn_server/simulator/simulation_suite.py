"""Runs simulations in parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from functools import partial

from .fresh_processes import fresh_processes, report
from .report.run_metrics import summarize_run
from .report.run_row import RunRow
from .run_log import RunLog
from .simulation_run import RunSpec, run_simulation


@dataclass(slots=True)
class SuiteResult:
    """Metrics and logs of a suite, in the order of its specifications."""

    rows: list[RunRow] = field(default_factory=list)
    logs: list[RunLog] = field(default_factory=list)
    missing_runs: int = 0
    """Number of runs that an interrupt left out."""


class SuiteInterrupted(KeyboardInterrupt):
    """The user interrupted a suite; ``result`` has its finished runs."""

    def __init__(self, result: SuiteResult) -> None:
        super().__init__()
        self.result = result


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
    in ``dict.fromkeys(specs)``. ``on_progress``, which another thread calls, gets the virtual seconds so far
    and the number of finished programs too. Metrics leave out the first ``since_s`` virtual seconds.

    Raises the errors of ``run_simulation`` and ``summarize_run``, ``BrokenProcessPool`` if a process dies,
    and ``SuiteInterrupted`` on Ctrl-C. Any error ends the other runs.
    """
    done: dict[RunSpec, tuple[RunRow, RunLog]] = {}
    try:
        with fresh_processes(processes) as submit:
            runs = {
                submit(partial(on_progress, number), _run_in_process, spec): (number, spec)
                for number, spec in enumerate(dict.fromkeys(specs))
            }
            for ended in as_completed(runs):
                number, spec = runs[ended]
                log = ended.result()
                done[spec] = (summarize_run(log, since_s=since_s), log)
                on_done(number)
    except KeyboardInterrupt:
        raise SuiteInterrupted(_result(specs, done)) from None
    return _result(specs, done)


def _result(specs: Sequence[RunSpec], done: dict[RunSpec, tuple[RunRow, RunLog]]) -> SuiteResult:
    finished = [done[spec] for spec in specs if spec in done]
    return SuiteResult([row for row, _ in finished], [log for _, log in finished], len(specs) - len(finished))
