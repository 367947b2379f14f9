"""What declarations have been worth: did the program come back after its turn as its hints said?"""

from __future__ import annotations

from collections.abc import Sequence

HALF_LIFE = 20.0
"""Outcomes after which an older one weighs half."""
MIN_OUTCOMES = 5.0
"""Weight of outcomes below which declarations are believed unseen."""
MAX_ERROR_RATIO = 1.25
"""How many times the error of saying the same of every turn a declaration's may be."""
ERROR_SLACK = 0.05
"""And this much more: sums of next to nothing tell nothing."""
CHANCE_ERROR = 0.25
"""Mean squared error of tossing a coin."""

_DECAY = 0.5 ** (1.0 / HALF_LIFE)


class HintReliability:
    """Squared errors of declared probabilities, beside those of the plain share of turns that were followed
    by another; both decayed."""

    __slots__ = ("base_error", "came_back", "declared", "error", "weight")

    def __init__(self) -> None:
        self.weight = self.came_back = self.declared = self.error = self.base_error = 0.0

    def observe(self, declared: float | None, came_back: bool) -> None:
        """A program came back after its turn, or ended. ``declared``: what its hints gave to the former."""
        outcome = float(came_back)
        if declared is not None:
            share = (self.came_back + 0.5) / (self.weight + 1.0)
            self.error = self.error * _DECAY + (declared - outcome) ** 2
            self.base_error = self.base_error * _DECAY + (share - outcome) ** 2
            self.declared = self.declared * _DECAY + 1.0
        self.weight = self.weight * _DECAY + 1.0
        self.came_back = self.came_back * _DECAY + outcome

    @property
    def hints_reliable(self) -> bool:
        """For many programs: whether declarations are no worse than saying the same of every turn."""
        return self.weight < MIN_OUTCOMES or self.error <= self.base_error * MAX_ERROR_RATIO + ERROR_SLACK

    @property
    def no_worse_than_chance(self) -> bool:
        """For one program, of which all turns but the last are followed by another."""
        return self.declared < MIN_OUTCOMES or self.error <= self.declared * CHANCE_ERROR

    def numbers(self) -> list[float]:
        """All of it, for ``restored``."""
        return [self.weight, self.came_back, self.declared, self.error, self.base_error]

    @classmethod
    def restored(cls, numbers: Sequence[float]) -> HintReliability:
        """From ``numbers``. Raises ``ValueError`` for anything else."""
        if len(numbers) != 5 or not all(isinstance(n, (int, float)) and 0 <= n < 1e9 for n in numbers):
            raise ValueError(f"credit: {list(numbers)[:6]!r}; expected five numbers ≥ 0")
        credit = cls()
        credit.weight, credit.came_back, credit.declared, credit.error, credit.base_error = map(
            float, numbers
        )
        return credit
