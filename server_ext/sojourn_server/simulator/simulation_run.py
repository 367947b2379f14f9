"""Builds and runs one simulation from a specification: one policy on one workload."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sojourn_server.traces.trace_schema import TraceError

from .event_queue import EventQueue
from .latency.latency_models import DeviceShape, LatencyModel
from .latency.latency_selection import load_latency_model
from .run_log import RunLog
from .simulated_gateway import UNLIMITED_S
from .simulator_policies import SimulatorPolicy, find_cluster_policy, find_policy
from .token_accounting import MOVED_CAUSE
from .workloads.arrival_processes import STAGGER_S, ArrivalProcess, closed_loop, load_programs, open_loop
from .workloads.program_plans import PlaybackOptions, ProgramPlanner

if TYPE_CHECKING:
    from .simulated_engine import SimulatedEngine
    from .simulation import Simulation

UNBOUNDED_HOST_TOKENS = 40_000_000
"""Host memory of the policy ``free-io``, in KV tokens: enough for 500 long contexts. The KV pool of
``unlimited`` has at least four tenths of this size. A run that fills it has a note."""

DISK_POLICIES_HINT = "a disk tier, such as continuum+host or mori"
"""Part of an error message: which policies have a disk."""


class SimulatorError(ValueError):
    """Invalid simulation setup; the message says what is wrong and what is expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One policy on one workload. Plain data that can be pickled."""

    policy: str
    """Name for ``find_policy``; with ``replicas``, for ``find_cluster_policy``."""
    workload: str
    """A trace file, or ``synthetic:NAME``."""
    hardware: str = "a100-80gb"
    """Name of a hardware profile, or a file."""
    model: str | None = None
    """Name of a model, or a file. ``None``: the model that the engine profile names, or ``DEFAULT_MODEL`` if
    ``hardware`` is no engine profile."""
    tp: int = 1
    """Tensor parallel devices of an engine."""
    async_scheduling: bool = False
    """Whether the engine plans each step before it has the previous step's results, as on CUDA."""
    cpu_ratio: float = 1.0
    """Host memory for KV as a multiple of the device's KV memory, for policies that use it."""
    disk_ratio: float = 0.0
    """Disk for KV as a multiple of the device's KV memory, for policies with sojourn's tiers; 0 for no
    disk."""
    replicas: int | None = None
    """Number of engines behind a gateway, each on hardware of its own; ``None`` for one engine without a
    gateway."""
    programs: int = 40
    """Number of concurrent programs (closed loop) or of arrivals (open loop), over all replicas."""
    rate_per_s: float | None = None
    """Mean arrivals per second of the Poisson process of an open loop; ``None`` for a closed loop."""
    burst: int = 1
    """Number of programs that arrive together in an open loop."""
    until_s: float | None = 3600.0
    """End of the run in virtual seconds; with ``None`` it ends when all programs have finished."""
    seed: int = 0
    max_gap_s: float | None = None
    """Upper limit of the gaps between turns, in seconds; ``None`` for no limit."""
    human_gaps: bool = True
    """Whether gaps include the response times of people; if false, people respond at once."""
    pool_tokens: int | None = None
    """KV tokens on the device. ``None``: the number in the engine profile or, without an engine profile, as
    many as fit beside the weights."""
    max_model_len: int | None = None
    """Longest context of the engine. ``None``: the limit in the engine profile or, without an engine profile,
    that of the model. vLLM requires that one request of this length fits the pool."""
    max_context_tokens: int | None = None
    """Programs end before a turn with more tokens. ``None`` means the engine's longest context."""
    hold_timeout_s: float = UNLIMITED_S
    """Longest wait for a place on the device. By default without limit: simulated clients never give up."""


