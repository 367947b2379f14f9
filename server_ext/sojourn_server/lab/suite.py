"""Many runs, side by side in processes, and their figures in one list.

Each run has a process of its own: what one policy loads (an adapter, a
connector) another cannot see.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module

import msgspec

from .kept_runs import KeptRuns, Outcome
from .limits.accesses import AccessLog
from .limits.compare import compare, over_belady
from .limits.orders import OPTIMUM
from .limits.regenerated import Regenerated
from .lives import RunLog
from .policies import Limit
from .report.measure import limit_row, measure
from .report.row import RunRow
from .run import RunSpec, engine_policy, run
from .workers import Report, side_by_side

OnProgress = Callable[[int, float, int], None]
"""(number of the run, virtual seconds, programs finished)"""


@dataclass(slots=True)
class SuiteResult:
    """Rows in the order asked for, and the logs behind them."""

    rows: list[RunRow] = field(default_factory=list)
    logs: list[RunLog] = field(default_factory=list)
    orders: list[dict[str, int]] = field(default_factory=list)
    """Of each row, the tokens that every order of eviction computes again on stock's accesses under the same
    load; empty where these were not recorded."""


ENGINE = ("sojourn_server.lab.quiet", "sojourn_server.lab.bare_engine", "sojourn_server.lab.simulation")
"""What takes most of a run's start to import: vLLM and torch. Nothing of the adapter: stock must not load
that."""


def plan(specs: Sequence[RunSpec]) -> list[RunSpec]:
    """What has to be run for ``specs``: ``belady`` needs the stock run's accesses instead of one of its own.

    Raises ``PolicyError``.
    """
    planned: dict[RunSpec, None] = {}
    recorded = set()
    for spec in specs:
        if engine_policy(spec).limit is Limit.BELADY:
            recorded.add(replace(spec, policy="stock"))
    for spec in specs:
        policy = engine_policy(spec)
        stock = replace(spec, policy="stock")
        if policy.limit is Limit.BELADY or (policy.name == "stock" and stock in recorded):
            spec = replace(stock, record_accesses=True)
        planned.setdefault(spec)
    return list(planned)


def run_suite(
    specs: Sequence[RunSpec],
    *,
    processes: int | None = None,
    since_s: float = 0.0,
    kept: KeptRuns | None = None,
    name: Callable[[RunSpec], str] = lambda spec: spec.label,
    on_start: Callable[[int, RunSpec], None] = lambda number, spec: None,
    on_progress: OnProgress = lambda number, now, finished: None,
    on_done: Callable[[int], None] = lambda number: None,
) -> SuiteResult:
    """Run ``plan(specs)`` on ``processes`` processes (default: one a core); numbers are places in that plan.

    With ``kept``, runs found there are not run again, and each is put there when it has ended. ``name`` is
    what errors call a run.
    Raises what ``run`` raises, and ``WorkerDied``; the other runs are then given up.
    """
    planned = plan(specs)
    outcomes: dict[RunSpec, Outcome] = {}
    for number, spec in enumerate(planned):
        outcome = kept.get(spec) if kept is not None else None
        if outcome is not None:
            outcomes[spec] = outcome
            on_start(number, spec)
            on_done(number)
    numbers = [number for number, spec in enumerate(planned) if spec not in outcomes]

    def end(place: int, answer: bytes) -> None:
        spec = planned[numbers[place]]
        outcome = outcomes[spec] = msgspec.msgpack.decode(answer, type=Outcome)
        if kept is not None:
            kept.put(spec, outcome)
        on_done(numbers[place])

    side_by_side(
        _work,
        [planned[number] for number in numbers],
        processes or os.cpu_count() or 1,
        name=name,
        on_start=lambda place, spec: on_start(numbers[place], spec),
        on_report=lambda place, what: on_progress(numbers[place], *what),
        on_done=end,
        preload=ENGINE,
    )
    return _rows(specs, outcomes, since_s)


def _work(spec: RunSpec, report: Report) -> bytes:
    import_module(ENGINE[0])  # where a process is not forked from one that has it
    result = run(spec, lambda label, now, finished: report((now, finished)))
    return msgspec.msgpack.encode(_outcome(result.log, result.accesses))


def _outcome(log: RunLog, accesses: AccessLog | None) -> Outcome:
    if accesses is None:
        return Outcome(log=log)
    # Other orders than the optimum are compared on stock's accesses only.
    orders = compare(accesses, None if log.policy == "stock" else ())
    turns = {turn.request_id: turn for program in log.programs for turn in program.turns}
    # What comes back from host memory is nobody's to compute again, and the optimum knows of no host.
    if not log.host_blocks:
        for request, tokens in zip(accesses.requests, orders[OPTIMUM].regenerated_by_request, strict=True):
            turns[request].optimum_tokens = tokens
    for order in orders.values():
        order.hit_blocks = []
        order.regenerated_by_owner = {}
    return Outcome(
        log=log, orders=orders, sent_s=[turns[request].submitted_s for request in accesses.requests]
    )


def _rows(
    specs: Sequence[RunSpec],
    outcomes: dict[RunSpec, Outcome],
    since_s: float,
) -> SuiteResult:
    result = SuiteResult()
    for spec in specs:
        policy = engine_policy(spec)
        stock = replace(spec, policy="stock", record_accesses=True)
        recorded = outcomes.get(stock)
        lost: dict[str, int] = {}
        if recorded is not None:
            lost = {
                name: order.regenerated_since(recorded.sent_s, since_s)
                for name, order in recorded.orders.items()
            }
        result.orders.append(lost)
        if policy.limit is Limit.BELADY:
            assert recorded is not None
            result.rows.append(
                limit_row(
                    measure(recorded.log, since_s=since_s),
                    policy.name,
                    regenerated_tokens=lost[Limit.BELADY.value],
                    regenerated_over_belady=1.0,
                    notes=_order_notes(recorded.orders, lost),
                )
            )
            continue
        log = recorded.log if policy.name == "stock" and recorded is not None else outcomes[spec].log
        order = policy.eviction_order
        ratio = over_belady(lost[order], lost[Limit.BELADY.value]) if order and order in lost else None
        result.logs.append(log)
        result.rows.append(
            measure(
                log,
                since_s=since_s,
                regenerated_over_belady=ratio,
                limit=policy.limit is not None,
            )
        )
    return result


def _order_notes(orders: dict[str, Regenerated], lost: dict[str, int]) -> list[str]:
    parts = [f"{name} {tokens:,}" for name, tokens in lost.items()]
    notes = [f"tokens computed again on the stock run's accesses, by eviction order: {', '.join(parts)}"]
    notes += [f"{name}: {order.note}" for name, order in orders.items() if order.note]
    return notes
