"""Recovery: how a preempted request gets its KV back, by recomputing or by offloading (Tetris §2.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

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


class RecoveryPolicy(Protocol):
    """Chooses how a victim's KV is recovered."""

    def recovery(self, victim: PreemptedRequestView, now: float) -> RecoveryMethod: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AlwaysRecompute:
    """Always recomputes, as the unmodified engine does."""

    def recovery(self, victim: PreemptedRequestView, now: float) -> RecoveryMethod:
        return RecoveryMethod.RECOMPUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class AlwaysOffload:
    """Always offloads if host memory has space, else recomputes."""

    def recovery(self, victim: PreemptedRequestView, now: float) -> RecoveryMethod:
        return RecoveryMethod.OFFLOAD if victim.offload_s < math.inf else RecoveryMethod.RECOMPUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class CheaperRecovery:
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
    back. Raises ``ValueError`` unless all arguments are finite and ≥ 0."""
    coefficients = (a_s, b_s_per_token, c_s_per_token2, copy_s_per_token)
    if not all(math.isfinite(value) and value >= 0 for value in coefficients):
        raise ValueError(f"a, b, c and copying are {coefficients}; expected finite numbers ≥ 0")
    gained = b_s_per_token - copy_s_per_token
    if gained >= 0:
        return 0.0
    if c_s_per_token2 == 0:
        return math.inf
    # The larger root of a + gained·S + c·S² = 0: below it copying costs more, except for very few tokens.
    root = gained * gained - 4 * c_s_per_token2 * a_s
    return 0.0 if root < 0 else (-gained + math.sqrt(root)) / (2 * c_s_per_token2)
