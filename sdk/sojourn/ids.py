"""Types of the id strings, so that a type checker finds, e.g., a program id in place of a call id."""

from __future__ import annotations

import re
from typing import NewType

ProgramId = NewType("ProgramId", str)
"""Id of one agent run, from its first to its last LLM request. At most ``MAX_ID_BYTES`` bytes of UTF-8."""

EmitterId = NewType("EmitterId", str)
"""Id of one process's event sender. A forked child has a new id, so that sequence numbers never collide."""

CallId = NewType("CallId", str)
"""Id of one tool call, unique within its program only."""

MAX_ID_BYTES = 256
"""Longest id accepted on the wire, in bytes of UTF-8 (the limit vLLM's router uses)."""

_CONTROL = re.compile("[\\x00-\\x1f\\x7f-\\x9f]")


def id_problem(value: str) -> str | None:
    """Return what is wrong with an id and what the wire format expects, as a phrase to put after the field's
    name; ``None`` for a valid id.

    Control characters are refused because paths of URLs and lines of logs cannot hold them.
    """
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        return "holds lone surrogates, which UTF-8 cannot encode"
    if not 0 < size <= MAX_ID_BYTES:
        return f"has {size} bytes; expected 1 to {MAX_ID_BYTES}"
    if not value.isprintable() and (found := _CONTROL.search(value)) is not None:
        return f"has the control character {found.group()!r}; expected none"
    return None
