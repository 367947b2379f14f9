"""Runs whichever job is due next, until a deadline."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from .clock import Clock, RealClock
from .job import Job


class Scheduler:
    """Keeps its jobs in a heap ordered by due time; ties run in the order they were added."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or RealClock()
        self._heap: list[tuple[float, int, Job]] = []
        self._order = count()
        self.jobs: dict[str, Job] = {}

    def every(self, period_s: float, action: Callable[[], None], name: str | None = None) -> Job:
        """Add a job whose first run is one period from now."""
        name = name or f"job-{len(self.jobs)}"
        if name in self.jobs:
            raise ValueError(f"there is a job called {name} already")
        job = Job(name, action, period_s, self._clock.now() + period_s)
        self.jobs[name] = job
        self._push(job)
        return job

    def cancel(self, name: str) -> None:
        """Forget a job. Raises ``KeyError`` for an unknown name."""
        job = self.jobs.pop(name)
        self._heap = [entry for entry in self._heap if entry[2] is not job]
        heapq.heapify(self._heap)

    def run_for(self, seconds: float) -> int:
        """Run what falls due within ``seconds``; returns how many runs there were."""
        end_s = self._clock.now() + seconds
        runs = 0
        while self._heap and self._heap[0][0] <= end_s:
            due_s, _, job = heapq.heappop(self._heap)
            self._clock.sleep(due_s - self._clock.now())
            job.run(self._clock)
            runs += 1
            if job.name in self.jobs:
                self._push(job)
        self._clock.sleep(end_s - self._clock.now())
        return runs

    def _push(self, job: Job) -> None:
        heapq.heappush(self._heap, (job.due_s, next(self._order), job))
