"""Result tables for the terminal: grouped by workload, best values marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from .result_columns import REFERENCES, ResultColumn, cells, columns_to_show
from .run_row import RunRow

if TYPE_CHECKING:
    from ..simulation_run import RunSpec


def legend(rows: Sequence[RunRow]) -> str:
    """Legend of a table of ``rows``. It names the baseline of the factors, if one was run."""
    ran = {row.policy for row in rows}
    names = [name for name in REFERENCES if name in ran and ran != {name}]
    factors = f"; N× times better than {' or '.join(names)}" if names else ""
    return f"* best of the policies{factors}; ≥ at least, ≤ at most"


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
    properties = (
        {row.trace for row in rows},
        {row.hardware for row in rows},
        {row.model for row in rows},
        {load_label(row) for row in rows},
    )
    parts = [same.pop() for same in properties if len(same) == 1]
    shortest_s, longest_s = min(row.virtual_s for row in rows), max(row.virtual_s for row in rows)
    # A run ends with the step that passes its time limit.
    if longest_s - shortest_s <= 0.01 * longest_s:
        parts.append(f"{longest_s:,.0f} virtual s")
    for name, field in (("KV pool", "pool_blocks"), ("host memory", "host_blocks"), ("disk", "disk_blocks")):
        size = _common_size(rows, field)
        if size:
            each = " each" if any(row.replicas for row in rows) else ""
            parts.append(f"{name} {size:,} tokens{each}")
    return " · ".join([*parts, f"seed {rows[0].seed}"])


def _common_size(rows: Sequence[RunRow], field: str) -> int | None:
    """Size of a memory in tokens. ``field`` names the field of ``RunRow`` that has the size in blocks.
    ``None`` if no policy has this memory, or if its size differs between policies that have it."""
    sizes = {(row.policy, getattr(row, field) * row.block_size) for row in rows if not row.limit}
    owners = {policy for policy, size in sizes if size}
    found = {size for policy, size in sizes if policy in owners}
    return found.pop() if len(found) == 1 else None


def load_label(row: RunRow | RunSpec) -> str:
    """The load of a run in words, such as ``40 programs at once``."""
    text = f"{row.programs} programs at once"
    if row.rate_per_s is not None:
        text = f"{row.programs} programs, {row.rate_per_s:g} a second"
    if row.replicas is None:
        return text
    return f"{text}, {row.replicas} replica{'s' if row.replicas > 1 else ''}"


def render(rows: Sequence[RunRow]) -> RenderableType:
    """One table per workload, wrapped to the width of the console, then the notes."""
    parts: list[RenderableType] = []
    for group in workloads(rows):
        columns = [value_cells(column, [group]) for column in columns_to_show(group)]
        parts += [Text(title(group), style="bold"), WrappedTable([policy_cells(group)], columns), Text("")]
    if parts:
        parts.append(Text(legend(rows), style="dim"))
    parts.extend(Text(f"note: {note}", style="dim") for note in notes(rows))
    parts.extend(Text(f"\n{summary(group)}") for group in workloads(rows) if summary(group))
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
    owners: dict[str, list[str]] = {}
    for row in rows:
        for note in row.notes:
            names = owners.setdefault(note, [])
            if row.policy not in names:
                names.append(row.policy)
    all_policies = {row.policy for row in rows if not row.limit}
    made = []
    for note, names in owners.items():
        of_all = all_policies <= set(names) or note.startswith(tuple(f"{name}:" for name in names))
        made.append(note if of_all else f"{', '.join(names)}: {note}")
    return made


def policy_cells(rows: Sequence[RunRow]) -> WrappedColumn:
    """Printable column of the policies' names; bounds are in italics."""
    return WrappedColumn(
        Text("policy"), [Text(row.policy, style="italic" if row.limit else "") for row in rows], "left"
    )


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
        least = sum(map(_width, self._first)) + _GAP * (len(self._first) - 1)
        used = least
        for column in self._others:
            width = _GAP + _width(column)
            if piece and used + width > options.max_width:
                yield self._table(piece)
                piece, used = [], least
            piece.append(column)
            used += width
        yield self._table(piece)

    def _table(self, piece: Sequence[WrappedColumn]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="", padding=(0, _GAP, 0, 0))
        columns = [*self._first, *piece]
        for column in columns:
            table.add_column(column.heading, justify=column.justify, no_wrap=True)
        for number in range(len(self._first[0].texts)):
            table.add_row(*(column.texts[number] for column in columns))
        return table


def _width(column: WrappedColumn) -> int:
    return max(line.cell_len for text in (column.heading, *column.texts) for line in text.split("\n"))
