"""From a specification to what happened: one policy on one workload, in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sojourn_server.traces.schema import TraceError

from .account import MOVED
from .clock import VirtualClock
from .latency.work import DeviceShape, LatencyModel
from .limits.accesses import AccessLog
from .lives import RunLog
from .policies import LabPolicy, Limit, find_policy

if TYPE_CHECKING:
    from .bare_engine import BareEngine
    from .simulation import SimulationOptions
    from .workloads.loops import Loop
    from .workloads.players import PlayOptions, Repertoire

ENDLESS_HOST_TOKENS = 40_000_000
"""Host memory of ``free-io``, in tokens of KV: what 500 long contexts take. A run that fills it says so."""

SEEN_SEED = 1_000_003
"""Between the seeds of a run and of the programs seen before it."""

LOOKS = 200
"""Looks at the occupancy of a run."""
LOOKS_AT_ENDLESS = 20
"""The same, where a look goes through millions of blocks."""

DEFAULT_MODEL = "llama-3.1-8b"
"""Where no model is named and the hardware brings none."""

WITH_A_DISK = "tiers of ours among them, such as continuum+host or mori"
"""What a policy is to have where nobody has a disk, in the words of a message."""

OnProgress = Callable[[str, float, int], None]
"""(label, virtual seconds, programs finished)"""


class LabError(ValueError):
    """A simulation cannot be set up; the text says what is wrong and what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One policy on one workload. Plain data: it travels to the process that runs it."""

    policy: str
    """With ``replicas``, a cluster's: see ``cluster.policies.find_cluster_policy``."""
    workload: str
    """A trace file, or ``synthetic:NAME``."""
    hardware: str = "a100-80gb"
    """A profile's name, or a file."""
    model: str | None = None
    """A model's name, or a file; ``None``: the one that an engine profile was measured with, else
    ``DEFAULT_MODEL``."""
    tp: int = 1
    cpu_ratio: float = 1.0
    """Host memory for KV as a multiple of the device's KV memory, for policies that use it."""
    disk_ratio: float = 0.0
    """Disk for KV as a multiple of the device's KV memory, for policies with tiers of ours; 0: none."""
    replicas: int | None = None
    """Engines behind a gateway, each on hardware of its own; ``None``: one, by itself."""
    programs: int = 40
    """At once (closed loop); in all (open loop). Of all replicas together."""
    rate_per_s: float | None = None
    """Poisson arrivals a second: an open loop. ``None``: closed."""
    until_s: float | None = 3600.0
    seed: int = 0
    max_gap_s: float | None = None
    """Longer idle times are cut to this."""
    human_gaps: bool = True
    """Keep the time people took."""
    pool_tokens: int | None = None
    """Tokens of KV on the device; ``None``: what fits beside the weights, or was measured."""
    max_model_len: int | None = None
    """The engine's longest context; ``None``: the model's own. vLLM refuses to start where the pool does not
    hold one such request."""
    max_context_tokens: int | None = None
    """Programs end before a turn that needs more; ``None``: at the engine's longest context."""
    record_accesses: bool = False
    seen: int = 0
    """Programs of a synthetic workload, made with another seed, that the gateway before ``replicas`` and its
    clients have seen end before the run: how long agents of each type run, and how far they grow."""

    @property
    def label(self) -> str:
        """What progress bars and tables call it."""
        load = f"{self.rate_per_s:g}/s" if self.rate_per_s is not None else str(self.programs)
        return (
            f"{self.policy} @ {load}"
            if self.replicas is None
            else f"{self.policy} @ {load} on {self.replicas}"
        )


@dataclass(slots=True)
class RunResult:
    """What one run gave."""

    spec: RunSpec
    log: RunLog
    accesses: AccessLog | None = None


def run(spec: RunSpec, on_progress: OnProgress = lambda label, now, finished: None) -> RunResult:
    """Simulate. Raises ``LabError``, ``PolicyError``, ``TraceError`` or ``LatencyProfileError`` first."""
    policy = engine_policy(spec)
    latency, shape = device_of(spec, _cpu_ratio(spec, policy))
    shape = _fitted(shape)
    loop = _loop(spec, shape)
    if spec.replicas is not None:
        return _simulate_cluster(spec, policy, shape, latency, loop, on_progress)
    clock = VirtualClock()
    engine = _engine(spec, policy, shape, clock)
    return _simulate(spec, policy, shape, latency, loop, engine, clock, on_progress)


def engine_policy(spec: RunSpec) -> LabPolicy:
    """What runs in the engine, or in each of several. Raises ``PolicyError``."""
    if spec.replicas is None:
        return find_policy(spec.policy)
    from .cluster.policies import find_cluster_policy

    return find_cluster_policy(spec.policy).engine


