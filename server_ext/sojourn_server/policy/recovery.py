"""How a preempted request gets its KV back: computed again, or copied out and in again (Tetris §2.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

NOWHERE_S_PER_TOKEN = 1e9
"""What copying a token's KV to host memory is said to take where there is no room: a number as tapes can hold
it, which infinity is not."""


class Recovery(str, Enum):
    """The two ways."""

    RECOMPUTE = "recompute"
    """Its KV may be lost when its blocks are reused."""
    OFFLOAD = "offload"
    """What is reused of it goes to host memory first, and comes back from there."""


class RecoveryView(NamedTuple):
    """A request that is to be preempted. Times are seconds."""

    tokens: int
    """Of its context."""
    recompute_s: float
    """To compute it again."""
    out_s_per_token: float | None
    """To copy a token's KV to host memory; ``None`` or ``NOWHERE_S_PER_TOKEN``: there is none, or it has no
    room."""
    back_s_per_token: float | None
    """To copy it back."""
    copied_tokens: int = 0
    """Of the context, what has been copied out already."""
    queued_s: float = 0.0
    """What the link has yet to do before it could begin."""

    @property
    def offload_s(self) -> float:
        """To copy it out, as far as it is not yet, and back; ``inf`` where there is nowhere to."""
        if self.out_s_per_token is None or self.back_s_per_token is None:
            return math.inf
        left = max(0, self.tokens - self.copied_tokens)
        if left and self.out_s_per_token >= NOWHERE_S_PER_TOKEN:
            return math.inf
        out_s = left * self.out_s_per_token if left else 0.0
        return self.queued_s + out_s + self.tokens * self.back_s_per_token


class RecoveryPolicy(Protocol):
    """Which way a victim's KV takes."""

    def recovery(self, victim: RecoveryView, now: float) -> Recovery: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AlwaysRecompute:
    """As the untouched engine: what is reused is lost."""

    def recovery(self, victim: RecoveryView, now: float) -> Recovery:
        return Recovery.RECOMPUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class AlwaysOffload:
    """Whatever is reused goes to host memory where there is room."""

    def recovery(self, victim: RecoveryView, now: float) -> Recovery:
        return Recovery.OFFLOAD if victim.offload_s < math.inf else Recovery.RECOMPUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class Cheaper:
    """Whichever takes less time: copying grows with the context, computing with its square."""

    def recovery(self, victim: RecoveryView, now: float) -> Recovery:
        return Recovery.OFFLOAD if victim.offload_s < victim.recompute_s else Recovery.RECOMPUTE


def break_even_tokens(
    *,
    layers: int,
    hidden: int,
    kv_bytes_per_token: float,
    flops_per_s: float,
    link_bytes_per_s: float,
) -> float:
    """Context in tokens from which copying KV out and in again is faster than computing it, where nothing was
    measured; 0 or less: always (§2.1, equations 1 to 3).

    Computing S tokens: 4·L·(6·S·D² + S²·D) operations. Copying: 2·S·M bytes, M of them a token. The paper's
    own K = 2·B_comp/B_mem − 6·D is this for M = 4·L·D, keys and values of two bytes without grouped heads;
    its equation 2 ends in S·D·L/B_mem, an eighth of that. Raises ``ValueError`` unless all are > 0.
    """
    for name, value in (
        ("layers", layers),
        ("hidden", hidden),
        ("kv_bytes_per_token", kv_bytes_per_token),
        ("flops_per_s", flops_per_s),
        ("link_bytes_per_s", link_bytes_per_s),
    ):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value}; expected a number above 0")
    return kv_bytes_per_token * flops_per_s / (2 * layers * hidden * link_bytes_per_s) - 6 * hidden


def measured_break_even_tokens(
    a_s: float, b_s_per_token: float, c_s_per_token2: float, copy_s_per_token: float
) -> float:
    """The same from a measured curve of prefill seconds, a + b·S + c·S², and seconds to copy a token's KV out
    and back: 0 where copying is always faster, ``inf`` where it never is for good. Raises ``ValueError``
    unless all are finite and ≥ 0.
    """
    coefficients = (a_s, b_s_per_token, c_s_per_token2, copy_s_per_token)
    if not all(math.isfinite(value) and value >= 0 for value in coefficients):
        raise ValueError(f"a, b, c and copying are {coefficients}; expected finite numbers ≥ 0")
    gained = b_s_per_token - copy_s_per_token
    if gained >= 0:
        return 0.0
    if c_s_per_token2 == 0:
        return math.inf
    # a + gained·S + c·S² = 0, the larger root: below it copying costs more, but for the first few tokens.
    root = gained * gained - 4 * c_s_per_token2 * a_s
    return 0.0 if root < 0 else (-gained + math.sqrt(root)) / (2 * c_s_per_token2)
