"""Results of a parameter sweep: which rows belong to which value, and the table of all rows."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from .result_columns import ENGINE, SERVICE, ResultColumn, TableCell, cells, columns_to_show, with_decimals
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
        if self.host_bytes is not None:
            gib = self.host_bytes / 2**30
            return f"{gib:,.0f} GiB" if gib >= 100 else f"{gib:.3g} GiB"
        return None if self.host_tokens is None else f"{self.host_tokens:,} tokens"


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


def sweep_runs(
    field: str,
    meaning: str,
    values: Sequence[float],
    rows: Sequence[RunRow],
    *,
    is_host_sweep: bool = False,
    kv_bytes_per_token: int | None = None,
) -> SweepRuns:
    """Assign the result rows to the swept values. ``rows`` has one row per policy for the first value, then
    for the second, and so on. ``field`` is the swept field of ``RunSpec``, and ``meaning`` describes it.

    With ``is_host_sweep``, the value is an amount of host memory. It is also shown in tokens and, if
    ``kv_bytes_per_token`` is given, in bytes. Raises ``ValueError`` unless all values have the same number of
    rows, at least one.
    """
    policies, left = divmod(len(rows), len(values))
    if left or not policies:
        raise ValueError(f"{len(rows)} rows at {len(values)} values; expected as many at each")
    made = []
    for number, value in enumerate(values):
        runs = range(number * policies, (number + 1) * policies)
        tokens = _host_tokens([rows[place] for place in runs]) if is_host_sweep else None
        size = tokens * kv_bytes_per_token if tokens is not None and kv_bytes_per_token is not None else None
        made.append(SweepValue(value=value, runs=tuple(runs), host_tokens=tokens, host_bytes=size))
    return SweepRuns(field=field, meaning=meaning, values=tuple(made))


def _host_tokens(rows: Sequence[RunRow]) -> int:
    # Bounds have host memory of their own, and some policies have none.
    return max((row.host_blocks * row.block_size for row in rows if not row.limit), default=0)


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
    keys = [_key_column(swept.field, [(value.text, len(value.runs)) for value in swept.values])]
    if any(value.host_text for value in swept.values):
        hosts = [(value.host_text or "–", len(value.runs)) for value in swept.values]
        keys.append(_key_column("host memory", hosts))
    columns = []
    for column in columns_to_show(ordered, _columns()):
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
    # The estimate is shown even if all programs finished, because the plot shows it.
    return [by_name[name]._replace(when=lambda row: True) for name in _SHOWN]


def _key_column(heading: str, texts: Sequence[tuple[str, int]]) -> WrappedColumn:
    return WrappedColumn(Text(heading), [Text(text) for text, times in texts for _ in range(times)])


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
