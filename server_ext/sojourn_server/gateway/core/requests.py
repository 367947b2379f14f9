"""Where every request is: it waits for any replica, waits for one of them, or was sent to one."""

from __future__ import annotations

from collections.abc import Iterator

from .fleet import Fleet, Replica
from .line import Line, Waiting
from .programs import Program
from .residents import Residents
from .tenants import Tenants


class Requests:
    """Moves requests between these three, and keeps the sums of programs, replicas and tenants right."""

    def __init__(self, fleet: Fleet, tenants: Tenants, residents: Residents) -> None:
        self._fleet = fleet
        self._tenants = tenants
        self._residents = residents
        self.by_id: dict[str, Waiting] = {}
        """All that are not over."""
        self.anywhere = Line(by_tenant=tenants.take_turns)
        self.failed = Line(by_tenant=False)
        """Those that wait for any but a replica at which they have failed: the room that others wait for may
        be of no use to them, and theirs to others."""
        self.queues: dict[str, Line] = {}
        """By the replica that they wait for; none is empty."""
        self.waiting = 0
        """Those that have not been sent."""
        self.waiting_of: dict[str, int] = {}
        """Of each tenant that has such."""
        self.strays: dict[str, Waiting] = {}
        """Sent to replicas that have not registered with this core."""
        self.freed: set[str] = set()
        """Replicas with less to do since this was last emptied."""
        self.unanswered: list[Program] = []
        """Those whose only request is over and that had no turn, since this was last emptied."""

    def open(self, waiting: Waiting) -> None:
        """One came; where it waits is said next."""
        self.by_id[waiting.request_id] = waiting
        self._count(waiting, 1)
        if waiting.program is not None:
            waiting.program.waiting += 1
            self._residents.touch(waiting.program)
        self._tenants.came(waiting.tenant, waiting.program)

    def close(self, waiting: Waiting, now: float) -> None:
        """One is over, wherever it was."""
        if waiting.sent_s is not None:
            self.take_back(waiting, now)
        else:
            self.take_out(waiting)
        del self.by_id[waiting.request_id]
        self._count(waiting, -1)
        if waiting.program is not None:
            waiting.program.waiting -= 1
            self._residents.touch(waiting.program)
            if not waiting.program.turns and not waiting.program.in_flight and not waiting.program.waiting:
                self.unanswered.append(waiting.program)
        self._tenants.over(waiting.tenant, waiting.program)

    def wait_anywhere(self, waiting: Waiting) -> None:
        """It waits for any replica; it waits nowhere yet."""
        waiting.replica_id = None
        (self.failed if waiting.failed_at else self.anywhere).add(waiting)

    def wait_at(self, waiting: Waiting, replica_id: str) -> None:
        """It waits for this replica; it waits nowhere yet."""
        waiting.replica_id = replica_id
        queue = self.queues.get(replica_id)
        if queue is None:
            queue = self.queues[replica_id] = Line(by_tenant=self._tenants.take_turns)
        queue.add(waiting)
        replica = self._fleet.get(replica_id)
        if replica is not None:
            self._fleet.queued(replica, waiting.context_tokens, 1)

    def take_out(self, waiting: Waiting) -> None:
        """It no longer waits where it did."""
        if waiting.replica_id is None:
            (self.failed if waiting.failed_at else self.anywhere).remove(waiting)
            return
        queue = self.queues.get(waiting.replica_id)
        if queue is not None and queue.remove(waiting):
            replica = self._fleet.get(waiting.replica_id)
            if replica is not None:
                self._fleet.queued(replica, -waiting.context_tokens, -1)
            if not queue:
                del self.queues[waiting.replica_id]
        waiting.replica_id = None

    def send(self, waiting: Waiting, replica_id: str, now: float) -> None:
        """It is sent; it waits nowhere any more."""
        waiting.replica_id, waiting.sent_s = replica_id, now
        self._count(waiting, -1)
        if waiting.program is not None:
            waiting.program.waiting -= 1
            waiting.program.in_flight += 1
        self._tenants.charge(waiting.tenant, waiting.context_tokens)
        replica = self._fleet.get(replica_id)
        if replica is None:
            self.strays[waiting.request_id] = waiting
        else:
            self._fleet.sent(replica, waiting.request_id, waiting.context_tokens, now)

    def take_back(self, waiting: Waiting, now: float) -> None:
        """It is no longer where it was sent, and waits nowhere yet."""
        replica = self._fleet.get(waiting.replica_id)
        if replica is not None and waiting.request_id in replica.in_flight:
            self._fleet.over(replica, waiting.request_id, now)
            self.freed.add(replica.replica_id)
        self.strays.pop(waiting.request_id, None)
        self._tenants.charge(waiting.tenant, -waiting.context_tokens)
        self._count(waiting, 1)
        if waiting.program is not None:
            waiting.program.in_flight -= 1
            waiting.program.waiting += 1
        waiting.replica_id = waiting.sent_s = None
        waiting.began = False

    def adopt(self, replica: Replica, now: float) -> None:
        """A replica registers to which some have been sent already."""
        for waiting in [w for w in self.strays.values() if w.replica_id == replica.replica_id]:
            del self.strays[waiting.request_id]
            self._fleet.sent(replica, waiting.request_id, waiting.context_tokens, now)

    def astray_since(self, before_s: float) -> list[Waiting]:
        """Those sent before that to replicas that have not registered since: nobody would say that they are
        gone."""
        return [one for one in self.strays.values() if one.sent_s is not None and one.sent_s <= before_s]

    def lines(self) -> list[Line]:
        """All in which somebody may wait."""
        return [self.anywhere, self.failed, *self.queues.values()]

    def replica_gone(self, replica: Replica) -> None:
        """Whoever failed there has not failed at what may come back under its id, unless it is the same."""
        for waiting in self.by_id.values():
            if replica.replica_id not in waiting.failed_at:
                continue
            aside = self.failed.remove(waiting)
            waiting.failed_at = tuple(one for one in waiting.failed_at if one != replica.replica_id)
            gone = (replica.replica_id, replica.instance)
            waiting.failed_at_gone = (*waiting.failed_at_gone, gone)
            if aside:
                self.wait_anywhere(waiting)

    def replica_came(self, replica: Replica) -> None:
        """Where it is what was taken to be gone, those who failed there have still failed there."""
        came = (replica.replica_id, replica.instance)
        for waiting in [one for one in self.by_id.values() if came in one.failed_at_gone]:
            waits_anywhere = waiting.sent_s is None and waiting.replica_id is None
            if waits_anywhere:
                self.take_out(waiting)
            waiting.failed_at = (*waiting.failed_at, replica.replica_id)
            waiting.failed_at_gone = tuple(one for one in waiting.failed_at_gone if one != came)
            if waits_anywhere:
                self.wait_anywhere(waiting)

    def _count(self, waiting: Waiting, more: int) -> None:
        self.waiting += more
        left = self.waiting_of.get(waiting.tenant, 0) + more
        if left:
            self.waiting_of[waiting.tenant] = left
        else:
            del self.waiting_of[waiting.tenant]

    def everybody_who_waits(self) -> Iterator[Waiting]:
        """Those that have not been sent."""
        for line in self.lines():
            yield from line
