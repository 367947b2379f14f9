"""Results of a parameter sweep: which rows belong to which value, and the table of all rows."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from .result_columns import COLUMNS, columns_to_show
from .results_table import WrappedColumn, WrappedTable, legend, notes, policy_cells, title, value_cells
from .run_row import RunRow


class SweepValue(msgspec.Struct, kw_only=True, frozen=True):
    """One value of the swept field, and the runs with this value."""

    value: float
    runs: tuple[int, ...]
    """Indices of the value's rows, one per policy, in the order of policies."""
    host_tokens: int | None = None
    """Host memory in KV tokens at this value; ``None`` if another field than host memory was swept."""
    host_bytes: int | None = None
    """Host memory in bytes at this value; ``None`` if ``host_tokens`` is ``None``, or if the KV bytes of a
    token are unknown."""

    @property
    def text(self) -> str:
        """The value for tables and axes, such as ``0.5`` or ``1,000``."""
        return f"{self.value:,.0f}" if self.value == int(self.value) else f"{self.value:g}"

    @property
    def host_text(self) -> str | None:
        """Host memory in GiB or, if bytes are unknown, in tokens; ``None`` if ``host_tokens`` is ``None``."""
        if self.host_bytes is None:
            return None if self.host_tokens is None else f"{self.host_tokens:,} tokens"
        gib = self.host_bytes / 2**30
        return f"{gib:,.0f} GiB" if gib >= 100 else f"{gib:.3g} GiB"


class SweepRuns(msgspec.Struct, kw_only=True, frozen=True):
    """A sweep of one field of ``RunSpec``: its values, and which rows of the suite belong to each value."""

    field: str
    """Name of the swept field of ``RunSpec``."""
    meaning: str
    """Meaning of the field, with its unit."""
    values: tuple[SweepValue, ...]
    """Values in the given order."""

    def rows_of(self, value: SweepValue, rows: Sequence[RunRow]) -> list[RunRow]:
        """The rows of ``value``; ``rows`` are all rows of the suite."""
        return [rows[place] for place in value.runs]


_SHOWN = (
    ("output", "tok/s"), ("est. of all", "P95 s"), ("programs", "/h"), ("finished", ""), ("unfinished", ""),
    ("TTFT", "mean s"), ("on host", "% prompt"), ("again", "% prompt"),
)  # fmt: skip
"""Columns of the table: throughput and P95, as in the plot, then metrics that explain these two."""


def render_sweep(swept: SweepRuns, rows: Sequence[RunRow]) -> RenderableType:
    """Table and notes of a sweep. The rows of each swept value are compared with one another only: each value
    has its own best results and its own baseline."""
    groups = [swept.rows_of(value, rows) for value in swept.values]
    ordered = [row for group in groups for row in group]
    values = [value for value in swept.values for _ in value.runs]
    keys = [WrappedColumn(Text(swept.field), [Text(value.text) for value in values])]
    if any(value.host_text for value in values):
        keys.append(WrappedColumn(Text("host memory"), [Text(value.host_text or "–") for value in values]))
    by_name = {(column.title, column.unit): column for column in COLUMNS}
    # The estimate is shown even if all programs finished, because the plot shows it.
    shown = [by_name[name]._replace(when=lambda row: True) for name in _SHOWN]
    columns = [value_cells(column, groups) for column in columns_to_show(ordered, shown)]
    return Group(
        Text(f"{title(ordered)} · {swept.field}: {swept.meaning}", style="bold"),
        WrappedTable([*keys, policy_cells(ordered)], columns),
        Text(""),
        Text(f"{legend(rows)}, at the same {swept.field}", style="dim"),
        *(Text(f"note: {note}", style="dim") for note in _notes(swept, groups)),
    )


def _notes(swept: SweepRuns, groups: Sequence[Sequence[RunRow]]) -> list[str]:
    """Every note once. If only some swept values have a note, the note begins with these values."""
    places: dict[str, list[str]] = {}
    for value, group in zip(swept.values, groups, strict=True):
        for note in notes(group):
            places.setdefault(note, []).append(value.text)
    return [
        note if len(found) == len(groups) else f"{swept.field} {', '.join(found)}: {note}"
        for note, found in places.items()
    ]