def policy_name(spec: RunSpec) -> str:
    """What logs and tables call the policy. Raises ``PolicyError``."""
    if spec.replicas is None:
        return find_policy(spec.policy).name
    from .cluster.policies import find_cluster_policy

    return find_cluster_policy(spec.policy).name


def check(specs: Sequence[RunSpec]) -> list[str]:
    """Read what ``specs`` name, without running it. Returns what the user should know of it.

    Raises as ``run`` does, before any time is spent.
    """
    from .workloads.players import PlayOptions

    notes: dict[str, None] = {}
    seen = set()
    sources: dict[str, str] = {}
    _check_disk_is_used(specs)
    for spec in specs:
        if spec.replicas is not None and spec.replicas < 1:
            raise LabError(f"replicas is {spec.replicas}; expected at least 1")
        _check_seen(spec)
        policy, name = engine_policy(spec), policy_name(spec)
        if sources.setdefault(name, spec.policy) != spec.policy:
            instead = "files of different names" if spec.replicas is None else "one of them"
            raise LabError(
                f"{sources[name]} and {spec.policy} would both be called {name!r}; expected {instead}"
            )
        key = replace(
            spec,
            policy="",
            cpu_ratio=_cpu_ratio(spec, policy),
            disk_ratio=spec.disk_ratio if uses_disk_ratio(policy) else 0.0,
            replicas=None,
            programs=0,
            rate_per_s=None,
            record_accesses=False,
            seen=0,
        )
        if key in seen:
            continue
        seen.add(key)
        _, shape = device_of(spec, _cpu_ratio(spec, policy))
        _disk_blocks(spec, policy, shape)
        options = PlayOptions(
            max_context_tokens=_longest_turn(spec, _fitted(shape)),
            max_gap_s=spec.max_gap_s,
            human_gaps=spec.human_gaps,
        )
        notes.update(dict.fromkeys(_repertoire(spec, options).notes))
    return list(notes)


def program_ids(spec: RunSpec) -> list[str]:
    """Ids of the workload's programs, in its order. Raises ``TraceError``."""
    from .workloads.choose import load_programs

    return [program.program_id for program in load_programs(spec.workload, spec.seed)]


def first_program_ids(spec: RunSpec) -> list[str]:
    """Ids, in the trace, of the programs that come whatever the policy does: of an open loop all there will
    be, of a closed loop those that begin it. Sub-agents stand behind their parents. Raises as ``run``.
    """
    _, shape = device_of(spec, cpu_ratio=0.0)
    coming = [plan for _, plan in _loop(spec, _fitted(shape)).initial()][::-1]
    found: dict[str, None] = {}
    while coming:
        plan = coming.pop()
        found[plan.trace_id] = None
        coming += reversed(plan.children)
    return list(found)


def _repertoire(spec: RunSpec, options: PlayOptions) -> Repertoire:
    from sojourn_server.traces.reader import line_of

    from .workloads.choose import load_programs
    from .workloads.players import NothingFits, Repertoire
    from .workloads.synthetic import PREFIX

    programs = load_programs(spec.workload, spec.seed)
    try:
        return Repertoire(programs, options)
    except NothingFits as error:
        where = spec.workload
        if not where.startswith(PREFIX):
            where += f", line {line_of(where, error.program_id)}"
        raise NothingFits(f"{where}: {error}", error.program_id) from error
    except TraceError as error:
        raise TraceError(f"{spec.workload}: {error}") from error


def device_of(spec: RunSpec, cpu_ratio: float) -> tuple[LatencyModel, DeviceShape]:
    """The device of a run with so much host memory for KV, as a multiple of its own. Raises
    ``LatencyProfileError``."""
    from .latency.choose import DeviceOptions, brings_its_model, latency_from

    options = DeviceOptions(
        cpu_ratio=cpu_ratio,
        kv_pool_tokens=spec.pool_tokens,
        max_model_len=spec.max_model_len,
    )
    model = spec.model
    if model is None and not brings_its_model(spec.hardware):
        model = DEFAULT_MODEL
    return latency_from(spec.hardware, model, spec.tp, options)


def uses_cpu_ratio(policy: LabPolicy) -> bool:
    """Whether ``RunSpec.cpu_ratio`` changes anything: for who has host memory, and not without end."""
    return policy.host_cache and policy.limit is not Limit.FREE_IO


def uses_disk_ratio(policy: LabPolicy) -> bool:
    """Whether ``RunSpec.disk_ratio`` changes anything."""
    return policy.own_tiers


