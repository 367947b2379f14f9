"""SAGA's ablation (Table 4, with Table 5's modes) and its sweep of tool times (Table 10), in the simulator.

    python benchmarks/saga_ablation.py --cache ablation-cache

Runs the paper's synthetic steps with a mean tool time of 1.2 s (``synthetic:latency-cv:X``), with Poisson
arrivals, until all programs have finished. Each row of Table 4 that applies to one replica is run on SAGA as
published (``saga-paper``) and on ``saga`` (``saga_ablations/*.toml``). Table 10 is swept
under stock and both.
"""

from __future__ import annotations

from pathlib import Path

from kept_runs import mean_completion_s, run_arguments, run_kept
from result_pages import Result, marked
from sojourn_server.simulator.report.results_file import document
from sojourn_server.simulator.report.run_row import RunRow
from sojourn_server.simulator.simulation_run import RunSpec

WITHOUT = Path(__file__).parent / "saga_ablations"
ROWS: tuple[tuple[str, str, str, str], ...] = (
    ("all of it", "saga-paper", "saga", "–"),
    (
        "without workflow-aware eviction",
        f"{WITHOUT}/saga-no-eviction.toml",
        f"{WITHOUT}/ours-no-eviction.toml",
        "+54 %",
    ),
    ("without tool-call TTL", f"{WITHOUT}/saga-no-ttl.toml", f"{WITHOUT}/ours-no-ttl.toml", "+42 %"),
    ("without speculative prefetch", f"{WITHOUT}/saga-no-prefetch.toml", "", "+19 %"),
    (
        "inference, no hints (Table 5)",
        f"{WITHOUT}/saga-inferred.toml",
        f"{WITHOUT}/ours-no-hints.toml",
        "+15.6 %",
    ),
    ("neither: cold (Table 5)", f"{WITHOUT}/saga-cold.toml", f"{WITHOUT}/ours-cold.toml", "+95.8 %"),
)
"""Rows of the ablation: (part left out, published policy, our policy, published mean completion time relative
to the whole system)."""
SWEEP = (0.5, 1.0, 1.5, 2.0, 3.0)
SWEPT = ("stock", "saga-paper", "saga")
PUBLISHED_SWEEP = {0.5: "–", 1.0: "+4 %", 1.5: "+12 %", 2.0: "+24 %", 3.0: "+53 %"}
"""Table 10: coefficient of variation of tool times → mean completion time relative to that at 0.5."""
WORKLOAD = "synthetic:latency-cv:{cv:g}"
BASE_CV = 1.0
PROGRAMS, RATE = 40, 0.07
"""Arrivals of each run, and arrivals per second."""


def main() -> None:
    options = run_arguments(__doc__).parse_args()
    result = Result("saga_ablation", "SAGA's ablation and its sweep of tool times")

    def spec(policy: str, cv: float) -> RunSpec:
        workload = WORKLOAD.format(cv=cv)
        return RunSpec(policy=policy, workload=workload, programs=PROGRAMS, rate_per_s=RATE, until_s=None)

    ablated = [policy for _, printed, ours, _ in ROWS for policy in (printed, ours) if policy]
    wanted = {(policy, cv): spec(policy, cv) for cv in SWEEP for policy in SWEPT}
    wanted |= {(policy, BASE_CV): spec(policy, BASE_CV) for policy in ablated}
    rows = dict(zip(wanted, run_kept(list(wanted.values()), options.cache, options.jobs), strict=True))
    result.write_paper(options.out, document(rows.values(), result.made), page(rows))


Rows = dict[tuple[str, float], RunRow]
"""Rows by (requested policy, coefficient of variation)."""


def page(rows: Rows) -> list[str]:
    """Return the paragraphs of the result page; ``{by hand}`` marks the place of hand-written text."""
    first = rows["stock", BASE_CV]
    return [
        f"{first.hardware}, {first.model}, {first.programs} programs a run arriving Poisson at "
        f"{first.rate_per_s:g} a second until all have finished, a KV pool of "
        f"{first.pool_blocks * first.block_size:,} tokens; seed {first.seed}. Synthetic: the paper's steps, "
        "tool times log-normal with mean 1.2 s. Stock finishes after "
        f"{mean_completion_s(first):,.0f} s on average and computes {_again(first)} of prompt tokens again.",
        "## Gain of each part (Tables 4 and 5)",
        "Mean completion in seconds, and against all of it; tokens computed again, of all prompt tokens. "
        "Rows of several replicas (session affinity, work stealing, fair shares) have no meaning on one.",
        marked(
            ["", *_heads("`saga-paper`", "vs. all of it"), *_heads("`saga`", "vs. all of it"), "published"],
            [_ablated(rows, *row) for row in ROWS],
        ),
        f"Coefficient of variation {BASE_CV:g}. A prefetch moves nothing yet: no tier is below the device.",
        "## Variation of tool times (Table 10)",
        marked(
            [
                "coefficient of variation",
                *(head for policy in SWEPT for head in _heads(f"`{policy}`", f"over {SWEEP[0]:g}")),
                "published",
            ],
            [
                [
                    f"{cv:g}",
                    *(cell for policy in SWEPT for cell in _swept(rows, policy, cv)),
                    PUBLISHED_SWEEP[cv],
                ]
                for cv in SWEEP
            ],
        ),
        "## Differences from the paper",
        "{by hand}",
    ]


def _heads(policy: str, over: str) -> tuple[str, str, str]:
    return f"{policy}, s", over, "again"


def _ablated(rows: Rows, name: str, printed: str, ours: str, published: str) -> list[str]:
    cells = [name]
    for policy, whole in ((printed, "saga-paper"), (ours, "saga")):
        if not policy:
            cells += ["–", "–", "–"]
            continue
        row = rows[policy, BASE_CV]
        cells += [f"{mean_completion_s(row):,.0f}", _over(row, rows[whole, BASE_CV]), _again(row)]
    return [*cells, published]


def _swept(rows: Rows, policy: str, cv: float) -> list[str]:
    row = rows[policy, cv]
    return [f"{mean_completion_s(row):,.0f}", _over(row, rows[policy, SWEEP[0]]), _again(row)]


def _over(row: RunRow, whole: RunRow) -> str:
    more = mean_completion_s(row) / mean_completion_s(whole) - 1.0
    return "–" if row is whole else f"{more:+.1%}"


def _again(row: RunRow) -> str:
    return f"{row.regenerated_tokens / row.prompt_tokens:.1%}"


if __name__ == "__main__":
    main()
