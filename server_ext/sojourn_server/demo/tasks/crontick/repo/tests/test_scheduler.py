import time
import unittest

from crontick.clock import ManualClock
from crontick.scheduler import Scheduler


class ManualTest(unittest.TestCase):
    def test_two_periods(self):
        seen = []
        scheduler = Scheduler(ManualClock())
        scheduler.every(2, lambda: seen.append("slow"))
        scheduler.every(1, lambda: seen.append("fast"))
        self.assertEqual(scheduler.run_for(4.5), 6)
        self.assertEqual(seen.count("fast"), 4)

    def test_an_error_stops_nobody(self):
        scheduler = Scheduler(ManualClock())
        bad = scheduler.every(1, lambda: 1 / 0)
        scheduler.run_for(3)
        self.assertEqual((bad.runs, len(bad.errors)), (3, 3))

    def test_cancel(self):
        scheduler = Scheduler(ManualClock())
        scheduler.every(1, lambda: None, name="a")
        scheduler.cancel("a")
        self.assertEqual(scheduler.run_for(5), 0)

    def test_skipped_times_are_counted(self):
        clock = ManualClock()
        scheduler = Scheduler(clock)
        job = scheduler.every(1, lambda: clock.sleep(2.5))
        scheduler.run_for(4)
        self.assertGreater(job.missed, 0)


class RealTimeTest(unittest.TestCase):
    def test_slow_action_does_not_drift(self):
        scheduler = Scheduler()
        job = scheduler.every(0.5, lambda: time.sleep(0.2))
        scheduler.run_for(3.1)
        self.assertEqual(job.runs, 6)


if __name__ == "__main__":
    unittest.main()
