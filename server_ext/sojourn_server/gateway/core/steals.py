"""Requests that wait for one replica and are sent to another that has nothing to do (SAGA §5.2)."""

from __future__ import annotations

from collections.abc import Iterator

from ...policy.stealing import StealingPolicy, StealView
from .fleet import Fleet, Replica
from .line import Waiting, may_leave
from .policy_failed import PolicyFailed
from .requests import Requests

LOOKED_AT = 8
"""Of those who wait for a replica, the first so many may be stolen."""
MOST_STEALS = 64
"""At once."""


class Steals:
    """Asks the policy while there is anything to steal."""

    def __init__(self, policy: StealingPolicy, fleet: Fleet, requests: Requests) -> None:
        self._policy = policy
        self._fleet = fleet
        self._requests = requests

    def each(self, now: float) -> Iterator[tuple[Waiting, str, str]]:
        """Who is stolen, by which replica and why, one after the other: each is to be moved before the
        next is asked for. Raises ``PolicyFailed``; those before are moved then."""
        if not self._policy.steals or not self._requests.queues:
            return
        if all(self._fleet.full(replica) for replica in self._fleet):
            return  # who would wait for the thief as well gains nothing
        views = {replica.replica_id: self._view(replica, now) for replica in self._fleet}
        for _ in range(MOST_STEALS):
            try:
                steal = self._policy.steal(list(views.values()), now)
            except Exception as error:
                raise PolicyFailed("nobody said who is stolen") from error
            if steal is None:
                return
            thief, victim = self._fleet.get(steal.thief), self._fleet.get(steal.victim)
            movable = self._movable(steal.victim)
            if thief is None or victim is None or thief is victim or not movable:
                return  # it came too late
            yield movable[0], steal.thief, stolen_for(steal.reason)
            for replica in (thief, victim):
                views[replica.replica_id] = self._view(replica, now)

    def _view(self, replica: Replica, now: float) -> StealView:
        view = self._fleet.view(replica.replica_id)
        assert view is not None
        queue = self._requests.queues.get(replica.replica_id)
        queued = len(queue) if queue is not None else 0
        idle_s = 0.0
        if replica.idle_since_s is not None and not queued:
            idle_s = max(0.0, now - replica.idle_since_s)
        movable = len(self._movable(replica.replica_id)) if queued else 0
        return StealView(replica.replica_id, view.load, queued, idle_s, view.takes_new, movable)

    def _movable(self, replica_id: str) -> list[Waiting]:
        queue = self._requests.queues.get(replica_id)
        return [waiting for waiting in queue.oldest(LOOKED_AT) if may_leave(waiting)] if queue else []


def stolen_for(reason: str) -> str:
    """Why a request that was stolen goes where it does."""
    return f"stolen_{reason}"
