"""MORI's single-replica set-ups in the simulator: ``mori`` against its baselines (MORI §6.2).

    python benchmarks/mori_setups.py --traces traces --json benchmarks/results/mori_setups.json

Each run is one virtual hour of the Claude Code trace in a closed loop: three set-ups, with 20, 50 and 80
concurrent programs, and with host memory of one and two times the KV pool. Reports output throughput and mean
TTFT, absolute and relative to ``thunderagent-offload``, the paper's baseline.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
from kept_runs import run_kept
from result_pages import less, show
from sojourn_server.cli.console import write_json
from sojourn_server.simulator.report.results_file import made_with
from sojourn_server.simulator.report.run_row import RunRow
from sojourn_server.simulator.simulation_run import RunSpec

TRACE = "kvct_v6_claude_code.jsonl.gz"
USUAL = RunSpec(policy="", workload="")
SETUPS = {
    "h200-80gb, qwen2.5-7b": replace(USUAL, hardware="h200-80gb", model="qwen2.5-7b"),
    "h200, qwen3-30b-a3b": replace(USUAL, hardware="h200", model="qwen3-30b-a3b"),
    "b200, llama-3.1-70b, tp 2": replace(USUAL, hardware="b200", model="llama-3.1-70b", tp=2),
}
LOADS, RATIOS = (20, 50, 80), (1.0, 2.0)
"""Concurrent programs, and host memory as a multiple of the KV pool."""
BASELINE = "thunderagent-offload"
POLICIES = ("mori", BASELINE, "lru-offload", "admit", "stock")


def figures(row: RunRow) -> dict[str, Any]:
    """Return a run's figures."""
    return {
        "output_tok_per_s": row.output_tok_per_s,
        "ttft_mean_s": row.ttft_s.mean,
        "ttft_p95_s": row.ttft_s.p95,
        "finished": row.programs_finished,
        "again_share": row.regenerated_tokens / max(1, row.prompt_tokens),
    }


def main() -> None:
    """Run, print, and write the results after each load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help=f"folder of {TRACE}")
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    made, lines = made_with(sys.argv), []
    found: dict[str, dict[str, Any]] = {}
    for load, (setup, spec) in product(LOADS, SETUPS.items()):
        common = replace(
            spec, workload=str(options.traces / TRACE), programs=load, until_s=3600.0 * options.hours
        )
        specs = [replace(common, cpu_ratio=ratio, policy=name) for ratio in RATIOS for name in POLICIES]
        rows = iter(run_kept(specs, None, None))
        of_load = found.setdefault(setup, {})[str(load)] = {}
        for ratio in RATIOS:
            of = of_load[f"{ratio:g}"] = {name: figures(next(rows)) for name in POLICIES}
            cell = (f"{run['output_tok_per_s']:.0f} / {run['ttft_mean_s']:.0f} s" for run in of.values())
            compared = ("output_tok_per_s", "ttft_mean_s")
            changes = (less(of["mori"][key], of[BASELINE][key]) for key in compared)
            lines.append((setup, str(load), f"{ratio:g}", *cell, *changes))
        if options.json:
            facts = {"command": f"python benchmarks/{made.command}", "hours": options.hours, "seed": 0}
            result = {**facts, "made_with": msgspec.to_builtins(made), "setups": found}
            write_json(result, str(options.json))
    print("output tokens a second / mean TTFT; the last two against " + BASELINE)
    show(("set-up", "programs", "ratio", *POLICIES, "mori: tokens", "mori: TTFT"), lines)


if __name__ == "__main__":
    main()
