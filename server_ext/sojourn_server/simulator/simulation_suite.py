"""Runs many simulations in parallel and collects their metrics.

Each run has its own process, so modules that one policy loads, such as a KV connector, do not affect other
policies.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module

import msgspec

from .limits.belady import compare_eviction_orders, competitive_ratio
from .limits.block_accesses import AccessLog
from .limits.eviction_replay import EvictionReplayResult
from .limits.replay_eviction_orders import OPTIMAL_ORDER
from .process_pool import ReportCallback, run_in_processes
from .report.run_metrics import bound_row, summarize_run
from .report.run_row import RunRow
from .run_cache import RunCache, RunOutcome
from .run_log import RunLog
from .simulation_run import RunSpec, engine_policy, run_simulation
from .simulator_policies import Bound

OnProgress = Callable[[int, float, int], None]
"""Callback for progress: gets (index of the run, virtual seconds so far, number of finished programs)."""


@dataclass(slots=True)
class SuiteResult:
    """Metrics and logs of a suite."""

    rows: list[RunRow] = field(default_factory=list)
    """One row for each specification, in their order."""
    logs: list[RunLog] = field(default_factory=list)
    """Logs of the rows that were simulated, in the order of the rows."""
    orders: list[dict[str, int]] = field(default_factory=list)
    """One dict for each row: name of an eviction order → tokens that it recomputes. Each order is replayed on
    the block accesses of the ``stock`` run with the same load. The dict is empty if that run recorded no
    accesses."""
    missing_runs: int = 0
    """Number of runs that an interrupt left out."""


class SuiteInterrupted(KeyboardInterrupt):
    """The user interrupted a suite. The results of its finished runs are available."""

    def __init__(self, specs: Sequence[RunSpec], outcomes: dict[RunSpec, RunOutcome], since_s: float) -> None:
        super().__init__()
        self.finished = [spec for spec in specs if _outcome_of(spec, outcomes) is not None]
        """Specifications whose runs had finished, in their order."""
        self._wanted = len(specs)
        self._outcomes = outcomes
        self._since_s = since_s

    def result(self, specs: Sequence[RunSpec]) -> SuiteResult:
        """Return the result of ``specs``, which must all be in ``finished``."""
        result = _rows(specs, self._outcomes, self._since_s)
        result.missing_runs = self._wanted - len(specs)
        return result


PRELOAD_MODULES = (
    "sojourn_server.simulator.quiet_vllm_logging",
    "sojourn_server.simulator.simulated_engine",
    "sojourn_server.simulator.simulation",
)
"""Modules that import vLLM and torch, which is slow. Sojourn's adapter is not among them, because runs of
``stock`` must not load it."""


def planned_runs(specs: Sequence[RunSpec]) -> list[RunSpec]:
    """Return the runs that ``specs`` need, each once. ``belady`` has no run of its own: it needs a ``stock``
    run that records its accesses. Raises ``PolicyError``."""
    planned: dict[RunSpec, None] = {}
    recorded = set()
    for spec in specs:
        if engine_policy(spec).bound is Bound.BELADY:
            recorded.add(replace(spec, policy="stock"))
    for spec in specs:
        policy = engine_policy(spec)
        stock = replace(spec, policy="stock")
        if policy.bound is Bound.BELADY or (policy.name == "stock" and stock in recorded):
            spec = replace(stock, record_accesses=True)
        planned.setdefault(spec)
    return list(planned)


def run_suite(
    specs: Sequence[RunSpec],
    *,
    processes: int | None = None,
    since_s: float = 0.0,
    cache: RunCache | None = None,
    name: Callable[[RunSpec], str] = lambda spec: spec.label,
    on_start: Callable[[int, RunSpec], None] = lambda number, spec: None,
    on_progress: OnProgress = lambda number, now, finished: None,
    on_done: Callable[[int], None] = lambda number: None,
) -> SuiteResult:
    """Run ``planned_runs(specs)``, up to ``processes`` at a time (default: one per core).

    Callbacks get the index of a run in ``planned_runs(specs)``. Metrics leave out the first ``since_s``
    virtual seconds of each run. Runs found in the ``cache`` are not repeated; new runs are stored in it.
    ``name`` returns the name of a run for errors. Raises the errors of ``run_simulation``,
    ``WorkerDiedError`` if a process dies, and ``SuiteInterrupted`` on Ctrl-C. Any error aborts the other
    runs.
    """
    planned = planned_runs(specs)
    outcomes: dict[RunSpec, RunOutcome] = {}
    for number, spec in enumerate(planned):
        outcome = cache.get(spec) if cache is not None else None
        if outcome is not None:
            outcomes[spec] = outcome
            on_start(number, spec)
            on_done(number)
    numbers = [number for number, spec in enumerate(planned) if spec not in outcomes]

    def end(place: int, answer: bytes) -> None:
        spec = planned[numbers[place]]
        outcome = outcomes[spec] = msgspec.msgpack.decode(answer, type=RunOutcome)
        if cache is not None:
            cache.put(spec, outcome)
        on_done(numbers[place])

    try:
        run_in_processes(
            _run_in_process,
            [planned[number] for number in numbers],
            processes or os.cpu_count() or 1,
            name=name,
            on_start=lambda place, spec: on_start(numbers[place], spec),
            on_report=lambda place, what: on_progress(numbers[place], *what),
            on_done=end,
            preload=PRELOAD_MODULES,
        )
        return _rows(specs, outcomes, since_s)
    except KeyboardInterrupt:
        raise SuiteInterrupted(specs, outcomes, since_s) from None


def _run_in_process(spec: RunSpec, report: ReportCallback) -> bytes:
    """Run ``spec``. Returns the ``RunOutcome`` as msgpack."""
    import_module(PRELOAD_MODULES[0])  # needed where processes are not forked
    log, accesses = run_simulation(spec, lambda now, finished: report((now, finished)))
    return msgspec.msgpack.encode(_run_outcome(log, accesses))


def _run_outcome(log: RunLog, accesses: AccessLog | None) -> RunOutcome:
    """Return the outcome of a run. Recorded accesses are also replayed with the offline optimum. Those of
    ``stock`` are replayed with all eviction orders."""
    if accesses is None:
        return RunOutcome(log=log)
    # Other orders are compared on the accesses of ``stock`` only.
    orders = compare_eviction_orders(accesses, None if log.policy == "stock" else ())
    turns = {turn.request_id: turn for program in log.programs for turn in program.turns}
    # Tokens loaded from host memory are not recomputed, and the optimum has no host memory.
    if not log.host_blocks:
        for request, tokens in zip(
            accesses.requests, orders[OPTIMAL_ORDER].regenerated_by_request, strict=True
        ):
            turns[request].optimum_tokens = tokens
    for order in orders.values():
        order.hit_blocks = []
    return RunOutcome(
        log=log, orders=orders, sent_s=[turns[request].submitted_s for request in accesses.requests]
    )


def _outcome_of(spec: RunSpec, outcomes: dict[RunSpec, RunOutcome]) -> RunOutcome | None:
    """Return the outcome of the run that ``spec`` needs; ``None`` if that run has not finished."""
    policy = engine_policy(spec)
    recorded = outcomes.get(replace(spec, policy="stock", record_accesses=True))
    if policy.bound is Bound.BELADY or (policy.name == "stock" and recorded is not None):
        return recorded
    return outcomes.get(spec)


def _rows(specs: Sequence[RunSpec], outcomes: dict[RunSpec, RunOutcome], since_s: float) -> SuiteResult:
    result = SuiteResult()
    for spec in specs:
        policy = engine_policy(spec)
        outcome = _outcome_of(spec, outcomes)
        assert outcome is not None
        recorded = outcomes.get(replace(spec, policy="stock", record_accesses=True))
        lost: dict[str, int] = {}
        if recorded is not None:
            lost = {
                name: order.regenerated_since(recorded.sent_s, since_s)
                for name, order in recorded.orders.items()
            }
        result.orders.append(lost)
        if policy.bound is Bound.BELADY:
            result.rows.append(
                bound_row(
                    summarize_run(outcome.log, since_s=since_s),
                    policy.name,
                    regenerated_tokens=lost[Bound.BELADY.value],
                    regenerated_over_belady=1.0,
                    notes=_eviction_order_notes(outcome.orders, lost),
                )
            )
            continue
        order = policy.eviction_order
        ratio = competitive_ratio(lost[order], lost[Bound.BELADY.value]) if order and order in lost else None
        result.logs.append(outcome.log)
        result.rows.append(
            summarize_run(
                outcome.log,
                since_s=since_s,
                regenerated_over_belady=ratio,
                limit=policy.bound is not None,
            )
        )
    return result


def _eviction_order_notes(orders: dict[str, EvictionReplayResult], lost: dict[str, int]) -> list[str]:
    parts = [f"{name} {tokens:,}" for name, tokens in lost.items()]
    notes = [f"tokens computed again on the stock run's accesses, by eviction order: {', '.join(parts)}"]
    notes += [f"{name}: {order.note}" for name, order in orders.items() if order.note]
    return notes
