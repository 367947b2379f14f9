"""Accounts and the entries that change them."""

from __future__ import annotations

from dataclasses import dataclass, field

from .money import Money


@dataclass(frozen=True)
class Entry:
    """One line of a transaction: ``amount`` flows into ``account``."""

    account: str
    amount: Money
    note: str = ""


@dataclass
class Account:
    """A named pot with its history."""

    name: str
    currency: str = "EUR"
    entries: list[Entry] = field(default_factory=list)

    @property
    def balance(self) -> Money:
        """Sum of all entries so far."""
        total = Money(0, self.currency)
        for entry in self.entries:
            total = total + entry.amount
        return total

    def apply(self, entry: Entry) -> None:
        """Append an entry that names this account."""
        if entry.account != self.name:
            raise ValueError(f"entry for {entry.account} applied to {self.name}")
        self.entries.append(entry)
