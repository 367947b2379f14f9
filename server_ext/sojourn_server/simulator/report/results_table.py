"""Result tables for the terminal: columns with title, unit and direction, best values marked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ..parameter_sweep import ParameterSweep
from .run_row import OVERALL, RunRow

if TYPE_CHECKING:
    from ..simulation_run import RunSpec

REFERENCES = ("stock", "prefix-affinity/stock")
"""The baselines of factors such as ``2.14×``: the policy for one engine, and the policy for a cluster."""
_MOST_DECIMALS = 3
MORE, LESS = 1, -1
"""Directions of a metric: larger or smaller values are better."""


Value = tuple[float, bool]
"""A number, and whether it is only a lower bound."""


class ResultColumn(NamedTuple):
    """One column of a result table."""

    title: str
    unit: str
    metric: str | Callable[[RunRow], float | None]
    """Where a row has the value: for ``read_metric``, or a function."""
    better: int = 0
    """``MORE`` or ``LESS``; 0: neither a larger nor a smaller value is better."""
    compare_to_stock: bool = False
    """Whether cells also show the factor relative to the baseline in ``REFERENCES``."""
    scale: float = 1.0
    decimals: int | None = None
    """Number of decimals; ``None``: as many as the smallest value needs (see ``_decimals``)."""
    when: Callable[[RunRow], bool] = lambda row: True
    """Whether a row needs the column. A column that no row needs is left out."""
    of_survivors: bool = False
    """Whether the values of a closed loop that was cut off are not compared, because each policy finishes
    other programs."""

    def read(self, row: RunRow) -> Value | None:
        """The row's value in the unit of the column; ``None`` if it was not measured."""
        if isinstance(self.metric, str):
            number, at_least = read_metric(row, self.metric)
        else:
            number, at_least = self.metric(row), False
        return None if number is None else (number * self.scale, at_least)


class TableCell(NamedTuple):
    """One cell of a table."""

    text: str
    """``–`` if not measured; ``≥`` before a lower bound."""
    factor: str = ""
    """Factor relative to the baseline, such as ``2.14×``; ``≥`` or ``≤`` before a bound of the factor. Empty
    if the cell shows no factor."""
    best: bool = False
    """Whether the cell has the best value of all policies."""


def read_metric(row: RunRow, metric: str) -> tuple[float | None, bool]:
    """Value of a metric, and whether it is a lower bound. ``metric`` is a field of ``RunRow``, or a field and
    one of its parts, such as ``ttft_s.p95``."""
    field, _, part = metric.partition(".")
    found: Any = getattr(row, field)
    if not part or found is None:
        return found, False
    if isinstance(found, dict):
        return found[part], False
    return getattr(found, part), part in found.at_least


def _share(field: str) -> Callable[[RunRow], float | None]:
    """Return a function that reads a number of tokens, in percent of the row's prompt tokens."""
    return lambda row: 100.0 * getattr(row, field) / row.prompt_tokens if row.prompt_tokens else None


def _has_unfinished(row: RunRow) -> bool:
    return row.programs_unfinished > 0


def _several(row: RunRow) -> bool:
    return (row.replicas or 0) > 1


