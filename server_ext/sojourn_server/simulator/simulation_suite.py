"""Runs simulations in parallel, and sweeps of one of their numbers.

Each run has its own process, so modules that one policy loads, such as a KV connector, do not affect other
policies.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from multiprocessing import forkserver, resource_tracker
from typing import Any, NamedTuple

from sojourn_server.policies.toml_document import did_you_mean

from .report.run_metrics import summarize_run
from .report.run_row import RunRow
from .report.sweep_results import SweepRuns, SweepValue
from .run_log import RunLog
from .simulation_run import DISK_POLICIES_HINT, RunSpec, chosen_policy, device_for_run, run_simulation

PRELOAD_MODULES = (
    "sojourn_server.simulator.quiet_vllm_logging",
    "sojourn_server.simulator.simulated_engine",
    "sojourn_server.simulator.simulation",
)
"""Modules that import vLLM and torch, which is slow. Processes fork from a server that has imported only
these. Sojourn's adapter is not among them, because runs of ``stock`` must not load it."""

OnProgress = Callable[[int, float, int], None]
"""Callback for progress: gets (index of the run, virtual seconds so far, number of finished programs)."""
_REPORT_INTERVAL_S = 0.2


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


def worker_pool(processes: int | None = None, reports: Any = None) -> ProcessPoolExecutor:
    """A pool of ``processes`` workers (default: one per core) in which each task has a fresh process.
    ``reports`` is the queue for ``OnProgress``."""
    context: Any = _context()
    return ProcessPoolExecutor(
        processes or os.cpu_count() or 1, context, _begin_worker, (reports,), max_tasks_per_child=1
    )


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Context that handles SIGINT and SIGTERM at its end: an interrupted start would leave a process behind.
    Workers never get the terminal's SIGINT, because they inherit the mask of the process that forks them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    before = {
        number: signal.signal(number, lambda got, frame: pending.append(got))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    resource_tracker.ensure_running()  # it would clear the mask if it started later
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        if _context().get_start_method() == "forkserver":
            forkserver.ensure_running()
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
        if pending:
            signal.raise_signal(pending[0])


def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD_MODULES))
    return context


_reports: Any = None
"""In a worker: the queue of its pool."""


def _begin_worker(reports: Any) -> None:
    global _reports
    _reports = reports
    import_module(PRELOAD_MODULES[0])  # needed where processes are not forked


def _run_in_worker(number: int, spec: RunSpec) -> RunLog:
    return run_simulation(spec, lambda now, finished: _reports.put((number, now, finished)))


def run_suite(
    specs: Sequence[RunSpec],
    *,
    processes: int | None = None,
    since_s: float = 0.0,
    on_progress: OnProgress = lambda number, now, finished: None,
    on_done: Callable[[int], None] = lambda number: None,
) -> SuiteResult:
    """Run ``specs``, up to ``processes`` at a time. Equal ones are run once; callbacks get the index of a run
    in ``dict.fromkeys(specs)``. Metrics leave out the first ``since_s`` virtual seconds of each run.

    Raises the errors of ``run_simulation``, ``BrokenProcessPool`` if a process dies, and ``SuiteInterrupted``
    on Ctrl-C. Any error ends the other runs.
    """
    planned = list(dict.fromkeys(specs))
    logs: dict[RunSpec, RunLog] = {}
    reports = _context().SimpleQueue()
    others = set(multiprocessing.active_children())
    pool = worker_pool(processes, reports)
    try:
        with _signals_deferred():
            numbers: dict[Future[RunLog], int] = {
                pool.submit(_run_in_worker, number, spec): number for number, spec in enumerate(planned)
            }
        waiting = set(numbers)
        while waiting:
            done, waiting = wait(waiting, _REPORT_INTERVAL_S, FIRST_COMPLETED)
            while not reports.empty():
                on_progress(*reports.get())
            for ended in sorted(done, key=numbers.__getitem__):
                logs[planned[numbers[ended]]] = ended.result()
                on_done(numbers[ended])
        pool.shutdown()
        return _result(specs, logs, since_s)
    except KeyboardInterrupt:
        raise SuiteInterrupted(_result(specs, logs, since_s)) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()


def _result(specs: Sequence[RunSpec], logs: dict[RunSpec, RunLog], since_s: float) -> SuiteResult:
    finished = [spec for spec in specs if spec in logs]
    rows = {spec: summarize_run(log, since_s=since_s) for spec, log in logs.items()}
    return SuiteResult(
        [rows[spec] for spec in finished], [logs[spec] for spec in finished], len(specs) - len(finished)
    )


# -- sweeps --------------------------------------------------------------------------------------


