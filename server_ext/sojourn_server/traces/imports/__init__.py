"""Imports of agent runs from other records: OpenTelemetry spans and sojourn's ledgers."""

from __future__ import annotations

from typing import NamedTuple

from ..trace_schema import TraceProgram


class ImportedTrace(NamedTuple):
    """The programs that an import found, and notes for the user."""

    programs: list[TraceProgram]
    notes: list[str]
    """What was left out or inferred, one line each."""


__all__ = ["ImportedTrace"]
