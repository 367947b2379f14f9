"""Admission: which program may enter the engine's memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..forecasting.context_growth import PRIOR_GROWTH, PRIOR_TURNS, GrowthStatistics, expected_growth_tokens
from ..forecasting.kv_demand import STEP_POINTS, needed_blocks, peak_demand_blocks
from ..policy_views import AdmissionView, ProgramGrowthView


@dataclass(frozen=True, slots=True, kw_only=True)
class NoAdmissionControl:
    """The engine's own rule: a request is admitted if its prompt fits now."""

    gates: bool = False
    reserves_prompt_blocks: bool = False
    forecasts: bool = False

    def may_admit(self, entry: AdmissionView, now: float) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeProgramAdmission:
    """A program is admitted if its prompt fits next to all KV that admitted programs hold; part of ``admit``.

    Admitted programs keep their KV while their tools run, so a program waits for the end of another program,
    not only of its turn. KV of later programs counts as free because it can be reclaimed; so the earliest
    program is always admitted. Growth of contexts is ignored.

    After ``patience_s`` of an idle engine the program is admitted anyway: the programs with KV may wait for
    it, as a parent does for its sub-agent.
    """

    gates: bool = True
    reserves_prompt_blocks: bool = True
    forecasts: bool = False
    patience_s: float = 30.0

    def may_admit(self, entry: AdmissionView, now: float) -> bool:
        if not entry.earlier or entry.idle_s >= self.patience_s:
            return True
        return entry.free_blocks >= entry.need_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedGrowthAdmission:
    """A program is admitted only if earlier programs can still grow to their expected end.

    An agent's context grows with every turn. A rule that looks at prompts alone admits all programs while
    contexts are young, and later evicts KV just after it was computed. Continuum leaves admission to the
    engine. Here a program without KV waits until its prompt fits next to the expected growth of earlier
    programs with KV. Later programs do not count: they are the first to be preempted, and their leases count
    as free. So the earliest program is always admitted, and an idle engine admits the first program in the
    queue.

    Expected growth is the mean growth per turn times the mean number of turns of finished programs. The
    priors of ``forecasting.context_growth`` apply until enough of both was observed.
    """

    gates: bool = True
    reserves_prompt_blocks: bool = False
    forecasts: bool = False
    reserve: float = 0.7
    """Share of the expected growth that is reserved. Below 1, since programs do not end at the same time."""
    prior_turns: float = PRIOR_TURNS
    prior_growth: float = PRIOR_GROWTH

    def may_admit(self, entry: AdmissionView, now: float) -> bool:
        if not entry.earlier or not entry.anything_running:
            return True
        growth = sum(self.expected_growth_tokens(program, entry) for program in entry.earlier)
        reserved_blocks = min(self.reserve * growth / entry.block_size, entry.pool_blocks)
        return entry.free_blocks - entry.need_blocks >= reserved_blocks

    def expected_growth_tokens(self, program: ProgramGrowthView, entry: AdmissionView) -> float:
        """Tokens by which the program's context will still grow: at least one turn's growth, at most to the
        limit."""
        seen = GrowthStatistics(
            entry.observed_turns, entry.mean_growth_tokens, entry.observed_programs, entry.mean_turns
        )
        return expected_growth_tokens(
            program,
            seen,
            entry.max_context_tokens,
            prior_turns=self.prior_turns,
            prior_growth=self.prior_growth,
        )


SLIGHT_SHARE = 0.1
"""If less than this share of a request's peak demand remains, the request has most likely ended."""

LARGEST_SHARE = 0.5
"""Maximum share of the available blocks that is reserved for one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandForecastAdmission:
    """A request is admitted if its expected demand and that of all running requests fit, for
    ``horizon_steps``.

    The paper starts an offload ahead of a preemption by "comparing future KV cache demand with available
    memory". Applied to new requests, the same comparison prevents preemptions. Without it, an engine that
    admits every prompt that fits preempts the newest request as the others grow, admits it again a step
    later, and so on. ``reserve`` of the available blocks stays free, since an expectation is exceeded half of
    the time.

    A request without prediction is admitted, as in the unmodified engine. So is the first request of an idle
    engine, whatever its demand. A request that needs most of the memory would wait until nothing runs, with
    all others behind it; so at most half of the memory is reserved for it. A shortage at a time when the
    request has most likely ended does not delay it.
    """

    reserve: float = 0.05
    horizon_steps: float = math.inf
    gates: bool = True
    reserves_prompt_blocks: bool = False
    forecasts: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.reserve < 1 or not self.horizon_steps > 0:
            raise ValueError(
                f"reserve {self.reserve}, horizon_steps {self.horizon_steps}; expected 0 up to 1, and above 0"
            )

    def may_admit(self, entry: AdmissionView, now: float) -> bool:
        own = entry.own
        if not entry.anything_running or own is None or not own.remaining or not entry.needed_blocks:
            return True
        room = entry.available_blocks * (1 - self.reserve)
        its = [min(part, LARGEST_SHARE * room) for part in needed_blocks([own], entry.block_size)]
        most = peak_demand_blocks(its, self.horizon_steps)
        return not any(
            others + part > room and part >= SLIGHT_SHARE * most
            for point, others, part in zip(STEP_POINTS, entry.needed_blocks, its, strict=True)
            if point <= self.horizon_steps
        )
