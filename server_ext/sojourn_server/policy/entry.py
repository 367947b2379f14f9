"""Which program may enter the engine's memory: the admission question."""

from __future__ import annotations

from dataclasses import dataclass

from .growth import PRIOR_GROWTH, PRIOR_TURNS, GrowthSeen, expected_growth_tokens
from .views import EntryView, GrowthView


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryoneEnters:
    """The engine's own rule: whoever's prompt fits now."""

    gates: bool = False
    counts_promised: bool = False
    forecasts: bool = False

    def may_enter(self, entry: EntryView, now: float) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeProgram:
    """A program enters when its prompt fits beside what those inside hold: the other half of ``admit``.

    Those inside hold their KV while their tools run too, so a program waits for
    another's end rather than for its turn's. What later programs hold counts as
    room, since they give way; the earliest therefore always enters. How contexts
    will grow is not asked.

    An engine that has stood idle for ``patience_s`` lets it in all the same: those
    inside may wait for the very one that is kept out, as a parent does for its
    sub-agent.
    """

    gates: bool = True
    counts_promised: bool = True
    forecasts: bool = False
    patience_s: float = 30.0

    def may_enter(self, entry: EntryView, now: float) -> bool:
        if not entry.earlier or entry.idle_s >= self.patience_s:
            return True
        return entry.free_blocks >= entry.need_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomToGrow:
    """A program enters only if the programs before it can still grow to their expected end.

    An agent's context grows with every turn. A rule that looks at prompts alone
    lets everybody in while contexts are young, and then takes from each in turn
    what it had just computed. Continuum leaves admission to the engine; here a
    program that holds no KV waits until its prompt fits beside the expected
    growth of those that arrived before it and hold KV. Later ones are not
    counted: they are the first to give way, and their leases count as free.
    The earliest program therefore always enters, and whoever is first enters
    where nothing runs.

    Growth is what turns have added so far to the longest context of their
    program, over as many turns as finished programs had; before enough of either
    was seen, the priors (``policy.growth``).
    """

    gates: bool = True
    counts_promised: bool = False
    forecasts: bool = False
    reserve: float = 0.7
    """Share of the expected growth that is kept free. Less than all of it, since programs do not reach
    their ends together."""
    prior_turns: float = PRIOR_TURNS
    prior_growth: float = PRIOR_GROWTH

    def may_enter(self, entry: EntryView, now: float) -> bool:
        if not entry.earlier or not entry.anything_running:
            return True
        growth = sum(self.expected_growth_tokens(program, entry) for program in entry.earlier)
        reserved_blocks = min(self.reserve * growth / entry.block_size, entry.pool_blocks)
        return entry.free_blocks - entry.need_blocks >= reserved_blocks

    def expected_growth_tokens(self, program: GrowthView, entry: EntryView) -> float:
        """Tokens the program's context will still grow by: at least one turn's, at most to its limit."""
        seen = GrowthSeen(entry.turns_seen, entry.mean_growth_tokens, entry.programs_seen, entry.mean_turns)
        return expected_growth_tokens(
            program,
            seen,
            entry.max_context_tokens,
            prior_turns=self.prior_turns,
            prior_growth=self.prior_growth,
        )
