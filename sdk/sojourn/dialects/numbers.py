"""Numbers as wide as a server's own: one that does not fit would fail the agent's request."""

from __future__ import annotations

I32_MAX = 2**31 - 1
U32_MAX = 2**32 - 1
I64_MAX = 2**63 - 1


def i32(value: int) -> int:
    """Clipped to ±(2**31 - 1): so that what is negated still fits."""
    return max(-I32_MAX, min(I32_MAX, value))


def i64(value: int) -> int:
    """Clipped to ±(2**63 - 1)."""
    return max(-I64_MAX, min(I64_MAX, value))


def u32(value: int) -> int:
    """Clipped to 0 … 2**32 - 1."""
    return max(0, min(U32_MAX, value))
