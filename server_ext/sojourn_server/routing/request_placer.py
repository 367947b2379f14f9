"""Finds a replica for a request: asks the routing policy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from heapq import nlargest

from ..policies.routing.replica_views import ReplicaView, RoutingDecision, RoutingView
from ..policies.routing.routing_policy import RoutingPolicy
from .replica_fleet import Replica, ReplicaHealth
from .routed_programs import RoutedProgram, turns_left
from .routing_events import AnyRoutingAction, ReleaseProgramKv, SendRequest
from .routing_limits import PolicyCallError
from .routing_queue import RoutedRequest
from .routing_tables import RoutingTables

MAX_REPLICAS_COMPARED = 8
"""Maximum number of replicas offered to a policy with ``reads_residents``, for a request without cached KV.
These are the replicas with the most free capacity."""
MAX_PREFIX_PIECES = 200_000
"""Maximum number of prompt pieces remembered per replica; each takes a few hundred bytes of memory."""


class PrefixIndex:
    """Hashes of the prompt pieces that were sent to each replica.

    A piece is a part of a prompt, ``PREFIX_PIECE_BYTES`` long. Its hash covers the piece and all pieces
    before it, so a prompt matches up to its first unknown hash. At most ``MAX_PREFIX_PIECES`` hashes are kept
    per replica; the least recently used ones are dropped.
    """

    def __init__(self) -> None:
        self._replicas: dict[str, OrderedDict[int, None]] = {}

    def add_prefix(self, replica_id: str, prefix: Sequence[int]) -> None:
        """Record that a prompt is sent to a replica, which then computes it. ``prefix``: hashes of the
        prompt's pieces."""
        known = self._replicas.setdefault(replica_id, OrderedDict())
        # Last piece first, so that the end of a prompt is forgotten before its beginning.
        for piece in reversed(prefix):
            known[piece] = None
            known.move_to_end(piece)
        while len(known) > MAX_PREFIX_PIECES:
            known.popitem(last=False)

    def matches(self, prefix: Sequence[int], context_tokens: int) -> dict[str, int]:
        """Estimate how many of the prompt's first tokens each replica has computed, by replica id. Replicas
        without any of these tokens are left out.

        ``prefix``: hashes of the prompt's pieces. ``context_tokens``: length of the prompt. All pieces are
        assumed to have the same number of tokens.
        """
        if not prefix:
            return {}
        found: dict[str, int] = {}
        for replica_id, known in self._replicas.items():
            pieces = 0
            while pieces < len(prefix) and prefix[pieces] in known:
                pieces += 1
            if pieces:
                found[replica_id] = context_tokens * pieces // len(prefix)
        return found

    def forget(self, replica_id: str) -> None:
        """Remove all hashes of a replica."""
        self._replicas.pop(replica_id, None)


