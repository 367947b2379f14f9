"""The simulator against a real engine: the same programs on a CPU server and in virtual time.

    python benchmarks/simulator_validation.py --json benchmarks/results/simulator_validation.json

Every run starts a new server on its own port. The code of ``sojourn replay`` drives it with forced tokens;
``sojourn profile`` measures the first stock server after its run. The simulator runs the same programs in the
same order with the same gaps, on the fitted profile and the servers' limits. Both sides return the tally of a
replay, which computes the figures of both.

A single run is only one sample. A request that arrives slightly earlier may find KV that is evicted a moment
later, and then everything after it differs. Both sides therefore run several times, and their medians are
compared. The real server runs as often as time allows, in alternating order. The simulator adds random errors
to the duration of each step, as large as those of the profile's samples. The workload has many small losses
instead of few large ones, so that equal runs differ by only 1 to 3 % in recomputed tokens.

``--smoke`` runs the tiny model, with programs whose order does not depend on chance.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_and_simulator import replay, simulate
from result_pages import provenance, show
from rich.console import Console
from sojourn_server.launch.engine_server import EngineServer
from sojourn_server.launch.serve_command import FORCED_TOKENS
from sojourn_server.policies.costs.engine_profile import EngineProfile
from sojourn_server.replay.completions_client import CompletionsClient
from sojourn_server.replay.replay_driver import ReplayOptions
from sojourn_server.replay.replay_report import ReplayTally
from sojourn_server.simulator.latency.latency_models import LatencyModel, StepWork
from sojourn_server.simulator.report.results_file import made_with
from sojourn_server.simulator.simulated_clients import SimulatedOutputs
from sojourn_server.simulator.simulation_run import RunSpec
from sojourn_server.simulator.workloads.arrival_processes import load_programs
from sojourn_server.traces.prompt_builder import plan_turns
from sojourn_server.traces.trace_schema import TraceError, TraceProgram, TraceToolRun, TraceTurn

JUDGED = {"completion_mean_s": 0.10, "regenerated_tokens": 0.05}
"""Figure → maximum relative error of the simulator."""
FIGURES = ("completion_mean_s", "ttft_mean_s", "regenerated_tokens", "prompt_tokens", "output_tokens")

console = Console(stderr=True)


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


def programs_of(scenario: Scenario) -> list[TraceProgram]:
    """Return the programs that both sides run, in order. Each fits into the engine's longest context.

    Raises ``TraceError`` if there are too few.
    """
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


# -- the real world -------------------------------------------------------------------------------


def server_of(scenario: Scenario, policy: str) -> EngineServer:
    """Return a server for the scenario, not yet started. The flags are the same for every policy."""
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


def replay_options(scenario: Scenario, at_once: int) -> ReplayOptions:
    return ReplayOptions(
        concurrency=at_once,
        stagger_s=scenario.stagger_s,
        token_scale=scenario.token_scale,
        force_tokens=True,
        block_size=scenario.block_size,
    )


def play_on_engine(
    scenario: Scenario, programs: list[TraceProgram], policy: str, at_once: int, profile_file: Path
) -> dict[str, float]:
    """Run the programs once on a new server, and return the figures. The first stock server is profiled
    after its run. Raises ``BenchmarkError`` if a program does not finish as planned."""
    with server_of(scenario, policy) as server:
        asyncio.run(warm_up(server.url))
        tally = asyncio.run(replay(server.url, programs, replay_options(scenario, at_once)))
        if policy == "stock" and not profile_file.exists():
            profile(scenario, server.url, profile_file)
    if len(tally.finished) < len(programs) or tally.notes():
        why = tally.notes() or dict(tally.errors) or [p.reason for p in tally.programs if not p.finished]
        raise BenchmarkError(f"the replay went wrong: {why} {tally.first_error or ''}")
    return figures(tally)


async def warm_up(url: str) -> None:
    """Send requests that share no blocks with the programs, because first requests include one-time costs."""
    async with CompletionsClient(url) as client:
        served = await client.discover(None)
        for length in (64, 200, 400):
            await client.complete(served.name, list(range(300, 300 + length)), 8)


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
) -> dict[str, float]:
    """Run the programs once in virtual time, and return the figures. With ``repeat`` 0, step times are
    not random. Any other ``repeat`` is part of the seed of random step times.

    Raises ``BenchmarkError`` if the simulator reports a fault of its own.
    """

    def prepare(simulation: Any) -> None:
        (replica,) = simulation.replicas
        if repeat:
            seed = f"{scenario.seed}/{policy}/{at_once}/{repeat}"
            replica.latency = Noisy(replica.latency, measured_off(profile_file), seed)
        if replica.engine.adapter is not None:
            # A replay's forced tokens contain no tool calls. Its server learns of tools from events only.
            replica.engine.adapter.reader = SimulatedOutputs()

    spec = RunSpec(
        policy=policy, workload=scenario.workload, hardware=str(profile_file), programs=at_once,
        until_s=None, seed=scenario.seed,
    )  # fmt: skip
    log, tally = simulate(spec, programs, replay_options(scenario, at_once), prepare)
    if log.notes or log.hook_failures or log.refused_hints:
        raise BenchmarkError(
            f"the simulation went wrong: {log.notes}, {log.hook_failures} failed hooks, "
            f"{log.refused_hints} refused hints"
        )
    return figures(tally)


# -- figures -----------------------------------------------------------------------------------------


def figures(tally: ReplayTally) -> dict[str, float]:
    """Return the compared figures of a run on either side."""
    told = tally.document()
    means_s = {f"{name}_mean_s": told[f"{name}_s"]["mean"] or 0.0 for name in ("completion", "ttft")}
    return {name: means_s[name] if name in means_s else told[name] for name in FIGURES}


def relative_error(lab: float, real: float) -> float | None:
    """Return the simulator's relative error, (lab - real) / real; 0 if both are 0, ``None`` if only ``real``
    is 0."""
    if lab == real:
        return 0.0
    return (lab - real) / real if real else None


def compare(real: Sequence[Mapping[str, float]], lab: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Compare the simulator's runs (``lab``) with the engine's: medians, relative errors, and whether they
    agree."""
    found: dict[str, Any] = {
        world: {name: statistics.median(run[name] for run in runs) for name in FIGURES}
        for world, runs in (("real", real), ("lab", lab))
    }
    error = {name: relative_error(found["lab"][name], found["real"][name]) for name in FIGURES}
    agrees = {name: (off := error[name]) is not None and abs(off) <= most for name, most in JUDGED.items()}
    return {**found, "error": error, "agrees": agrees}


