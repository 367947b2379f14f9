import time
import unittest

from turnstile.bucket import Bucket
from turnstile.gate import Gate


class BucketTest(unittest.TestCase):
    def test_starts_full(self):
        self.assertTrue(Bucket(3, 1).take(3))

    def test_never_holds_more_than_its_capacity(self):
        bucket = Bucket(2, 10)
        time.sleep(0.8)
        self.assertEqual(bucket.tokens, 2)

    def test_fills_with_time(self):
        bucket = Bucket(1, 2)
        self.assertTrue(bucket.take())
        self.assertFalse(bucket.take())
        time.sleep(0.7)
        self.assertTrue(bucket.take())

    def test_impossible_cost(self):
        with self.assertRaises(ValueError):
            Bucket(1, 1).wait_s(2)


class GateTest(unittest.TestCase):
    def test_burst_after_a_pause(self):
        gate = Gate()
        gate.enrol("ana", "free")
        time.sleep(1.2)
        verdicts = [gate.judge("ana").allowed for _ in range(4)]
        self.assertEqual(verdicts, [True, True, False, False])

    def test_tells_when_to_come_back(self):
        gate = Gate()
        gate.judge("bo", 2)
        self.assertAlmostEqual(gate.judge("bo").retry_after_s, 1.0, delta=0.1)

    def test_unknown_plan(self):
        with self.assertRaises(KeyError):
            Gate().enrol("cy", "gold")


if __name__ == "__main__":
    unittest.main()