class RequestPlacer:
    """Asks the routing policy for a replica. Then sends the request to that replica, or adds it to the
    replica's queue. Actions are appended to ``actions``."""

    def __init__(
        self, routing: RoutingPolicy, tables: RoutingTables, actions: list[AnyRoutingAction]
    ) -> None:
        self._routing = routing
        self._tables = tables
        self._fleet, self._requests, self._residents = tables.fleet, tables.requests, tables.residents
        self._prefixes = PrefixIndex() if routing.reads_prefixes else None
        self.actions = actions

    def route(
        self, request: RoutedRequest, now: float, reserved_replica: str | None = None, *, leaves: bool = False
    ) -> RoutingDecision:
        """Return the routing policy's decision about a request, without carrying it out.

        ``reserved_replica``: the replica that is reserved for another, late request; ``None``: no replica is
        reserved. In the policy's view, this replica and the replicas where the request failed accept no new
        programs. ``leaves``: the policy decides as if the program had no home. Raises ``PolicyCallError`` if
        the policy fails.
        """
        program = request.program
        shut = request.failed_at if reserved_replica is None else (*request.failed_at, reserved_replica)
        home = parent_home = None
        if program is not None and not leaves:
            at = self._fleet.get(program.home)
            # A request that has failed once does not test whether a suspect home is alive.
            doubtful = at is not None and request.failures and at.health is ReplicaHealth.SUSPECT
            if at is not None and at.health is not ReplicaHealth.DRAINING and not doubtful:
                home = self._fleet.view(program.home) if program.home not in request.failed_at else None
            parent = self._tables.programs.get(program.parent)
            if parent is not None and not program.turns and parent.home not in shut:
                parent_home = self._fleet.view(parent.home)
        view = RoutingView(
            request.request_id,
            request.number,
            request.context_tokens,
            request.size_tokens,
            home,
            program is not None and (program.cached or program.in_flight > 0),
            parent_home,
            self._prefixes.matches(request.prefix, request.context_tokens) if self._prefixes else {},
        )
        views = self._fleet.views_without(shut) if shut else self._fleet.views
        if self._residents.wanted and not (view.home is not None and view.cached):
            views = _largest_capacity(views)
            self.update_turns_left(program)
            shown = self._residents.at([one.replica_id for one in views], program, now)
            left = turns_left(program) if program is not None else 1.0
            view = view._replace(turns_left=left, residents=shown)
        try:
            return self._routing.route(view, views, now)
        except Exception as error:
            raise PolicyCallError(f"no route for request {request.request_id!r}") from error

    def update_turns_left(self, program: RoutedProgram | None) -> None:
        """Estimate again how many turns a program has left, if the policy reads this number."""
        if self._residents.wanted and program is not None:
            program.turns_left = self._tables.expected.turns_left(program)
            self._residents.mark_stale(program)

    def send_or_queue(self, request: RoutedRequest, route: RoutingDecision, now: float) -> bool:
        """Send a request to the replica of ``route``, or queue it for that replica. The replica becomes the
        home of the request's program. Returns False, without effect, if the route has no known replica.

        The request must be in no queue."""
        replica = self._fleet.get(route.replica_id)
        if replica is None:
            return False
        request.reason = route.reason
        if request.program is not None and self._tables.is_current(request.program):
            because = self._home_left_reason(request, request.program)
            request.moved_from = self.set_home(request.program, replica, request.size_tokens, now)
            request.left_because = because if request.moved_from is not None else ""
        if self._prefixes is not None:
            self._prefixes.add_prefix(replica.replica_id, request.prefix)
        if self._queues_at(replica):
            self._requests.enqueue_for_replica(request, replica.replica_id)
        else:
            self.send(request, replica, now)
        return True

    def place(self, request: RoutedRequest, reserved_replica: str | None, now: float) -> RoutingDecision:
        """Route a request that waits for any replica; return the decision. If a replica is found, send the
        request there or add it to the replica's queue. ``reserved_replica``: a replica that takes no new
        program, because it is reserved for another request; ``None``: no replica is reserved."""
        route = self.route(request, now, reserved_replica)
        if self._fleet.get(route.replica_id) is not None:
            self._requests.take_out(request)
            self.send_or_queue(request, route, now)
        return route

    def route_away_from(self, request: RoutedRequest, replica_id: str, now: float) -> RoutingDecision | None:
        """Return the route that a request would get if its program left ``replica_id``; ``None``: the request
        would have to wait. Changes nothing."""
        route = self.route(request, now, replica_id, leaves=True)
        replica = self._fleet.get(route.replica_id)
        return None if replica is None or self._queues_at(replica) else route

    def send(self, request: RoutedRequest, replica: Replica, now: float) -> None:
        """Send a request to a replica. The request must be in no queue."""
        self._requests.send(request, replica.replica_id, now)
        self._tables.counts.sent(request.reason)
        self.actions.append(
            SendRequest(
                request.request_id,
                replica.replica_id,
                request.reason,
                request.moved_from,
                request.left_because,
            )
        )

    def set_home(self, program: RoutedProgram, replica: Replica, size_tokens: int, now: float) -> str | None:
        """Make a replica the program's home, and count ``size_tokens`` there for the program. Returns the id
        of the former home; ``None``: the program did not move.

        If the program moves and has no request in flight, its former home may drop the program's KV
        (``ReleaseProgramKv``).
        """
        before = self._tables.homes.set_home(program, replica, size_tokens, now)
        if before is not None:
            self._tables.counts.moves += 1
            if not program.in_flight:
                self.actions.append(ReleaseProgramKv(program.key[1], before, program.tenant))
        return before

    def forget(self, replica_id: str) -> None:
        """Forget the prompts that were sent to a replica."""
        if self._prefixes is not None:
            self._prefixes.forget(replica_id)

    def _home_left_reason(self, request: RoutedRequest, program: RoutedProgram) -> str:
        """Return why a request's program has to leave its home: ``drain`` or ``failed``, or ``""`` if it may
        stay."""
        at = self._fleet.get(program.home)
        if at is not None and at.health is ReplicaHealth.DRAINING:
            return "drain"
        return "failed" if program.home in request.failed_at else ""

    def _queues_at(self, replica: Replica) -> bool:
        """Whether a new request for this replica has to wait, because the replica is full or other requests
        wait for it."""
        return replica.replica_id in self._requests.queues or self._fleet.full(replica)


def _largest_capacity(views: Sequence[ReplicaView]) -> Sequence[ReplicaView]:
    """Return the ``MAX_REPLICAS_COMPARED`` replicas with the most free capacity, or all if there are
    fewer."""
    if len(views) <= MAX_REPLICAS_COMPARED:
        return views
    return nlargest(
        MAX_REPLICAS_COMPARED, views, key=lambda view: (view.takes_new, not view.homed, view.room_tokens)
    )
