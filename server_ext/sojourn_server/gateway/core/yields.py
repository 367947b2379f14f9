"""Requests that make way for one of a more urgent tenant that waits behind them (SAGA §6.2).

One waits for a replica that is full: others that were sent there, and have not begun to be answered, are
taken back. Or one waits for room: programs that have no more than one request, which waits there or has not
begun, leave one of the replicas with the most room, those with KV there only if another has room for them.
"""

from __future__ import annotations

from heapq import nlargest
from typing import NamedTuple

from ...policy.replica_views import Route
from ...policy.yielding import BlockedView, MayYieldView, NoYielding, Standing, YieldPolicy
from .facts import Recall
from .fleet import Fleet, Replica
from .homes import Homes
from .line import Waiting, may_leave
from .placing import Placing
from .policy_failed import PolicyFailed
from .requests import Requests
from .tenants import Tenants

MOST_BLOCKED = 16
"""Requests that others may make way for in one epoch."""
LOOKED_AT = 64
"""Requests of one replica that may make way for one that needs room."""
REPLICAS_LOOKED_AT = 4
"""Where those are looked for: the replicas with the most room."""
MADE_WAY = "made_way"
"""Why a request goes where it does that made way for another."""


class WayMade(NamedTuple):
    """Who goes first at a replica, and who makes way there."""

    blocked: Waiting
    others: list[Waiting]
    replica_id: str
    for_room: bool


