"""Attained service in levels: the priority queues of Autellix §4.2.2."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLevels:
    """K queues over attained service; 0 is served first.

    Queue i < K−1 takes programs with less than ``first_s`` · 2^i seconds of
    service, the last all others, and lets a request run for ``quantum_s`` · 2^i
    seconds before it sinks to the next one.

    The paper prints no K, bounds or quanta. These are those of a public
    re-implementation (Crystalclear9/Autellix at c7a38cf: bounds 2, 4 … 64, quanta
    1, 2 … 64, in decoding steps), here in seconds. Raises ``ValueError`` where
    a number is out of range.
    """

    levels: int = 7
    first_s: float = 2.0
    quantum_s: float = 1.0

    def __post_init__(self) -> None:
        if not (1 <= self.levels <= 64 and 0 < self.first_s < float("inf")):
            raise ValueError(
                f"levels {self.levels}, first_s {self.first_s}; expected 1 to 64, and seconds > 0"
            )
        if not 0 < self.quantum_s < float("inf"):
            raise ValueError(f"quantum_s is {self.quantum_s}; expected finite seconds > 0")

    def level(self, attained_s: float, ran_s: float) -> int:
        """Where a request stands whose program had attained ``attained_s`` when it arrived, and which has
        itself run for ``ran_s`` since."""
        level = 0
        while level < self.levels - 1 and attained_s >= self.first_s * 2.0**level:
            level += 1
        while level < self.levels - 1 and ran_s >= self.quantum_s * 2.0**level:
            ran_s -= self.quantum_s * 2.0**level
            level += 1
        return level
