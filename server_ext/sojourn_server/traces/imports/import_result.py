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

    All runs of an agent (the programs of one ``group``) get the same number: the smallest number of cached
    tokens above 0 in any of their first prompts, but no more than the length of the program's first prompt.
    If no first prompt had cached tokens, the field stays unset. The minimum is used because runs on the same
    task share more than the system prompt. Counts of 0 are ignored, because the first run of an agent finds
    no blocks of an earlier run.
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
