"""Columns of result tables: title, unit, direction and values, for terminal and Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from .run_row import OVERALL, ReplicaChanges, RunRow, SummaryStatistics, Utilisation

REFERENCES = ("stock", "prefix-affinity/stock")
"""The baselines of factors such as ``2.14×``: the policy for one engine, and the policy for a cluster."""
_MOST_DECIMALS = 3


class Direction(Enum):
    """Whether a larger or a smaller value of a metric is better."""

    MORE = "more"
    LESS = "less"


class ColumnValue(NamedTuple):
    """Value of one cell, in the unit of its column."""

    number: float
    at_least: bool = False
    """Whether the value is a lower bound."""
    biased: bool = False
    """Whether comparing the value with those of other policies would mislead."""


class ResultColumn(NamedTuple):
    """One column of a result table."""

    title: str
    unit: str
    read: Callable[[RunRow], ColumnValue | None]
    better: Direction | None = None
    """``None``: neither a larger nor a smaller value is better."""
    when: Callable[[RunRow], bool] = lambda row: True
    """Whether a row needs the column. A column that no row needs is left out."""
    compare_to_stock: bool = False
    """Whether cells also show the factor relative to the baseline in ``REFERENCES``."""
    decimals: int | None = None
    """Number of decimals; ``None``: as many as the smallest value needs (see ``_decimals``)."""


class TableCell(NamedTuple):
    """One cell of a table."""

    text: str
    """``–`` if not measured; ``≥`` before a lower bound."""
    factor: str = ""
    """Factor relative to the baseline, such as ``2.14×``; ``≥`` or ``≤`` before a bound of the factor. Empty
    if the cell shows no factor."""
    best: bool = False
    """Whether the cell has the best value of all policies."""


def _plain(
    read: Callable[[RunRow], float | None], scale: float = 1.0
) -> Callable[[RunRow], ColumnValue | None]:
    """Return a function that reads a number from a row and multiplies it by ``scale``."""

    def value(row: RunRow) -> ColumnValue | None:
        number = read(row)
        return None if number is None else ColumnValue(number * scale)

    return value


def _figure(
    read: Callable[[RunRow], SummaryStatistics], name: str, scale: float = 1.0
) -> Callable[[RunRow], ColumnValue | None]:
    """Return a function that reads the statistic ``name``, such as ``p95``, and multiplies it by
    ``scale``."""

    def value(row: RunRow) -> ColumnValue | None:
        figures = read(row)
        number: float | None = getattr(figures, name)
        return None if number is None else ColumnValue(number * scale, name in figures.at_least)

    return value


def _completion(name: str) -> Callable[[RunRow], ColumnValue | None]:
    """Return a function that reads the statistic ``name`` of completion times from a row. The value is biased
    if the end of the run cut off a closed loop, because then policies finish different programs."""
    read = _figure(lambda row: row.completion_s, name)

    def value(row: RunRow) -> ColumnValue | None:
        found = read(row)
        biased = row.loop == "closed" and row.programs_unfinished > 0
        return found and found._replace(biased=biased)

    return value


def _share(amount: Callable[[RunRow], int]) -> Callable[[RunRow], float | None]:
    """Return a function that reads an amount of tokens from a row, in percent of the row's prompt tokens."""
    return lambda row: 100.0 * amount(row) / row.prompt_tokens if row.prompt_tokens else None


def _run_only(read: Callable[[RunRow], float | None]) -> Callable[[RunRow], ColumnValue | None]:
    """Return a function that reads a number from a row. It returns ``None`` for the row of a bound that was
    not simulated."""
    return _plain(lambda row: None if row.limit and row.output_tok_per_s is None else read(row))


def _has_unfinished(row: RunRow) -> bool:
    return row.programs_unfinished > 0


def _none_finished(row: RunRow) -> bool:
    return not row.programs_finished and not row.limit


def _estimate(row: RunRow) -> SummaryStatistics:
    return row.completion_estimate_s


def _changes(
    read: Callable[[ReplicaChanges], float], scale: float = 1.0
) -> Callable[[RunRow], ColumnValue | None]:
    return _plain(lambda row: None if row.replica_changes is None else read(row.replica_changes), scale)


def _used(read: Callable[[Utilisation], float]) -> Callable[[RunRow], ColumnValue | None]:
    return _plain(lambda row: None if row.utilisation is None else read(row.utilisation), 100.0)


def _slo_share(row: RunRow) -> float | None:
    return None if row.slo_attainment is None else row.slo_attainment.get(OVERALL)


def _several(row: RunRow) -> bool:
    return (row.replicas or 0) > 1


MORE, LESS = Direction.MORE, Direction.LESS

SERVICE: tuple[ResultColumn, ...] = (
    ResultColumn("finished", "", _run_only(lambda r: r.programs_finished), decimals=0),
    ResultColumn("unfinished", "", _run_only(lambda r: r.programs_unfinished), decimals=0),
    ResultColumn("turns", "done", _run_only(lambda r: r.turns_finished), when=_none_finished, decimals=0),
    ResultColumn("programs", "/h", _plain(lambda r: r.programs_per_hour), MORE, compare_to_stock=True),
    ResultColumn("completion", "mean s", _completion("mean"), LESS, compare_to_stock=True),
    ResultColumn("completion", "P95 s", _completion("p95"), LESS, compare_to_stock=True),
    ResultColumn(
        "est. of all", "P50 s", _figure(_estimate, "p50"), LESS, _has_unfinished, compare_to_stock=True
    ),
    ResultColumn(
        "est. of all", "P95 s", _figure(_estimate, "p95"), LESS, _has_unfinished, compare_to_stock=True
    ),
    ResultColumn("TTFT", "mean s", _figure(lambda r: r.ttft_s, "mean"), LESS, compare_to_stock=True),
    ResultColumn("TTFT", "P95 s", _figure(lambda r: r.ttft_s, "p95"), LESS),
    ResultColumn("TPOT", "mean ms", _figure(lambda r: r.tpot_s, "mean", 1e3), LESS),
    ResultColumn("in time", "% programs", _plain(_slo_share, 100.0), MORE, _several, decimals=1),
)
"""Metrics that clients observe."""

