"""Speed of the simulator: virtual seconds per wall second, and its growth with the number of programs.

    python benchmarks/simulator_speed.py isobench_trae.jsonl.gz

Runs stock in a closed loop, one run after the other, each in its own process. Only the simulation counts, not
the import of torch and vLLM. The exit code is 1 if the target for 80
programs is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from sojourn_server.cli.console import write_json
from sojourn_server.cli.simulate import run_with_progress
from sojourn_server.simulator.report.results_file import made_with
from sojourn_server.simulator.report.run_row import RunRow
from sojourn_server.simulator.simulation_run import RunSpec

TARGET = {"programs": 80, "virtual_s_per_wall_s": 60.0}


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
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/simulator_speed.json"))
    return parser.parse_args()


def main() -> None:
    options = arguments()
    counts = [int(part) for part in options.programs.split(",")]
    rounds: list[Sequence[RunRow]] = []
    for _ in range(options.rounds):
        specs = [
            RunSpec(policy="stock", workload=options.trace, programs=count, until_s=3600.0)
            for count in counts
        ]
        # One run at a time, so that runs do not compete for memory bandwidth and cache.
        rounds.append(run_with_progress(specs, 1).rows)
    points = [point([rows[place] for rows in rounds]) for place in range(len(counts))]
    for each in points:
        print(f"{each.programs} programs at once: {each.virtual_s_per_wall_s:.0f} virtual s a wall second")
    made = made_with(sys.argv)
    write_json(
        {
            "made_with": msgspec.to_builtins(made),
            "trace": rounds[0][0].trace,
            "policy": "stock",
            "hardware": rounds[0][0].hardware,
            "model": rounds[0][0].model,
            "virtual_hours": 1.0,
            "points": msgspec.to_builtins(points),
        },
        str(options.json),
    )
    target = next((p for p in points if p.programs == TARGET["programs"]), None)
    if target is not None and target.virtual_s_per_wall_s < TARGET["virtual_s_per_wall_s"]:
        aim = TARGET["virtual_s_per_wall_s"]
        sys.exit(f"missed: {aim:.0f} virtual s a wall second at {target.programs} programs")


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


if __name__ == "__main__":
    main()
