"""Requests that replicas did not answer: how often each may be tried, and where no more."""

from __future__ import annotations

from . import facts
from .fleet import Fleet, Health, Replica
from .limits import CoreLimits
from .line import Waiting


class Failures:
    """Judges; whoever asks it acts."""

    def __init__(self, fleet: Fleet, limits: CoreLimits) -> None:
        self._fleet = fleet
        self._limits = limits

    def count(self, waiting: Waiting, fact: facts.Failed) -> bool:
        """Take in what is said of one; False: it is not where it failed any more, and need not be moved."""
        if waiting.replica_id != fact.replica_id or waiting.sent_s is None:
            # It waits or was sent elsewhere since. Of a replica that is gone this is how it ended there.
            if fact.computing and waiting.lost_with == fact.replica_id:
                waiting.lost_with = None
                waiting.failures_computing += 1
            return False
        waiting.failures_computing += fact.computing
        if self._fleet.get(fact.replica_id) is not None:
            waiting.failed_at = (*waiting.failed_at, fact.replica_id)
        return True

    def are_enough(self, waiting: Waiting) -> bool:
        """It is not tried again."""
        limits = self._limits
        return (
            waiting.failures >= limits.most_failures
            or waiting.failures_computing >= limits.most_failures_computing
        )

    def may_be_answered(self, waiting: Waiting) -> bool:
        """By some replica, now or later."""
        return any(_may_answer(replica, waiting) for replica in self._fleet)

    def words(self, waiting: Waiting) -> str:
        """Why it is not tried again."""
        times = waiting.failures
        if waiting.failures_computing >= self._limits.most_failures_computing:
            return f"{waiting.failures_computing} replicas took it in and did not answer it"
        if times >= self._limits.most_failures:
            return f"{times} replicas in turn did not answer"
        return f"it was sent to {times} replica{'s' if times > 1 else ''} and not answered; no other is left"


def _may_answer(replica: Replica, waiting: Waiting) -> bool:
    """Where it failed only what comes in its place, if it is not known to live."""
    if replica.replica_id in waiting.failed_at:
        return replica.health is Health.SUSPECT
    return replica.health is not Health.DRAINING
