"""What a table of results shows: its columns, each with its unit, which way is better, and its figures.

Shared by the terminal's table and the Markdown one, so that both say the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from .row import OVERALL, Figures, ReplicaChanges, RunRow, Utilisation

BASELINES = ("stock", "prefix-affinity/stock")
"""The policy that factors are relative to: on one engine, and on several."""
_MOST_DECIMALS = 3


class Better(Enum):
    """Which way a figure is better."""

    MORE = "more"
    LESS = "less"


class Value(NamedTuple):
    """One figure."""

    number: float
    at_least: bool = False
    """Only a lower bound is known."""
    biased: bool = False
    """Not to be compared."""


class Column(NamedTuple):
    """One column."""

    title: str
    unit: str
    read: Callable[[RunRow], Value | None]
    better: Better | None = None
    when: Callable[[RunRow], bool] = lambda row: True
    """The column is worth its place where this holds for a row."""
    against_stock: bool = False
    """Also say how many times better than stock."""
    decimals: int | None = None
    """Without it as many as the smallest figure needs."""


class Cell(NamedTuple):
    """What one place of a table says."""

    text: str
    """``–`` where nothing was measured; ``≥`` before a lower bound."""
    factor: str = ""
    """How many times better than stock, such as ``2.14×``; ``≥`` or ``≤`` where a bound is involved."""
    best: bool = False


def _plain(read: Callable[[RunRow], float | None], scale: float = 1.0) -> Callable[[RunRow], Value | None]:
    def value(row: RunRow) -> Value | None:
        number = read(row)
        return None if number is None else Value(number * scale)

    return value


def _figure(
    read: Callable[[RunRow], Figures], name: str, scale: float = 1.0
) -> Callable[[RunRow], Value | None]:
    def value(row: RunRow) -> Value | None:
        figures = read(row)
        number: float | None = getattr(figures, name)
        return None if number is None else Value(number * scale, name in figures.at_least)

    return value


def _completion(name: str) -> Callable[[RunRow], Value | None]:
    """Of a closed loop that was cut off, the finished programs are not all alike under all policies."""
    read = _figure(lambda row: row.completion_s, name)

    def value(row: RunRow) -> Value | None:
        found = read(row)
        biased = row.loop == "closed" and row.programs_unfinished > 0
        return found and found._replace(biased=biased)

    return value


def _share(amount: Callable[[RunRow], int]) -> Callable[[RunRow], float | None]:
    """In percent of the prompt tokens."""
    return lambda row: 100.0 * amount(row) / row.prompt_tokens if row.prompt_tokens else None


def _of_run(read: Callable[[RunRow], float | None]) -> Callable[[RunRow], Value | None]:
    """A limit that was only counted, never run, has none of this."""

    def value(row: RunRow) -> Value | None:
        number = None if row.limit and row.output_tok_per_s is None else read(row)
        return None if number is None else Value(number)

    return value


def _some_unfinished(row: RunRow) -> bool:
    return row.programs_unfinished > 0


def _none_finished(row: RunRow) -> bool:
    return not row.programs_finished and not row.limit


def _estimate(row: RunRow) -> Figures:
    return row.completion_estimate_s


def _changes(read: Callable[[ReplicaChanges], float], scale: float = 1.0) -> Callable[[RunRow], Value | None]:
    return _plain(lambda row: None if row.replica_changes is None else read(row.replica_changes), scale)


def _used(read: Callable[[Utilisation], float]) -> Callable[[RunRow], Value | None]:
    return _plain(lambda row: None if row.utilisation is None else read(row.utilisation), 100.0)


def _in_time(row: RunRow) -> float | None:
    return None if row.slo_attainment is None else row.slo_attainment.get(OVERALL)


def _several(row: RunRow) -> bool:
    return (row.replicas or 0) > 1


MORE, LESS = Better.MORE, Better.LESS

SERVICE: tuple[Column, ...] = (
    Column("finished", "", _of_run(lambda r: r.programs_finished), decimals=0),
    Column("unfinished", "", _of_run(lambda r: r.programs_unfinished), decimals=0),
    Column("turns", "done", _of_run(lambda r: r.turns_finished), when=_none_finished, decimals=0),
    Column("programs", "/h", _plain(lambda r: r.programs_per_hour), MORE, against_stock=True),
    Column("completion", "mean s", _completion("mean"), LESS, against_stock=True),
    Column("completion", "P95 s", _completion("p95"), LESS, against_stock=True),
    Column("est. of all", "P50 s", _figure(_estimate, "p50"), LESS, _some_unfinished, against_stock=True),
    Column("est. of all", "P95 s", _figure(_estimate, "p95"), LESS, _some_unfinished, against_stock=True),
    Column("TTFT", "mean s", _figure(lambda r: r.ttft_s, "mean"), LESS, against_stock=True),
    Column("TTFT", "P95 s", _figure(lambda r: r.ttft_s, "p95"), LESS),
    Column("TPOT", "mean ms", _figure(lambda r: r.tpot_s, "mean", 1e3), LESS),
    Column("in time", "% programs", _plain(_in_time, 100.0), MORE, _several, decimals=1),
)
"""What the clients see."""

ENGINE: tuple[Column, ...] = (
    Column("output", "tok/s", _plain(lambda r: r.output_tok_per_s), MORE, against_stock=True),
    Column("on device", "% prompt", _of_run(_share(lambda r: r.device_hit_tokens)), decimals=1),
    Column("on host", "% prompt", _of_run(_share(lambda r: r.host_hit_tokens)), decimals=1),
    Column("again", "% prompt", _plain(_share(lambda r: r.regenerated_tokens)), LESS, decimals=1),
    Column("again", "÷ Bélády", _plain(lambda r: r.regenerated_over_belady), LESS),
    Column("preempted", "", _of_run(lambda r: r.preemptions), LESS, decimals=0),
    Column("cascades", "", _of_run(lambda r: r.cascades), LESS, decimals=0),
    Column("device", "% busy", _plain(lambda r: r.device_busy_fraction, 100.0), decimals=1),
    Column("least used", "% busy", _used(lambda u: u.min), when=_several, decimals=1),
    Column("most used", "% busy", _used(lambda u: u.max), when=_several, decimals=1),
    Column("moved", "% programs", _changes(lambda c: c.programs_share, 100.0), LESS, _several, decimals=1),
    Column("moves", "/program", _changes(lambda c: c.per_program), LESS, _several, decimals=2),
    Column("scheduler", "ms/step", _plain(lambda r: r.scheduler_ms_per_step)),
)
"""What the engine did."""


def cells(rows: Sequence[RunRow], column: Column) -> list[Cell]:
    """The column's cells for ``rows`` of one workload, in their order."""
    values = [column.read(row) for row in rows]
    decimals = column.decimals
    if decimals is None:
        decimals = _decimals([value.number for value in values if value is not None])
    # What is printed alike is alike: no policy wins by less than the last digit.
    rounded = [value and value._replace(number=round(value.number, decimals)) for value in values]
    best = _best(rows, rounded, column.better)
    stock = next((value for row, value in zip(rows, values, strict=True) if row.policy in BASELINES), None)
    made = []
    for row, value, printed in zip(rows, values, rounded, strict=True):
        if value is None or printed is None:
            made.append(Cell("–"))
            continue
        text = f"{'≥' if value.at_least else ''}{value.number:,.{decimals}f}"
        factor = ""
        if (
            column.against_stock
            and column.better is not None
            and row.policy not in BASELINES
            and stock is not None
        ):
            factor = _factor(value, stock, column.better)
        made.append(Cell(text, factor, printed.number == best and not value.at_least and not row.limit))
    return made