class Yields:
    """Asks the policy about those who have waited longest, the most urgent tenant's first."""

    def __init__(
        self,
        policy: YieldPolicy | NoYielding,
        fleet: Fleet,
        requests: Requests,
        tenants: Tenants,
        homes: Homes,
        placing: Placing,
    ) -> None:
        self._policy = policy
        self._fleet = fleet
        self._requests = requests
        self._tenants = tenants
        self._homes = homes
        self._placing = placing

    def make_way(self, now: float) -> int:
        """Have those make way who are to; how many were taken back from a replica. Raises ``PolicyFailed``;
        everybody waits somewhere then, or was sent."""
        if not self._policy.yields or not self._requests.waiting or len(self._tenants.shares) < 2:
            return 0
        recalled = 0
        for blocked in self._blocked(now):
            if blocked.sent_s is not None:
                continue  # way was made for another, and it went too
            if blocked.replica_id is None:
                made = self._for_room(blocked, now)
            else:
                made = self._in_the_queue(blocked, blocked.replica_id, now)
            if made is not None:
                recalled += self._carry_out(made, now)
        return recalled

    def _carry_out(self, made: WayMade, now: float) -> int:
        """Some leave a replica, or go back into its queue, and one goes there before them."""
        homeless: list[Waiting] = []
        try:
            return self._let_past(made, homeless, now)
        finally:
            for waiting in homeless:
                waiting.needs_tokens = 0
                self._requests.wait_anywhere(waiting)

    def _let_past(self, made: WayMade, homeless: list[Waiting], now: float) -> int:
        """``homeless`` are those who wait nowhere afterwards."""
        recalled = 0
        for waiting in made.others:
            program = waiting.program
            route = self._placing.away_from(waiting, made.replica_id, now)
            if made.for_room and route is None and program is not None and program.cached:
                continue  # one before it took the room that there was elsewhere: its KV stays, and so does it
            recalled += self._take_back(waiting, made.replica_id, now)
            if not may_leave(waiting):
                self._requests.wait_at(waiting, made.replica_id)
            elif route is not None:
                self._placing.bring(waiting, Route(route.replica_id, MADE_WAY), now)
            elif made.for_room and program is not None:
                self._homes.leave(program, now)
                homeless.append(waiting)
            else:
                self._requests.wait_at(waiting, made.replica_id)
        replica = self._fleet.get(made.replica_id)
        if made.for_room:
            self._placing.place(made.blocked, None, now)
        elif replica is not None and not self._fleet.full(replica):
            self._requests.take_out(made.blocked)
            self._placing.send(made.blocked, replica, now)
        return recalled

    def _take_back(self, waiting: Waiting, replica_id: str, now: float) -> bool:
        """It waits nowhere; True if it had been sent."""
        if waiting.sent_s is None:
            self._requests.take_out(waiting)
            return False
        self._requests.take_back(waiting, now)
        waiting.recalled, waiting.recalled_from = True, replica_id
        self._placing.actions.append(Recall(waiting.request_id, replica_id))
        return True

    def _blocked(self, now: float) -> list[Waiting]:
        shares = self._tenants.shares
        firsts = [row.first for line in self._requests.lines() for row in line.rows.values()]
        waited = [waiting for waiting in firsts if now - waiting.since_s >= self._policy.blocked_s]
        waited.sort(key=lambda waiting: (-shares.get(waiting.tenant, 0.0), waiting.number))
        return waited[:MOST_BLOCKED]

    def _in_the_queue(self, blocked: Waiting, replica_id: str, now: float) -> WayMade | None:
        replica = self._fleet.get(replica_id)
        if replica is None:
            return None
        tokens, requests = self._fleet.missing(replica)
        capacity = self._fleet.capacity_tokens
        others = [
            MayYieldView(w.request_id, w.tenant, w.context_tokens, w.context_tokens / capacity, w.sent_s)
            for w in map(self._requests.by_id.__getitem__, replica.in_flight)
            if not (w.began or w.recalled) and w.tenant != blocked.tenant
        ]
        view = BlockedView(
            blocked.request_id,
            blocked.tenant,
            now - blocked.since_s,
            blocked.context_tokens / capacity,
            tokens,
            requests,
        )
        return self._asked(blocked, view, others, replica_id, for_room=False)

    def _for_room(self, blocked: Waiting, now: float) -> WayMade | None:
        if not blocked.needs_tokens:
            return None
        roomy = [view for view in self._fleet.views if view.takes_new]
        for view in nlargest(REPLICAS_LOOKED_AT, roomy, key=lambda view: view.room_tokens):
            replica = self._fleet.get(view.replica_id)
            if replica is not None:
                made = self._for_room_at(replica, view.room_tokens, blocked, now)
                if made is not None:
                    return made
        return None

    def _for_room_at(
        self, replica: Replica, room_tokens: int, blocked: Waiting, now: float
    ) -> WayMade | None:
        room = self._fleet.room_tokens
        others = []
        for waiting in self._at_home(replica):
            program = waiting.program
            assert program is not None
            if waiting.tenant == blocked.tenant:
                continue
            if program.cached and self._placing.away_from(waiting, replica.replica_id, now) is None:
                continue
            size = program.size_tokens
            others.append(MayYieldView(waiting.request_id, waiting.tenant, size, size / room, waiting.sent_s))
        view = BlockedView(
            blocked.request_id,
            blocked.tenant,
            now - blocked.since_s,
            blocked.needs_tokens / room,
            blocked.needs_tokens - room_tokens,
        )
        return self._asked(blocked, view, others, replica.replica_id, for_room=True)

    def _at_home(self, replica: Replica) -> list[Waiting]:
        """Requests whose programs could leave a replica with them; who waits before who was sent."""
        queue = self._requests.queues.get(replica.replica_id)
        waiting = queue.oldest(LOOKED_AT) if queue is not None else []
        newest = [self._requests.by_id[request_id] for request_id in reversed(replica.in_flight)]
        found = []
        for one in [*waiting, *newest]:
            program = one.program
            if program is None or program.home != replica.replica_id or one.began or one.recalled:
                continue
            alone = program.in_flight + program.waiting == 1
            if alone and program.moved_at_turn != program.turns and self._placing.lives(program):
                found.append(one)
        return found[:LOOKED_AT]

    def _asked(
        self,
        blocked: Waiting,
        view: BlockedView,
        others: list[MayYieldView],
        replica_id: str,
        *,
        for_room: bool,
    ) -> WayMade | None:
        if not others:
            return None
        tenants = self._tenants
        standings = {
            tenant: Standing(tenants.shares.get(tenant, 0.0), tenants.used(tenant, room=for_room))
            for tenant in {blocked.tenant, *(other.tenant for other in others)}
        }
        known = {other.request_id for other in others}
        try:
            named = list(self._policy.make_way(view, others, standings))
        except Exception as error:
            raise PolicyFailed(f"nobody said who makes way for request {view.request_id!r}") from error
        chosen = [request_id for request_id in named if request_id in known]
        if not chosen:
            return None
        return WayMade(blocked, [self._requests.by_id[i] for i in chosen], replica_id, for_room)
