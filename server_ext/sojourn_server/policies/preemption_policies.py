"""Preemption: which running request is preempted (``victim`` in presets), and how does it get its KV back
(``recovery``; Tetris §2.1)?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import nlargest
from statistics import fmean
from typing import Annotated, NamedTuple

from msgspec import Meta

from .forecasting import STEP_POINTS, needed_blocks, peak_demand_blocks
from .policy_views import BlockShortage, RunningRequestView
from .queue_order_policies import service_level

HORIZON_STEPS = 1024.0
IMMUNE_TOKENS = 64
MOST_PREEMPTIONS = 3
MOST_COMPARED = 128
"""Numbers of ``BestFitVictim``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VictimPolicy:
    """Chooses the running request to preempt, by its id. The base leaves the choice to the engine (``None``),
    which preempts the request admitted last."""

    def victim(self, running: Sequence[RunningRequestView], need: BlockShortage, now: float) -> str | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestProgramVictim(VictimPolicy):
    """Preempts the request whose program arrived last.

    The program of the request admitted last may have arrived early, and only just returned from a tool. A
    queue order such as ``program-fcfs`` prefers such a program.
    """

    def victim(self, running: Sequence[RunningRequestView], need: BlockShortage, now: float) -> str | None:
        return _last(running, lambda view: (view.program_rank, view.position))


@dataclass(frozen=True, slots=True, kw_only=True)
class MostAttainedServiceVictim(VictimPolicy):
    """Preempts a request whose program has had the most service (arXiv 2502.13965, Autellix, §4.2.2): the
    last admitted request of the queue with the most service (``service_level``)."""

    def victim(self, running: Sequence[RunningRequestView], need: BlockShortage, now: float) -> str | None:
        return _last(running, lambda view: (service_level(view.attained_s, view.ran_s), view.position))


@dataclass(frozen=True, slots=True, kw_only=True)
class BestFitVictim(VictimPolicy):
    """Preempts one request whose removal ends the shortage: the one with the least loss (Tetris §1, §4).

    A removal ends the shortage if the expected demand of the other requests fits in the available blocks for
    ``HORIZON_STEPS`` steps. If no single removal does, the one that leaves the smallest shortage is chosen.
    The loss is the victim's pause (the wait until blocks are free again, and the work to restore the KV)
    divided by its total output tokens: the same pause hurts a short answer more than a long one.

    A preempted request is immune until it has generated ``IMMUNE_TOKENS`` more tokens, and for ever after
    ``MOST_PREEMPTIONS`` preemptions. If all requests are immune, those with the fewest preemptions are
    candidates. While no program's request has a predicted output length, the candidate admitted last is the
    victim. Of more than ``MOST_COMPARED`` candidates, only those with the most blocks are compared, since a
    step waits for the choice. If no running request belongs to a program, the engine chooses. It also chooses
    while no request is expected to generate ``least_tokens`` more tokens in the mean: where outputs are
    short, a pause costs more than the choice of the victim saves.
    """

    least_tokens: Annotated[int, Meta(ge=0)] = 0

    def victim(self, running: Sequence[RunningRequestView], need: BlockShortage, now: float) -> str | None:
        if not any(view.of_program for view in running):
            return None
        if all(fmean(view.remaining or (0.0,)) < self.least_tokens for view in running):
            return None
        candidates = [view for view in running if not _is_immune(view)]
        if not candidates:
            least = min(view.preemptions for view in running)
            candidates = [view for view in running if view.preemptions == least]
        if not any(view.of_program and view.remaining for view in running):
            if len(candidates) == len(running):
                return None
            return max(candidates, key=lambda view: (view.position, view.request_id)).request_id
        if len(candidates) > MOST_COMPARED:
            candidates = nlargest(MOST_COMPARED, candidates, key=lambda one: one.blocks - one.shared_blocks)
        # A fixed order, so that floating-point sums do not depend on the order of the requests.
        in_order: Sequence[RunningRequestView] = sorted(running, key=lambda view: view.request_id)
        needed = needed_blocks(in_order, need.block_size)

        def worth(view: RunningRequestView) -> tuple[float, float, int, int]:
            own = needed_blocks([view], need.block_size)
            # Rounded to a millionth of a block, so that an exact fit does not fail in the last digit.
            others = [round(whole - its, 6) for whole, its in zip(needed, own, strict=True)]
            # ``available_blocks`` counts a shared block for each request that uses it. The victim's shared
            # blocks stay in use after its removal.
            available_blocks = need.available_blocks - view.shared_blocks
            lacking = max(0.0, peak_demand_blocks(others, HORIZON_STEPS) - available_blocks)
            back_at = next(
                (
                    at
                    for at, taken in zip(STEP_POINTS, others, strict=True)
                    if round(taken + own[0], 6) <= available_blocks
                ),
                2 * STEP_POINTS[-1],
            )
            return (lacking, _preemption_loss(view, back_at, need.step_s), -view.program_rank, -view.position)

        return min(candidates, key=worth).request_id


