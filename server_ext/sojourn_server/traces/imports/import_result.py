"""The result of an import: programs and notes. Also estimates the prefix that the runs of an agent share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ..trace_schema import TraceProgram


class ImportResult(NamedTuple):
    """The programs that an import found, and notes for the user."""

    programs: list[TraceProgram]
    notes: list[str]
    """What the import left out or inferred, one line each."""


def with_shared_prefixes(programs: Sequence[TraceProgram]) -> list[TraceProgram]:
    """Return the programs with ``shared_prefix_tokens`` estimated from the cached tokens of first prompts.

    All programs of one ``group`` are runs of one agent. Their estimate is the smallest number of cached
    tokens in any of their first prompts, limited to the length of the program's own first prompt. Larger
    numbers are not used, because runs on the same task share more than the system prompt. Counts of 0 are
    ignored, because the first run finds no blocks of an earlier run. If all counts are 0 or missing, the
    field stays unset.
    """
    least: dict[str | None, int] = {}
    for program in programs:
        found = program.turns[0].cached_tokens or 0
        if found > 0:
            least[program.group] = min(found, least.get(program.group, found))
    return [
        msgspec.structs.replace(
            program, shared_prefix_tokens=min(least[program.group], program.turns[0].prompt_tokens)
        )
        if program.group in least
        else program
        for program in programs
    ]
