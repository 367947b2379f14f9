"""The workload of ``simulator_validation.py``, and its two sides: a real server and the simulator."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sojourn_server.traces.prompt_builder import TurnPlan, plan_turns
from sojourn_server.traces.trace_schema import TraceError, TraceProgram, TraceToolRun, TraceTurn

if TYPE_CHECKING:
    from sojourn_server.launch.engine_server import EngineServer
    from sojourn_server.simulator.latency.latency_models import LatencyModel, StepWork


class BenchmarkError(RuntimeError):
    """Raised for a run that cannot be compared. The text says what went wrong."""


# -- the workload ------------------------------------------------------------------------------------

ORDERLY = "orderly"
"""Name of the workload made by ``orderly_programs``."""
ORDERLY_TURNS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The engine and its workload. Lengths are in tokens."""

    model: str = "smol"
    blocks: int = 34
    """KV blocks, vLLM's null block included."""
    block_size: int = 32
    max_model_len: int = 1024
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 1024
    workload: str = "synthetic:continuum-bfcl"
    """A trace or synthetic workload of the simulator, or ``ORDERLY``."""
    token_scale: float = 0.012
    """Factor of all lengths. It is small, because the workload's programs have 37,302 tokens on average, but
    two cores compute only a few hundred tokens per second."""
    programs: int = 72
    """Number of programs; each is run once, to its end."""
    seed: int = 1
    loads: tuple[int, ...] = (12, 24)
    """Numbers of concurrent programs."""
    stagger_s: float = 1.0
    policies: tuple[str, ...] = ("stock", "continuum")
    repeats: int = 3
    """Number of repetitions of each run on the real engine."""
    lab_repeats: int = 11
    profile_budget_s: float = 240.0


SMOKE = Scenario(
    model="tiny",
    blocks=96,
    max_model_len=2048,
    workload=ORDERLY,
    token_scale=1.0,
    programs=6,
    loads=(6,),
    stagger_s=0.4,
    repeats=1,
    lab_repeats=1,
    profile_budget_s=5.0,
)


class TurnMeasurement(NamedTuple):
    """Measurements of one turn, on either side."""

    program: str
    turn: int
    sent_s: float
    """Time of sending, in seconds after the run's start."""
    ttft_s: float
    latency_s: float
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens found in the cache at the first admission."""
    output_tokens: int


@dataclass(slots=True)
class RunMeasurements:
    """Measurements of one run, on either side."""

    turns: list[TurnMeasurement] = field(default_factory=list)
    completions_s: list[float] = field(default_factory=list)
    """Seconds from each program's arrival to its last token."""
    wall_s: float = 0.0
    preemptions: int = 0


def programs_of(scenario: Scenario) -> list[TraceProgram]:
    """Return the programs that both sides run, in order. Each fits into the engine's longest context.

    Raises ``TraceError`` if there are too few.
    """
    from sojourn_server.simulator.workloads.arrival_processes import load_programs

    if scenario.workload == ORDERLY:
        return orderly_programs(scenario.programs, scenario.stagger_s)

    def fits(program: TraceProgram) -> bool:
        plans = plan_turns(program, scenario.token_scale)
        return all(plan.prompt_tokens + plan.output_tokens <= scenario.max_model_len for plan in plans)

    fitting = [p for p in load_programs(scenario.workload, scenario.seed) if p.parent is None and fits(p)]
    if len(fitting) < scenario.programs:
        raise TraceError(
            f"{scenario.workload}: {len(fitting)} programs fit {scenario.max_model_len} tokens; "
            f"expected {scenario.programs}"
        )
    return fitting[: scenario.programs]


def orderly_programs(count: int, every_s: float) -> list[TraceProgram]:
    """Return programs that take turns. They start ``every_s`` seconds apart, and each sends its next request
    after all others have sent one.

    As long as a turn takes no longer than ``every_s``, the machine's speed changes neither the order of
    requests nor the cache hits and losses. The contexts of six such programs grow from half of ``SMOKE``'s
    pool to twice its size.
    """
    gap_s = count * every_s
    wait = (TraceToolRun(name="wait", s=gap_s),)
    programs = []
    for number in range(count):
        turns, prompt = [], 180 + 30 * number
        for turn in range(ORDERLY_TURNS):
            turns.append(TraceTurn(prompt_tokens=prompt, output_tokens=6, gap_s=gap_s, tools=wait))
            prompt += 6 + 120 + 20 * ((number + turn) % 4)
        programs.append(TraceProgram(program_id=f"orderly/{number}", turns=tuple(turns), source=ORDERLY))
    return programs


