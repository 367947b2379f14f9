"""Programs that are at home at a replica and there, or taken to come back, for a routing that asks for them.

One that has no request comes back if something is known of its kind, and not for ever: many a client never
says that its programs are over. Of a program that changed it is only noted that it did, until somebody asks;
then those that have as many turns behind and before them are counted together. So a question costs what
changed since the one before and as much as there are different ones, where thousands are at home.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from ...policy.replica_views import Resident
from ...policy.routing import RoutingPolicy
from .programs import Program


class _Counted(NamedTuple):
    """What a program was counted as, and where."""

    program: Program
    replica_id: str
    turns_left: float
    turns: int
    context_tokens: int
    size_tokens: int


class Residents:
    """``for_s``: who has no request is counted until so many seconds after it was last heard of. ``wanted``:
    the routing asks for them; else none is counted."""

    def __init__(self, for_s: float = math.inf, *, wanted: bool = True) -> None:
        self._for_s = for_s
        self.wanted = wanted
        self._touched: dict[int, Program] = {}
        """Those that may count otherwise than they did; by identity, since an id may be used again."""
        self._counted: dict[int, _Counted] = {}
        self._groups: dict[str, dict[tuple[float, int], Resident]] = {}
        """By replica, those alike by turns left and had."""
        self._sorted: dict[str, tuple[Resident, ...]] = {}
        """The same, of replicas where nothing has changed since they were asked for."""
        self._lapses: list[tuple[float, int, Program]] = []
        """A heap of those without a request, by when they were last heard of."""
        self._lapse_s: dict[int, float] = {}
        """The earliest in the heap of each."""

    def touch(self, program: Program) -> None:
        """It may count otherwise from now on. Whoever changes a program's home, sizes, turns or whether it
        has a request says so."""
        if self.wanted:
            self._touched[id(program)] = program

    def at(
        self, replica_ids: Iterable[str], but: Program | None, now: float
    ) -> dict[str, tuple[Resident, ...]]:
        """Those at each of these replicas but one, in a fixed order; replicas without any are left out."""
        self._catch_up(now)
        own = self._counted.get(id(but))
        found = {}
        for replica_id in replica_ids:
            if own is not None and own.replica_id == replica_id:
                self._change(own, -1)
                there = self._of(replica_id)
                self._change(own, 1)
            else:
                there = self._of(replica_id)
            if there:
                found[replica_id] = there
        return found

    def _catch_up(self, now: float) -> None:
        lapses, touched = self._lapses, self._touched
        while lapses and now - lapses[0][0] >= self._for_s:
            at_s, name, program = heappop(lapses)
            if self._lapse_s.get(name) == at_s:
                del self._lapse_s[name]
            touched[name] = program
        for name, program in touched.items():
            self._count(name, program, now)
        touched.clear()

    def _count(self, name: int, program: Program, now: float) -> None:
        before = self._counted.get(name)
        after = self._counting(program, now)
        if before == after:
            return
        if before is not None:
            self._change(before, -1)
            del self._counted[name]
        if after is not None:
            self._change(after, 1)
            self._counted[name] = after

    def _counting(self, program: Program, now: float) -> _Counted | None:
        if program.home is None:
            return None
        if not (program.in_flight or program.waiting):
            if program.turns_left is None or not now - program.last_s < self._for_s:
                return None
            self._will_lapse(program)
        return _Counted(
            program,
            program.home,
            turns_left(program),
            program.turns,
            program.context_tokens,
            max(program.size_tokens, program.context_tokens),
        )

    def _will_lapse(self, program: Program) -> None:
        name, at_s = id(program), program.last_s
        if self._for_s < math.inf and at_s < self._lapse_s.get(name, math.inf):
            heappush(self._lapses, (at_s, name, program))
            self._lapse_s[name] = at_s

    def _change(self, one: _Counted, programs: int) -> None:
        groups = self._groups.setdefault(one.replica_id, {})
        alike = one.turns_left, one.turns
        group = groups.get(alike) or Resident(0, 0, one.turns, one.turns_left, 0)
        if group.programs + programs:
            groups[alike] = Resident(
                group.context_tokens + programs * one.context_tokens,
                group.size_tokens + programs * one.size_tokens,
                one.turns,
                one.turns_left,
                group.programs + programs,
            )
        else:
            del groups[alike]
            if not groups:
                del self._groups[one.replica_id]
        self._sorted.pop(one.replica_id, None)

    def _of(self, replica_id: str) -> tuple[Resident, ...]:
        there = self._sorted.get(replica_id)
        if there is None:
            groups = self._groups.get(replica_id, {})
            there = self._sorted[replica_id] = tuple(groups[alike] for alike in sorted(groups))
        return there


def turns_left(program: Program) -> float:
    """At least 1; where nothing is known, as many as it has had."""
    return max(1.0, program.turns if program.turns_left is None else program.turns_left)


def residents_for(routing: RoutingPolicy) -> Residents:
    """As a policy reads them. A class of the operator's own need not know of them."""
    return Residents(
        float(getattr(routing, "resident_for_s", math.inf)),
        wanted=bool(getattr(routing, "reads_residents", False)),
    )
