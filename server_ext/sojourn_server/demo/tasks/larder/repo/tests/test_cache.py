import time
import unittest

from larder.cache import Cache, TooLarge


class SpaceTest(unittest.TestCase):
    def test_least_recently_used_leaves(self):
        cache = Cache(2, ttl_s=60)
        cache.put("a", 1)
        cache.put("b", 2)
        cache.get("a")
        cache.put("c", 3)
        self.assertEqual((cache.get("a"), cache.get("b"), cache.get("c")), (1, None, 3))

    def test_sizes(self):
        cache = Cache(10, ttl_s=60)
        cache.put("big", "x", size=8)
        cache.put("small", "y", size=3)
        self.assertEqual(len(cache), 1)
        with self.assertRaises(TooLarge):
            cache.put("huge", "z", size=11)

    def test_statistics(self):
        cache = Cache(1, ttl_s=60)
        cache.put("a", 1)
        cache.get("a")
        cache.get("b")
        self.assertEqual(cache.statistics.hit_rate, 0.5)


class SpoilTest(unittest.TestCase):
    def test_spoils_without_reads(self):
        cache = Cache(4, ttl_s=0.4)
        cache.put("milk", "fresh")
        time.sleep(0.6)
        self.assertIsNone(cache.get("milk"))

    def test_reading_does_not_preserve(self):
        cache = Cache(4, ttl_s=1.0)
        cache.put("milk", "fresh")
        for _ in range(3):
            time.sleep(0.6)
            last = cache.get("milk")
        self.assertIsNone(last)


if __name__ == "__main__":
    unittest.main()
