"""Runs prefill/decode simulations from specifications (system, cluster and load), several in parallel."""

from __future__ import annotations

import gc
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ..process_pool import ReportCallback, run_in_processes
from ..workloads.synthetic_workloads import DUALPATH, SYNTHETIC_PREFIX
from .prefill_decode_cluster import CALIBRATION_JCT_S, PD_MODELS, PdCluster, PdMachine
from .prefill_decode_outcome import PdOutcome, run_outcome
from .prefill_decode_simulation import PdSimulation
from .prefill_decode_systems import PD_SYSTEMS
from .trajectories import Trajectory, TrajectoryShaping, load_trajectories, sample_agents

OnProgress = Callable[[int, float, int], None]
"""Callback for progress: gets (index of the run, virtual seconds so far, number of ended agents)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PdSpec:
    """Specification of a run. ``system``: key of ``PD_SYSTEMS``. ``model``: key of ``PD_MODELS``.
    ``workload``: a trace file or ``synthetic:NAME``. Raises ``ValueError`` for invalid values."""

    system: str = "scheduling"
    model: str = "ds-660b"
    workload: str = "synthetic:dualpath-64k"
    prefill_nodes: int = 2
    decode_nodes: int = 4
    agents: int = 2000
    """Concurrent agents or, with ``rate_per_s``, the maximum number of arrivals."""
    rate_per_s: float | None = None
    """Mean arrivals of agents per second, a Poisson process until ``until_s``. ``None``: all agents are
    present from the start."""
    until_s: float | None = None
    """Virtual end of the run; with ``None`` it ends when all agents have ended."""
    warm_up_s: float = 0.0
    """Virtual time from which submitted turns count in the latencies. Used only with ``rate_per_s``."""
    seed: int = 0
    append_scale: float = 1.0
    """Factor of the new prompt tokens of each turn after the first."""
    output_scale: float = 1.0
    max_context_tokens: int | None = None
    """Maximum of a turn's prompt and output tokens together. A trajectory ends before its first turn with
    more tokens. ``None`` means the workload's limit, if any."""
    max_gap_s: float | None = None
    """Upper limit of the gaps between turns, in seconds; ``None`` for no limit."""
    isolated: bool = True
    """Whether model traffic has priority over KV on the compute network (``PdCluster.isolated``)."""
    step_tokens: int | None = None
    """Maximum number of new tokens per device and prefill step. ``None``: the compute quota is the limit."""
    machine: PdMachine = PdMachine()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        for word, known, what in ((self.system, PD_SYSTEMS, "system"), (self.model, PD_MODELS, "model")):
            if word not in known:
                raise ValueError(f"unknown {what} {word!r}; expected one of {', '.join(known)}")
        if self.agents < 1:
            raise ValueError(f"agents is {self.agents}; expected at least 1")
        if self.rate_per_s is not None:
            if not 0 < self.rate_per_s < math.inf:
                raise ValueError(f"rate_per_s is {self.rate_per_s}; expected finite and above 0")
            if self.until_s is None:
                raise ValueError("rate_per_s needs an end of the run; expected until_s")
        if self.until_s is not None and not 0 < self.until_s < math.inf:
            raise ValueError(f"until_s is {self.until_s}; expected finite and above 0")
        if not 0 <= self.warm_up_s < (self.until_s or math.inf):
            raise ValueError(f"warm_up_s is {self.warm_up_s}; expected ≥ 0 and before the end")

    @property
    def label(self) -> str:
        """Name in progress bars and errors."""
        load = f"{self.agents} agents" if self.rate_per_s is None else f"{self.rate_per_s:g}/s"
        return f"{self.system} {self.cluster.name} {load}"

    @property
    def cluster(self) -> PdCluster:
        """The cluster of this run. Raises ``ValueError`` like ``PdCluster``."""
        return PdCluster(
            prefill_nodes=self.prefill_nodes,
            decode_nodes=self.decode_nodes,
            model=PD_MODELS[self.model],
            machine=self.machine,
            isolated=self.isolated,
            step_tokens=self.step_tokens,
        )

    @property
    def shaping(self) -> TrajectoryShaping:
        """Changes to the lengths of the workload's turns. Raises ``ValueError`` if a change is invalid."""
        limit = self.max_context_tokens
        if limit is None and self.workload.startswith(SYNTHETIC_PREFIX):
            limit = DUALPATH.get(self.workload[len(SYNTHETIC_PREFIX) :], (None,))[0]
        return TrajectoryShaping(
            append_scale=self.append_scale,
            output_scale=self.output_scale,
            max_context_tokens=limit,
            max_gap_s=self.max_gap_s,
        )


