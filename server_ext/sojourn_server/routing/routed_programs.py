"""Programs that a gateway routes: their homes, estimates of their size and turns, and the programs at each
replica.

``ResidentPrograms`` counts the resident programs of each replica, for policies that read these numbers. A
program is resident at its home if it has an open request or is expected to send one. Many clients never end
their programs. So a program without an open request counts only for a limited time. If its number of turns
left is unknown, it does not count at all.

Programs with the same numbers of past turns and turns left form one group. A change of a program only marks
the program; the next query counts the marked programs again. So the cost of a query depends on the numbers of
changes and groups, not on the number of programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from statistics import median_low
from typing import Any, NamedTuple

from ..policies.forecasting.output_length_prediction import (
    OutputLengthView,
    SurvivalPrediction,
)
from ..policies.routing.replica_views import ResidentProgramGroup
from ..policies.routing.routing_policy import RoutingPolicy
from ..programs.idleness import IdlenessTracker
from ..programs.tool_and_turn_history import SlidingMean, SortedWindow
from .bounded_program_table import Key
from .routing_status import ProgramRouteStatus
from .tenant_statistics import ProgramStatistics, TypeStatistics

MIN_FINISHED_PROGRAMS = 16
"""Minimum number of finished programs of an agent type before their contexts and turns serve as an
estimate."""
MIN_SHARING_TENANTS = 3
"""If at least this many tenants have enough ended programs, a tenant with too few is estimated from the
programs of all these tenants. With three, no single tenant determines the median."""
SHARED_LENGTHS = 8
"""Number of lengths that each tenant contributes to the estimate for another tenant, evenly spread over its
sorted lengths. A length is a context length or a number of turns."""
ESTIMATOR_VERSION = 3
"""Version of the documents that ``ProgramEstimator`` writes and reads."""


@dataclass(slots=True)
class RoutedProgram:
    """A program that the gateway routes. Sizes are in tokens, times on the core's clock."""

    key: Key
    agent_type: str | None
    parent: Key | None
    began_s: float
    """Time of the program's first request."""
    last_s: float
    """Time of the program's last event."""
    deadline_s: float | None = None
    """Deadline that the client stated; ``None``: it stated none."""
    home: str | None = None
    """Id of the replica that serves the program's turns; ``None``: no replica yet, or the replica is gone."""
    cached: bool = False
    """Whether the program's KV is at its home, as far as known."""
    context_tokens: int = 0
    """Longest context of the program so far."""
    size_tokens: int = 0
    """Expected longest context, which is counted for the program at its home; 0 without a home."""
    turns: int = 0
    """Number of answered requests."""
    in_flight: int = 0
    """Number of requests that were sent to a replica and have not ended."""
    waiting: int = 0
    """Number of requests that have not been sent."""
    moves: int = 0
    """Number of changes of the home, from one replica to another."""
    moved_at_turn: int = -1
    """Value of ``turns`` when the program last moved to another home; -1: never. Stealing and preemption do
    not move the program again while ``turns`` has this value."""
    idleness: IdlenessTracker = field(default_factory=IdlenessTracker)
    """Time in tools and in engines; kept only if the order of waiting requests reads it. A request counts as
    running from its sending to its end, because engines do not report their own queues."""
    turns_left: float | None = None
    """Number of turns left, estimated at the last turn; ``None``: unknown, or the routing policy does not
    read it."""

    @property
    def tenant(self) -> str:
        """The tenant of the program's API key."""
        return self.key[0]

    @property
    def is_idle(self) -> bool:
        """Whether the program has no open request."""
        return not (self.in_flight or self.waiting)

    def status(self) -> ProgramRouteStatus:
        """Status of the program, for operators."""
        return ProgramRouteStatus(
            self.key[1],
            self.tenant,
            self.home,
            self.turns,
            self.context_tokens,
            self.size_tokens,
            self.moves,
            self.in_flight,
            self.waiting,
        )


