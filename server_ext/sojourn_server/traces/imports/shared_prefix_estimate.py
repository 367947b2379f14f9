"""How much of their first prompts an agent's runs share, from what a service had cached of them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..trace_schema import TraceProgram


def with_shared_prefixes(programs: Sequence[TraceProgram]) -> list[TraceProgram]:
    """The programs with ``shared_prefix_tokens`` filled in.

    What the service had cached of a first prompt came from another run. The
    first run of all finds nothing cached and shares it all the same; two runs
    on one task find more than the system prompt. So all runs of an agent get
    the least that any of them found, or none where nobody found anything.
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
