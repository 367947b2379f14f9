"""Tenants: what each has in flight, what its share is, and whose turn it is."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Mapping
from itertools import islice

from ...policy.fair_share import SharePolicy, TaskView, TenantView, TurnOf
from .fleet import USUAL_RUNNING, Fleet
from .limits import CoreCounts
from .line import Row
from .programs import Expectations, Key, Program

ESTIMATED = 256
"""Programs with a new request whose work is estimated in one epoch; others are as they were until then."""
REFRESHED = 64
"""Where few have one, others are estimated again: of 10,000 that wait each is so every 16 s."""


class Tenants:
    """Who is charged for what.

    ``slo_factor``: a program without a deadline is due when it has taken so many times what its kind takes;
    ``usual_life_s`` is what a kind is taken to take of which none has ended yet.

    Clients say how urgent their programs are, but not more urgent than is possible: a deadline that one gave
    counts as no earlier than ``now`` and the work that is left, which is when it would be over if it were
    computed without pause. And of a tenant's programs no more count than all replicas compute at once: those
    that came first.
    """

    def __init__(
        self,
        policy: SharePolicy,
        fleet: Fleet,
        expected: Expectations,
        slo_factor: float,
        usual_life_s: float,
        counts: CoreCounts,
    ) -> None:
        self._policy = policy
        self._fleet = fleet
        self._expected = expected
        self._slo_factor = slo_factor
        self._usual_life_s = usual_life_s
        self._counts = counts
        self._tokens: dict[str, int] = {}
        """Contexts in flight."""
        self._homed: dict[str, int] = {}
        """What programs at home somewhere count for there."""
        self._open: dict[str, int] = {}
        """Requests that are not over."""
        self._working: OrderedDict[Key, Program] = OrderedDict()
        """Programs with a request, those whose work was estimated longest ago first."""
        self._asked_anew: dict[Key, Program] = {}
        """Of these, those that have asked since their work was estimated."""
        self._tasks: dict[str, dict[Key, tuple[TaskView, bool]]] = {}
        """What they have left to do, by tenant; True where a client gave the deadline."""
        self._shares: Mapping[str, float] = {}
        self._shares_due_s = -math.inf

    @property
    def take_turns(self) -> bool:
        """False: everybody goes as they came."""
        return self._policy.shares_out

    @property
    def shares(self) -> Mapping[str, float]:
        """Of capacity, as of this epoch."""
        return self._shares

    @property
    def in_flight_tokens(self) -> Mapping[str, int]:
        """Contexts of requests that were sent and are not over, of tenants that have such."""
        return self._tokens

    @property
    def homed_tokens(self) -> Mapping[str, int]:
        """What programs count for at their homes, of tenants that have such."""
        return self._homed

    # -- what happens -----------------------------------------------------------

    def came(self, tenant: str, program: Program | None) -> None:
        """A request came."""
        self._open[tenant] = self._open.get(tenant, 0) + 1
        if program is not None and self._policy.shares_out:
            self._working[program.key] = program
            self._asked_anew[program.key] = program

    def over(self, tenant: str, program: Program | None) -> None:
        """A request is answered, refused or given up."""
        left = self._open[tenant] - 1
        if left:
            self._open[tenant] = left
        else:
            del self._open[tenant]
        if program is None or program.in_flight or program.waiting:
            return
        if self._working.get(program.key) is program:
            del self._working[program.key]
            self._asked_anew.pop(program.key, None)
            tasks = self._tasks.get(program.tenant)
            if tasks is not None and tasks.pop(program.key, None) is not None and not tasks:
                del self._tasks[program.tenant]

    def charge(self, tenant: str, tokens: int) -> None:
        """So much more of it is in flight."""
        _add(self._tokens, tenant, tokens)

    def housed(self, tenant: str, tokens: int) -> None:
        """Its programs need so much more where they are at home."""
        _add(self._homed, tenant, tokens)

    # -- shares -----------------------------------------------------------------

    def share_out(self, now: float) -> None:
        """Once an epoch: shares by what tenants' programs have left to do."""
        epoch_s = self._policy.epoch_s
        if not self._policy.shares_out or 0 < self._shares_due_s - now <= epoch_s:
            return  # further off than an epoch it is by a clock that stepped back
        self._shares_due_s = now + epoch_s
        fresh = list(islice(self._asked_anew.values(), ESTIMATED))
        for program in [*fresh, *islice(self._working.values(), max(0, REFRESHED - len(fresh)))]:
            self._asked_anew.pop(program.key, None)
            if self._working.get(program.key) is program:
                self._estimate(program)
        # A tenant whose requests are of no program has work that nobody knows: the least share.
        views = [TenantView(tenant, self._counting(tenant, now)) for tenant in self._open]
        try:
            self._shares = dict(self._policy.shares(views, now))
        except Exception as error:
            self._counts.policy_failed(error)  # they stay as they were

    def _counting(self, tenant: str, now: float) -> list[TaskView]:
        """Those of its programs that count, with the deadlines that do. ``now`` moves on, and so this is no
        part of the estimate."""
        tasks = islice(self._tasks.get(tenant, {}).values(), self._fleet.max_running or USUAL_RUNNING)
        return [
            TaskView(task.work_s, now + task.work_s)
            if given and task.deadline_s < now + task.work_s
            else task
            for task, given in tasks
        ]

    def used(self, tenant: str, *, room: bool = False) -> float:
        """Share of all capacity that its requests use; with ``room``, or of all tiers that its programs do,
        whichever is more."""
        fleet = self._fleet
        used = self._tokens.get(tenant, 0) / fleet.capacity_tokens if fleet.capacity_tokens else 0.0
        if room and fleet.room_tokens:
            used = max(used, self._homed.get(tenant, 0) / fleet.room_tokens)
        return used

    def order(self, rows: Collection[tuple[str, Row]], *, room: bool) -> list[str]:
        """Whose request goes first, of those of whom somebody waits, for ``room`` or for a replica's time."""
        if len(rows) == 1:
            return [tenant for tenant, _ in rows]
        turns = [TurnOf(tenant, self.used(tenant, room=room), row.first.since_s) for tenant, row in rows]
        try:
            return self._policy.order(turns, self._shares)
        except Exception as error:
            self._counts.policy_failed(error)
            return [turn.tenant for turn in sorted(turns, key=lambda turn: (turn.since_s, turn.tenant))]

    def _estimate(self, program: Program) -> None:
        task = TaskView(self._expected.work_s(program), self._deadline_s(program))
        self._tasks.setdefault(program.tenant, {})[program.key] = task, program.deadline_s is not None
        self._working.move_to_end(program.key)

    def _deadline_s(self, program: Program) -> float:
        if program.deadline_s is not None:
            return program.deadline_s
        life_s = self._expected.life_s(program)
        usual_s = self._usual_life_s if life_s is None else life_s
        return program.began_s + self._slo_factor * usual_s


def _add(sums: dict[str, int], tenant: str, tokens: int) -> None:
    left = sums.get(tenant, 0) + tokens
    if left:
        sums[tenant] = left
    else:
        sums.pop(tenant, None)
