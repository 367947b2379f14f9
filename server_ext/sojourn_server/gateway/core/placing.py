"""Where requests go: the routing policy is asked, and what it says is done."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest

from ...policy.replica_views import ReplicaView, Route, RouteView
from ...policy.routing import RoutingPolicy
from .facts import AnyAction, Left, Send
from .fleet import Fleet, Health, Replica
from .homes import Homes
from .limits import CoreCounts
from .line import Waiting
from .policy_failed import PolicyFailed
from .prefixes import PrefixIndex
from .programs import Expectations, Program, Programs
from .requests import Requests
from .residents import Residents, turns_left

LOOKED_AT = 8
"""Replicas whose residents a new program is compared with: those with the most room."""


class Placing:
    """Sends requests, or has them wait for a replica. ``actions`` are those that it has come to."""

    def __init__(
        self,
        routing: RoutingPolicy,
        fleet: Fleet,
        programs: Programs,
        homes: Homes,
        requests: Requests,
        counts: CoreCounts,
        expected: Expectations,
        residents: Residents,
    ) -> None:
        self._routing = routing
        self._fleet = fleet
        self._programs = programs
        self._homes = homes
        self._requests = requests
        self._counts = counts
        self._expected = expected
        self._residents = residents
        self._prefixes = PrefixIndex() if routing.reads_prefixes else None
        self.actions: list[AnyAction] = []

    def lives(self, program: Program) -> bool:
        """Its requests may outlive it: then they are anybody's."""
        return self._programs.get(program.key) is program

    def route(
        self, waiting: Waiting, now: float, kept_free: str | None = None, *, leaves: bool = False
    ) -> Route:
        """Where a request goes that is not to move into ``kept_free``, or is to leave its home. Raises
        ``PolicyFailed``, and has changed nothing then."""
        program = waiting.program
        shut = waiting.failed_at if kept_free is None else (*waiting.failed_at, kept_free)
        home = parent_home = None
        if program is not None and not leaves:
            at = self._fleet.get(program.home)
            # Whether it lives need not be found out with one that has failed already.
            doubtful = at is not None and waiting.failures and at.health is Health.SUSPECT
            if at is not None and at.health is not Health.DRAINING and not doubtful:
                home = self._fleet.view(program.home) if program.home not in waiting.failed_at else None
            parent = self._programs.get(program.parent)
            if parent is not None and not program.turns and parent.home not in shut:
                parent_home = self._fleet.view(parent.home)
        view = RouteView(
            waiting.request_id,
            waiting.number,
            waiting.context_tokens,
            waiting.size_tokens,
            home,
            program is not None and (program.cached or program.in_flight > 0),
            parent_home,
            self._prefixes.matches(waiting.prefix, waiting.context_tokens) if self._prefixes else {},
        )
        views = self._fleet.views_without(shut) if shut else self._fleet.views
        if self._residents.wanted and not (view.home is not None and view.cached):
            views = _roomiest(views)
            self.expect_turns(program)
            shown = self._residents.at([one.replica_id for one in views], program, now)
            left = turns_left(program) if program is not None else 1.0
            view = view._replace(turns_left=left, residents=shown)
        try:
            return self._routing.route(view, views, now)
        except Exception as error:
            raise PolicyFailed(f"no route for request {waiting.request_id!r}") from error

    def expect_turns(self, program: Program | None) -> None:
        """Judge anew how many turns a program has left, if the routing asks for that."""
        if self._residents.wanted and program is not None:
            program.turns_left = self._expected.turns_left(program)
            self._residents.touch(program)

    def bring(self, waiting: Waiting, route: Route, now: float) -> bool:
        """Send a request that waits nowhere where its route says, or have it wait there; False: it says
        nowhere."""
        replica = self._fleet.get(route.replica_id)
        if replica is None:
            return False
        waiting.reason = route.reason
        if waiting.program is not None and self.lives(waiting.program):
            because = self._why_left(waiting, waiting.program)
            waiting.moved_from = self.settle(waiting.program, replica, waiting.size_tokens, now)
            waiting.left_because = because if waiting.moved_from is not None else ""
        if self._prefixes is not None:
            self._prefixes.computed(replica.replica_id, waiting.prefix)
        if self._queues_at(replica):
            self._requests.wait_at(waiting, replica.replica_id)
        else:
            self.send(waiting, replica, now)
        return True

    def place(self, waiting: Waiting, kept_free: str | None, now: float) -> Route:
        """Ask about a request that waits for any replica, and bring it where its route says; its route."""
        route = self.route(waiting, now, kept_free)
        if self._fleet.get(route.replica_id) is not None:
            self._requests.take_out(waiting)
            self.bring(waiting, route, now)
        return route

    def away_from(self, waiting: Waiting, replica_id: str, now: float) -> Route | None:
        """Where a request that leaves a replica, and its program with it, could be sent at once."""
        route = self.route(waiting, now, replica_id, leaves=True)
        replica = self._fleet.get(route.replica_id)
        return None if replica is None or self._queues_at(replica) else route

    def send(self, waiting: Waiting, replica: Replica, now: float) -> None:
        """Send a request that waits nowhere."""
        self._requests.send(waiting, replica.replica_id, now)
        self._counts.sent(waiting.reason)
        self.actions.append(
            Send(
                waiting.request_id,
                replica.replica_id,
                waiting.reason,
                waiting.moved_from,
                waiting.left_because,
            )
        )

    def settle(self, program: Program, replica: Replica, size_tokens: int, now: float) -> str | None:
        """A program is at home here from now on; returns where it was."""
        before = self._homes.settle(program, replica, size_tokens, now)
        if before is not None:
            self._counts.moves += 1
            if not program.in_flight:
                self.actions.append(Left(program.key[1], before, program.tenant))
        return before

    def forget(self, replica_id: str) -> None:
        """A replica is gone."""
        if self._prefixes is not None:
            self._prefixes.forget(replica_id)

    def _why_left(self, waiting: Waiting, program: Program) -> str:
        """If it has to leave its home: why."""
        at = self._fleet.get(program.home)
        if at is not None and at.health is Health.DRAINING:
            return "drain"
        return "failed" if program.home in waiting.failed_at else ""

    def _queues_at(self, replica: Replica) -> bool:
        return replica.replica_id in self._requests.queues or self._fleet.full(replica)


def _roomiest(views: Sequence[ReplicaView]) -> Sequence[ReplicaView]:
    """Of many replicas the few whose residents are looked at."""
    if len(views) <= LOOKED_AT:
        return views
    return nlargest(LOOKED_AT, views, key=lambda view: (view.takes_new, not view.homed, view.room_tokens))
