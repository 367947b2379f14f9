"""Rows to text, and rows to columns for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .dialect import CSV, Dialect


def write(rows: Iterable[Sequence[object]], dialect: Dialect = CSV) -> str:
    """Write ``rows``; cells are quoted only where they must be."""
    lines = (dialect.separator.join(_cell(str(value), dialect) for value in row) for row in rows)
    return "".join(line + dialect.newline for line in lines)


def columns(rows: Sequence[Sequence[object]], gap: int = 2) -> str:
    """Align ``rows`` for reading: numbers to the right, all else to the left."""
    if not rows:
        return ""
    widths = [max(len(str(row[index])) for row in rows) for index in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            str(value).rjust(width) if isinstance(value, (int, float)) else str(value).ljust(width)
            for value, width in zip(row, widths, strict=True)
        ]
        lines.append((" " * gap).join(cells).rstrip())
    return "\n".join(lines)


def _cell(value: str, dialect: Dialect) -> str:
    special = (dialect.separator, dialect.quote, "\n", "\r")
    if not any(char in value for char in special):
        return value
    doubled = value.replace(dialect.quote, dialect.quote * 2)
    return f"{dialect.quote}{doubled}{dialect.quote}"
