"""Arrival processes: closed and open loops over the programs of a workload.

The order in which programs arrive depends on workload and seed only, not on the policy. In a closed loop, the
next program in that order replaces a finished one. Only clients see an arrival process; policies do not.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from sojourn_server.traces.trace_file import read_trace
from sojourn_server.traces.trace_schema import TraceError, TraceProgram, check_parents

from .program_plans import ProgramPlan, ProgramPlanner
from .synthetic_workloads import SYNTHETIC_PREFIX, synthetic_programs

Arrival = tuple[float, ProgramPlan]
"""(time of arrival in virtual seconds, program)"""


class ArrivalProcess(Protocol):
    """Source of programs and their arrival times."""

    def initial(self) -> Iterator[Arrival]:
        """Yield the arrivals that do not depend on the end of other programs, in order of time. Call this
        once."""
        ...

    def finished(self, program: ProgramPlan, now: float) -> Arrival | None:
        """Return the arrival that replaces ``program``; ``None`` if nothing replaces it. Called at ``now``
        virtual seconds, when a top-level program and all its sub-agents have finished."""
        ...


STAGGER_S = 0.5
"""Seconds between the arrivals of the first programs of a closed loop, on one engine."""


class ClosedLoop:
    """Endless closed loop: ``n`` programs run at a time. When one finishes, the next replaces it at once
    (MORI §5.1). The programs of the workload arrive in rounds; each round has all of them, in a new random
    order."""

    def __init__(self, programs: ProgramPlanner, n: int, seed: int, *, stagger_s: float = STAGGER_S) -> None:
        """The first ``n`` programs arrive ``stagger_s`` seconds apart."""
        self._n = n
        self._stagger_s = stagger_s
        self._plans = _endless_shuffle(programs, seed)

    def initial(self) -> Iterator[Arrival]:
        """Yield the arrivals of the first ``n`` programs."""
        for number, plan in enumerate(itertools.islice(self._plans, self._n)):
            yield number * self._stagger_s, plan

    def finished(self, program: ProgramPlan, now: float) -> Arrival | None:
        """Return the next program, which arrives at ``now``. ``FiniteClosedLoop`` returns ``None`` after the
        last program."""
        plan = next(self._plans, None)
        return None if plan is None else (now, plan)


class FiniteClosedLoop(ClosedLoop):
    """Closed loop that runs every program once, in the trace's order, as ``sojourn replay`` does. At most
    ``n`` programs run at a time."""

    def __init__(self, programs: ProgramPlanner, n: int, *, stagger_s: float = 0.0) -> None:
        super().__init__(programs, n, seed=0, stagger_s=stagger_s)
        self._plans = (programs.plan(index) for index in range(len(programs)))


class OpenLoop:
    """Open loop: ``count`` programs arrive in random order, at the times of a Poisson process (Continuum
    §6.1). If ``count`` is ``None``, every program arrives once. At each of these times, ``burst`` programs
    arrive together."""

    def __init__(
        self, programs: ProgramPlanner, rate_per_s: float, count: int | None, seed: int, *, burst: int = 1
    ) -> None:
        """``rate_per_s``: mean number of top-level programs per virtual second. It does not depend on
        ``burst``."""
        self.count = len(programs) if count is None else count
        """Total number of arrivals."""
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._times = random.Random(f"arrivals/{seed}")
        self._plans = _endless_shuffle(programs, seed)

    def initial(self) -> Iterator[Arrival]:
        """Yield all arrivals."""
        at_s = 0.0
        for number, plan in enumerate(itertools.islice(self._plans, self.count)):
            if number % self._burst == 0:
                at_s += self._times.expovariate(self._rate_per_s / self._burst)
            yield at_s, plan

    def finished(self, program: ProgramPlan, now: float) -> Arrival | None:
        """Return ``None``, because arrivals do not depend on finished programs."""
        return None


def _endless_shuffle(programs: ProgramPlanner, seed: int) -> Iterator[ProgramPlan]:
    """Yield all programs in random order, then all in another random order, and so on. The programs of one
    round share prefixes as recorded; programs of different rounds share system prompts only."""
    rng = random.Random(f"order/{seed}")
    for copy in itertools.count():
        order = list(range(len(programs)))
        rng.shuffle(order)
        for index in order:
            yield programs.plan(index, copy)


def load_programs(workload: str, seed: int = 0) -> list[TraceProgram]:
    """Return the programs of ``workload``: the path of a trace file, or ``synthetic:NAME``. Synthetic
    programs are drawn with ``seed``. Raises ``TraceError``, also if ``check_parents`` rejects the trace."""
    if workload.startswith(SYNTHETIC_PREFIX):
        return synthetic_programs(workload[len(SYNTHETIC_PREFIX) :], seed=seed)
    programs = list(read_trace(Path(workload)))
    try:
        check_parents(programs)
    except TraceError as error:
        raise TraceError(f"{workload}: {error}") from None
    return programs
