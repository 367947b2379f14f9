"""From what a user names to a loop: a trace file or a synthetic workload, and how it arrives."""

from __future__ import annotations

from pathlib import Path

from sojourn_server.traces.trace_reader import read_trace
from sojourn_server.traces.trace_schema import TraceProgram

from .arrival_processes import STAGGER_S, ArrivalProcess, ClosedLoop, OpenLoop, RecordedArrivals
from .program_plans import PlaybackOptions, ProgramPlanner
from .synthetic_workloads import SYNTHETIC_PREFIX, synthetic_programs


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
