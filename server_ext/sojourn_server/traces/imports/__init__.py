"""Other people's records of agent runs, made into traces."""

from __future__ import annotations

from typing import NamedTuple

from ..schema import TraceProgram


class Imported(NamedTuple):
    """What an import gave."""

    programs: list[TraceProgram]
    notes: list[str]
    """What was left out or inferred, one line each."""


__all__ = ["Imported"]
