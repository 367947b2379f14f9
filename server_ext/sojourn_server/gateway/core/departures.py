"""Who goes when something has changed: those who wait for any replica or for one, and who goes instead.

Every fact may make room. So after each those who wait are gone through, as far as it matters to them; who
moves to an idle replica, or makes way, is a question of every epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...policy.replica_views import Route
from .failures import Failures
from .fleet import Fleet
from .homes import Homes
from .limits import CoreCounts
from .line import Waiting
from .placing import Placing
from .policy_failed import PolicyFailed
from .refusals import Refusals
from .requests import Requests
from .room import RoomLine
from .steals import Steals
from .tenants import Tenants
from .yields import Yields

MOST_ASKED_AGAIN = 256
"""Requests asked about at once that have failed at a replica which lives on."""
UNROUTED = Route("", "policy_failed")
"""Of one that waits no more, and went nowhere."""


class Departures:
    """Sends whoever may go. ``room_changed``: there may be room, or somebody to be asked about anew."""

    def __init__(
        self,
        fleet: Fleet,
        requests: Requests,
        tenants: Tenants,
        homes: Homes,
        placing: Placing,
        room: RoomLine,
        steals: Steals,
        yields: Yields,
        failures: Failures,
        refusals: Refusals,
        counts: CoreCounts,
    ) -> None:
        self._fleet = fleet
        self._requests = requests
        self._tenants = tenants
        self._homes = homes
        self._placing = placing
        self._room = room
        self._steals = steals
        self._yields = yields
        self._failures = failures
        self._refusals = refusals
        self._counts = counts
        self.room_changed = False
        self._not_all_asked = False
        """Of those who wait for room some are to be asked about with the next fact."""

    def send_off(self, now: float, *, epoch: bool) -> None:
        """Send whoever may go now. ``epoch``: time has gone by, and who moves or makes way is asked too."""
        if self._not_all_asked:
            self.room_changed, self._not_all_asked = True, False
        self._let_go(now)
        if epoch or self._fleet.newly_idle:
            self._fleet.newly_idle = False
            with self._counted_failures():
                for waiting, thief, reason in self._steals.each(now):
                    self._requests.take_out(waiting)
                    self._counts.steals += 1
                    self._placing.bring(waiting, Route(thief, reason), now)
            self._let_go(now)
        if epoch:
            with self._counted_failures():
                self._counts.recalls += self._yields.make_way(now)
            self._let_go(now)

    def wait_anywhere(self, waiting: Waiting) -> None:
        """It is to be asked about anew; it waits nowhere yet."""
        waiting.needs_tokens = 0
        self._requests.wait_anywhere(waiting)
        self.room_changed = True

    @contextmanager
    def _counted_failures(self) -> Iterator[None]:
        """What a policy does not answer is left undone, and asked again when time has gone by."""
        try:
            yield
        except PolicyFailed as error:
            self._counts.policy_failed(error)

    def _let_go(self, now: float) -> None:
        """Those who wait for any replica, where there is room; those who wait for one that has less to do."""
        while self.room_changed or self._homes.room_grew:
            self.room_changed = self._homes.room_grew = False
            self._send_failed(now)
            if not self._room.place(self._place, now):
                self._not_all_asked = True
                break
        freed = self._requests.freed
        if not freed:
            return
        self._requests.freed = set()
        queues = self._requests.queues
        for replica_id in sorted(freed & queues.keys()):
            replica = self._fleet.get(replica_id)
            while replica is not None and replica_id in queues and not self._fleet.full(replica):
                rows = queues[replica_id].rows
                waiting = rows[self._tenants.order(rows.items(), room=False)[0]].first
                self._requests.take_out(waiting)
                self._placing.send(waiting, replica, now)

    def _place(self, waiting: Waiting, kept_free: str | None, now: float) -> Route:
        try:
            return self._placing.place(waiting, kept_free, now)
        except PolicyFailed as error:
            # Asked about again it would fail again, and those behind it would wait for it.
            self._requests.close(waiting, now)
            self._refusals.unrouted(waiting.request_id, error)
            return UNROUTED

    def _send_failed(self, now: float) -> None:
        """Those that have failed at a replica which lives on: elsewhere, or nowhere if none is left."""
        failed = self._requests.failed
        for waiting in failed.oldest(MOST_ASKED_AGAIN) if failed else ():
            if self._failures.may_be_answered(waiting):
                self._place(waiting, self._room.kept_free, now)
            else:
                self._refusals.failed(waiting, now)