def run_prefill_decode(
    spec: PdSpec,
    on_progress: Callable[[float, int], None] | None = None,
    *,
    cluster: PdCluster | None = None,
) -> PdOutcome:
    """Run one specification on ``cluster`` (default: ``spec.cluster``). Raises ``TraceError`` for an
    unreadable workload, and ``ValueError`` like ``PdCluster``."""
    players, arrivals_s = _load_workload(spec)
    cluster = cluster or spec.cluster
    began_s = time.process_time()
    with _garbage_collection_paused():
        simulation = PdSimulation(
            cluster,
            PD_SYSTEMS[spec.system],
            players,
            arrivals_s,
            latencies_from_s=None if spec.rate_per_s is None else spec.warm_up_s,
        )
        simulation.run(math.inf if spec.until_s is None else spec.until_s, on_progress)
    return run_outcome(
        simulation,
        workload=spec.workload,
        rate_per_s=spec.rate_per_s,
        seed=spec.seed,
        cpu_s=time.process_time() - began_s,
    )


def run_prefill_decode_suite(
    specs: Sequence[PdSpec],
    *,
    processes: int | None = None,
    on_start: Callable[[int, PdSpec], None] = lambda number, spec: None,
    on_progress: OnProgress = lambda number, now, finished: None,
    on_done: Callable[[int, PdOutcome], None] = lambda number, outcome: None,
) -> list[PdOutcome]:
    """Run all specifications, up to ``processes`` at a time (default: one per core). Returns the outcomes in
    the order of ``specs``. Callbacks get the index of a run in ``specs``. Raises like
    ``run_prefill_decode``."""
    outcomes: list[PdOutcome] = run_in_processes(
        _run_spec_in_process,
        list(specs),
        processes or os.cpu_count() or 1,
        name=lambda spec: spec.label,
        on_start=on_start,
        on_report=lambda number, what: on_progress(number, *what),
        on_done=on_done,
        preload=(__name__,),
    )
    return outcomes


def calibrate(
    spec: PdSpec,
    wanted_s: float = CALIBRATION_JCT_S,
    tolerance: float = 0.005,
    play: Callable[[PdSpec], PdOutcome] = run_prefill_decode,
) -> list[tuple[float, float]]:
    """Find the machine efficiency with which the run ``spec`` takes ``wanted_s`` virtual seconds.

    The search is a bisection on a log scale. Returns an (efficiency, virtual seconds) pair for each run, in
    order. The last pair has the result: its seconds differ from ``wanted_s`` by at most the fraction
    ``tolerance``. ``play`` runs a spec. Raises ``ValueError`` if no efficiency between 5 % and 100 % fits,
    because compute is then not the bottleneck.
    """
    tried: list[tuple[float, float]] = []
    low, high = 0.05, 1.0
    efficiency = high
    while high / low > 1 + tolerance / 10:
        took_s = play(replace(spec, machine=replace(spec.machine, efficiency=efficiency))).virtual_s
        tried.append((efficiency, took_s))
        if abs(took_s / wanted_s - 1) <= tolerance:
            return tried
        if took_s > wanted_s:
            if efficiency == high:
                break
            low = efficiency
        else:
            high = efficiency
        efficiency = math.sqrt(low * high)
    raise ValueError(f"no efficiency from 5 % to 100 % makes {spec.label} take {wanted_s:g} s: {tried}")


def _load_workload(spec: PdSpec) -> tuple[list[Trajectory], list[float] | None]:
    trajectories = load_trajectories(spec.workload, spec.shaping, spec.seed)
    if spec.rate_per_s is None:
        return sample_agents(trajectories, spec.agents, spec.seed), None
    assert spec.until_s is not None
    rng = random.Random(f"pd arrivals/{spec.seed}")
    arrivals_s: list[float] = []
    now = rng.expovariate(spec.rate_per_s)
    while now <= spec.until_s and len(arrivals_s) < spec.agents:
        arrivals_s.append(now)
        now += rng.expovariate(spec.rate_per_s)
    arrivals_s = arrivals_s or [0.0]
    return sample_agents(trajectories, len(arrivals_s), spec.seed), arrivals_s


def _run_spec_in_process(spec: PdSpec, report: ReportCallback) -> PdOutcome:
    return run_prefill_decode(spec, lambda now, finished: report((now, finished)))


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Context that pauses garbage collection. Collection would take a third of the time, and is not needed,
    because turns create no reference cycles."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
