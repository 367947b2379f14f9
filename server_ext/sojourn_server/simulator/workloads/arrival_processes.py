"""Arrival processes: closed and open loops over the programs of a workload.

The order in which programs arrive depends on workload and seed only, not on the policy. In a closed loop, the
next program in that order replaces a finished one. Only clients see an arrival process; policies do not.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sojourn_server.traces.trace_file import read_trace
from sojourn_server.traces.trace_schema import TraceError, TraceProgram, check_parents

from .program_plans import ProgramPlan, ProgramPlanner
from .synthetic_workloads import SYNTHETIC_PREFIX, synthetic_programs


@dataclass(slots=True)
class ArrivalProcess:
    """Source of programs and their arrival times."""

    initial: Iterable[tuple[float, ProgramPlan]]
    """(Time of arrival in virtual seconds, program) of the arrivals that do not depend on the end of other
    programs, in order of time."""
    following: Iterator[ProgramPlan] = field(default_factory=lambda: iter(()))
    """Programs that arrive later, each at the moment at which an earlier top-level program and all its
    sub-agents have finished."""


STAGGER_S = 0.5
"""Seconds between the arrivals of the first programs of a closed loop, on one engine."""


def closed_loop(
    programs: ProgramPlanner, n: int, seed: int, *, stagger_s: float = STAGGER_S
) -> ArrivalProcess:
    """Endless closed loop: ``n`` programs run at a time. When one finishes, the next replaces it at once
    (MORI §5.1). The programs of the workload arrive in rounds; each round has all of them, in a new random
    order. The first ``n`` arrive ``stagger_s`` seconds apart."""
    return _replacing(_endless_shuffle(programs, seed), n, stagger_s)


def finite_closed_loop(programs: ProgramPlanner, n: int, *, stagger_s: float = 0.0) -> ArrivalProcess:
    """Closed loop that runs every program once, in the trace's order, as ``sojourn replay`` does. At most
    ``n`` programs run at a time."""
    return _replacing(map(programs.plan, range(len(programs))), n, stagger_s)


def open_loop(
    programs: ProgramPlanner, rate_per_s: float, count: int, seed: int, *, burst: int = 1
) -> ArrivalProcess:
    """Open loop: ``count`` programs arrive in random order, at the times of a Poisson process (Continuum
    §6.1). At each of these times, ``burst`` programs arrive together. ``rate_per_s``: mean number of
    top-level programs per virtual second. It does not depend on ``burst``."""
    draw = random.Random(f"arrivals/{seed}")
    gaps_s = (draw.expovariate(rate_per_s / burst) for _ in itertools.count())
    times_s = (at_s for at_s in itertools.accumulate(gaps_s) for _ in range(burst))
    plans = itertools.islice(_endless_shuffle(programs, seed), count)
    return ArrivalProcess(zip(times_s, plans, strict=False))


def _replacing(plans: Iterator[ProgramPlan], n: int, stagger_s: float) -> ArrivalProcess:
    first = enumerate(itertools.islice(plans, n))
    return ArrivalProcess(((number * stagger_s, plan) for number, plan in first), plans)


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
