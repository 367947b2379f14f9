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

    A request of ``cached`` tokens that are there and ``new`` ones computes new·cached + new·(new+1)/2 pairs
    and reads the KV of cached + new tokens. Raises ``ValueError`` for costs that are not finite and ≥ 0.
    """

    pair_s: float
    token_s: float = 0.0
    request_s: float = 0.0
    kv_token_s: float = 0.0

    def __post_init__(self) -> None:
        costs = (self.pair_s, self.token_s, self.request_s, self.kv_token_s)
        if not all(0 <= cost < math.inf for cost in costs):
            raise ValueError(f"{self}; expected seconds, finite and ≥ 0")

    @classmethod
    def of(cls, costs: StepCosts) -> AttentionCosts:
        """The part of a step's fitted costs that is attention's: pairs, and the KV read, which is nearly all
        that a decode costs. A profile's seconds a token and a request are mostly those of other layers."""
        return cls(pair_s=costs.pair_s, kv_token_s=costs.kv_token_s)

    def seconds(self, cached: int, new: int) -> float:
        """What one request adds."""
        return (
            self.pair_s * new * (cached + (new + 1) / 2)
            + self.kv_token_s * (cached + new)
            + self.token_s * new
            + self.request_s
        )


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

    The first that does not fit whole is cut: it gets as much as does fit, up to the end of a block of
    ``block_tokens``, found by halving; nobody behind it is looked at. A step in which nothing fits computes
    one block all the same, so that it always goes on. Raises ``ValueError``.
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
            most = new if tokens + new <= tokens_at_most else int(tokens_at_most - tokens)
            chunk = self.chunk(cached, most, left_s, first=not chunks)
            if not chunk:
                break
            chunks.append(chunk)
            tokens += chunk
            spent_s += self.costs.seconds(cached, chunk)
            left_s = self.quota_s - spent_s
            if chunk < new:
                break
        return StepPlan(tuple(chunks), spent_s)

    def chunk(self, cached: int, new: int, left_s: float, *, first: bool) -> int:
        """How many of a request's ``new`` tokens take at most ``left_s``: all, as many as end with a block,
        or none; of the ``first`` of a step the rest of a block at least."""
        if self.costs.seconds(cached, new) <= left_s:
            return new
        # Where the context ends within a block, the first end of a block is nearer than a block.
        ahead = cached % self.block_tokens
        low, high = 0, (ahead + new) // self.block_tokens
        while low < high:
            middle = (low + high + 1) // 2
            if self.costs.seconds(cached, middle * self.block_tokens - ahead) <= left_s:
                low = middle
            else:
                high = middle - 1
        if low:
            return low * self.block_tokens - ahead
        return min(new, self.block_tokens - ahead) if first else 0


class OpenStep:
    """A step that an engine packs by itself: it is asked about one prompt after the other, in their order.

    ``decodes_s`` of the quota are spoken for by requests that generate: they are in every step, wherever in
    line they stand, and nobody waits for a token because of prompts. The rest is the prompts'.
    """

    __slots__ = ("_quota", "_taken", "closed", "cut", "decodes_s", "prompts_s")

    def __init__(self, quota: ComputeQuota, decodes_s: float) -> None:
        self._quota = quota
        self._taken: dict[str, float] = {}
        self.decodes_s = decodes_s
        self.prompts_s = 0.0
        """Of those taken so far."""
        self.closed = False
        """Somebody did not fit: nobody else gets anything."""
        self.cut: str | None = None
        """Who was cut; not who was kept out whole."""

    def offer(self, request_id: str, cached: int, new: int, *, divisible: bool = True) -> int:
        """How many of ``new`` tokens it may compute. One that is not ``divisible`` gets all or none, and all
        where it is the step's first. What it computes in the end is to be told with ``take``."""
        if self.closed:
            return 0
        left_s = self._quota.quota_s - self.decodes_s - self.prompts_s
        chunk = self._quota.chunk(cached, new, left_s, first=not self._taken)
        if chunk < new:
            self.closed = True
            if not divisible:
                return 0 if self._taken else new
            self.cut = request_id if chunk else None
        return chunk

    def take(self, request_id: str, cached: int, chunk: int) -> None:
        """It computes so much in this step."""
        seconds = self._quota.costs.seconds(cached, chunk)
        self._taken[request_id] = seconds
        self.prompts_s += seconds

    def taken(self) -> set[str]:
        """Who computes something, as far as is known."""
        return set(self._taken)

    def leave(self, request_id: str) -> None:
        """It computes nothing after all; harmless where it was to compute nothing anyway."""
        if request_id not in self._taken:
            return
        del self._taken[request_id]
        self.prompts_s = math.fsum(self._taken.values())
        if request_id == self.cut:  # nobody has been kept out but those behind it
            self.cut, self.closed = None, False
