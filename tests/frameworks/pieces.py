"""Streamed answers, compared without regard to where they were cut."""

from __future__ import annotations

from typing import Any, NamedTuple


class Piece(NamedTuple):
    """One piece of a streamed answer."""

    kind: str
    text: str = ""


def whole(value: Any) -> Any:
    """A play's outcome with successive pieces of one kind put together.

    How an engine's answer is cut into pieces depends on how busy the machine is, with sojourn or without.
    """
    if isinstance(value, Piece) or not isinstance(value, (list, tuple)):
        return value
    found: list[Any] = []
    for each in map(whole, value):
        last = found[-1] if found else None
        if isinstance(each, Piece) and isinstance(last, Piece) and each.kind == last.kind:
            found[-1] = Piece(each.kind, last.text + each.text)
        else:
            found.append(each)
    return type(value)(found)