COLUMNS: tuple[ResultColumn, ...] = (
    # What the engine has, and what clients observe.
    ResultColumn("host memory", "tokens", lambda row: row.host_blocks * row.block_size or None, decimals=0),
    ResultColumn("disk", "tokens", lambda row: row.disk_blocks * row.block_size or None, decimals=0),
    ResultColumn("finished", "", "programs_finished", decimals=0),
    ResultColumn("unfinished", "", "programs_unfinished", decimals=0),
    ResultColumn(
        "turns",
        "done",
        "turns_finished",
        decimals=0,
        when=lambda row: not row.programs_finished and not row.limit,
    ),
    ResultColumn("programs", "/h", "programs_per_hour", MORE, True),
    ResultColumn("completion", "mean s", "completion_s.mean", LESS, True, of_survivors=True),
    ResultColumn("completion", "P95 s", "completion_s.p95", LESS, True, of_survivors=True),
    ResultColumn("est. of all", "P50 s", "completion_estimate_s.p50", LESS, True, when=_has_unfinished),
    ResultColumn("est. of all", "P95 s", "completion_estimate_s.p95", LESS, True, when=_has_unfinished),
    ResultColumn("TTFT", "mean s", "ttft_s.mean", LESS, True),
    ResultColumn("TTFT", "P95 s", "ttft_s.p95", LESS),
    ResultColumn("TPOT", "mean ms", "tpot_s.mean", LESS, scale=1e3),
    ResultColumn(
        "in time", "% programs", f"slo_attainment.{OVERALL}", MORE, scale=100.0, decimals=1, when=_several
    ),
    # What the engine does.
    ResultColumn("output", "tok/s", "output_tok_per_s", MORE, True),
    ResultColumn("on device", "% prompt", _share("device_hit_tokens"), decimals=1),
    ResultColumn("on host", "% prompt", _share("host_hit_tokens"), decimals=1),
    ResultColumn("again", "% prompt", _share("regenerated_tokens"), LESS, decimals=1),
    ResultColumn("preempted", "", "preemptions", LESS, decimals=0),
    ResultColumn("cascades", "", "cascades", LESS, decimals=0),
    ResultColumn("device", "% busy", "device_busy_fraction", scale=100.0, decimals=1),
    ResultColumn("least used", "% busy", "utilisation.min", scale=100.0, decimals=1, when=_several),
    ResultColumn("most used", "% busy", "utilisation.max", scale=100.0, decimals=1, when=_several),
    ResultColumn(
        "moved", "% programs", "replica_changes.programs_share", LESS, scale=100.0, decimals=1, when=_several
    ),
    ResultColumn("moves", "/program", "replica_changes.per_program", LESS, decimals=2, when=_several),
    ResultColumn("scheduler", "ms/step", "scheduler_ms_per_step"),
)


def cells(groups: Sequence[Sequence[RunRow]], column: ResultColumn) -> list[TableCell]:
    """One cell of ``column`` for each row of ``groups``. The rows of a group have the same workload, and are
    compared with one another only. All cells have the same number of decimals."""
    values = [[column.read(row) for row in rows] for rows in groups]
    decimals = column.decimals
    if decimals is None:
        decimals = _decimals([value[0] for found in values for value in found if value is not None])
    return [
        cell
        for rows, found in zip(groups, values, strict=True)
        for cell in _group_cells(rows, found, column, decimals)
    ]


def _group_cells(
    rows: Sequence[RunRow], values: Sequence[Value | None], column: ResultColumn, decimals: int
) -> list[TableCell]:
    cut_off = any(row.loop == "closed" and row.programs_unfinished for row in rows)
    better = 0 if column.of_survivors and cut_off else column.better
    # Values that are printed alike count as equal.
    rounded = [value and (round(value[0], decimals), value[1]) for value in values]
    best = _best([value for row, value in zip(rows, rounded, strict=True) if value and not row.limit], better)
    stock = next((value for row, value in zip(rows, values, strict=True) if row.policy in REFERENCES), None)
    made = []
    for row, value, printed in zip(rows, values, rounded, strict=True):
        if value is None or printed is None:
            made.append(TableCell("–"))
            continue
        text = f"{'≥' if value[1] else ''}{value[0]:,.{decimals}f}"
        compared = column.compare_to_stock and better and stock and row.policy not in REFERENCES
        factor = _factor(value, stock, better) if compared and stock else ""
        made.append(TableCell(text, factor, printed == (best, False) and not row.limit))
    return made


def columns_to_show(rows: Sequence[RunRow], columns: Sequence[ResultColumn] = COLUMNS) -> list[ResultColumn]:
    """Select from ``columns``. A column is kept if at least one row needs it (``ResultColumn.when``), and at
    least one row has a value other than 0 in it."""
    return [
        column
        for column in columns
        if any(map(column.when, rows)) and any(value and value[0] for value in map(column.read, rows))
    ]


def _best(values: Sequence[Value], better: int) -> float | None:
    """The best of the policies' values, which the table marks; ``None`` if there are fewer than two, if more
    than half of them equal the best one, or if one that is only a lower bound may be better."""
    exact = [number for number, at_least in values if not at_least]
    if not better or len(values) < 2 or not exact:
        return None
    best = max(exact) if better == MORE else min(exact)
    # The value of a lower bound may be larger by any amount.
    settled = all(better == LESS and number >= best for number, at_least in values if at_least)
    return best if settled and 2 * exact.count(best) <= len(values) else None


