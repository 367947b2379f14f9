"""What another order of waiting programs gains over the order of the policy ``sojourn``, in the simulator.

    python benchmarks/policy_order.py --traces traces --cache order-cache

Runs small open loops in which programs wait for memory, until all have finished. The arms are ``sojourn``,
``mori``, other orders (``sojourn_orders/*.toml``), and ``sojourn-oracle``, which knows the work that each
program has left. Finished runs are kept in the cache folder, so that an interrupted run continues. Writes
policy_order.json and .md into benchmarks/results.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from result_pages import made_by, marked, write_result
from sojourn_server.cli.suite_progress import run_with_progress
from sojourn_server.simulator.report.results_file import made_with
from sojourn_server.simulator.report.run_row import RunRow
from sojourn_server.simulator.run_cache import RunCache
from sojourn_server.simulator.simulation_run import RunSpec

ORDERS = Path(__file__).parent / "sojourn_orders"
ARMS = {
    "sojourn": "sojourn",
    "by arrival": str(ORDERS / "by-arrival.toml"),
    "by worth": str(ORDERS / "by-worth.toml"),
    "by service so far": str(ORDERS / "by-attained.toml"),
    "mori": "mori",
    "oracle": "sojourn-oracle",
}


@dataclass(frozen=True)
class Load:
    """An open loop on a trace of the folder, or on a synthetic workload."""

    name: str
    workload: str
    programs: int
    rate_per_s: float
    pool_tokens: int
    cpu_ratio: float
    max_context_tokens: int | None = None


LOADS = (
    Load("airline chats, host memory 1", "taubench_gpt4o_airline", 80, 1.2, 40_000, 1.0),
    Load("airline chats, no host memory", "taubench_gpt4o_airline", 80, 1.0, 40_000, 0.0),
    Load("SWE agents (trae), host memory 1", "isobench_trae", 40, 0.15, 60_000, 1.0, 12_000),
)


def specs(load: Load, traces: Path) -> dict[str, RunSpec]:
    """The runs of a load by arm. ``mori`` needs host memory."""
    spec = RunSpec(
        policy="sojourn", workload=str(traces / f"{load.workload}.jsonl.gz"), hardware="a100-80gb",
        model="llama-3.1-8b", programs=load.programs, rate_per_s=load.rate_per_s, until_s=None,
        pool_tokens=load.pool_tokens, cpu_ratio=load.cpu_ratio, max_context_tokens=load.max_context_tokens,
    )  # fmt: skip
    return {
        arm: replace(spec, policy=policy) for arm, policy in ARMS.items() if load.cpu_ratio or arm != "mori"
    }


def page(found: dict[str, dict[str, RunRow]], made: str) -> str:
    """The page in Markdown; ``{by hand}`` marks the place of hand-written text."""
    lines = [
        "# Orders of waiting programs",
        "",
        made,
        "",
        "Completion times in seconds, mean and percentiles; *over sojourn*: mean completion time over "
        "sojourn's, below 1 is better; *again*: share of prompt tokens computed again.",
        "",
        "{by hand}",
        "",
    ]
    for load in LOADS:
        if load.name not in found:
            continue
        rows = found[load.name]
        lines += [
            f"## {load.name}",
            "",
            f"{load.programs} programs, {load.rate_per_s:g} a second, KV for {load.pool_tokens:,} tokens"
            + (f", contexts up to {load.max_context_tokens:,}." if load.max_context_tokens else "."),
            "",
            marked(
                ("order", "mean", "P50", "P95", "P99", "over sojourn", "again"),
                ([arm, *_cells(row, rows["sojourn"])] for arm, row in rows.items()),
            ),
            "",
        ]
    return "\n".join(lines)


def _cells(row: RunRow, ours: RunRow) -> list[str]:
    took, our_mean_s = row.completion_s, ours.completion_s.mean
    assert our_mean_s is not None, "an open loop runs until all have finished"
    times = (took.mean, took.p50, took.p95, took.p99)
    again = row.regenerated_tokens / row.prompt_tokens if row.prompt_tokens else 0.0
    return [
        *(f"{value or 0.0:.0f}" for value in times),
        f"{(took.mean or 0.0) / our_mean_s:.2f}",
        f"{again:.1%}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True, help="folder of .jsonl.gz traces")
    parser.add_argument("--only", type=int, default=len(LOADS), help="number of loads, the first ones")
    parser.add_argument("--cache", required=True, help="folder in which finished runs are kept")
    parser.add_argument("--jobs", type=int, help="processes; default: one per core")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    began = time.monotonic()
    kept = RunCache(options.cache)
    found = {}
    for load in LOADS[: options.only]:
        wanted = specs(load, options.traces)
        rows = run_with_progress(list(wanted.values()), processes=options.jobs, cache=kept).rows
        found[load.name] = dict(zip(wanted, rows, strict=True))
    made = made_with(sys.argv)
    loads = {
        name: {arm: {"completion_mean_s": row.completion_s.mean, "completion_p99_s": row.completion_s.p99,
                     "ttft_mean_s": row.ttft_s.mean, "recomputed_tokens": row.regenerated_tokens,
                     "prompt_tokens": row.prompt_tokens} for arm, row in rows.items()}
        for name, rows in found.items()
    }  # fmt: skip
    text = page(found, made_by(made, time.monotonic() - began))
    write_result(options.out, "policy_order", made, {"loads": loads}, text)


if __name__ == "__main__":
    main()
