"""Programs at home at each replica that run or are expected back, for policies that read them.

A program without a request counts as expected if its agent type is known, and only for a time: many clients
never end their programs. A change only marks a program; the next question counts the marked ones. Programs
with the same numbers of turns done and left form one group. So a question costs as much as there were changes
and groups, even with thousands of programs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from ..policies.routing.replica_views import ResidentProgramGroup
from ..policies.routing.routing_policies import RoutingPolicy
from .routed_programs import RoutedProgram


class _CountedProgram(NamedTuple):
    """How a program was counted, and where."""

    program: RoutedProgram
    replica_id: str
    turns_left: float
    turns: int
    context_tokens: int
    size_tokens: int


class ResidentPrograms:
    """``for_s``: how long a program without a request counts after its last event. ``wanted``: the policy
    reads them; else none is counted."""

    def __init__(self, for_s: float = math.inf, *, wanted: bool = True) -> None:
        self._for_s = for_s
        self.wanted = wanted
        self._touched: dict[int, RoutedProgram] = {}
        """Programs to be counted again; by identity, because an id may be used again."""
        self._counted: dict[int, _CountedProgram] = {}
        self._groups: dict[str, dict[tuple[float, int], ResidentProgramGroup]] = {}
        """By replica, groups by turns left and turns done."""
        self._sorted: dict[str, tuple[ResidentProgramGroup, ...]] = {}
        """The same, sorted, of replicas without changes since the last question."""
        self._lapses: list[tuple[float, int, RoutedProgram]] = []
        """Heap of programs without a request, by the time of their last event."""
        self._lapse_s: dict[int, float] = {}
        """Earliest heap entry of each program."""

    def touch(self, program: RoutedProgram) -> None:
        """Mark a program; to be called after each change of its home, sizes, turns or number of requests."""
        if self.wanted:
            self._touched[id(program)] = program

    def at(
        self, replica_ids: Iterable[str], but: RoutedProgram | None, now: float
    ) -> dict[str, tuple[ResidentProgramGroup, ...]]:
        """Groups at each of these replicas without one program, in a fixed order; empty ones are left out."""
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

    def _count(self, name: int, program: RoutedProgram, now: float) -> None:
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

    def _counting(self, program: RoutedProgram, now: float) -> _CountedProgram | None:
        if program.home is None:
            return None
        if not (program.in_flight or program.waiting):
            if program.turns_left is None or not now - program.last_s < self._for_s:
                return None
            self._will_lapse(program)
        return _CountedProgram(
            program,
            program.home,
            turns_left(program),
            program.turns,
            program.context_tokens,
            max(program.size_tokens, program.context_tokens),
        )

    def _will_lapse(self, program: RoutedProgram) -> None:
        name, at_s = id(program), program.last_s
        if self._for_s < math.inf and at_s < self._lapse_s.get(name, math.inf):
            heappush(self._lapses, (at_s, name, program))
            self._lapse_s[name] = at_s

    def _change(self, one: _CountedProgram, programs: int) -> None:
        groups = self._groups.setdefault(one.replica_id, {})
        alike = one.turns_left, one.turns
        group = groups.get(alike) or ResidentProgramGroup(0, 0, one.turns, one.turns_left, 0)
        if group.programs + programs:
            groups[alike] = ResidentProgramGroup(
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

    def _of(self, replica_id: str) -> tuple[ResidentProgramGroup, ...]:
        there = self._sorted.get(replica_id)
        if there is None:
            groups = self._groups.get(replica_id, {})
            there = self._sorted[replica_id] = tuple(groups[alike] for alike in sorted(groups))
        return there


def turns_left(program: RoutedProgram) -> float:
    """Expected number of turns left, at least 1; if unknown, as many as the program has had."""
    return max(1.0, program.turns if program.turns_left is None else program.turns_left)


def build_resident_programs(routing: RoutingPolicy) -> ResidentPrograms:
    """For a routing policy. A policy class from outside need not declare that it reads them."""
    return ResidentPrograms(
        float(getattr(routing, "resident_for_s", math.inf)),
        wanted=bool(getattr(routing, "reads_residents", False)),
    )