def _factor(value: Value, stock: Value, better: int) -> str:
    above, below = (value, stock) if better == MORE else (stock, value)
    if (above[1] and below[1]) or not below[0] or not above[0]:
        return ""
    factor = above[0] / below[0]
    bound = "≥" if above[1] else "≤" if below[1] else ""
    return f"{bound}{factor:.{2 if factor < 10 else 1 if factor < 100 else 0}f}×"


def _decimals(numbers: Sequence[float]) -> int:
    """Number of decimals, 0 to 3, that shows three digits of the smallest positive number, or two digits if
    that number is below 1."""
    least = min((number for number in numbers if number > 0), default=100.0)
    magnitude = math.floor(math.log10(least))
    return min(_MOST_DECIMALS, max(0, (2 if magnitude >= 0 else 1) - magnitude))


def workloads(rows: Sequence[RunRow]) -> list[list[RunRow]]:
    """Rows grouped by workload, in order of trace and load. Each group has the baseline (``REFERENCES``)
    first and bounds last."""
    groups: dict[tuple[object, ...], list[RunRow]] = {}
    for row in rows:
        groups.setdefault(row.workload, []).append(row)
    ordered = sorted(groups.values(), key=lambda group: group[0].workload)
    return [sorted(group, key=lambda row: (row.limit, row.policy not in REFERENCES)) for group in ordered]


def title(rows: Sequence[RunRow]) -> str:
    """Title of a table: the properties that all its rows share."""
    properties = zip(*((row.trace, row.hardware, row.model, load_label(row)) for row in rows), strict=True)
    parts = [values[0] for values in properties if len(set(values)) == 1]
    shortest_s, longest_s = min(row.virtual_s for row in rows), max(row.virtual_s for row in rows)
    # A run ends with the step that passes its time limit.
    if longest_s - shortest_s <= 0.01 * longest_s:
        parts.append(f"{longest_s:,.0f} virtual s")
    pools = {row.pool_blocks * row.block_size for row in rows if not row.limit}
    if len(pools) == 1:
        parts.append(f"KV pool {pools.pop():,} tokens{' each' if any(row.replicas for row in rows) else ''}")
    return " · ".join([*parts, f"seed {rows[0].seed}"])


def load_label(row: RunRow | RunSpec) -> str:
    """The load of a run in words, such as ``40 programs at once``."""
    text = f"{row.programs} programs at once"
    if row.rate_per_s is not None:
        text = f"{row.programs} programs, {row.rate_per_s:g} a second"
    if row.replicas is None:
        return text
    return f"{text}, {row.replicas} replica{'s' if row.replicas > 1 else ''}"


def render(rows: Sequence[RunRow], swept: ParameterSweep | None = None) -> RenderableType:
    """One table per workload or, of a sweep, one in which the rows of each value are compared with one
    another only; wrapped to the width of the console. Then the notes."""
    parts: list[RenderableType] = []
    tables = [[group] for group in workloads(rows)] if swept is None else [swept.groups(rows)]
    for groups in tables:
        shown = [row for group in groups for row in group]
        heading = title(shown)
        names = [Text(row.policy, style="italic" if row.limit else "") for row in shown]  # bounds
        first = [WrappedColumn(Text("policy"), names, "left")]
        if swept is not None:
            heading += f" · {swept.field}: {swept.meaning}"
            pairs = zip(swept.values, groups, strict=True)
            values = [Text(f"{value:,.10g}") for value, group in pairs for _ in group]
            first.insert(0, WrappedColumn(Text(swept.field), values))
        columns = [value_cells(column, groups) for column in columns_to_show(shown)]
        parts += [Text(heading, style="bold"), WrappedTable(first, columns), Text("")]
    if parts:  # the legend names the baseline of the factors, if one was run
        ran = {row.policy for row in rows}
        stock = [name for name in REFERENCES if name in ran and ran != {name}]
        factors = f"; N× times better than {' or '.join(stock)}" if stock else ""
        legend = f"* best of the policies{factors}; ≥ at least, ≤ at most"
        parts.append(Text(legend + (f", at the same {swept.field}" if swept else ""), style="dim"))
    parts.extend(Text(f"note: {note}", style="dim") for note in notes(rows))
    if swept is None:
        parts.extend(Text(f"\n{said}") for group in workloads(rows) if (said := summary(group)))
    return Group(*parts)