def _cpu_ratio(spec: RunSpec, policy: LabPolicy) -> float:
    """An engine profile may not tell what host memory needs: only who has some and pays for it must know."""
    return spec.cpu_ratio if uses_cpu_ratio(policy) else 0.0


def _check_disk_is_used(specs: Sequence[RunSpec]) -> None:
    asked = next((spec.disk_ratio for spec in specs if spec.disk_ratio), 0.0)
    if asked and not any(uses_disk_ratio(engine_policy(spec)) for spec in specs):
        named = ", ".join(dict.fromkeys(spec.policy for spec in specs))
        raise LabError(
            f"disk_ratio is {asked:g}, and nobody among {named} has a disk; "
            f"expected a policy with {WITH_A_DISK}"
        )


def _check_seen(spec: RunSpec) -> None:
    from .workloads.synthetic import PREFIX

    if spec.seen < 0:
        raise LabError(f"seen is {spec.seen}; expected a number of programs")
    if spec.seen and (spec.replicas is None or not spec.workload.startswith(PREFIX)):
        raise LabError(
            f"seen is {spec.seen} with the workload {spec.workload}; expected {PREFIX}NAME and replicas: of "
            "a recorded trace the programs seen would be those that are still to come"
        )


def _disk_blocks(spec: RunSpec, policy: LabPolicy, shape: DeviceShape) -> int:
    """What the engine would refuse is refused here too."""
    if not uses_disk_ratio(policy) or not spec.disk_ratio:
        return 0
    if not 0 <= spec.disk_ratio < float("inf"):
        raise LabError(f"disk_ratio is {spec.disk_ratio}; expected a number ≥ 0")
    if shape.host_kv_tokens < shape.block_size:
        raise LabError(
            f"{policy.name}: disk_ratio is {spec.disk_ratio:g} and cpu_ratio {spec.cpu_ratio:g}, no host "
            "memory; expected some: what goes to disk and comes from there goes through it"
        )
    blocks = int(shape.kv_pool_tokens * spec.disk_ratio) // shape.block_size
    if not blocks:
        raise LabError(f"disk_ratio is {spec.disk_ratio:g}; expected 0, or enough for a block of KV")
    return blocks


