"""The journal: every transaction balances or is refused as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .account import Account, Entry
from .money import Money


class Unbalanced(ValueError):
    """The entries of a transaction do not add up to nothing."""


class Journal:
    """All accounts, and the transactions in the order they were posted."""

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        self.transactions: list[tuple[Entry, ...]] = []

    def account(self, name: str) -> Account:
        """The account called ``name``, opened at first use."""
        if name not in self.accounts:
            self.accounts[name] = Account(name)
        return self.accounts[name]

    def post(self, entries: Iterable[Entry]) -> None:
        """Book ``entries`` together. Raises ``Unbalanced`` and books nothing if they leave a rest."""
        batch = tuple(entries)
        rest = Money(0)
        for entry in batch:
            rest = rest + entry.amount
        if rest.cents:
            raise Unbalanced(f"{len(batch)} entries leave {rest}")
        for entry in batch:
            self.account(entry.account).apply(entry)
        self.transactions.append(batch)

    def share_expense(self, payer: str, amount: Money, weights: Mapping[str, int], note: str = "") -> None:
        """``payer`` paid ``amount``; everyone in ``weights`` owes a share of it."""
        people = sorted(weights)
        shares = amount.split([weights[person] for person in people])
        entries = [Entry(payer, amount, note)]
        entries += [Entry(person, -share, note) for person, share in zip(people, shares, strict=True)]
        self.post(entries)

    def trial_balance(self) -> str:
        """One line for each account, largest balance first."""
        ranked = sorted(self.accounts.values(), key=lambda account: (-account.balance.cents, account.name))
        return "\n".join(f"{account.name:<12}{account.balance!s:>16}" for account in ranked)