def summary(group: Sequence[RunRow]) -> str:
    """The rows of ``sojourn``, vLLM alone and vLLM with host memory in words. Empty without the first two."""
    ours, stock, offload = (
        next((row for row in group if row.policy == name), None)
        for name in ("sojourn", "stock", "lru-offload")
    )
    if ours is None or stock is None:
        return ""
    memory = "No host memory is used."
    if ours.host_blocks:
        size = f"{ours.host_blocks * ours.block_size:,} tokens of host memory"
        said = _against(offload, stock) if offload else "not run; add lru-offload to --policy"
        memory = f"sojourn has {size}. vLLM's own offloading to as much: {said}."
    return f"With {load_label(ours)} on {ours.hardware}, sojourn: {_against(ours, stock)}. {memory}"


def _against(row: RunRow, stock: RunRow) -> str:
    """How much sooner programs end than with ``stock``; how much is written, if a mean is only a bound."""
    ours, theirs = row.completion_estimate_s, stock.completion_estimate_s
    shares = [f"{100 * one.regenerated_tokens / max(1, one.prompt_tokens):.0f} %" for one in (row, stock)]
    again = f"; {shares[0]} of the prompt tokens are computed again, {shares[1]} by vLLM alone"
    if ours.mean and theirs.mean and "mean" not in (*ours.at_least, *theirs.at_least):
        times = f"after {ours.mean:,.0f} s in place of {theirs.mean:,.0f} s"
        return f"programs end {theirs.mean / ours.mean:.2f}× as soon, {times}{again}"
    if row.output_tok_per_s and stock.output_tok_per_s:
        return f"{row.output_tok_per_s / stock.output_tok_per_s:.2f}× as many output tokens a second{again}"
    return again[2:]


def notes(rows: Sequence[RunRow]) -> list[str]:
    """The notes of the rows, each once. If a note is not about all policies, the names of its policies
    precede it."""
    owners: dict[str, dict[str, None]] = {}
    for row in rows:
        for note in row.notes:
            owners.setdefault(note, {})[row.policy] = None
    all_policies = {row.policy for row in rows if not row.limit}
    made = []
    for note, names in owners.items():
        of_all = all_policies <= names.keys() or note.startswith(tuple(f"{name}:" for name in names))
        made.append(note if of_all else f"{', '.join(names)}: {note}")
    return made


def value_cells(column: ResultColumn, groups: Sequence[Sequence[RunRow]]) -> WrappedColumn:
    """Printable column of values. The rows of a group are compared with one another only."""
    found = cells(groups, column)
    factor_width = max(len(cell.factor) for cell in found)
    texts = []
    for cell in found:
        text = Text(cell.text + ("*" if cell.best else " "), style="bold green" if cell.best else "")
        if factor_width:
            text.append(f" {cell.factor:>{factor_width}}", style="not bold dim default")
        texts.append(text)
    return WrappedColumn(Text(column.title).append(f"\n{column.unit}", style="dim"), texts)


_GAP = 2
"""Spaces between columns."""


class WrappedColumn(NamedTuple):
    """One column: heading, and one text per row."""

    heading: Text
    texts: list[Text]
    justify: Literal["left", "right"] = "right"


class WrappedTable:
    """A table that is split into parts if it is wider than the console. The parts are printed one below the
    other. Every part begins with the columns ``first``, at least one."""

    def __init__(self, first: Sequence[WrappedColumn], others: Sequence[WrappedColumn]) -> None:
        self._first = first
        self._others = others

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        piece: list[WrappedColumn] = []
        for column in self._others:
            widths = [_GAP + _width(each) for each in (*self._first, *piece, column)]
            if piece and sum(widths) - _GAP > options.max_width:
                yield self._table(piece)
                piece = []
            piece.append(column)
        yield self._table(piece)

    def _table(self, piece: Sequence[WrappedColumn]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="", padding=(0, _GAP, 0, 0))
        for column in (*self._first, *piece):
            table.add_column(column.heading, justify=column.justify, no_wrap=True)
        for cells in zip(*(column.texts for column in (*self._first, *piece)), strict=True):
            table.add_row(*cells)
        return table


def _width(column: WrappedColumn) -> int:
    return max(line.cell_len for text in (column.heading, *column.texts) for line in text.split("\n"))
