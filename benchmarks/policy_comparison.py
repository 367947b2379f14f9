"""Run every policy on every trace under several loads, and write benchmarks/RESULTS.md.

    python benchmarks/policy_comparison.py --traces traces --cache results-cache

Finished runs are kept in the cache folder; the same command continues an interrupted run. The tables are
generated each time. Text between the marks of RESULTS.md is kept.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from result_pages import FIRST_WORDS, made_by, write_page
from rich.console import Console
from sojourn_server.cli.console import write_json
from sojourn_server.cli.suite_progress import run_with_progress
from sojourn_server.policies.preset import load_preset
from sojourn_server.simulator.report.results_file import document, made_with
from sojourn_server.simulator.report.results_table import markdown
from sojourn_server.simulator.report.run_metrics import trace_name
from sojourn_server.simulator.report.run_row import RunRow
from sojourn_server.simulator.run_cache import RunCache
from sojourn_server.simulator.simulation_run import RunSpec, validate_specs
from sojourn_server.simulator.simulator_policies import find_policy, policy_names

LEFT_OUT = ("observe",)
"""Presets left out because they decide like stock."""

Ratio = Callable[[RunRow, RunRow], "float | None"]
"""(row of a policy, row of stock) → factor of improvement; ``None`` if it is unknown."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True, help="folder of .jsonl and .jsonl.gz traces")
    parser.add_argument("--only", help="traces whose names hold one of these, commas between")
    parser.add_argument("--programs", default="20,40,80")
    parser.add_argument("--policy", help="default: all but those that decide as stock does")
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--hardware", default="a100-80gb")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, help="processes; default: one a core")
    parser.add_argument("--cache", required=True, help="folder in which finished runs are kept")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/RESULTS.md"))
    parser.add_argument("--json", default="benchmarks/results/policy_comparison.json")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    began = time.monotonic()
    console = Console(stderr=True)
    traces = chosen(options.traces, options.only)
    policies = (
        options.policy.split(",") if options.policy else [n for n in policy_names() if n not in LEFT_OUT]
    )
    plans = {
        trace: [
            RunSpec(
                policy=policy, workload=str(trace), programs=int(count), until_s=options.hours * 3600.0,
                hardware=options.hardware, model=options.model, seed=options.seed,
            )
            for count in options.programs.split(",")
            for policy in policies
        ]
        for trace in traces
    }  # fmt: skip
    remarks = {trace_name(str(trace)): validate_specs(specs) for trace, specs in plans.items()}
    rows: list[RunRow] = []
    kept = RunCache(options.cache)
    for number, (trace, specs) in enumerate(plans.items(), 1):
        console.print(f"{number} of {len(plans)}: {trace.name}, {len(specs)} runs", highlight=False)
        # One trace at a time: the logs of all traces would not fit into memory.
        rows += run_with_progress(specs, processes=options.jobs, cache=kept).rows
    made = made_with(sys.argv)
    write_json(document(rows, made), options.json)
    write_page(options.out, page(rows, remarks, made_by(made, time.monotonic() - began)), FIRST_WORDS)
    console.print(f"wrote {options.out} and {options.json}", highlight=False)


def chosen(folder: Path, only: str | None) -> list[Path]:
    """Return the folder's traces, sorted. ``only`` has parts of file names, separated by commas, that select
    traces."""
    words = only.split(",") if only else [""]
    found = [
        path
        for path in sorted(folder.iterdir())
        if path.name.endswith((".jsonl", ".jsonl.gz")) and any(word in path.name for word in words)
    ]
    if not found:
        sys.exit(f"{folder} holds no trace{f' named like {only}' if only else ''}")
    return found


