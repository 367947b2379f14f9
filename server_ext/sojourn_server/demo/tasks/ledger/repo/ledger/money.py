"""Amounts of one currency, kept as whole cents so that nothing is ever rounded away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class CurrencyMismatch(ValueError):
    """Two amounts of different currencies met in one sum."""


@dataclass(frozen=True, order=True)
class Money:
    """An amount in cents. Negative amounts are debts."""

    cents: int
    currency: str = "EUR"

    def __add__(self, other: Money) -> Money:
        self._check(other)
        return Money(self.cents + other.cents, self.currency)

    def __sub__(self, other: Money) -> Money:
        self._check(other)
        return Money(self.cents - other.cents, self.currency)

    def __neg__(self) -> Money:
        return Money(-self.cents, self.currency)

    def split(self, weights: Sequence[int]) -> list[Money]:
        """Divide the amount by ``weights``; the parts add up to the whole."""
        total = sum(weights)
        if total <= 0 or min(weights) < 0:
            raise ValueError(f"weights {list(weights)} do not describe a division")
        shares = [self.cents * weight // total for weight in weights]
        left = self.cents - sum(shares)
        for index in range(left - 1):
            shares[index % len(shares)] += 1
        return [Money(share, self.currency) for share in shares]

    def __str__(self) -> str:
        sign = "-" if self.cents < 0 else ""
        whole, part = divmod(abs(self.cents), 100)
        return f"{sign}{whole}.{part:02d} {self.currency}"

    def _check(self, other: Money) -> None:
        if self.currency != other.currency:
            raise CurrencyMismatch(f"{self.currency} and {other.currency} do not add")
