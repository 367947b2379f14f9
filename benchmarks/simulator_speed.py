"""Speed of the simulator: virtual seconds per wall second, and its growth with the number of programs.

    python benchmarks/simulator_speed.py isobench_trae.jsonl.gz

Runs stock in a closed loop, one run after the other, each in its own process. Only the simulation counts, not
the import of torch and vLLM. The exit code is 1 if the target for 80 programs is missed or the cost grows
faster than linearly.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from sojourn_server.cli.console import write_json
from sojourn_server.cli.simulate import run_with_progress
from sojourn_server.simulator.report.results_file import made_with
from sojourn_server.simulator.report.run_row import RunRow
from sojourn_server.simulator.simulation_run import RunSpec

TARGET = {"programs": 80, "virtual_s_per_wall_s": 60.0}
NOISE = 1.15
"""Growth up to this factor above linear counts as linear, because equal runs differ by a few per cent."""


class Point(msgspec.Struct, kw_only=True, frozen=True):
    """Results for one number of programs; wall figures are medians over the rounds."""

    programs: int
    virtual_s_per_wall_s: float
    wall_s_per_virtual_hour: float
    scheduler_ms_per_step: float
    steps: int
    turns_finished: int
    rounds: list[float]
    """Wall seconds of each round."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", help="a trace file, or synthetic:NAME")
    parser.add_argument("--programs", default="20,40,80,160,320")
    parser.add_argument("--hours", type=float, default=1.0, help="virtual hours of a run")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--policy", default="stock")
    parser.add_argument("--hardware", default="a100-80gb")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/simulator_speed.json"))
    parser.add_argument("--plot", type=Path, default=Path("benchmarks/results/simulator_speed.svg"))
    return parser.parse_args()


def main() -> None:
    options = arguments()
    counts = [int(part) for part in options.programs.split(",")]
    rounds: list[Sequence[RunRow]] = []
    for _ in range(options.rounds):
        specs = [
            RunSpec(
                policy=options.policy, workload=options.trace, programs=count, hardware=options.hardware,
                model=options.model, seed=options.seed, until_s=options.hours * 3600.0,
            )
            for count in counts
        ]  # fmt: skip
        # One run at a time, so that runs do not compete for memory bandwidth and cache.
        rounds.append(run_with_progress(specs, 1).rows)
    points = [point([rows[place] for rows in rounds]) for place in range(len(counts))]
    verdicts = judge(points)
    console = Console()
    console.print(table(points))
    for name, (good, text) in verdicts.items():
        console.print(f"{'met' if good else 'MISSED'}: {name}: {text}", highlight=False)
    made = made_with(sys.argv)
    write_json(
        {
            "made_with": msgspec.to_builtins(made),
            "trace": rounds[0][0].trace,
            "policy": options.policy,
            "hardware": rounds[0][0].hardware,
            "model": rounds[0][0].model,
            "virtual_hours": options.hours,
            "points": msgspec.to_builtins(points),
            "verdicts": {name: {"met": good, "what": text} for name, (good, text) in verdicts.items()},
        },
        str(options.json),
    )
    plot(points, options.plot)
    sys.exit(not all(good for good, _ in verdicts.values()))


def point(rows: Sequence[RunRow]) -> Point:
    """Summarise the rounds of one number of programs."""
    wall_s = statistics.median(row.wall_s for row in rows)
    first = rows[0]
    return Point(
        programs=first.programs,
        virtual_s_per_wall_s=first.virtual_s / wall_s,
        wall_s_per_virtual_hour=wall_s * 3600.0 / first.virtual_s,
        scheduler_ms_per_step=statistics.median(row.scheduler_ms_per_step or 0.0 for row in rows),
        steps=first.steps,
        turns_finished=first.turns_finished,
        rounds=[round(row.wall_s, 3) for row in rows],
    )


def judge(points: Sequence[Point]) -> dict[str, tuple[bool, str]]:
    """Return for each target whether it is met, and why: speed at 80 programs, and linear growth."""
    found: dict[str, tuple[bool, str]] = {}
    target = next((p for p in points if p.programs == TARGET["programs"]), None)
    if target is not None:
        reached = target.virtual_s_per_wall_s
        found["speed"] = (
            reached >= TARGET["virtual_s_per_wall_s"],
            f"{reached:.0f} virtual s a wall second at {target.programs} programs; the target is "
            f"{TARGET['virtual_s_per_wall_s']:.0f}",
        )
    if len(points) > 1:
        least, most = points[0], points[-1]
        more = most.programs / least.programs
        dearer = most.wall_s_per_virtual_hour / least.wall_s_per_virtual_hour
        found["growth"] = (
            dearer <= more * NOISE,
            f"{more:g} times the programs cost {dearer:.2f} times as much: exponent "
            f"{exponent(points):.2f} over all points, at most 1 is linear",
        )
    return found


def exponent(points: Sequence[Point]) -> float:
    """Return the slope of log cost over log programs, by least squares."""
    xs = [math.log(p.programs) for p in points]
    return statistics.linear_regression(xs, [math.log(p.wall_s_per_virtual_hour) for p in points]).slope


def table(points: Sequence[Point]) -> Table:
    """Return a table of the points."""
    shown = Table(title="stock, closed loop")
    for name in (
        "programs",
        "virtual s / wall s",
        "wall s / virtual h",
        "scheduler ms / step",
        "steps",
        "turns",
    ):
        shown.add_column(name, justify="right")
    for p in points:
        shown.add_row(
            f"{p.programs}", f"{p.virtual_s_per_wall_s:.0f}", f"{p.wall_s_per_virtual_hour:.0f}",
            f"{p.scheduler_ms_per_step:.2f}", f"{p.steps:,}", f"{p.turns_finished:,}",
        )  # fmt: skip
    return shown


def plot(points: Sequence[Point], path: Path) -> None:
    """Plot cost over programs, both logarithmic, with the line of linear growth from the first point."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "sojourn"
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5.5, 4))
    xs = [p.programs for p in points]
    first = points[0].wall_s_per_virtual_hour
    drawn: dict[str, Any] = {"color": "#0072B2", "marker": "o", "label": "stock"}
    axis.plot(xs, [p.wall_s_per_virtual_hour for p in points], **drawn)
    axis.plot(xs, [first * x / xs[0] for x in xs], color="#8A8A8A", linestyle="--", label="linear")
    axis.axhline(
        3600.0 / TARGET["virtual_s_per_wall_s"], color="#D55E00", linestyle=":", label="target at 80 programs"
    )
    axis.set(xscale="log", yscale="log", xlabel="programs at once", ylabel="wall s for a virtual hour")
    axis.set_xticks(xs, [str(x) for x in xs])
    axis.minorticks_off()
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
