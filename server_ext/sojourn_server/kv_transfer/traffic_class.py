"""Whose bytes they are, and who goes first on a link that both want (DualPath §5.1).

On a fabric, virtual lanes or hardware queues keep KV out of the way of the model's collectives, which come in
bursts of less than a millisecond: no software between the bursts can do that, as the paper says. What is here
carries the class on every transfer, so that a transport which has such lanes can use them, and orders this
engine's *own* software lane by it. It knows nothing of collectives that a library of its own sends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum


class TrafficClass(Enum):
    """What a transfer is for."""

    MODEL = "model"
    """What a forward pass waits for."""
    KV = "kv"
    """What can wait."""


class TrafficClassArbiter:
    """Strict priority for the model, but for a small share of bytes for KV so that it does not starve.

    While both wait, KV's bytes are ``kv_share`` of all, to within one item of each. What one leaves idle is
    the other's. KV that did not wait has no claim on what it could have had.
    """

    def __init__(self, kv_share: float) -> None:
        """Raises ``ValueError`` for a share outside [0, 1)."""
        if not (math.isfinite(kv_share) and 0 <= kv_share < 1):
            raise ValueError(f"KV's share of a link must be at least 0 and below 1, not {kv_share}")
        self._factor = kv_share / (1 - kv_share)
        self._owed = 0.0
        """Bytes that KV has earned while it waited."""

    def take(self, heads: Mapping[TrafficClass, int]) -> TrafficClass:
        """Who sends next; ``heads`` has the bytes of the first item of each class that waits."""
        if TrafficClass.KV not in heads:
            self._owed = 0.0
            return TrafficClass.MODEL
        if TrafficClass.MODEL not in heads:
            return TrafficClass.KV
        if self._factor and self._owed >= heads[TrafficClass.KV]:
            self._owed -= heads[TrafficClass.KV]
            return TrafficClass.KV
        self._owed += heads[TrafficClass.MODEL] * self._factor
        return TrafficClass.MODEL
