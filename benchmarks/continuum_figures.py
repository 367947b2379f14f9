"""Continuum's figures in the simulator: delay against vLLM's over a load sweep, and its ablations.

    python benchmarks/continuum_figures.py

Runs the paper's synthetic workloads (Table 1) on A100-80GB with llama-3.1-8b and Poisson arrivals, until all
programs have finished (§6.1). Delay is a program's time from arrival to last token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from kept_runs import mean_completion_s, row_and_log, run_arguments, run_kept
from result_pages import Result, marked
from sojourn_server.simulator.report.results_file import document
from sojourn_server.simulator.report.run_row import RunRow
from sojourn_server.simulator.report.turn_phases import PHASE_KINDS, totals
from sojourn_server.simulator.run_log import RunLog
from sojourn_server.simulator.simulation_run import RunSpec

RATES = {
    "synthetic:continuum-swe-bench": (0.008, 0.012, 0.018, 0.030),
    "synthetic:continuum-bfcl": (0.015, 0.025, 0.040, 0.070),
    "synthetic:continuum-swe-bench:0.05": (0.030, 0.060, 0.130),
    "synthetic:continuum-bfcl:0.05": (0.050, 0.100, 0.200),
}
"""Workload → programs per second, from a load without queueing to one whose queue only grows. The suffix
``:0.05`` is the share of a context that the model writes (default: a fifth); the paper does not state it."""
PROGRAMS = {workload: 60 if workload.endswith(":0.05") else 40 for workload in RATES}
"""Workload → number of arrivals per run. Workloads with short programs have more."""
ABLATION = ("stock", "program-fcfs", "static-ttl", "continuum-paper")
"""Policies of the ablation in Figure 15, in its order."""
POLICIES = (*ABLATION, "continuum", "unlimited")
PUBLISHED = (1.12, 3.66)
"""Minimum and maximum of vLLM's mean delay ÷ Continuum's over all models, devices and workloads (§1)."""

Cell = tuple[str, float]
"""Workload and rate."""


def main() -> None:
    options = run_arguments(__doc__).parse_args()
    result = Result("continuum_figures", "Continuum's figures in the simulator")
    specs = [
        RunSpec(
            policy=policy, workload=workload, programs=PROGRAMS[workload], rate_per_s=rate, until_s=None
        )
        for workload, rates in RATES.items()
        for rate in rates
        for policy in POLICIES
    ]  # fmt: skip
    found = run_kept(specs, options.cache, options.jobs, row_and_log)
    rows, logs = [row for row, _ in found], [log for _, log in found]
    result.write_paper(options.out, document(rows, result.made), page(rows, logs))


def cells(rows: Iterable[RunRow]) -> dict[Cell, dict[str, RunRow]]:
    """Return the rows grouped by workload and rate, and then by policy."""
    found: dict[Cell, dict[str, RunRow]] = {}
    for row in rows:
        assert row.rate_per_s is not None
        found.setdefault((row.trace, row.rate_per_s), {})[row.policy] = row
    return found


def factor(rows: dict[str, RunRow], policy: str) -> float | None:
    """Return the mean delay of stock ÷ that of the policy; ``None`` if one of them is missing."""
    stock, mine = rows.get("stock"), rows[policy].completion_s.mean
    return stock.completion_s.mean / mine if stock and stock.completion_s.mean and mine else None


def seconds_by(log: RunLog) -> dict[str, float]:
    """Return the mean seconds that a program spends in each kind of phase."""
    sums = dict.fromkeys(PHASE_KINDS, 0.0)
    for program in log.programs:
        for kind, seconds in totals(program, log.virtual_s).items():
            sums[kind] += seconds / len(log.programs)
    return sums


def _cell(rows: dict[str, RunRow], policy: str) -> str:
    mean, times = rows[policy].completion_s.mean, factor(rows, policy)
    text = "–" if mean is None else f"{mean:,.0f}"
    return text if times is None or policy == "stock" else f"{text} ({times:.2f}×)"


def page(rows: Sequence[RunRow], logs: Sequence[RunLog]) -> list[str]:
    """Return the paragraphs of the result page; ``{by hand}`` marks the place of hand-written text."""
    names = list(dict.fromkeys(row.policy for row in rows))
    first = rows[0]
    programs = " or ".join(str(count) for count in sorted({row.programs for row in rows}))
    return [
        f"{first.hardware}, {first.model}, {programs} programs a run arriving Poisson, seed "
        f"{first.seed}; a KV pool of {first.pool_blocks * first.block_size:,} tokens. `unlimited` is stock "
        "with a pool that is never full: a limit, no policy.",
        "## Delay",
        f"Mean seconds from a program's arrival to its last token, and stock ÷ policy. Published (§1): "
        f"{PUBLISHED[0]}× to {PUBLISHED[1]}×.",
        marked(
            ["workload", "programs/s", *names],
            [
                [trace, f"{rate:g}", *(_cell(mine, name) for name in names)]
                for (trace, rate), mine in cells(rows).items()
            ],
        ),
        "## Ablation (Figure 15)",
        "\n".join(ablation(rows)),
        "## Causes",
        "Mean seconds of a program in each state; prompt tokens computed again, of all prompt tokens; the "
        "device's busy share.",
        marked(
            ["workload", "programs/s", "policy", *PHASE_KINDS[1:], "again", "busy", "preemptions"],
            _evidence(rows, logs),
        ),
        "## Differences from the paper",
        "{by hand}",
    ]


def _evidence(rows: Sequence[RunRow], logs: Sequence[RunLog]) -> list[list[str]]:
    lines = []
    for row, log in zip(rows, logs, strict=True):
        by = seconds_by(log)
        lines.append(
            [
                row.trace, f"{row.rate_per_s:g}", row.policy,
                *(f"{by[kind]:,.0f}" for kind in PHASE_KINDS[1:]),
                f"{row.regenerated_tokens / row.prompt_tokens:.1%}", f"{row.device_busy_fraction or 0:.0%}",
                f"{row.preemptions}",
            ]
        )  # fmt: skip
    return lines


def ablation(rows: Sequence[RunRow]) -> list[str]:
    """Return lines of text that say at how many loads each step of Figure 15 helps."""
    lines = []
    for trace in dict.fromkeys(row.trace for row in rows):
        loads = [mine for (name, _), mine in cells(rows).items() if name == trace]
        steps = [name for name in ABLATION if all(name in mine for mine in loads)]
        if len(steps) < 2:
            continue
        told = []
        for before, after in pairwise(steps):
            gains = [mean_completion_s(mine[before]) / mean_completion_s(mine[after]) for mine in loads]
            helps = sum(gain > 1.005 for gain in gains)
            hurts = sum(gain < 0.995 for gain in gains)
            middle = math.exp(sum(map(math.log, gains)) / len(gains))
            told.append(f"{before} → {after} {middle:.2f}× (better at {helps} loads, worse at {hurts})")
        lines.append(f"- `{trace}`, geometric mean over {len(loads)} loads: {'; '.join(told)}")
    return lines or ["- not run"]


if __name__ == "__main__":
    main()
