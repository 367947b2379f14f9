"""Finds waiting requests for idle replicas: asks the work-stealing policy."""

from __future__ import annotations

from collections.abc import Iterator

from ..policies.routing.work_stealing import StealingPolicy, StealingReplicaView
from .replica_fleet import Replica, ReplicaFleet
from .routing_limits import PolicyCallError
from .routing_queue import RoutedRequest, can_move
from .routing_tables import RoutedRequestTable

MAX_STEAL_CANDIDATES = 8
"""Maximum number of requests of a replica's queue that are examined for stealing, the oldest first."""
MAX_STEALS_PER_ROUND = 64
"""Maximum number of requests that one call of ``RequestStealer.each`` moves."""


class RequestStealer:
    """Finds the waiting requests that the work-stealing policy moves to idle replicas."""

    def __init__(self, policy: StealingPolicy, fleet: ReplicaFleet, requests: RoutedRequestTable) -> None:
        self._policy = policy
        self._fleet = fleet
        self._requests = requests

    def each(self, now: float) -> Iterator[tuple[RoutedRequest, str, str]]:
        """Yield (request, id of its new replica, reason) for each request to move.

        The caller must move a request before it asks for the next one. Raises ``PolicyCallError`` if the
        policy fails; earlier moves stay valid."""
        if not self._policy.is_used or not self._requests.queues:
            return
        if all(self._fleet.full(replica) for replica in self._fleet):
            return  # no replica has room, so a stolen request would wait as well
        views = {replica.replica_id: self._view(replica, now) for replica in self._fleet}
        for _ in range(MAX_STEALS_PER_ROUND):
            try:
                steal = self._policy.steal(list(views.values()), now)
            except Exception as error:
                raise PolicyCallError("the stealing policy failed") from error
            if steal is None:
                return
            thief, victim = self._fleet.get(steal.thief), self._fleet.get(steal.victim)
            movable = self._movable(steal.victim)
            if thief is None or victim is None or thief is victim or not movable:
                return  # the policy's answer does not fit the replicas
            yield movable[0], steal.thief, steal_reason(steal.reason)
            for replica in (thief, victim):
                views[replica.replica_id] = self._view(replica, now)

    def _view(self, replica: Replica, now: float) -> StealingReplicaView:
        view = self._fleet.view(replica.replica_id)
        assert view is not None
        idle_s = 0.0
        if replica.idle_since_s is not None and not view.queued:
            idle_s = max(0.0, now - replica.idle_since_s)
        movable = len(self._movable(replica.replica_id))
        return StealingReplicaView(
            replica.replica_id, view.load, view.queued, idle_s, view.takes_new, movable
        )

    def _movable(self, replica_id: str) -> list[RoutedRequest]:
        """Return the requests that may move, among the ``MAX_STEAL_CANDIDATES`` oldest requests that wait for
        this replica."""
        queue = self._requests.queues.get(replica_id)
        return [one for one in queue.oldest(MAX_STEAL_CANDIDATES) if can_move(one)] if queue else []


def steal_reason(reason: str) -> str:
    """Return the ``SendRequest.reason`` of a stolen request, made from the policy's ``reason``."""
    return f"stolen_{reason}"
