"""Admission (``admission`` in presets): which program without KV may start to use the engine's memory?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from .forecasting import expected_growth_tokens, growth_reserve, needed_blocks
from .policy_views import AdmissionView

RELAX_S = 600.0
"""Seconds without a loss of KV after which ``ExpectedGrowthAdmission`` reserves nothing."""
SLIGHT_SHARE = 0.1
"""When a request's expected demand falls below this share of its peak, the request has most likely ended."""
LARGEST_SHARE = 0.5
"""Maximum share of the available blocks that is reserved for one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionPolicy:
    """Decides whether a program that holds no KV is admitted now. The base admits every program: the engine
    admits a request if its prompt fits now."""

    is_used = False
    """Whether the policy is asked. If not, every program is admitted."""
    reserves_prompt_blocks = False
    """Whether the free blocks are less those that running requests still need for their prompts."""
    forecasts = False
    """Whether the scheduler adds the demand forecast to the view. If so, the scheduler asks the policy about
    every request of a program, even if the request was preempted or the program has a lease."""

    def may_admit(self, view: AdmissionView, now: float) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeProgramAdmission(AdmissionPolicy):
    """Admits a program if its prompt fits beside the KV of all earlier programs. Used by preset ``admit``.

    Admitted programs keep their KV while their tools run, so a program may wait until another one ends. KV of
    later programs counts as free, because it can be reclaimed: the earliest program is always admitted. If
    the engine has been idle for ``patience_s``, a program that does not fit is admitted too: programs with KV
    may be waiting for it, as a parent waits for its sub-agent.
    """

    is_used = True
    reserves_prompt_blocks = True
    patience_s: float = 30.0

    def may_admit(self, view: AdmissionView, now: float) -> bool:
        if not view.earlier or view.idle_s >= self.patience_s:
            return True
        return view.free_blocks >= view.need_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedGrowthAdmission(AdmissionPolicy):
    """Admits a program if the free blocks hold its prompt and a share of the expected growth of earlier
    programs with KV.

    A rule on prompts alone would admit all programs while their contexts are short, and would later evict KV
    that was just computed. Programs that arrived later do not count, because they are preempted first, and
    blocks leased to them count as free. So the earliest program is always admitted. If nothing runs, the
    first program in the queue is admitted too. The share is 0 until a living program loses KV for the first
    time (``growth_reserve`` says why). After each loss it is ``reserve``, and falls to 0 within ``RELAX_S``.
    """

    is_used = True
    reserve: Annotated[float, Meta(ge=0, le=1)] = 0.7
    """Share of the expected growth to reserve. Programs end at different times, so 1 is too much."""

    def may_admit(self, view: AdmissionView, now: float) -> bool:
        if not view.earlier or not view.anything_running:
            return True
        share = growth_reserve(self.reserve, view.since_shortage_s, RELAX_S)
        growth_tokens = 0.0
        for program in view.earlier if share else ():
            growth_tokens += expected_growth_tokens(program, view.growth, view.max_context_tokens)
        reserved_blocks = min(share * growth_tokens / view.block_size, view.pool_blocks)
        return view.free_blocks - view.need_blocks >= reserved_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandForecastAdmission(AdmissionPolicy):
    """Admits a request if the expected KV demand of this request and all running requests fits the memory.

    The Tetris paper makes this comparison before it copies KV. Here it precedes each admission, to prevent
    preemptions: an engine without the policy admits every prompt that fits, preempts the newest request when
    contexts grow, admits it again one step later, and so on. The share ``reserve`` of the available blocks
    stays free, since demand exceeds its expectation half of the time.

    Requests without prediction are admitted, and the first if nothing runs. All are until a living program
    loses KV, since until then memory was sufficient. The demand of one request counts as at most
    ``LARGEST_SHARE`` of the memory that may be used. Otherwise a request that needs most of it would wait
    until nothing runs, and the queue behind it. A shortage at a step is ignored if the request's own demand
    there is below ``SLIGHT_SHARE`` of its peak: the request has most likely ended by then.
    """

    reserve: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    is_used = True
    forecasts = True

    def may_admit(self, view: AdmissionView, now: float) -> bool:
        own = view.own
        if not view.anything_running or own is None or not own.remaining or not view.needed_blocks:
            return True
        if math.isinf(view.since_shortage_s):
            return True
        room = view.available_blocks * (1 - self.reserve)
        own_blocks = [min(part, LARGEST_SHARE * room) for part in needed_blocks([own], view.block_size)]
        peak = max(own_blocks)
        return not any(
            others + part > room and part >= SLIGHT_SHARE * peak
            for others, part in zip(view.needed_blocks, own_blocks, strict=True)
        )