class SweepError(ValueError):
    """Invalid sweep; the message says what is wrong and what is expected."""


class SweepParameter(NamedTuple):
    """A field of ``RunSpec`` that can be swept."""

    name: str
    meaning: str
    """Axis label, with unit."""
    whole: bool = False
    """Whether only integers are allowed."""
    zero: bool = False
    """Whether 0 is allowed."""
    needs: str = ""
    """What a policy needs for the field to have an effect on it; empty: nothing."""


HOST_MEMORY = SweepParameter(
    "cpu_ratio", "host memory for KV, as a multiple of the device's", zero=True,
    needs="host memory, such as lru-offload or continuum+host",
)  # fmt: skip
DISK = SweepParameter(
    "disk_ratio", "disk for KV, as a multiple of the device's memory", zero=True,
    needs=DISK_POLICIES_HINT,
)  # fmt: skip
SWEEP_PARAMETERS = {
    field.name: field
    for field in (
        HOST_MEMORY,
        DISK,
        SweepParameter("pool_tokens", "KV tokens on the device", whole=True),
        SweepParameter("programs", "programs at once, or arrivals in all", whole=True),
        SweepParameter("rate_per_s", "programs arriving a second"),
        SweepParameter("tp", "tensor parallel devices", whole=True),
        SweepParameter("replicas", "replicas behind a gateway", whole=True),
    )
}
"""Fields that can be swept, by name. A larger value means more hardware or more load."""


@dataclass(frozen=True, slots=True)
class ParameterSweep:
    """A field of ``RunSpec``, and the values that it takes, in the given order."""

    field: SweepParameter
    values: tuple[float, ...]

    def specs(self, specs: Sequence[RunSpec]) -> list[RunSpec]:
        """All of ``specs`` with the first value, then all of them with the second, and so on.

        If a policy does not use the field, the field is 0 in all its specifications: they are equal, and
        ``run_suite`` runs one of them. Raises ``SweepError`` if no policy uses it, and ``PolicyError``.
        """
        if not any(self._affects(spec) for spec in specs):
            named = ", ".join(spec.policy for spec in specs)
            raise SweepError(
                f"--sweep {self.field.name} changes nothing for {named}; "
                f"expected a policy with {self.field.needs}"
            )
        changes: list[dict[str, Any]] = [{self.field.name: value} for value in self.values]
        unused: dict[str, Any] = {self.field.name: 0.0}
        return [
            replace(spec, **(change if self._affects(spec) else unused))
            for change in changes
            for spec in specs
        ]

    def group_rows(self, specs: Sequence[RunSpec], rows: Sequence[RunRow]) -> SweepRuns:
        """Assign the results of the specifications that ``specs`` returned to the values."""
        policies = len(rows) // len(self.values)
        token_bytes = device_for_run(specs[0])[1].kv_bytes_per_token
        values = []
        for number, value in enumerate(self.values):
            runs = range(number * policies, (number + 1) * policies)
            tokens = size = None
            if self.field is HOST_MEMORY:
                # Bounds have host memory of their own, and some policies have none.
                own = [rows[place] for place in runs if not rows[place].limit]
                tokens = max((row.host_blocks * row.block_size for row in own), default=0)
                size = tokens * token_bytes if token_bytes else None
            values.append(SweepValue(value=value, runs=tuple(runs), host_tokens=tokens, host_bytes=size))
        return SweepRuns(field=self.field.name, meaning=self.field.meaning, values=tuple(values))

    def _affects(self, spec: RunSpec) -> bool:
        if self.field == HOST_MEMORY:
            return chosen_policy(spec).engine.uses_cpu_ratio
        return self.field != DISK or chosen_policy(spec).engine.own_tiers


def read_sweep(text: str) -> ParameterSweep:
    """Parse ``NAME=V1,V2,…``. Raises ``SweepError`` naming the invalid part."""
    name, _, listed = text.partition("=")
    field = SWEEP_PARAMETERS.get(name.strip())
    if field is None:
        hint = did_you_mean(name, SWEEP_PARAMETERS)
        raise SweepError(
            f"--sweep {text}: cannot sweep {name!r}; expected one of {', '.join(SWEEP_PARAMETERS)}{hint}"
        )
    values: list[float] = []
    for part in listed.split(","):
        try:
            value = int(part) if field.whole else float(part)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf or (value == 0 and not field.zero) or value in values:
            number = "a whole number" if field.whole else "a finite number"
            expected = f"{number} of 0 or more" if field.zero else f"{number} above 0"
            raise SweepError(f"--sweep {text}: {part.strip()!r} is not {expected}, each once")
        values.append(abs(value))  # abs() turns -0 into 0
    return ParameterSweep(field, tuple(values))
