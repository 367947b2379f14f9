"""The simulator against a real engine: the same programs on a CPU server and in virtual time.

    python benchmarks/simulator_validation.py --json benchmarks/results/simulator_validation.json

Every run starts a new server on its own port. The code of ``sojourn replay`` drives it with forced tokens;
``sojourn profile`` measures the first stock server after its run. The simulator runs the same programs in the
same order with the same gaps, on the fitted profile and the servers' limits. Both sides return one record per
turn, and one function computes the figures of both.

A single run is only one sample. A request that arrives slightly earlier may find KV that is evicted a moment
later, and then everything after it differs. Both sides therefore run several times, and their medians are
compared. The real server runs as often as time allows, in alternating order. The simulator adds random errors
to the duration of each step, as large as those of the profile's samples. The workload has many small losses
instead of few large ones, so that equal runs differ by only 1 to 3 % in recomputed tokens.

``--smoke`` runs the tiny model, with programs whose order does not depend on chance.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from result_pages import show
from rich.console import Console
from sojourn_server.metrics.summary_statistics import summarise
from sojourn_server.traces.prompt_builder import TurnPlan, recomputed_tokens
from validation_runs import (
    SMOKE,
    BenchmarkError,
    RunMeasurements,
    Scenario,
    measured_off,
    plans_of,
    play_in_simulator,
    play_on_engine,
    programs_of,
)

JUDGED = {"completion_mean_s": 0.10, "regenerated_tokens": 0.05}
"""Figure → maximum relative error of the simulator."""
FIGURES = (
    "completion_mean_s",
    "completion_p95_s",
    "ttft_mean_s",
    "regenerated_tokens",
    "computed_tokens",
    "prompt_tokens",
    "output_tokens",
    "preemptions",
    "wall_s",
)

console = Console(stderr=True)


def figures(
    played: RunMeasurements, plans: Mapping[str, Sequence[TurnPlan]], block_size: int
) -> dict[str, float]:
    """Return the compared figures of a run. ``plans`` maps a program id to the lengths of the program's
    turns."""
    completion = summarise(played.completions_s)
    turns = played.turns
    again = (recomputed_tokens(plans[t.program], t.turn, t.cached_tokens, block_size) for t in turns)
    prompt = sum(t.prompt_tokens for t in turns)
    return {
        "completion_mean_s": completion["mean"] or 0.0,
        "completion_p95_s": completion["p95"] or 0.0,
        "ttft_mean_s": statistics.fmean(t.ttft_s for t in turns) if turns else 0.0,
        "regenerated_tokens": sum(again),
        "computed_tokens": prompt - sum(t.cached_tokens for t in turns),
        "prompt_tokens": prompt,
        "output_tokens": sum(t.output_tokens for t in turns),
        "preemptions": played.preemptions,
        "wall_s": played.wall_s,
    }


def relative_error(lab: float, real: float) -> float | None:
    """Return the simulator's relative error, (lab - real) / real; 0 if both are 0, ``None`` if only ``real``
    is 0."""
    if lab == real:
        return 0.0
    return (lab - real) / real if real else None


def compare(real: Sequence[Mapping[str, float]], lab: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Compare the simulator's runs (``lab``) with the engine's: medians, ranges, relative errors, and whether
    they agree."""
    worlds = {"real": real, "lab": lab}
    found: dict[str, Any] = {
        world: {name: statistics.median(run[name] for run in runs) for name in FIGURES}
        for world, runs in worlds.items()
    }
    for world, runs in worlds.items():
        found[f"{world}_range"] = {n: [min(r[n] for r in runs), max(r[n] for r in runs)] for n in FIGURES}
    error = {name: relative_error(found["lab"][name], found["real"][name]) for name in FIGURES}
    agrees = {name: (off := error[name]) is not None and abs(off) <= most for name, most in JUDGED.items()}
    return {**found, "error": error, "agrees": agrees}


def measure(scenario: Scenario, profile_file: Path) -> list[dict[str, Any]]:
    """Run every policy at every load on both sides. Return their comparisons.

    Raises ``BenchmarkError`` and ``ServerStartError``.
    """
    programs = programs_of(scenario)
    plans = plans_of(programs, scenario)
    cells = [(at_once, policy) for at_once in scenario.loads for policy in scenario.policies]
    found: dict[tuple[int, str, str], list[dict[str, float]]] = defaultdict(list)

    for repeat in range(scenario.repeats):
        # Every second repeat reverses the order, so that no policy always gets the warmer machine.
        for at_once, policy in cells if repeat % 2 == 0 else reversed(cells):
            started = time.perf_counter()
            played = play_on_engine(scenario, programs, policy, at_once, profile_file)
            run = figures(played, plans, scenario.block_size)
            found[at_once, policy, "real"].append(run)
            console.print(
                f"{policy} at {at_once}, run {repeat + 1}: completion {run['completion_mean_s']:.1f} s, "
                f"{run['regenerated_tokens']:,} tokens again; {time.perf_counter() - started:.0f} s",
                highlight=False,
            )
    for at_once, policy in cells:
        for repeat in range(scenario.lab_repeats):
            played = play_in_simulator(scenario, programs, policy, at_once, profile_file, repeat)
            found[at_once, policy, "lab"].append(figures(played, plans, scenario.block_size))
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
            numbers = [
                _short(number)
                for world in ("real", "lab")
                for number in (result[world][name], *result[f"{world}_range"][name])
            ]
            error = "–" if off is None else f"{off:+.1%}{mark}"
            lines.append((str(result["policy"]), str(result["at_once"]), name, *numbers, error))
    head = ("policy", "at once", "figure", "real", "from", "to", "lab", "from", "to", "error")
    show(head, lines, title="the simulator against the engine")


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"


def document(scenario: Scenario, profile_file: Path, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON document with all results."""
    from sojourn_server.policies.costs.engine_profile import EngineProfile
    from sojourn_server.simulator.report.results_file import made_with

    measured = EngineProfile.from_toml(profile_file.read_text(encoding="utf-8"))
    made = made_with(sys.argv)
    steps = measured.steps
    return {
        "command": f"python benchmarks/{made.command}",
        "versions": {**made.versions, "engine": measured.engine},
        "machine": made.machine,
        "scenario": dataclasses.asdict(scenario),
        "within": JUDGED,
        "profile": {
            "measured_at": measured.measured_at,
            "step_costs": steps._asdict() if steps is not None else None,
            "samples": len(measured.step_samples),
            "samples_off_root_mean_square": steps.relative_error(measured.step_samples) if steps else None,
            "samples_off_median": measured_off(profile_file),
        },
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