def measure(scenario: Scenario, profile_file: Path) -> list[dict[str, Any]]:
    """Run every policy at every load on both sides. Return their comparisons.

    Raises ``BenchmarkError`` and ``ServerStartError``.
    """
    programs = programs_of(scenario)
    cells = [(at_once, policy) for at_once in scenario.loads for policy in scenario.policies]
    found: dict[tuple[int, str, str], list[dict[str, float]]] = defaultdict(list)

    for repeat in range(scenario.repeats):
        # Every second repeat reverses the order, so that no policy always gets the warmer machine.
        for at_once, policy in cells if repeat % 2 == 0 else reversed(cells):
            started = time.perf_counter()
            run = play_on_engine(scenario, programs, policy, at_once, profile_file)
            found[at_once, policy, "real"].append(run)
            console.print(
                f"{policy} at {at_once}, run {repeat + 1}: completion {run['completion_mean_s']:.1f} s, "
                f"{run['regenerated_tokens']:,} tokens again; {time.perf_counter() - started:.0f} s",
                highlight=False,
            )
    for at_once, policy in cells:
        for repeat in range(scenario.lab_repeats):
            run = play_in_simulator(scenario, programs, policy, at_once, profile_file, repeat)
            found[at_once, policy, "lab"].append(run)
    return [
        {
            "policy": policy,
            "at_once": at_once,
            **compare(found[at_once, policy, "real"], found[at_once, policy, "lab"]),
        }
        for at_once, policy in cells
    ]


def show_results(results: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of real and simulated figures and errors, with one row per figure."""
    lines = []
    for result in results:
        for name in FIGURES:
            off = result["error"][name]
            mark = "" if name not in JUDGED else " ✓" if result["agrees"][name] else " ✗"
            medians = (f"{result[world][name]:,.1f}" for world in ("real", "lab"))
            error = "–" if off is None else f"{off:+.1%}{mark}"
            lines.append((str(result["policy"]), str(result["at_once"]), name, *medians, error))
    head = ("policy", "at once", "figure", "real", "lab", "error")
    show(head, lines, title="the simulator against the engine")


def document(scenario: Scenario, profile_file: Path, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON document with all results."""
    measured = EngineProfile.from_toml(profile_file.read_text(encoding="utf-8"))
    told = provenance(made_with(sys.argv))
    return {
        **told,
        "versions": {**told["versions"], "engine": measured.engine},
        "scenario": dataclasses.asdict(scenario),
        "within": JUDGED,
        "results": results,
        "agrees": all(all(result["agrees"].values()) for result in results),
    }


def main() -> None:
    """Measure, print and write the results. Exit code 1 if a figure's error exceeds its maximum in
    ``JUDGED``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--smoke", action="store_true", help="the tiny model, one load: one minute")
    parser.add_argument("--repeats", type=int, help="of each real run")
    options = parser.parse_args()
    scenario = SMOKE if options.smoke else Scenario()
    if options.repeats is not None:
        scenario = dataclasses.replace(scenario, repeats=options.repeats)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        profile_file = Path(folder) / "engine.toml"
        try:
            results = measure(scenario, profile_file)
        except (BenchmarkError, subprocess.CalledProcessError) as error:
            raise SystemExit(str(error)) from None
        result = document(scenario, profile_file, results)
    show_results(results)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    raise SystemExit(0 if result["agrees"] else 1)


if __name__ == "__main__":
    main()