def plans_of(programs: Iterable[TraceProgram], scenario: Scenario) -> dict[str, list[TurnPlan]]:
    """Return the lengths of each program's turns, by program id."""
    return {program.program_id: plan_turns(program, scenario.token_scale) for program in programs}


# -- the real world -------------------------------------------------------------------------------


def server_of(scenario: Scenario, policy: str) -> EngineServer:
    """Return a server for the scenario, not yet started. The flags are the same for every policy."""
    from sojourn_server.launch.engine_server import EngineServer
    from sojourn_server.launch.serve_command import FORCED_TOKENS

    flags = (
        "--block-size", str(scenario.block_size),
        "--num-gpu-blocks-override", str(scenario.blocks),
        "--max-model-len", str(scenario.max_model_len),
        "--max-num-seqs", str(scenario.max_num_seqs),
        "--max-num-batched-tokens", str(scenario.max_num_batched_tokens),
        "--logits-processors", FORCED_TOKENS,
    )  # fmt: skip
    return EngineServer(scenario.model, policy=policy, serve_args=flags)


def profile(scenario: Scenario, url: str, into: Path) -> None:
    """Measure a stock server with ``sojourn profile``, which writes the file ``into``. Raises
    ``CalledProcessError``."""
    command = [
        sys.executable, "-m", "sojourn_server.cli", "profile", "--url", url, "-o", str(into),
        "--budget-s", str(scenario.profile_budget_s),
        # A stock server reports only its pool and its longest context.
        "--max-num-seqs", str(scenario.max_num_seqs),
        "--max-num-batched-tokens", str(scenario.max_num_batched_tokens),
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=sys.stderr)


def play_on_engine(
    scenario: Scenario, programs: list[TraceProgram], policy: str, at_once: int, profile_file: Path
) -> RunMeasurements:
    """Run the programs once on a new server, and return the measurements. The first stock server is profiled
    after its run. Raises ``BenchmarkError`` if a program does not finish as planned."""
    from sojourn_server.demo.demo_run import read_counts

    with server_of(scenario, policy) as server:
        before = read_counts(server.url)
        played = asyncio.run(_replay(scenario, programs, server.url, at_once))
        played.preemptions = round(read_counts(server.url).since(before).preemptions)
        if policy == "stock" and not profile_file.exists():
            profile(scenario, server.url, profile_file)
    return played


async def _replay(
    scenario: Scenario, programs: list[TraceProgram], url: str, at_once: int
) -> RunMeasurements:
    from sojourn_server.replay.completions_client import CompletionsClient
    from sojourn_server.replay.program_announcer import ProgramAnnouncer
    from sojourn_server.replay.replay_driver import Replay, ReplayOptions

    options = ReplayOptions(
        concurrency=at_once,
        stagger_s=scenario.stagger_s,
        token_scale=scenario.token_scale,
        force_tokens=True,
        block_size=scenario.block_size,
    )
    async with CompletionsClient(url) as client:
        served = await client.discover(None)
        # Warm up: first requests include one-time costs. They share no blocks with the programs.
        for length in (64, 200, 400):
            await client.complete(served.name, list(range(300, 300 + length)), 8)
        announcer = ProgramAnnouncer(url if served.speaks_sojourn else None)
        try:
            tally = await Replay(programs, client, served, announcer, options).run()
        finally:
            announcer.close()
    if len(tally.finished) < len(programs) or tally.notes():
        why = tally.notes() or dict(tally.errors) or [p.reason for p in tally.programs if not p.finished]
        raise BenchmarkError(f"the replay went wrong: {why} {tally.first_error or ''}")
    played = RunMeasurements(wall_s=tally.wall_s)
    played.completions_s = [p.completion_s for p in tally.finished if p.completion_s is not None]
    for outcome in tally.turns:
        done = outcome.completion
        played.turns.append(
            TurnMeasurement(
                outcome.program_id, outcome.turn, outcome.sent_s, done.ttft_s, done.latency_s,
                done.prompt_tokens, done.cached_tokens or 0, done.output_tokens,
            )
        )  # fmt: skip
    return played