class ProgramEstimator:
    """Estimates of programs' sizes, turns and durations, learned from ended programs by tenant and agent
    type.

    An agent type with too few ended programs gets the estimates for all types of its tenant. A tenant with
    too few ended programs gets estimates from all tenants, each with the same weight. For sizes and numbers
    of turns, at least ``MIN_SHARING_TENANTS`` tenants must have enough ended programs, so no single tenant
    can inflate the estimates of another tenant. ``quantile``: desired probability that a program stays at or
    below its estimated size and number of turns.
    """

    def __init__(self, quantile: float = 0.5) -> None:
        if not 0 < quantile < 1:
            raise ValueError(f"quantile is {quantile}; expected between 0 and 1")
        self._quantile = quantile
        self._predictor = SurvivalPrediction(min_outputs=MIN_FINISHED_PROGRAMS, hints=False)
        self._tenants = ProgramStatistics()

    def ended(self, program: RoutedProgram, now: float) -> None:
        """Learn from a program that ended at ``now``. A program without answered turns is ignored."""
        if program.turns:
            for known in self._tenants.of_program(program.tenant, program.agent_type):
                known.peaks.add(max(1, program.context_tokens))
                known.turns.add(program.turns)
                known.life_s.observe(max(0.0, now - program.began_s))

    def observe_turn(self, program: RoutedProgram, seconds: float) -> None:
        """Learn from an answered turn; ``seconds``: time from sending the request to the end of its
        answer."""
        for known in self._tenants.of_program(program.tenant, program.agent_type):
            known.turn_s.observe(max(0.0, seconds))

    def size_tokens(self, program: RoutedProgram, context_tokens: int, most_tokens: int) -> int:
        """Return the longest context, in tokens, that a program is expected to reach: at least
        ``context_tokens``, its present context. ``most_tokens``: longest context that a replica can
        compute."""
        known = self._lengths(program, lambda one: one.peaks)
        left = self._left(known, context_tokens, max(1, most_tokens - context_tokens))
        return context_tokens + (round(left) if left is not None else 0)

    def turns_left(self, program: RoutedProgram) -> float | None:
        """Return the expected number of turns that the program has left; ``None``: unknown. Without an agent
        type, the number is always unknown: a client that states no agent type may not report the program's
        end either."""
        if program.agent_type is None:
            return None
        return self._left(self._lengths(program, lambda one: one.turns), program.turns, 10_000)

    def work_s(self, program: RoutedProgram) -> float:
        """Return the expected time, in seconds, that replicas still need for the program: the number of turns
        left times the mean duration of a turn. An unknown number of turns counts as 1. The result is 0 if the
        duration is unknown."""
        turns = self._left(self._lengths(program, lambda one: one.turns), program.turns, 10_000)
        return (turns or 1.0) * (self._mean(program, lambda one: one.turn_s) or 0.0)

    def life_s(self, program: RoutedProgram) -> float | None:
        """Return the mean time from first request to end, in seconds, over the tenant's ended programs of the
        same agent type. If the type has none, the mean is over all types. If the tenant has none, return the
        median of all tenants' means. ``None``: unknown."""
        return self._mean(program, lambda one: one.life_s)

    def snapshot(self) -> dict[str, Any]:
        """Return all statistics as a JSON-able document."""
        return {"version": ESTIMATOR_VERSION, "tenants": self._tenants.snapshot()}

    def restore(self, document: Any) -> None:
        """Replace the statistics by those of a ``snapshot``. A snapshot of an earlier version gives empty
        statistics. Raises ``ValueError`` for anything else."""
        version = document.get("version") if isinstance(document, Mapping) else None
        entries = document.get("tenants") if version == ESTIMATOR_VERSION else [] if version in (1, 2) else 0
        if not isinstance(entries, list):
            raise ValueError(f"estimates: expected a document of version {ESTIMATOR_VERSION}")
        self._tenants = ProgramStatistics.restore(entries)

    def _lengths(self, program: RoutedProgram, of: Callable[[TypeStatistics], SortedWindow]) -> Sequence[int]:
        """Return the lengths from which a program is estimated, ascending; empty if too few programs have
        ended. They are lengths of ended programs of the program's agent type, of its tenant, or of all
        tenants. ``of`` selects the kind of length from a ``TypeStatistics``: contexts or numbers of turns."""
        kind, least = program.agent_type, MIN_FINISHED_PROGRAMS
        own = self._tenants.get(program.tenant)
        known = own.lengths(kind, of, least) if own is not None else ()
        if known:
            return known
        every = [lengths for one in self._tenants.values() if (lengths := one.lengths(kind, of, least))]
        if len(every) < MIN_SHARING_TENANTS:
            return ()
        count = 2 * SHARED_LENGTHS
        return sorted(lengths[len(lengths) * odd // count] for lengths in every for odd in range(1, count, 2))

    def _mean(self, program: RoutedProgram, of: Callable[[TypeStatistics], SlidingMean]) -> float | None:
        """Return the mean of one quantity, such as the turn time, for programs like this one; ``None``:
        unknown. ``of`` selects the quantity.

        It is the mean over the tenant's programs of the same agent type; if there are none, over all the
        tenant's programs. If the tenant has no values, it is the median of the other tenants' means, each
        found in the same way."""
        own = self._tenants.get(program.tenant)
        known = own.mean(program.agent_type, of) if own is not None else None
        if known is not None:
            return known
        means = [
            mean for one in self._tenants.values() if (mean := one.mean(program.agent_type, of)) is not None
        ]
        return median_low(means) if means else None

    def _left(self, known: Sequence[int], so_far: int, most: int) -> float | None:
        """Predict how much a length will grow. ``so_far``: the present length. ``known``: final lengths of
        ended programs. ``most``: maximum of the result. Returns ``None`` if too few lengths are known."""
        left = self._predictor.remaining(OutputLengthView("", so_far, most, known), 0.0)
        return left[min(len(left) - 1, math.floor(len(left) * self._quantile))] if left else None


class _CountedProgram(NamedTuple):
    """The values with which a program was last counted at a replica. They are subtracted when the program
    changes."""

    program: RoutedProgram
    replica_id: str
    turns_left: float
    turns: int
    context_tokens: int
    size_tokens: int


class ResidentPrograms:
    """The resident programs of each replica, in groups (see the module's docstring).

    ``for_s``: seconds for which a program without a request counts after its last event. A program whose
    time is over counts again only after a new event, even if the clock jumps back. ``wanted``: whether the
    policy reads the groups; if not, nothing is counted.
    """

    def __init__(self, for_s: float = math.inf, *, wanted: bool = True) -> None:
        self._for_s = for_s
        self.wanted = wanted
        self._stale: dict[int, RoutedProgram] = {}
        """Programs to be counted again. Keys are Python's ``id()``, because a new program may have the
        program id of an ended one."""
        self._counted: dict[int, _CountedProgram] = {}
        """Counted programs, by ``id()``."""
        self._groups: dict[str, dict[tuple[float, int], ResidentProgramGroup]] = {}
        """Groups of each replica, by (turns left, past turns)."""
        self._sorted: dict[str, tuple[ResidentProgramGroup, ...]] = {}
        """Cache of each replica's sorted groups; a replica with changes since the last query is absent."""
        self._lapses: list[tuple[float, int, RoutedProgram]] = []
        """Heap of (time of the last event, ``id()``, program) for counted programs without a request. Such a
        program is no longer counted ``for_s`` seconds after its last event."""
        self._lapse_s: dict[int, float] = {}
        """Time of each program's earliest entry in ``_lapses``."""

    def mark_stale(self, program: RoutedProgram) -> None:
        """Mark a program to be counted again. Call this after each change of the program's home, sizes, turns
        or number of requests."""
        if self.wanted:
            self._stale[id(program)] = program

    def at(
        self, replica_ids: Iterable[str], but: RoutedProgram | None, now: float
    ) -> dict[str, tuple[ResidentProgramGroup, ...]]:
        """Return the groups of resident programs at each of these replicas, by replica id. Replicas without
        programs are left out. The groups of a replica are sorted by (turns left, past turns). ``but``: a
        program that is not counted; ``None``: all programs are counted."""
        self._recount_stale(now)
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

    def _recount_stale(self, now: float) -> None:
        """Count again the marked programs, and the programs whose last event was at least ``for_s`` seconds
        ago."""
        lapses, stale = self._lapses, self._stale
        while lapses and now - lapses[0][0] >= self._for_s:
            at_s, name, program = heappop(lapses)
            if self._lapse_s.get(name) == at_s:
                del self._lapse_s[name]
            stale[name] = program
        for name, program in stale.items():
            self._count(name, program, now)
        stale.clear()

    def _count(self, name: int, program: RoutedProgram, now: float) -> None:
        """Count a program with its present values instead of those of its last count. ``name``: the program's
        ``id()``."""
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
        """Return the values with which a program counts at its home; ``None``: the program is not
        resident."""
        if program.home is None:
            return None
        if program.is_idle:
            if program.turns_left is None or not now - program.last_s < self._for_s:
                return None
            self._schedule_recount(program)
        return _CountedProgram(
            program,
            program.home,
            turns_left(program),
            program.turns,
            program.context_tokens,
            max(program.size_tokens, program.context_tokens),
        )

    def _schedule_recount(self, program: RoutedProgram) -> None:
        """Schedule another count of a program without a request, ``for_s`` seconds after the program's last
        event."""
        name, at_s = id(program), program.last_s
        if self._for_s < math.inf and at_s < self._lapse_s.get(name, math.inf):
            heappush(self._lapses, (at_s, name, program))
            self._lapse_s[name] = at_s

    def _change(self, one: _CountedProgram, programs: int) -> None:
        """Add a program to its group (``programs`` 1), or subtract it (-1)."""
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
        """Return the groups of one replica, sorted by (turns left, past turns)."""
        there = self._sorted.get(replica_id)
        if there is None:
            groups = self._groups.get(replica_id, {})
            there = self._sorted[replica_id] = tuple(groups[alike] for alike in sorted(groups))
        return there


def turns_left(program: RoutedProgram) -> float:
    """Return the expected number of turns that a program has left, at least 1. If unknown, the number of past
    turns is used."""
    return max(1.0, program.turns if program.turns_left is None else program.turns_left)


def build_resident_programs(routing: RoutingPolicy) -> ResidentPrograms:
    """Build the ``ResidentPrograms`` for a routing policy. It counts programs only if the policy sets
    ``reads_residents``."""
    return ResidentPrograms(
        float(getattr(routing, "resident_for_s", math.inf)),
        wanted=bool(getattr(routing, "reads_residents", False)),
    )
