"""Streamed answers, compared without regard to where they were cut."""

from __future__ import annotations

from typing import Any, NamedTuple


class StreamPiece(NamedTuple):
    """One piece of a streamed answer."""

    kind: str
    text: str = ""


def join_pieces(value: Any) -> Any:
    """Result of a play, with successive pieces of one kind joined.

    The cuts of an engine's answer depend on the machine's load, with or without sojourn.
    """
    if isinstance(value, StreamPiece) or not isinstance(value, (list, tuple)):
        return value
    found: list[Any] = []
    for each in map(join_pieces, value):
        last = found[-1] if found else None
        if isinstance(each, StreamPiece) and isinstance(last, StreamPiece) and each.kind == last.kind:
            found[-1] = StreamPiece(each.kind, last.text + each.text)
        else:
            found.append(each)
    return type(value)(found)