# -- the simulator --------------------------------------------------------------------------------------


class Noisy:
    """A latency model with random step times, which are the step times of ``latency`` times a log-normal
    factor with mean 1 and standard deviation ``off``."""

    def __init__(self, latency: LatencyModel, off: float, seed: str) -> None:
        self._latency = latency
        self._sigma = math.sqrt(math.log1p(off * off))
        self._random = random.Random(seed)

    @property
    def call_s(self) -> float:
        """Seconds per call of the underlying model."""
        return self._latency.call_s

    def step_s(self, work: StepWork) -> float:
        """Return the underlying model's seconds times a random factor."""
        factor = self._random.lognormvariate(-self._sigma * self._sigma / 2, self._sigma)
        return self._latency.step_s(work) * factor

    def copy_s(self, kv_bytes: int, *, to_host: bool) -> float:
        """Return the underlying model's seconds for a copy."""
        return self._latency.copy_s(kv_bytes, to_host=to_host)


def measured_off(profile_file: Path) -> float:
    """Return the relative deviation of step times from the fit, from 0 to 1, as the median over the profile's
    samples."""
    from sojourn_server.policies.costs.engine_profile import EngineProfile

    measured = EngineProfile.from_toml(profile_file.read_text(encoding="utf-8"))
    steps = measured.steps
    if steps is None or not measured.step_samples:
        return 0.0
    offs = (abs(steps.seconds(s) / s.seconds - 1) for s in measured.step_samples)
    return min(1.0, statistics.median(offs))


def play_in_simulator(
    scenario: Scenario,
    programs: list[TraceProgram],
    policy: str,
    at_once: int,
    profile_file: Path,
    repeat: int = 0,
) -> RunMeasurements:
    """Run the programs once in virtual time, and return the measurements. With ``repeat`` 0, step times are
    not random. Any other ``repeat`` is part of the seed of random step times.

    Raises ``BenchmarkError`` if the simulator reports a fault of its own.
    """
    from sojourn_server.simulator.simulated_clients import SimulatedOutputs
    from sojourn_server.simulator.simulation_run import RunSpec, run_simulation
    from sojourn_server.simulator.workloads.arrival_processes import finite_closed_loop
    from sojourn_server.simulator.workloads.program_plans import PlaybackOptions, ProgramPlanner

    def prepare(simulation: Any) -> None:
        (replica,) = simulation.replicas
        if repeat:
            seed = f"{scenario.seed}/{policy}/{at_once}/{repeat}"
            replica.latency = Noisy(replica.latency, measured_off(profile_file), seed)
        if replica.engine.adapter is not None:
            # A replay's forced tokens contain no tool calls. Its server learns of tools from events only.
            replica.engine.adapter.reader = SimulatedOutputs()

    planner = ProgramPlanner(programs, PlaybackOptions(token_scale=scenario.token_scale))
    log = run_simulation(
        RunSpec(
            policy=policy, workload=scenario.workload, hardware=str(profile_file), programs=at_once,
            until_s=None, seed=scenario.seed,
        ),
        arrivals=finite_closed_loop(planner, at_once, stagger_s=scenario.stagger_s),
        prepare=prepare,
    )  # fmt: skip
    if log.notes or log.hook_failures or log.refused_hints:
        raise BenchmarkError(
            f"the simulation went wrong: {log.notes}, {log.hook_failures} failed hooks, "
            f"{log.refused_hints} refused hints"
        )
    played = RunMeasurements(wall_s=max(program.finished_s for program in log.programs))
    for program in log.programs:
        played.completions_s.append(program.completion_s)
        for turn in program.turns:
            played.preemptions += turn.preemptions
            played.turns.append(
                TurnMeasurement(
                    program.trace_id, turn.turn, turn.submitted_s, turn.first_token_s - turn.submitted_s,
                    turn.finished_s - turn.submitted_s, turn.prompt_tokens, turn.device_tokens,
                    turn.output_tokens,
                )
            )  # fmt: skip
    return played