def run_simulation(
    spec: RunSpec,
    on_progress: Callable[[float, int], None] = lambda now, finished: None,
    *,
    arrivals: ArrivalProcess | None = None,
    prepare: Callable[[Simulation], None] | None = None,
) -> RunLog:
    """Run one specification, and return its log.

    ``on_progress`` gets the virtual seconds so far and the number of finished programs. ``arrivals`` replaces
    the programs and arrivals of ``spec.workload``. ``prepare`` gets the simulation before it runs. For an
    invalid specification, raises ``SimulatorError``, ``PolicyError``, ``TraceError`` or
    ``LatencyProfileError`` before the run starts.
    """
    policy = chosen_policy(spec)
    latency, shape = device_for_run(spec, policy)
    if arrivals is None:
        planner = _program_planner(spec, shape)
        if spec.rate_per_s is None:
            stagger_s = STAGGER_S / (spec.replicas or 1)
            arrivals = closed_loop(planner, spec.programs, spec.seed, stagger_s=stagger_s)
        else:
            arrivals = open_loop(planner, spec.rate_per_s, spec.programs, spec.seed, burst=spec.burst)
    from .simulation import Simulation

    clock = EventQueue()
    engines = [_build_engine(spec, policy, shape, latency, clock) for _ in range(spec.replicas or 1)]
    options = engines[0][0].options
    log = RunLog(
        policy=policy.name,
        programs_wanted=spec.programs,
        hardware=shape.hardware,
        model=shape.model,
        trace=spec.workload,
        seed=spec.seed,
        loop="open" if spec.rate_per_s is not None else "closed",
        rate_per_s=spec.rate_per_s,
        limit=bool(policy.bound),
        pool_blocks=options.blocks - 1,
        host_blocks=options.host_blocks,
        disk_blocks=options.disk_blocks,
        block_size=shape.block_size,
    )
    simulation = Simulation(
        engines,
        clock,
        latency,
        arrivals,
        log,
        front=policy.request_router(),
        standalone=spec.replicas is None,
        with_hints=policy.settings is not None,
        until_s=spec.until_s,
        on_progress=on_progress,
    )
    if prepare is not None:
        prepare(simulation)
    simulation.run()
    turns = [turn for program in log.programs for turn in program.turns]
    again = sum(turn.regenerated_tokens - turn.regenerated.get(MOVED_CAUSE, 0) for turn in turns)
    if policy.bound and again:
        text = f"is no bound here: its memory filled up; {again:,} tokens were computed again"
        log.notes.append(f"{log.policy} {text}")
    return log


def chosen_policy(spec: RunSpec) -> SimulatorPolicy:
    """The policy of a run. Raises ``PolicyError``."""
    return find_policy(spec.policy) if spec.replicas is None else find_cluster_policy(spec.policy)


def validate_specs(specs: Sequence[RunSpec]) -> list[str]:
    """Check ``specs`` without running them. Returns notes for the user. Raises like ``run_simulation``."""
    notes: dict[str, None] = {}
    planned = set()
    sources: dict[str, str] = {}
    asked = next((spec.disk_ratio for spec in specs if spec.disk_ratio), 0.0)
    if asked and not any(chosen_policy(spec).own_tiers for spec in specs):
        named = ", ".join(dict.fromkeys(spec.policy for spec in specs))
        raise SimulatorError(
            f"disk_ratio is {asked:g}, but none of {named} has a disk; "
            f"expected a policy with {DISK_POLICIES_HINT}"
        )
    for spec in specs:
        policy = chosen_policy(spec)
        name = policy.name
        if sources.setdefault(name, spec.policy) != spec.policy:
            instead = "files of different names" if spec.replicas is None else "one of them"
            raise SimulatorError(
                f"{sources[name]} and {spec.policy} would both be called {name!r}; expected {instead}"
            )
        _, shape = device_for_run(spec, policy)
        _disk_blocks(spec, policy, shape)
        if policy.uses_cpu_ratio and policy.needs_host_memory and shape.host_kv_tokens < shape.block_size:
            notes[
                f"{name} has no host memory to place programs in: an engine starts only with "
                "allow_missing_tiers=true"
            ] = None
        # Policies, loads and memory do not change the programs.
        programs = (spec.workload, spec.seed, shape.max_context_tokens)
        if programs not in planned:
            planned.add(programs)
            notes.update(dict.fromkeys(_program_planner(spec, shape).notes))
    return list(notes)


