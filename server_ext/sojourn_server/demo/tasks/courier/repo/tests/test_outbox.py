import time
import unittest

from courier.backoff import Backoff
from courier.outbox import Outbox
from courier.transport import FlakyTransport


class BackoffTest(unittest.TestCase):
    def test_starts_with_the_base(self):
        delays = list(Backoff(base_s=0.5, factor=2, cap_s=9, attempts=4).delays())
        self.assertEqual(delays, [0.5, 1.0, 2.0])

    def test_never_above_the_cap(self):
        self.assertEqual(max(Backoff(cap_s=1.0, attempts=9).delays()), 1.0)

    def test_refuses_to_stand_still(self):
        with self.assertRaises(ValueError):
            Backoff(base_s=0)


class OutboxTest(unittest.TestCase):
    def test_first_try(self):
        transport = FlakyTransport()
        receipt = Outbox(transport).send("ana", "hello")
        self.assertEqual((receipt.attempts, receipt.waited_s), (1, 0.0))

    def test_third_try_waits_for_real(self):
        transport = FlakyTransport(failures=2)
        start = time.monotonic()
        receipt = Outbox(transport, Backoff(base_s=0.5)).send("bo", "hello")
        self.assertTrue(receipt.delivered)
        self.assertAlmostEqual(time.monotonic() - start, 1.5, delta=0.4)

    def test_dead_letter(self):
        transport = FlakyTransport(failures=9)
        outbox = Outbox(transport, Backoff(base_s=0.15))
        self.assertFalse(outbox.send("cy", "hello").delivered)
        self.assertEqual(len(outbox.dead_letters), 1)

    def test_refused_is_not_retried(self):
        outbox = Outbox(FlakyTransport(refused=frozenset({"di"})))
        self.assertEqual(outbox.send("di", "hello").attempts, 1)


if __name__ == "__main__":
    unittest.main()
