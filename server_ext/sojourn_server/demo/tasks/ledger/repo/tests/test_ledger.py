import unittest

from ledger.account import Entry
from ledger.journal import Journal, Unbalanced
from ledger.money import CurrencyMismatch, Money


class MoneyTest(unittest.TestCase):
    def test_prints_cents(self):
        self.assertEqual(str(Money(-1205)), "-12.05 EUR")

    def test_currencies_do_not_mix(self):
        with self.assertRaises(CurrencyMismatch):
            Money(1) + Money(1, "USD")

    def test_even_split(self):
        self.assertEqual(Money(900).split([1, 1, 1]), [Money(300)] * 3)

    def test_split_keeps_every_cent(self):
        for cents in (100, 101, 9999):
            parts = Money(cents).split([1, 1, 1])
            self.assertEqual(sum(part.cents for part in parts), cents)

    def test_split_by_weight(self):
        self.assertEqual([part.cents for part in Money(1000).split([3, 1])], [750, 250])


class JournalTest(unittest.TestCase):
    def test_refuses_a_rest(self):
        journal = Journal()
        with self.assertRaises(Unbalanced):
            journal.post([Entry("cash", Money(5)), Entry("sales", Money(-4))])
        self.assertEqual(journal.accounts, {})

    def test_dinner_for_three(self):
        journal = Journal()
        journal.share_expense("ana", Money(5000), {"ana": 1, "bo": 1, "cy": 1}, "dinner")
        self.assertEqual(journal.account("ana").balance, Money(3333))
        self.assertIn("bo", journal.trial_balance())


if __name__ == "__main__":
    unittest.main()
