"""Text to rows: a small state machine over characters."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto

from .dialect import CSV, Dialect


class ParseError(ValueError):
    """The text is not a table; the message names the line."""


class State(Enum):
    """Where in a row the reader is."""

    START = auto()
    PLAIN = auto()
    QUOTED = auto()
    CLOSED = auto()


def read(text: str, dialect: Dialect = CSV) -> Iterator[list[str]]:
    """Yield the rows of ``text``. Raises ``ParseError`` for unbalanced quotes."""
    state = State.START
    row: list[str] = []
    cell: list[str] = []
    line = 1
    for char in text:
        if char == "\n":
            line += 1
        if state is State.QUOTED:
            if char == dialect.quote:
                state = State.CLOSED
            else:
                cell.append(char)
        elif char == dialect.separator:
            row.append("".join(cell))
            cell, state = [], State.START
        elif char == "\n":
            row.append("".join(cell))
            yield row
            row, cell, state = [], [], State.START
        elif char == dialect.quote and state is State.START:
            state = State.QUOTED
        elif state is State.CLOSED:
            raise ParseError(f"line {line}: {char!r} after a closing quote")
        else:
            cell.append(char)
            state = State.PLAIN
    if state is State.QUOTED:
        raise ParseError(f"line {line}: a quote is never closed")
    if row or cell or state is State.CLOSED:
        row.append("".join(cell))
        yield row
