"""The rows of a sweep for the terminal: one a value and policy, compared at the same value."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from .result_columns import ENGINE, SERVICE, ResultColumn, TableCell, cells, shown, with_decimals
from .results_table import legend, notes, policy_cells, title, value_cells
from .run_row import RunRow
from .sweep_results import SweepRuns
from .wrapped_table import WrappedColumn, WrappedTable

_SHOWN = (
    ("output", "tok/s"), ("est. of all", "P95 s"), ("programs", "/h"), ("finished", ""), ("unfinished", ""),
    ("TTFT", "mean s"), ("on host", "% prompt"), ("again", "% prompt"),
)  # fmt: skip
"""Throughput and P95 first, as in the plot; then what tells why. All figures are in the JSON."""


def render_sweep(swept: SweepRuns, rows: Sequence[RunRow]) -> RenderableType:
    """The table, with the notes below it. Best, and times better than stock, are within one value."""
    groups = [swept.rows_of(value, rows) for value in swept.values]
    ordered = [row for group in groups for row in group]
    keys = [_key_column(swept.field, [(value.text, len(value.runs)) for value in swept.values])]
    if any(value.host_text for value in swept.values):
        hosts = [(value.host_text or "–", len(value.runs)) for value in swept.values]
        keys.append(_key_column("host memory", hosts))
    columns = []
    for column in shown(ordered, _columns()):
        same = with_decimals(column, ordered)
        found: list[TableCell] = [cell for group in groups for cell in cells(group, same)]
        columns.append(value_cells(same, found))
    return Group(
        Text(f"{title(ordered)} · {swept.field}: {swept.meaning}", style="bold"),
        WrappedTable([*keys, policy_cells(ordered)], columns),
        Text(""),
        Text(f"{legend(rows)}, at the same {swept.field}", style="dim"),
        *(Text(f"note: {note}", style="dim") for note in _notes(swept, groups)),
    )


def _columns() -> list[ResultColumn]:
    by_name = {(column.title, column.unit): column for column in (*SERVICE, *ENGINE)}
    # The estimate is shown also where all finished: then it is what the plot has, exactly.
    return [by_name[name]._replace(when=lambda row: True) for name in _SHOWN]


def _key_column(heading: str, texts: Sequence[tuple[str, int]]) -> WrappedColumn:
    return WrappedColumn(Text(heading), [Text(text) for text, times in texts for _ in range(times)])


def _notes(swept: SweepRuns, groups: Sequence[Sequence[RunRow]]) -> list[str]:
    """Every note once; where it does not hold at all values it begins with those at which it does."""
    places: dict[str, list[str]] = {}
    for value, group in zip(swept.values, groups, strict=True):
        for note in notes(group):
            places.setdefault(note, []).append(value.text)
    return [
        note if len(found) == len(groups) else f"{swept.field} {', '.join(found)}: {note}"
        for note, found in places.items()
    ]
