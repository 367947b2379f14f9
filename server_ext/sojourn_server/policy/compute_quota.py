"""How much of the waiting prompts one step computes: as much as attention takes so long (DualPath §6.2, D7).

Devices that share expert layers wait for one another after each attention layer, and attention over a long
context takes longer than over a short one for as many new tokens. A quota in seconds of attention makes them
equally long where one in tokens does not. An engine by itself waits for nobody: there it bounds how long a
step takes, and no more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from .step_costs import StepCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCosts:
    """Seconds of attention in a step, fitted to an engine in advance: all layers, one request after another.

    A request of ``cached`` tokens that are there and ``new`` ones computes new·cached + new·(new+1)/2 pairs.
    Raises ``ValueError`` for costs that are not finite and ≥ 0.
    """

    pair_s: float
    token_s: float = 0.0
    request_s: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= cost < math.inf for cost in (self.pair_s, self.token_s, self.request_s)):
            raise ValueError(f"{self}; expected seconds, finite and ≥ 0")

    @classmethod
    def of(cls, costs: StepCosts) -> AttentionCosts:
        """The part of a step's fitted costs that is attention's: pairs alone, since a profile's seconds a
        token and a request are mostly those of other layers."""
        return cls(pair_s=costs.pair_s)

    def seconds(self, cached: int, new: int) -> float:
        """What one request adds."""
        return self.pair_s * new * (cached + (new + 1) / 2) + self.token_s * new + self.request_s


class Prefill(NamedTuple):
    """A request that could be computed in this step."""

    cached: int
    """Tokens whose KV is there, from storage or from steps before."""
    new: int
    """Tokens that are left to compute; at least 1."""


class StepPlan(NamedTuple):
    """What a step computes: the first ``len(chunks)`` requests, each so many of its new tokens."""

    chunks: tuple[int, ...]
    attention_s: float
    """Predicted."""

    @property
    def tokens(self) -> int:
        """Of all chunks: an engine that packs the same requests in the same order up to this many tokens
        plans the same step."""
        return sum(self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeQuota:
    """Packs requests in their order until attention would take longer than ``quota_s``.

    The first that does not fit whole gets the largest chunk that does, in multiples of ``block_tokens``,
    found by halving; nobody behind it is looked at. A step in which nothing fits computes one block all the
    same, so that it always goes on. Raises ``ValueError``.
    """

    costs: AttentionCosts
    quota_s: float = 0.3
    block_tokens: int = 64

    def __post_init__(self) -> None:
        if not self.quota_s > 0 or self.block_tokens < 1:
            raise ValueError(
                f"quota_s {self.quota_s}, block_tokens {self.block_tokens}; expected above 0, at least 1"
            )

    def plan(
        self,
        requests: Iterable[Prefill],
        *,
        tokens_at_most: float = math.inf,
        requests_at_most: float = math.inf,
    ) -> StepPlan:
        """``requests``: those that run first, then those that wait, first come first served. Only as many
        are taken from it as are looked at. Raises ``ValueError`` for one without new tokens."""
        chunks: list[int] = []
        left_s, tokens = self.quota_s, 0
        spent_s = 0.0
        for cached, new in requests:
            if new < 1 or cached < 0:
                raise ValueError(f"a request of {cached} cached and {new} new tokens; expected ≥ 0 and ≥ 1")
            if len(chunks) >= requests_at_most or tokens >= tokens_at_most:
                break
            chunk = new if tokens + new <= tokens_at_most else int(tokens_at_most - tokens)
            cost_s = self.costs.seconds(cached, chunk)
            if cost_s > left_s:
                chunk = self._largest(cached, chunk, left_s)
                if not chunk:
                    if chunks:
                        break
                    chunk = int(min(self.block_tokens, new, tokens_at_most))
                cost_s = self.costs.seconds(cached, chunk)
            chunks.append(chunk)
            tokens += chunk
            spent_s += cost_s
            left_s = self.quota_s - spent_s
            if chunk < new:
                break
        return StepPlan(tuple(chunks), spent_s)

    def _largest(self, cached: int, most: int, left_s: float) -> int:
        """The largest multiple of a block below ``most`` that takes at most ``left_s``; 0: none does."""
        low, high = 0, most // self.block_tokens
        while low < high:
            middle = (low + high + 1) // 2
            if self.costs.seconds(cached, middle * self.block_tokens) <= left_s:
                low = middle
            else:
                high = middle - 1
        return low * self.block_tokens
