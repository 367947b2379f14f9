"""Who arrives when: closed and open loops over the programs of a trace.

A loop is on the client's side of a simulation: it knows what is still to come
and tells nobody. The order of programs depends on trace and seed only, never on
what a policy did; which of them comes when one finishes does not either, since
the next is always the next in that order.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from sojourn_server.traces.trace_reader import read_trace
from sojourn_server.traces.trace_schema import TraceError, TraceProgram

from .program_plans import PlaybackOptions, ProgramPlan, ProgramPlanner
from .synthetic_workloads import SYNTHETIC_PREFIX, synthetic_programs

Arrival = tuple[float, ProgramPlan]
"""(seconds since the run's start, what arrives)"""


class ArrivalProcess(Protocol):
    """Where programs come from."""

    notes: list[str]
    """What one should know of the programs before reading anything into results."""

    def initial(self) -> Iterator[Arrival]:
        """Arrivals that wait for nobody, in order of time; made as they are asked for. Ask once."""
        ...

    def finished(self, program: ProgramPlan, now: float) -> Arrival | None:
        """Who comes because this top-level program and its sub-agents have finished."""
        ...


STAGGER_S = 0.5
"""Between the first programs of a closed loop."""


class ClosedLoop:
    """``n`` programs at once, without end: one that finishes is replaced at once (MORI §5.1)."""

    def __init__(self, programs: ProgramPlanner, n: int, seed: int, *, stagger_s: float = STAGGER_S) -> None:
        """The first ``n`` arrive ``stagger_s`` apart. Raises ``ValueError`` for an ``n`` below 1."""
        if n < 1:
            raise ValueError(f"the number of programs at once is {n}; expected at least 1")
        if not stagger_s >= 0:
            raise ValueError(f"stagger_s is {stagger_s}; expected ≥ 0")
        self.notes = programs.notes
        self._n = n
        self._stagger_s = stagger_s
        self._endless = _endless_shuffle(programs, seed)

    def initial(self) -> Iterator[Arrival]:
        """The first ``n``."""
        for number in range(self._n):
            yield number * self._stagger_s, next(self._endless)

    def finished(self, program: ProgramPlan, now: float) -> Arrival | None:
        """The next of a shuffle; when all have had their turn, of another one."""
        return now, next(self._endless)


class FiniteClosedLoop:
    """Every program once, ``n`` at a time, in the trace's order: what ``sojourn replay`` does."""

    def __init__(self, programs: ProgramPlanner, n: int, *, stagger_s: float = 0.0) -> None:
        """The first ``n`` arrive ``stagger_s`` apart. Raises ``ValueError`` for an ``n`` below 1."""
        if n < 1:
            raise ValueError(f"the number of programs at once is {n}; expected at least 1")
        if not stagger_s >= 0:
            raise ValueError(f"stagger_s is {stagger_s}; expected ≥ 0")
        self.notes = programs.notes
        self._n = min(n, len(programs))
        self._stagger_s = stagger_s
        self._waiting = (programs.plan(index) for index in range(len(programs)))

    def initial(self) -> Iterator[Arrival]:
        """The first ``n``."""
        for number in range(self._n):
            plan = next(self._waiting, None)
            if plan is None:  # those before were over so soon that the others have played them all
                return
            yield number * self._stagger_s, plan

    def finished(self, program: ProgramPlan, now: float) -> Arrival | None:
        """The next; ``None`` when all have come."""
        plan = next(self._waiting, None)
        return None if plan is None else (now, plan)


class OpenLoop:
    """Poisson arrivals: each program once, or ``count`` of them, until all have finished (Continuum §6.1)."""

    def __init__(self, programs: ProgramPlanner, rate_per_s: float, count: int | None, seed: int) -> None:
        """``rate_per_s`` is in top-level programs. Raises ``ValueError`` for a rate or count that is none."""
        if not 0 < rate_per_s < float("inf"):
            raise ValueError(f"the arrival rate is {rate_per_s} a second; expected a number above 0")
        if count is not None and count < 1:
            raise ValueError(f"the number of arrivals is {count}; expected at least 1")
        self.count = len(programs) if count is None else count
        """Arrivals in all."""
        self.notes = programs.notes
        self._rate_per_s = rate_per_s
        self._times = random.Random(f"arrivals/{seed}")
        self._endless = _endless_shuffle(programs, seed)

    def initial(self) -> Iterator[Arrival]:
        """All of them."""
        at_s = 0.0
        for plan in itertools.islice(self._endless, self.count):
            at_s += self._times.expovariate(self._rate_per_s)
            yield at_s, plan

    def finished(self, program: ProgramPlan, now: float) -> Arrival | None:
        """Nobody: arrivals wait for none."""
        return None


class RecordedArrivals:
    """Every program once, at its recorded time; the first at 0."""

    def __init__(self, programs: ProgramPlanner, *, speed: float = 1.0) -> None:
        """``speed`` divides the times. Raises ``TraceError`` where a program's arrival isn't recorded."""
        if not speed > 0:
            raise ValueError(f"speed is {speed}; expected > 0")
        times = []
        for index, root in enumerate(programs.roots):
            if root.arrival_s is None:
                raise TraceError(
                    f"program {root.program_id!r} has no arrival_s; expected one for every program, "
                    "or play the trace in a closed loop or with an arrival rate"
                )
            times.append((root.arrival_s, index))
        self.notes = programs.notes
        self._times = sorted(times)
        self._programs = programs
        self._speed = speed

    def initial(self) -> Iterator[Arrival]:
        """All of them."""
        first_s = self._times[0][0]
        for arrival_s, index in self._times:
            yield (arrival_s - first_s) / self._speed, self._programs.plan(index)

    def finished(self, program: ProgramPlan, now: float) -> Arrival | None:
        """Nobody: arrivals wait for none."""
        return None


def _endless_shuffle(programs: ProgramPlanner, seed: int) -> Iterator[ProgramPlan]:
    """One shuffle of all programs after the other. Within one, all share what they shared when recorded;
    between two, system prompts only."""
    rng = random.Random(f"order/{seed}")
    for copy in itertools.count():
        order = list(range(len(programs)))
        rng.shuffle(order)
        for index in order:
            yield programs.plan(index, copy)


def load_programs(workload: str, seed: int = 0) -> list[TraceProgram]:
    """The programs of a trace file, or of ``synthetic:NAME`` made with ``seed``. Raises ``TraceError``."""
    if workload.startswith(SYNTHETIC_PREFIX):
        return synthetic_programs(workload[len(SYNTHETIC_PREFIX) :], seed=seed)
    return list(read_trace(Path(workload)))


def make_arrival_process(
    workload: str,
    *,
    programs: int,
    rate_per_s: float | None = None,
    seed: int = 0,
    max_context_tokens: int | None = None,
    max_gap_s: float | None = None,
    human_gaps: bool = True,
    token_scale: float = 1.0,
    recorded_arrivals: bool = False,
    replicas: int = 1,
) -> ArrivalProcess:
    """A closed loop of ``programs`` at once, the first of which come to each of ``replicas`` as they come to
    one engine by itself; or with ``rate_per_s`` that many Poisson arrivals in all, or
    with ``recorded_arrivals`` every program of the trace once, at its time.

    Raises ``TraceError`` for a workload that cannot be read or played, and
    ``ValueError`` for a number that makes no sense.
    """
    options = PlaybackOptions(
        max_context_tokens=max_context_tokens,
        max_gap_s=max_gap_s,
        human_gaps=human_gaps,
        token_scale=token_scale,
    )
    planner = ProgramPlanner(load_programs(workload, seed), options)
    if recorded_arrivals:
        return RecordedArrivals(planner)
    if rate_per_s is None:
        return ClosedLoop(planner, programs, seed, stagger_s=STAGGER_S / replicas)
    return OpenLoop(planner, rate_per_s, programs, seed)
