"""Expected growth of a program's context, from earlier turns and programs."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..policy_views import ProgramGrowthView

MIN_TURNS_SEEN = 16
"""The mean growth per turn replaces the prior once at least this many turns were observed."""

MIN_PROGRAMS_SEEN = 8
"""The mean number of turns of finished programs replaces the prior once at least this many have finished."""

PRIOR_TURNS = 11.0
"""Prior number of turns of a program: Continuum's SWE-bench workload has 10.9 (Table 3)."""

PRIOR_GROWTH = 0.3
"""Prior growth per turn as a share of the first prompt. With ``PRIOR_TURNS``, a context grows to about four
times its first prompt. In public agent traces, the medians of this factor are 2 to 6."""


def growth_reserve(reserve: float, calm_s: float, relax_s: float) -> float:
    """Return the share of expected growth to reserve, ``calm_s`` seconds after the last loss of KV (``inf``
    if never lost).

    Expected growth says how large contexts become, not that they are large at the same time. So nothing is
    reserved before the first loss. After each loss, the share falls linearly from ``reserve`` to 0 within
    ``relax_s`` seconds. ``relax_s`` = ``inf``: the share is always ``reserve``.
    """
    if math.isinf(relax_s):
        return reserve
    return reserve * max(0.0, 1.0 - max(0.0, calm_s) / relax_s)


class GrowthStatistics(NamedTuple):
    """An engine's observations of the growth of its programs' contexts."""

    observed_turns: int = 0
    mean_growth_tokens: float = 0.0
    """Mean growth of a context per turn."""
    observed_programs: int = 0
    mean_turns: float = 0.0
    """Mean number of turns of finished programs."""

    @property
    def growth_observed(self) -> bool:
        """Whether enough turns were observed to use ``mean_growth_tokens`` in place of the prior."""
        return self.observed_turns >= MIN_TURNS_SEEN


def expected_growth_tokens(
    program: ProgramGrowthView,
    seen: GrowthStatistics,
    max_context_tokens: int,
    *,
    turns_ahead: float | None = None,
    prior_turns: float = PRIOR_TURNS,
    prior_growth: float = PRIOR_GROWTH,
) -> float:
    """Return the tokens by which the program's context is expected to grow, at most up to
    ``max_context_tokens``.

    ``turns_ahead``: number of turns to look ahead. ``None``: look ahead until the program ends, at least one
    turn. With ``None``, a context that was longer before is expected to reach its former length again, since
    the program may run a shorter branch now, such as a sub-agent. ``prior_turns`` and ``prior_growth`` (a
    share of the first prompt) apply until ``seen`` has enough observations.
    """
    room = max(0, max_context_tokens - program.context_tokens)
    turns = seen.mean_turns if seen.observed_programs >= MIN_PROGRAMS_SEEN else prior_turns
    prior = prior_growth * program.first_prompt_tokens
    per_turn = seen.mean_growth_tokens if seen.growth_observed else prior
    if turns_ahead is not None:
        return min(turns_ahead * per_turn, room)
    back = max(0, program.peak_tokens - program.context_tokens)
    return min(max(back, max(1.0, turns - program.turns) * per_turn), room)