def _last(
    running: Sequence[RunningRequestView], order: Callable[[RunningRequestView], tuple[int, int]]
) -> str | None:
    last = max(running, key=order, default=None)
    return None if last is None else last.request_id


def _is_immune(view: RunningRequestView) -> bool:
    return view.preemptions > 0 and (
        view.preemptions >= MOST_PREEMPTIONS or view.stayed_tokens < IMMUNE_TOKENS
    )


def _preemption_loss(view: RunningRequestView, back_at: int, step_s: float) -> float:
    """Return the loss of preempting a request: steps until the request continues, per token of its total
    output.

    ``back_at``: steps until the request fits again. ``step_s``: seconds per step; 0: unknown."""
    work = view.recover_s / step_s if step_s > 0 else 0.0
    left = math.fsum(view.remaining) / len(view.remaining) if view.remaining else 0.0
    return (back_at + work) / max(1.0, view.output_tokens + left)


NO_OFFLOAD_S_PER_TOKEN = 1e9
"""Value of a copy time per token that means "no space in host memory". It is finite, since recordings cannot
hold infinity."""


class RecoveryMethod(str, Enum):
    """How a preempted request's KV is recovered."""

    RECOMPUTE = "recompute"
    """The request's blocks are reused without a copy, and its KV is computed again."""
    OFFLOAD = "offload"
    """Blocks are copied to host memory before their reuse, and loaded back from there."""


class PreemptedRequestView(NamedTuple):
    """A request that is about to be preempted. Times in seconds."""

    tokens: int
    """Context length."""
    recompute_s: float
    """Time to recompute the context."""
    offload_s_per_token: float | None
    """Time to copy a token's KV to host memory. ``None``: no host memory; ``NO_OFFLOAD_S_PER_TOKEN``: no
    space in it; 0: unknown."""
    load_back_s_per_token: float | None
    """Time to copy a token's KV back to the device; ``None``: no host memory; 0: unknown."""
    copied_tokens: int = 0
    """Tokens of the context that are already in host memory."""
    queued_s: float = 0.0
    """Time until the queued copies to host memory are done."""
    loads_queued_s: float = 0.0
    """Time until the queued copies to the device are done."""

    @property
    def offload_s(self) -> float:
        """Seconds of an offload: to copy the missing tokens to host memory, and later all tokens back to the
        device. The wait for queued copies is included. ``inf``: no host memory, or no space in it."""
        if self.offload_s_per_token is None or self.load_back_s_per_token is None:
            return math.inf
        left = max(0, self.tokens - self.copied_tokens)
        if left and self.offload_s_per_token >= NO_OFFLOAD_S_PER_TOKEN:
            return math.inf
        out_s = left * self.offload_s_per_token if left else 0.0
        # The copy back begins when the KV is in host memory and the queued copies to the device have ended.
        return max(self.queued_s + out_s, self.loads_queued_s) + self.tokens * self.load_back_s_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPolicy:
    """Chooses how a victim's KV is recovered. The base always offloads if host memory has space, else
    recomputes."""

    def recovery(self, victim: PreemptedRequestView, now: float) -> RecoveryMethod:
        return RecoveryMethod.OFFLOAD if victim.offload_s < math.inf else RecoveryMethod.RECOMPUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class CheaperRecovery(RecoveryPolicy):
    """Chooses the faster of recomputing and offloading. The time to copy grows linearly with the context, the
    time to recompute quadratically."""

    def recovery(self, victim: PreemptedRequestView, now: float) -> RecoveryMethod:
        return RecoveryMethod.OFFLOAD if victim.offload_s < victim.recompute_s else RecoveryMethod.RECOMPUTE


def measured_break_even_tokens(
    a_s: float, b_s_per_token: float, c_s_per_token2: float, copy_s_per_token: float
) -> float:
    """Return the context length in tokens beyond which offloading is faster than recomputing, from
    measurements.

    0: offloading is faster at every length. ``inf``: recomputing is faster for all long contexts. The prefill
    of S tokens takes a + b·S + c·S² seconds. ``copy_s_per_token`` is the time to copy a token's KV out and
    back."""
    gained = b_s_per_token - copy_s_per_token
    if gained >= 0:
        return 0.0
    if c_s_per_token2 == 0:
        return math.inf
    # The larger root of a + gained·S + c·S² = 0: below it copying costs more, except for very few tokens.
    root = gained * gained - 4 * c_s_per_token2 * a_s
    return 0.0 if root < 0 else (-gained + math.sqrt(root)) / (2 * c_s_per_token2)