def _program_planner(spec: RunSpec, shape: DeviceShape) -> ProgramPlanner:
    """The planner of the workload's programs. Raises ``TraceError``, which names the workload."""
    programs = load_programs(spec.workload, spec.seed)
    options = PlaybackOptions(
        # The context limit is the same for every policy.
        max_context_tokens=min(shape.max_context_tokens, spec.max_context_tokens or shape.max_context_tokens),
        max_gap_s=spec.max_gap_s,
        human_gaps=spec.human_gaps,
    )
    try:
        return ProgramPlanner(programs, options)
    except TraceError as error:
        raise type(error)(f"{spec.workload}: {error}") from error


def device_for_run(spec: RunSpec, policy: SimulatorPolicy | None = None) -> tuple[LatencyModel, DeviceShape]:
    """Latency model and shape of the device of a run with ``policy``. There is no host memory without a
    policy that uses it; then an engine profile may lack its copy bandwidths. Raises
    ``LatencyProfileError``."""
    return load_latency_model(
        spec.hardware,
        spec.model,
        spec.tp,
        cpu_ratio=spec.cpu_ratio if policy is not None and policy.uses_cpu_ratio else 0.0,
        kv_pool_tokens=spec.pool_tokens,
        max_model_len=spec.max_model_len,
    )


def _disk_blocks(spec: RunSpec, policy: SimulatorPolicy, shape: DeviceShape) -> int:
    """Number of KV blocks on the disk. Raises ``SimulatorError`` for a disk that the engine would reject."""
    if not policy.own_tiers or not spec.disk_ratio:
        return 0
    if shape.host_kv_tokens < shape.block_size:
        raise SimulatorError(
            f"{policy.name}: disk_ratio is {spec.disk_ratio:g} and cpu_ratio {spec.cpu_ratio:g}, no host "
            "memory; expected some: all copies to and from the disk pass through host memory"
        )
    if not 0 <= spec.disk_ratio < float("inf"):
        raise SimulatorError(f"disk_ratio is {spec.disk_ratio}; expected a number ≥ 0")
    blocks = int(shape.kv_pool_tokens * spec.disk_ratio) // shape.block_size
    if not blocks:
        raise SimulatorError(f"disk_ratio is {spec.disk_ratio:g}, less than one block; expected more, or 0")
    return blocks


def _build_engine(
    spec: RunSpec, policy: SimulatorPolicy, shape: DeviceShape, latency: LatencyModel, clock: EventQueue
) -> tuple[SimulatedEngine, Any]:
    """An engine, and the simulated transfers to and from its host memory; ``None`` without host memory."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from .simulated_engine import SimulatedEngine, SimulatedEngineOptions

    blocks = shape.kv_pool_tokens // shape.block_size
    host_blocks = shape.host_kv_tokens // shape.block_size if policy.host_cache else 0
    block_bytes = shape.kv_bytes_per_token * shape.block_size
    if policy.bound == "host":
        host_blocks, block_bytes = UNBOUNDED_HOST_TOKENS // shape.block_size, 0
    if policy.bound == "device":
        blocks = max(blocks, 4 * UNBOUNDED_HOST_TOKENS // 10 // shape.block_size)
    engine = SimulatedEngine(
        SimulatedEngineOptions(
            blocks=blocks,
            block_size=shape.block_size,
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            max_model_len=shape.max_context_tokens,
            asynchronous=spec.async_scheduling,
            host_blocks=host_blocks,
            own_tiers=policy.own_tiers,
            disk_blocks=_disk_blocks(spec, policy, shape),
            sojourn=policy.settings and {**policy.settings, "hold_timeout_s": spec.hold_timeout_s},
        ),
        clock,
    )
    if not host_blocks:
        return engine, None
    if engine.adapter is not None:
        # Seconds per token loaded from host memory, which a live engine reads from its profile.
        per_block_s = latency.copy_s(block_bytes, to_host=False)
        engine.adapter.program_scheduler.pool.host_s_per_token = per_block_s / shape.block_size
    if policy.own_tiers:
        from .tier_transfers import TierTransfers

        return engine, TierTransfers(latency, block_bytes)
    from .vllm_offload_transfers import VllmOffloadTransfers

    return engine, VllmOffloadTransfers(latency, block_bytes)
