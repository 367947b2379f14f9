"""Estimate of the prefix that an agent's runs share, from the cached tokens of their first prompts."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..trace_schema import TraceProgram


def with_shared_prefixes(programs: Sequence[TraceProgram]) -> list[TraceProgram]:
    """Return the programs with ``shared_prefix_tokens`` filled in.

    All runs of an agent get the same number. It is the smallest number of cached tokens that any of their
    first prompts had, not counting 0. If all had 0, the field stays unset. A first prompt can hit only blocks
    that another run computed, so the very first run has 0 cached tokens. Runs on the same task have more
    cached tokens than the prefix is long, because they share more than the system prompt.
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
