"""Computes the context length from which offloading KV is faster than recomputing it (Tetris §2.1), from the
measured prefill curve and copy bandwidth."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from sojourn_server.policies.costs.engine_profile import EngineProfile
from sojourn_server.policies.preemption_policies import measured_break_even_tokens


class OffloadBreakEven(NamedTuple):
    """The context length from which copying KV out and back is faster than recomputing it."""

    tokens: float | None
    """The length in tokens. 0 or less: copying is always faster. ``inf``: never. ``None``: unknown."""
    copy_s_per_token: float | None = None
    """Seconds to copy a token's KV out and back."""
    why: str = ""
    """Why the length is unknown."""

    def words(self, longest: int) -> str:
        """Return the length as text. ``longest``: the longest measured context, in tokens."""
        if self.tokens is None:
            return f"not known, {self.why}"
        if self.tokens <= 0:
            return "always"
        if self.tokens == math.inf:
            return "never"
        beyond = f", beyond the {longest:,} measured" if self.tokens > longest else ""
        return f"from {math.ceil(self.tokens):,} tokens on{beyond}"

    def as_json(self) -> dict[str, Any]:
        """Return the length as a JSON object. ``faster`` is ``always``, ``from``, ``never`` or ``not known``.
        ``tokens`` is the length: 0 for ``always``; null for ``never`` and ``not known``."""
        faster = "not known" if self.tokens is None else "from" if self.tokens > 0 else "always"
        tokens = max(0.0, self.tokens) if self.tokens is not None else None
        if tokens == math.inf:
            faster, tokens = "never", None
        return {
            "faster": faster, "tokens": tokens, "why": self.why, "copy_s_per_token": self.copy_s_per_token,
        }  # fmt: skip


def offload_break_even(profile: EngineProfile) -> OffloadBreakEven:
    """Return the context length from which offloading is faster. If inputs are missing, the length is
    unknown, and ``why`` says what is missing. Never raises."""
    kv_bytes = profile.limits.kv_bytes_per_token
    down, up = profile.device_to_host_bytes_per_s, profile.host_to_device_bytes_per_s
    if not kv_bytes:
        why = "the server does not report the KV bytes per token; sojourn serve does"
        return OffloadBreakEven(None, why=why)
    if not (down and up):
        return OffloadBreakEven(None, why="no copies were measured")
    copy_s = kv_bytes / down + kv_bytes / up
    curve = profile.prefill
    return OffloadBreakEven(
        measured_break_even_tokens(curve.a_s, curve.b_s_per_token, curve.c_s_per_token2, copy_s), copy_s
    )