def aligned(column: Column, rows: Sequence[RunRow]) -> Column:
    """``column`` with as many decimals as the smallest of its figures in ``rows`` needs, whichever of them
    ``cells`` is asked for."""
    if column.decimals is not None:
        return column
    found = [value.number for row in rows if (value := column.read(row)) is not None]
    return column._replace(decimals=_decimals(found))


def shown(rows: Sequence[RunRow], columns: Sequence[Column]) -> list[Column]:
    """Those of ``columns`` that are worth their place and hold a figure other than 0 in any of ``rows``."""
    kept = []
    for column in columns:
        if not any(column.when(row) for row in rows):
            continue
        values = [column.read(row) for row in rows]
        if any(value is not None and value.number for value in values):
            kept.append(column)
    return kept


def _best(rows: Sequence[RunRow], values: Sequence[Value | None], better: Better | None) -> float | None:
    """The best figure of the policies; ``None`` where there is no choice or a lower bound leaves it open."""
    known = [value for row, value in zip(rows, values, strict=True) if value is not None and not row.limit]
    exact = [value.number for value in known if not value.at_least]
    if better is None or len(known) < 2 or not exact or any(value.biased for value in known):
        return None
    if better is Better.MORE:
        # A figure known only from below may be anything above it.
        best = max(exact)
        settled = len(exact) == len(known)
    else:
        best = min(exact)
        settled = all(value.number >= best for value in known)
    # What most of them reach sets nobody apart.
    return best if settled and 2 * exact.count(best) <= len(known) else None


def _factor(value: Value, stock: Value, better: Better) -> str:
    above, below = (value, stock) if better is Better.MORE else (stock, value)
    if value.biased or stock.biased or (above.at_least and below.at_least):
        return ""
    if not below.number or not above.number:
        return ""
    factor = above.number / below.number
    bound = "≥" if above.at_least else "≤" if below.at_least else ""
    return f"{bound}{factor:.{2 if factor < 10 else 1 if factor < 100 else 0}f}×"


def _decimals(numbers: Sequence[float]) -> int:
    """One number of decimals a column, to compare: the smallest figure gets three digits, below 1 two."""
    positive = [number for number in numbers if number > 0]
    if not positive:
        return 0
    magnitude = math.floor(math.log10(min(positive)))
    return min(_MOST_DECIMALS, max(0, (2 if magnitude >= 0 else 1) - magnitude))
