"""By how much a program's context is expected to grow: what turns and programs have shown so far."""

from __future__ import annotations

from typing import NamedTuple

from .views import GrowthView

MIN_TURNS_SEEN = 16
"""Turns after which the observed growth replaces the prior."""

MIN_PROGRAMS_SEEN = 8
"""Finished programs after which their mean number of turns replaces the prior."""

PRIOR_TURNS = 11.0
"""Turns of a program: Continuum's SWE-bench workload has 10.9 (Table 3)."""

PRIOR_GROWTH = 0.3
"""Growth a turn as a share of the first prompt. With ``PRIOR_TURNS`` a context ends at about four times its
first prompt; the medians of public agent traces lie between two and six times."""


class GrowthSeen(NamedTuple):
    """What an engine has seen of its programs."""

    turns_seen: int = 0
    mean_growth_tokens: float = 0.0
    """Tokens a turn has added to a context, on average."""
    programs_seen: int = 0
    mean_turns: float = 0.0
    """Turns of finished programs, on average."""


def expected_growth_tokens(
    program: GrowthView,
    seen: GrowthSeen,
    max_context_tokens: int,
    *,
    turns_ahead: float | None = None,
    prior_turns: float = PRIOR_TURNS,
    prior_growth: float = PRIOR_GROWTH,
) -> float:
    """Tokens the program's context will still grow by: at least one turn's, at most to its limit.

    ``turns_ahead``: over so many turns; ``None``: until it ends.

    A context that has been shorter lately, as a parent's while its sub-agents run, is expected to be at least
    as long again.
    """
    room = max(0, max_context_tokens - program.context_tokens)
    turns = seen.mean_turns if seen.programs_seen >= MIN_PROGRAMS_SEEN else prior_turns
    if seen.turns_seen >= MIN_TURNS_SEEN:
        per_turn = seen.mean_growth_tokens
    else:
        per_turn = prior_growth * program.first_prompt_tokens
    if turns_ahead is not None:
        return min(turns_ahead * per_turn, room)
    back = max(0, program.peak_tokens - program.context_tokens)
    return min(max(back, max(1.0, turns - program.turns) * per_turn), room)