ENGINE: tuple[ResultColumn, ...] = (
    ResultColumn("output", "tok/s", _plain(lambda r: r.output_tok_per_s), MORE, compare_to_stock=True),
    ResultColumn("on device", "% prompt", _run_only(_share(lambda r: r.device_hit_tokens)), decimals=1),
    ResultColumn("on host", "% prompt", _run_only(_share(lambda r: r.host_hit_tokens)), decimals=1),
    ResultColumn("again", "% prompt", _plain(_share(lambda r: r.regenerated_tokens)), LESS, decimals=1),
    ResultColumn("preempted", "", _run_only(lambda r: r.preemptions), LESS, decimals=0),
    ResultColumn("cascades", "", _run_only(lambda r: r.cascades), LESS, decimals=0),
    ResultColumn("device", "% busy", _plain(lambda r: r.device_busy_fraction, 100.0), decimals=1),
    ResultColumn("least used", "% busy", _used(lambda u: u.min), when=_several, decimals=1),
    ResultColumn("most used", "% busy", _used(lambda u: u.max), when=_several, decimals=1),
    ResultColumn(
        "moved", "% programs", _changes(lambda c: c.programs_share, 100.0), LESS, _several, decimals=1
    ),
    ResultColumn("moves", "/program", _changes(lambda c: c.per_program), LESS, _several, decimals=2),
    ResultColumn("scheduler", "ms/step", _plain(lambda r: r.scheduler_ms_per_step)),
)
"""Metrics of the engine."""


def cells(rows: Sequence[RunRow], column: ResultColumn) -> list[TableCell]:
    """One cell of ``column`` for each of ``rows``. All rows must have the same workload."""
    values = [column.read(row) for row in rows]
    decimals = column.decimals
    if decimals is None:
        decimals = _decimals([value.number for value in values if value is not None])
    # Values that are printed alike count as equal.
    rounded = [value and value._replace(number=round(value.number, decimals)) for value in values]
    best = _best(rows, rounded, column.better)
    stock = next((value for row, value in zip(rows, values, strict=True) if row.policy in REFERENCES), None)
    made = []
    for row, value, printed in zip(rows, values, rounded, strict=True):
        if value is None or printed is None:
            made.append(TableCell("–"))
            continue
        text = f"{'≥' if value.at_least else ''}{value.number:,.{decimals}f}"
        compared = column.compare_to_stock and row.policy not in REFERENCES
        factor = _factor(value, stock, column.better) if compared and stock and column.better else ""
        made.append(TableCell(text, factor, printed.number == best and not value.at_least and not row.limit))
    return made


def with_decimals(column: ResultColumn, rows: Sequence[RunRow]) -> ResultColumn:
    """``column`` with as many decimals as its smallest value in ``rows`` needs."""
    if column.decimals is not None:
        return column
    found = [value.number for row in rows if (value := column.read(row)) is not None]
    return column._replace(decimals=_decimals(found))


def columns_to_show(rows: Sequence[RunRow], columns: Sequence[ResultColumn]) -> list[ResultColumn]:
    """Select from ``columns``. A column is kept if at least one row needs it (``ResultColumn.when``), and at
    least one row has a value other than 0 in it."""
    kept = []
    for column in columns:
        if not any(column.when(row) for row in rows):
            continue
        values = [column.read(row) for row in rows]
        if any(value is not None and value.number for value in values):
            kept.append(column)
    return kept


def _best(
    rows: Sequence[RunRow], values: Sequence[ColumnValue | None], better: Direction | None
) -> float | None:
    """The best value of all policies, which the table marks. Rows of bounds do not count.

    Returns ``None``, and the table marks nothing, in any of these cases:

    - neither larger nor smaller values are better (``better`` is ``None``)
    - there are fewer than two values
    - a value is biased
    - more than half of the values equal the best one
    - a value that is only a lower bound may be better
    """
    known = [value for row, value in zip(rows, values, strict=True) if value is not None and not row.limit]
    exact = [value.number for value in known if not value.at_least]
    if better is None or len(known) < 2 or not exact or any(value.biased for value in known):
        return None
    if better is Direction.MORE:
        # The value of a lower bound may be larger by any amount.
        best = max(exact)
        settled = len(exact) == len(known)
    else:
        best = min(exact)
        settled = all(value.number >= best for value in known)
    # A value that most policies reach is not marked.
    return best if settled and 2 * exact.count(best) <= len(known) else None


def _factor(value: ColumnValue, stock: ColumnValue, better: Direction) -> str:
    above, below = (value, stock) if better is Direction.MORE else (stock, value)
    if value.biased or stock.biased or (above.at_least and below.at_least):
        return ""
    if not below.number or not above.number:
        return ""
    factor = above.number / below.number
    bound = "≥" if above.at_least else "≤" if below.at_least else ""
    return f"{bound}{factor:.{2 if factor < 10 else 1 if factor < 100 else 0}f}×"


def _decimals(numbers: Sequence[float]) -> int:
    """Number of decimals, 0 to 3, that shows three digits of the smallest positive number, or two digits if
    that number is below 1."""
    positive = [number for number in numbers if number > 0]
    if not positive:
        return 0
    magnitude = math.floor(math.log10(min(positive)))
    return min(_MOST_DECIMALS, max(0, (2 if magnitude >= 0 else 1) - magnitude))
