"""Computes the context length from which offloading KV is faster than recomputing it (Tetris §2.1), from the
measured prefill curve and copy bandwidth."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..policies.costs.engine_profile import EngineProfile
from ..policies.preemption_policies import measured_break_even_tokens


class OffloadBreakEven(NamedTuple):
    """The context length from which copying KV out and back is faster than recomputing it."""

    faster: str
    """Whether copying is faster: ``always``, ``from`` (``tokens`` on), ``never`` or ``not known``."""
    tokens: float | None = None
    """The length; 0 for ``always``, ``None`` for ``never`` and ``not known``."""
    why: str = ""
    """Why the length is unknown."""
    copy_s_per_token: float | None = None
    """Seconds to copy a token's KV out and back."""

    def words(self, longest: int) -> str:
        """Return the length as text. ``longest``: the longest measured context, in tokens."""
        if self.why:
            return f"not known, {self.why}"
        if not self.tokens:
            return self.faster
        beyond = f", beyond the {longest:,} measured" if self.tokens > longest else ""
        return f"from {math.ceil(self.tokens):,} tokens on{beyond}"


def offload_break_even(profile: EngineProfile) -> OffloadBreakEven:
    """Return the context length from which offloading is faster. Never raises."""
    kv_bytes, curve = profile.limits.kv_bytes_per_token, profile.prefill
    down, up = profile.device_to_host_bytes_per_s, profile.host_to_device_bytes_per_s
    if not kv_bytes:
        why = "the server does not report the KV bytes per token; sojourn serve does"
        return OffloadBreakEven("not known", why=why)
    if not (down and up):
        return OffloadBreakEven("not known", why="no copies were measured")
    copy_s = kv_bytes / down + kv_bytes / up
    tokens = measured_break_even_tokens(curve.a_s, curve.b_s_per_token, curve.c_s_per_token2, copy_s)
    if tokens == math.inf:
        return OffloadBreakEven("never", copy_s_per_token=copy_s)
    return OffloadBreakEven("from" if tokens > 0 else "always", max(0.0, tokens), copy_s_per_token=copy_s)