def _fitted(shape: DeviceShape) -> DeviceShape:
    """With no context longer than the pool: a request that fills it alone is the longest that can run."""
    # vLLM's null block is one of the pool's.
    usable = (shape.kv_pool_tokens // shape.block_size - 1) * shape.block_size
    if usable < shape.block_size:
        raise LabError(
            f"the KV pool holds {shape.kv_pool_tokens:,} tokens; expected at least {2 * shape.block_size}, "
            "which one request needs"
        )
    return shape._replace(max_context_tokens=min(shape.max_context_tokens, usable))


def _longest_turn(spec: RunSpec, shape: DeviceShape) -> int:
    """Where programs are cut, in tokens. Every policy gets the same cuts."""
    return min(shape.max_context_tokens, spec.max_context_tokens or shape.max_context_tokens)


def _loop(spec: RunSpec, shape: DeviceShape) -> Loop:
    from .workloads.choose import choose_loop

    return choose_loop(
        spec.workload,
        programs=spec.programs,
        rate_per_s=spec.rate_per_s,
        seed=spec.seed,
        max_context_tokens=_longest_turn(spec, shape),
        max_gap_s=spec.max_gap_s,
        human_gaps=spec.human_gaps,
        replicas=spec.replicas or 1,
    )


def _engine(spec: RunSpec, policy: LabPolicy, shape: DeviceShape, clock: VirtualClock) -> BareEngine:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from .bare_engine import BareEngine, BareEngineOptions

    blocks = shape.kv_pool_tokens // shape.block_size
    host_blocks = shape.host_kv_tokens // shape.block_size if policy.host_cache else 0
    if policy.limit is Limit.FREE_IO:
        host_blocks = ENDLESS_HOST_TOKENS // shape.block_size
    if policy.limit is Limit.UNLIMITED:
        blocks = max(blocks, 4 * ENDLESS_HOST_TOKENS // 10 // shape.block_size)
    return BareEngine(
        BareEngineOptions(
            blocks=blocks,
            block_size=shape.block_size,
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            max_model_len=shape.max_context_tokens,
            host_blocks=host_blocks,
            own_tiers=policy.own_tiers,
            disk_blocks=_disk_blocks(spec, policy, shape),
            sojourn=policy.settings,
        ),
        clock,
    )


def _log(spec: RunSpec, shape: DeviceShape, engine: BareEngine) -> RunLog:
    return RunLog(
        policy=policy_name(spec),
        programs_wanted=spec.programs,
        hardware=shape.hardware,
        model=shape.model,
        trace=spec.workload,
        seed=spec.seed,
        loop="open" if spec.rate_per_s is not None else "closed",
        rate_per_s=spec.rate_per_s,
        pool_blocks=engine.options.blocks - 1,
        host_blocks=engine.options.host_blocks,
        disk_blocks=engine.options.disk_blocks,
        block_size=shape.block_size,
    )


def _host(policy: LabPolicy, shape: DeviceShape, latency: LatencyModel, engine: BareEngine) -> Any:
    """The copies of an engine's host memory; ``None`` where it has none."""
    if not engine.options.host_blocks:
        return None
    from .host_cache import HostCache

    free = policy.limit is Limit.FREE_IO
    block_bytes = 0 if free else shape.kv_bytes_per_token * shape.block_size
    host: Any
    if policy.own_tiers:
        from .tier_copies import TierCopies

        host = TierCopies(latency, block_bytes)
    else:
        host = HostCache(latency, block_bytes)
    adapter = getattr(engine.scheduler, "sojourn", None)
    if adapter is not None:
        # What an engine would take from its profile: how soon a token comes back from host memory.
        per_block_s = latency.copy_s(block_bytes, to_host=False)
        adapter.steward.pool.host_s_per_token = per_block_s / shape.block_size
    return host


def _options(spec: RunSpec, policy: LabPolicy, samples: int) -> SimulationOptions:
    from .simulation import SimulationOptions

    return SimulationOptions(
        until_s=spec.until_s,
        samples=LOOKS_AT_ENDLESS if policy.limit is Limit.UNLIMITED else samples,
        oracle=policy.oracle,
        erring=policy.erring,
    )


def _progress(spec: RunSpec, on_progress: OnProgress) -> Callable[[RunLog, float], None]:
    def progress(log: RunLog, now: float) -> None:
        finished = sum(1 for program in log.programs if program.finished_s is not None)
        on_progress(spec.label, now, finished)

    return progress


def _simulate(
    spec: RunSpec,
    policy: LabPolicy,
    shape: DeviceShape,
    latency: LatencyModel,
    loop: Loop,
    engine: BareEngine,
    clock: VirtualClock,
    on_progress: OnProgress,
) -> RunResult:
    from .access_recorder import AccessRecorder
    from .simulation import Simulation

    log = _log(spec, shape, engine)
    recorder = AccessRecorder(engine.options.blocks - 1, shape.block_size) if spec.record_accesses else None
    simulation = Simulation(
        engine,
        clock,
        latency,
        loop,
        log,
        _options(spec, policy, LOOKS),
        door=policy.door(),
        host=_host(policy, shape, latency, engine),
        recorder=recorder,
        with_hints=policy.settings is not None,
        on_progress=_progress(spec, on_progress),
    )
    simulation.run()
    _note_filled(log, policy)
    accesses = recorder.close(engine.scheduler.requests) if recorder is not None else None
    return RunResult(spec, log, accesses)


def _simulate_cluster(
    spec: RunSpec,
    policy: LabPolicy,
    shape: DeviceShape,
    latency: LatencyModel,
    loop: Loop,
    on_progress: OnProgress,
) -> RunResult:
    from .cluster.policies import find_cluster_policy
    from .cluster.simulation import ClusterSimulation

    assert spec.replicas is not None
    clock = VirtualClock()
    engines = [_engine(spec, policy, shape, clock) for _ in range(spec.replicas)]
    log = _log(spec, shape, engines[0])
    simulation = ClusterSimulation(
        [(engine, _host(policy, shape, latency, engine)) for engine in engines],
        clock,
        latency,
        loop,
        log,
        # A look goes through every block of every engine.
        _options(spec, policy, max(LOOKS_AT_ENDLESS, LOOKS // spec.replicas)),
        front=find_cluster_policy(spec.policy).front(spec.replicas),
        with_hints=policy.settings is not None,
        on_progress=_progress(spec, on_progress),
    )
    if spec.seen:
        _check_seen(spec)
        before = replace(spec, seed=spec.seed + SEEN_SEED, programs=spec.seen, rate_per_s=1.0)
        simulation.saw(plan for _, plan in _loop(before, shape).initial())
    simulation.run()
    _note_filled(log, policy)
    return RunResult(spec, log)


def _note_filled(log: RunLog, policy: LabPolicy) -> None:
    if policy.limit is None:
        return
    again = sum(
        tokens
        for program in log.programs
        for turn in program.turns
        for cause, tokens in turn.regenerated.items()
        if cause != MOVED
    )
    if again:
        log.notes.append(
            f"{log.policy} is no bound here: its memory filled up; {again:,} tokens were computed again"
        )
