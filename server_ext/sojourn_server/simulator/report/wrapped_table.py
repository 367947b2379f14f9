"""A table as wide as it must be on a console as narrow as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

_GAP = 2
"""Spaces between columns."""


class WrappedColumn(NamedTuple):
    """One column: what stands above it, and one text a row."""

    heading: Text
    texts: list[Text]
    justify: Literal["left", "right"] = "right"


class WrappedTable:
    """A table whose columns that do not fit beside the others go below them, behind the first ones again.

    Cutting figures off would be worse, and so would be leaving them out. ``first``, at least one, are what
    tells the rows apart.
    """

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
