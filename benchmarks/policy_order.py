"""What another order of waiting programs gains over the order of the policy ``sojourn``, in the simulator.

    python benchmarks/policy_order.py --traces traces --cache order-cache

Runs small open loops in which programs wait for memory, until all have finished. The arms are ``sojourn``,
``mori``, other orders (``sojourn_orders/*.toml``), and ``sojourn-oracle``, which knows the work that each
program has left. A run's completion times are compared with those of ``sojourn`` with the same seed. Finished
runs are kept in the cache folder, so that an interrupted run continues. Writes policy_order.json and .md into
benchmarks/results.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from policy_constants import LOADS as SYNTHETIC_LOADS
from policy_constants import RECORDED_LOADS
from result_pages import made_by, marked, write_result
from sojourn_server.cli.suite_progress import run_with_progress
from sojourn_server.simulator.report.results_file import made_with
from sojourn_server.simulator.report.run_row import RunRow
from sojourn_server.simulator.run_cache import RunCache
from sojourn_server.simulator.simulation_run import RunSpec

ORDERS = Path(__file__).parent / "sojourn_orders"
OURS = "sojourn"
ARMS = {
    OURS: OURS,
    "smallest first": str(ORDERS / "by-size.toml"),
    "by arrival": str(ORDERS / "by-arrival.toml"),
    "by worth": str(ORDERS / "by-worth.toml"),
    "by service so far": str(ORDERS / "by-attained.toml"),
    "mori": "mori",
    "oracle": "sojourn-oracle",
}

_CHATS = replace(
    SYNTHETIC_LOADS["bfcl, host memory 1"], workload="taubench_gpt4o_airline", programs=80, rate_per_s=1.2,
    pool_tokens=40_000, max_context_tokens=None,
)  # fmt: skip
LOADS = {
    "airline chats, host memory 1": _CHATS,
    "airline chats, no host memory": replace(_CHATS, rate_per_s=1.0, cpu_ratio=0.0),
    **{name: RECORDED_LOADS[name] for name in ("mini-swe-agent, host memory 1", "trae, host memory 1")},
    **{
        name: SYNTHETIC_LOADS[name]
        for name in ("ten tenants, host memory 1", "bfcl, no host memory", "swe-bench, host memory 1")
    },
}

Rows = dict[str, list[RunRow]]
"""Arm → its runs, one per seed."""


def specs(load: RunSpec, traces: Path, seeds: int) -> dict[str, list[RunSpec]]:
    """The runs of a load by arm. ``mori`` needs host memory."""
    workload = load.workload
    if not workload.startswith("synthetic:"):
        workload = str(traces / f"{workload}.jsonl.gz")
    return {
        arm: [replace(load, workload=workload, policy=policy, seed=seed) for seed in range(seeds)]
        for arm, policy in ARMS.items()
        if load.cpu_ratio or arm != "mori"
    }


def page(found: dict[str, Rows], made: str) -> str:
    """The page in Markdown; ``{by hand}`` marks the place of hand-written text."""
    lines = [
        "# Orders of waiting programs",
        "",
        made,
        "",
        "*Mean*, *P95*: completion time in seconds, averaged over the seeds. *Over sojourn*: geometric mean "
        "over the seeds of the mean completion time over sojourn's, with its range; below 1 is "
        "better. *P95 over*, *slowdown over*: the same of P95 and of the P99 of slowdown (completion time ÷ "
        "that alone). *Again*: share of prompt tokens computed again.",
        "",
        "{by hand}",
        "",
    ]
    for name, rows in found.items():
        load, seeds = LOADS[name], len(rows[OURS])
        lines += [
            f"## {name}",
            "",
            f"{load.programs} programs, {load.rate_per_s:g} a second, KV for {load.pool_tokens:,} tokens"
            + (f", contexts up to {load.max_context_tokens:,}" if load.max_context_tokens else "")
            + f"; seeds 0 to {seeds - 1}.",
            "",
            marked(
                ("order", "mean", "P95", "over sojourn", "P95 over", "slowdown over", "again"),
                ([arm, *_cells(some, rows[OURS])] for arm, some in rows.items()),
            ),
            "",
        ]
    return "\n".join(lines)


def _cells(rows: Sequence[RunRow], ours: Sequence[RunRow]) -> list[str]:
    means = _ratios(rows, ours, lambda row: row.completion_s.mean)
    again = sum(row.regenerated_tokens for row in rows) / sum(row.prompt_tokens for row in rows)
    return [
        f"{fmean(row.completion_s.mean or 0.0 for row in rows):.0f}",
        f"{fmean(row.completion_s.p95 or 0.0 for row in rows):.0f}",
        f"{geometric_mean(means):.2f} ({min(means):.2f} to {max(means):.2f})",
        f"{geometric_mean(_ratios(rows, ours, lambda row: row.completion_s.p95)):.2f}",
        f"{geometric_mean(_ratios(rows, ours, lambda row: row.slowdown.p99)):.2f}",
        f"{again:.1%}",
    ]


def _ratios(rows: Sequence[RunRow], ours: Sequence[RunRow], measure: Any) -> list[float]:
    """``measure`` of each run over that of our run with the same seed."""
    return [measure(row) / measure(own) for row, own in zip(rows, ours, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True, help="folder of .jsonl.gz traces")
    parser.add_argument("--only", type=int, default=len(LOADS), help="number of loads, the first ones")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--cache", required=True, help="folder in which finished runs are kept")
    parser.add_argument("--jobs", type=int, help="processes; default: one per core")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    for name in ("seeds", "only"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; expected at least 1")
    began = time.monotonic()
    kept = RunCache(options.cache)
    found: dict[str, Rows] = {}
    for name, load in list(LOADS.items())[: options.only]:
        wanted = specs(load, options.traces, options.seeds)
        every = [spec for some in wanted.values() for spec in some]
        rows = iter(run_with_progress(every, processes=options.jobs, cache=kept).rows)
        found[name] = {arm: [next(rows) for _ in some] for arm, some in wanted.items()}
    made = made_with(sys.argv)
    loads = {
        name: {
            arm: [
                {"seed": row.seed, "completion_mean_s": row.completion_s.mean,
                 "completion_p95_s": row.completion_s.p95, "completion_p99_s": row.completion_s.p99,
                 "slowdown_p99": row.slowdown.p99, "ttft_mean_s": row.ttft_s.mean,
                 "recomputed_tokens": row.regenerated_tokens, "prompt_tokens": row.prompt_tokens}
                for row in some
            ]
            for arm, some in rows.items()
        }
        for name, rows in found.items()
    }  # fmt: skip
    text = page(found, made_by(made, time.monotonic() - began))
    write_result(options.out, "policy_order", made, {"loads": loads}, text)


if __name__ == "__main__":
    main()
