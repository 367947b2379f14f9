"""Prefill quota: limits a step's prompt tokens by their attention time (DualPath §6.2; mechanism D7).

Devices that share expert layers synchronise after each attention layer. Attention takes longer over a long
context than over a short one. So a quota in seconds of attention makes the devices' steps equally long; a
quota in tokens does not. On a single engine, the quota only bounds the duration of a step.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from ..costs.step_costs import StepCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillComputeQuota:
    """Limits the attention of a step's prompts to ``quota_s`` seconds. A prompt that does not fit is cut at a
    block boundary (``block_tokens``)."""

    costs: StepCosts
    """Costs of attention. ``token_s`` is 0 unless it is about attention: costs per token belong mostly to
    other layers."""
    quota_s: float = 0.3
    block_tokens: int = 64

    def chunk(self, cached: int, new: int, left_s: float, *, first: bool) -> int:
        """Return how many of a request's ``new`` tokens fit in ``left_s`` seconds of attention.

        ``cached``: number of tokens before the new ones. If not all new tokens fit, the context is cut at a
        block boundary, and the result may be 0. ``first``: whether the request is the first of the step. A
        first request gets tokens up to the next block boundary even if these do not fit."""
        if self.costs.chunk_s(cached, new) <= left_s:
            return new
        # If the cached context ends within a block, the next block boundary is less than a block away.
        ahead = cached % self.block_tokens
        cut = bisect_right(
            range(1, (ahead + new) // self.block_tokens + 1),
            left_s,
            key=lambda blocks: self.costs.chunk_s(cached, blocks * self.block_tokens - ahead),
        )
        if cut:
            return cut * self.block_tokens - ahead
        return min(new, self.block_tokens - ahead) if first else 0


class StepQuotaUsage:
    """Packs prompts into one step, in order, and counts their attention seconds against the quota.

    The first prompt that does not fit is cut, and later ones get nothing. A step computes at least one block
    of its first prompt, so that every step makes progress. ``decodes_s`` seconds of the quota are reserved
    for decoding requests, which are in every step: prompts never displace them.
    """

    __slots__ = ("_closed_by", "_quota", "_taken", "closed", "cut", "decodes_s", "prompts_s")

    def __init__(self, quota: PrefillComputeQuota, decodes_s: float) -> None:
        self._quota = quota
        self._taken: dict[str, float] = {}
        self._closed_by: str | None = None
        """Id of the request that closed the step (see ``closed``), if it got tokens."""
        self.decodes_s = decodes_s
        self.prompts_s = 0.0
        """Attention seconds of the prompts packed so far."""
        self.closed = False
        """True once a prompt did not fit completely; later prompts of the step get nothing."""
        self.cut: str | None = None
        """Id of the request that got only part of its tokens."""

    def offer(self, request_id: str, cached: int, new: int, *, chunkable: bool = True) -> int:
        """Return how many of a request's ``new`` tokens may be computed in this step. ``cached``: number of
        tokens before them.

        The tokens count as used only after ``take``. If ``chunkable`` is false, the request gets all its
        tokens or none. It gets all if they fit, or if the request is the first prompt of the step."""
        if self.closed:
            return 0
        left_s = self._quota.quota_s - self.decodes_s - self.prompts_s
        chunk = self._quota.chunk(cached, new, left_s, first=not self._taken)
        if chunk < new:
            self.closed = True
            if not chunkable:
                chunk = 0 if self._taken else new
            elif chunk:
                self.cut = request_id
            self._closed_by = request_id if chunk else None
        return chunk

    def take(self, request_id: str, cached: int, chunk: int) -> None:
        """Record that the request computes ``chunk`` tokens in this step."""
        seconds = self._quota.costs.chunk_s(cached, chunk)
        self._taken[request_id] = seconds
        self.prompts_s += seconds

    def taken(self) -> set[str]:
        """Return the ids of the requests that were passed to ``take`` in this step."""
        return set(self._taken)

    def undo_take(self, request_id: str) -> None:
        """Undo ``take`` for a request; no effect if the request took nothing. If the request closed the step,
        later prompts may be added again."""
        if request_id not in self._taken:
            return
        del self._taken[request_id]
        self.prompts_s = math.fsum(self._taken.values())
        if request_id == self._closed_by:
            self.cut, self._closed_by, self.closed = None, None, False
