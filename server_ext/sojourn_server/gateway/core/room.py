"""Those who wait for room at any replica: who is asked about when there is some, and for whom it is kept.

A route that says "wait" says for how much room, and whoever needs as much waits too. So of 10,000 only those
are asked about whom the largest room would hold: the first of them, in order of arrival or of tenants' turns.
Who needs less may go past who needs more, but not for ever: when the first of a row has waited for
``patience_s``, or ``patience`` others have got room while it was the first, the replica with the most room
takes in nobody else, until that room is enough or the replica is empty. One replica is kept so at a time,
for the row whose turn comes first; rows before it are not held up by it. While it is kept it only empties,
and another one takes its place only with more room: whoever it is kept for gets in as soon as enough of
its programs have ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ...policy.replica_views import ReplicaView, Route
from .fleet import Fleet
from .line import Line, Row, Waiting
from .tenants import Tenants

MOST_ASKED = 512
"""Routes asked for in vain at once. It takes so many only where it is not known what those need who wait."""
TURNS_PER = 32
"""Turns are worked out anew after each 32nd part of all tenants that wait had one: up to 63 tenants, after
each request. Beyond, nobody gets more than one before it is."""

Place = Callable[[Waiting, "str | None", float], Route]
"""Send a request, unless it would have to wait, but not into this replica; returns its route."""


class RoomLine:
    """Goes through the line. ``kept_free``: the replica that is kept, if one is. ``got_room``: how many did,
    those who came while others waited among them."""

    def __init__(self, line: Line, fleet: Fleet, tenants: Tenants, patience_s: float, patience: int) -> None:
        self._line = line
        self._fleet = fleet
        self._tenants = tenants
        self._patience_s = patience_s
        self._patience = patience
        self.kept_free: str | None = None
        self.got_room = 0
        self.is_shut = False
        """Somebody waits of whom it is not known how much room would be enough: whoever comes new waits too,
        and is asked about in turn."""

    def place(self, place: Place, now: float) -> bool:
        """Send whoever there is room for; False: some have not been asked about yet."""
        self.kept_free, self.is_shut = None, False
        line, fleet = self._line, self._fleet
        if not line:
            return True
        asked, most_known = 0, math.inf
        best = fleet.most_room()
        while best is not None and line:
            most = min(most_known, _holds(best))
            rows = [
                (tenant, row)
                for tenant, row in line.rows.items()
                if row.least <= most or (self.kept_free is None and self._is_late(row, now))
            ]
            if not rows:
                break
            order = self._tenants.order(rows, room=True)
            for tenant in order[: max(1, len(order) // TURNS_PER)]:
                row = line.rows[tenant]
                if self.kept_free is None and row.first.needs_tokens > most and self._is_late(row, now):
                    self.kept_free = best.replica_id
                    break
                waiting = row.first_needing(most)
                if waiting is None:
                    continue
                route = place(waiting, self.kept_free, now)
                if route.replica_id is None:
                    if not route.needs_tokens:
                        self.is_shut = True
                        return True
                    line.waits_for(waiting, route.needs_tokens)
                    most_known = min(most_known, route.needs_tokens - 1)
                    asked += 1
                    if asked == MOST_ASKED:
                        return not any(not row.least for row in line.rows.values())
                else:
                    self.got_room += 1
                best = fleet.most_room(self.kept_free)
                if best is None:
                    break
                most = min(most_known, _holds(best))
            best = fleet.most_room(self.kept_free)
        return True

    def _is_late(self, row: Row, now: float) -> bool:
        first = row.first
        if first.first_since is None:
            first.first_since = self.got_room
        if not first.needs_tokens:
            return False
        return self.got_room - first.first_since >= self._patience or now - first.since_s >= self._patience_s


def _holds(replica: ReplicaView) -> float:
    """The most that a request may need which it is worth asking about."""
    return max(0, replica.room_tokens) if replica.homed else math.inf