def page(rows: Sequence[RunRow], remarks: dict[str, list[str]], made: str) -> str:
    """Return the result page in Markdown; ``{by hand}`` marks the place of hand-written text."""
    first = rows[0]
    lines = [
        "# Results",
        "",
        "Every policy on every trace, in the simulator: vLLM's own scheduler in virtual time "
        "([docs/simulator.md](../docs/simulator.md) says what that leaves out). All but what is between the "
        "marks is generated by",
        "",
        made,
        "",
        f"{first.hardware}, {first.model}, a KV pool of {first.pool_blocks * first.block_size:,} tokens; "
        f"closed loop, {first.virtual_s / 3600:.2g} virtual hours a run, seed {first.seed}. Limits are in "
        "*italics*.",
        "",
        "## Best policy by workload",
        "",
        "{by hand}",
        "",
        "## Output tokens a second, over stock's",
        "",
        *matrix(rows, lambda row, stock: _over(row.output_tok_per_s, stock.output_tok_per_s)),
        "",
        "## Programs finished an hour, over stock's",
        "",
        "Few finish in an hour where programs are long: beside each number of programs is how many stock "
        "finished.",
        "",
        *matrix(
            rows, lambda row, stock: _over(row.programs_per_hour, stock.programs_per_hour), finished=True
        ),
        "",
        "## Mean time to first token: stock's over the policy's",
        "",
        *matrix(rows, lambda row, stock: _over(stock.ttft_s.mean, row.ttft_s.mean)),
        "",
        "## Notes on the traces",
        "",
        *(f"- {trace}: {'; '.join(notes)}" for trace, notes in remarks.items() if notes),
        "",
        "## The policies",
        "",
        *(f"- {name}: {find_policy(name).paper or load_preset(name).paper}" for name in _policies(rows)),
        "",
        "## All results",
        "",
        markdown(rows, one_table=True),
    ]
    return "\n".join(lines)


def matrix(rows: Sequence[RunRow], ratio: Ratio, *, finished: bool = False) -> list[str]:
    """Return a table with one row per policy and one column per trace and load. The first column is the
    geometric mean. The best policy is bold."""
    cells: dict[tuple[str, int], dict[str, RunRow]] = {}
    for row in rows:
        cells.setdefault((row.trace, row.programs), {})[row.policy] = row
    values: dict[str, list[float | None]] = {}
    for policy in _policies(rows):
        values[policy] = [
            ratio(mine[policy], mine["stock"]) if policy in mine and "stock" in mine else None
            for mine in cells.values()
        ]
    limits = {row.policy for row in rows if row.limit}
    shown = [name for name, found in values.items() if any(v is not None for v in found)]
    means = {name: _geometric(values[name]) for name in shown}
    best = [
        max((values[name][place] or 0.0 for name in shown if name not in limits), default=0.0)
        for place in range(len(cells))
    ]
    best_mean = max((mean for name, mean in means.items() if mean and name not in limits), default=0.0)
    heads = [
        f"{trace} {count}" + (f" ({mine['stock'].programs_finished})" if finished and "stock" in mine else "")
        for (trace, count), mine in cells.items()
    ]
    lines = [f"| policy | all | {' | '.join(heads)} |", f"|---|{'--:|' * (len(heads) + 1)}"]
    for name in sorted(shown, key=lambda n: (n in limits, -(means[n] or 0.0))):
        tops = [None] * (len(best) + 1) if name in limits else [best_mean, *best]
        texts = [_text(value, top) for value, top in zip([means[name], *values[name]], tops, strict=True)]
        lines.append(f"| {f'*{name}*' if name in limits else name} | {' | '.join(texts)} |")
    return lines


def _policies(rows: Sequence[RunRow]) -> list[str]:
    return list(dict.fromkeys(row.policy for row in rows))


def _over(mine: float | None, other: float | None) -> float | None:
    return mine / other if mine is not None and other else None


def _geometric(values: Sequence[float | None]) -> float | None:
    """Return the geometric mean of the known values; ``None`` if there are none, or if one is 0."""
    known = [value for value in values if value is not None]
    return math.exp(sum(map(math.log, known)) / len(known)) if known and all(known) else None


def _text(value: float | None, best: float | None) -> str:
    if value is None:
        return "–"
    return f"**{value:.2f}**" if best and round(value, 2) >= round(best, 2) else f"{value:.2f}"


if __name__ == "__main__":
    main()
