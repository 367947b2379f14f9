"""SAGA's competitive ratio in the simulator: recomputed tokens of a policy ÷ those of Bélády's order.

    python benchmarks/saga_competitive_ratio.py --traces traces --cache ratio-cache

For every trace, programs arrive by a Poisson process and run until all have finished, so every policy does
the same work. The KV pool has several sizes. Two preliminary runs find the scale of the trace. In the first,
each program has the device alone; this gives an arrival rate that keeps ``LIVE`` programs alive. In the
second, programs arrive at that rate and no KV is lost. Pool sizes are shares of the largest total of living
contexts in this run. (In much smaller pools, running programs displace each other under any order, and LRU is
as good as Bélády.) At each size, stock vLLM is run and its block accesses are recorded. Bélády and "LRU +
Prefix" (SAGA, Table 2) are replayed on these accesses. Sizes at which LRU ÷ Bélády is at least 2.0, as in the
paper's table, are run under every other policy.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from belady import AccessRecorder, recomputed_tokens
from kept_runs import row_and_log, row_of, run_arguments, run_kept, traces_of
from result_pages import Result, marked, number
from rich.console import Console
from sojourn_server.simulator.report.results_file import document
from sojourn_server.simulator.report.run_metrics import summarize_run, trace_name
from sojourn_server.simulator.report.run_row import RunRow
from sojourn_server.simulator.run_log import RunLog
from sojourn_server.simulator.simulation_run import RunSpec, run_simulation
from sojourn_server.simulator.simulator_policies import find_policy

WITHOUT = Path(__file__).parent / "saga_ablations"
POLICIES = (
    "continuum", "saga", "saga-paper",
    *(f"{WITHOUT}/saga-{part}.toml" for part in ("inferred", "cold", "no-eviction", "no-ttl")),
)  # fmt: skip
PUBLISHED = {"LRU": (2.84, 2.12), "LRU + Prefix": (1.97, 1.74), "WA-LRU": (1.31, 1.28)}
"""SAGA's Table 2: competitive ratios for SWE-bench and WebArena."""
WORTH = 2.0
"""Minimum of LRU ÷ Bélády for a pool size to be used."""
SHARES = (0.7, 0.8, 0.85, 0.9, 0.95)
"""Pool sizes as shares of the largest total of living programs' contexts."""
LEAST_POOL = 1.1
"""Minimum pool size ÷ the longest context."""
ALONE_PER_S = 1e-4
"""Arrivals per second of the first run: one in three hours."""
PROGRAMS = 24
"""Arrivals of each run."""
LIVE = 8.0
"""Programs alive at once, with no KV ever lost."""
MAX_GAP_S = 120.0
"""Longer idle times are cut to this."""
TARGET = 1.31
LEAST = 0.01
"""Minimum ratio in a geometric mean. Smaller ratios count as this one."""


class Size:
    """Results of one trace at one pool size."""

    def __init__(self, asked_tokens: int, stock: RunRow, orders: dict[str, int]) -> None:
        """``orders`` has the recomputed tokens by eviction order."""
        self.asked_tokens = asked_tokens
        self.stock = stock
        self.optimum = orders["belady"]
        self.prefix_lru = self.ratio(orders["prefix-lru"])
        self.lru = self.ratio(stock.regenerated_tokens)
        self.rows: dict[str, RunRow] = {}

    @property
    def pool_tokens(self) -> int:
        return self.stock.pool_blocks * self.stock.block_size

    @property
    def counts(self) -> bool:
        return self.lru is not None and self.lru >= WORTH

    def ratio(self, tokens: int) -> float | None:
        """Return ``tokens`` ÷ Bélády's recomputed tokens; ``None`` if Bélády recomputes none."""
        return tokens / self.optimum if self.optimum else None


def stock_and_orders(spec: RunSpec) -> tuple[RunRow, dict[str, int]]:
    """The metrics of a run, and the tokens that each eviction order recomputes on its accesses."""
    recorders: list[AccessRecorder] = []
    row = summarize_run(run_simulation(spec, prepare=lambda made: recorders.append(AccessRecorder(made))))
    log = recorders[0].close()
    return row, {order: recomputed_tokens(log, order) for order in ("belady", "prefix-lru")}


def main() -> None:
    parser = run_arguments(__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="folder of .jsonl and .jsonl.gz traces")
    options = parser.parse_args()
    result = Result("saga_competitive_ratio", "Competitive ratio")
    console = Console(stderr=True)
    names = [find_policy(policy).name for policy in POLICIES]

    def spec(
        trace: Path,
        policy: str,
        rate_per_s: float,
        pool_tokens: int | None = None,
        longest: int | None = None,
    ) -> RunSpec:
        return RunSpec(
            policy=policy, workload=str(trace), rate_per_s=rate_per_s, until_s=None,
            programs=PROGRAMS, pool_tokens=pool_tokens, max_context_tokens=longest, max_gap_s=MAX_GAP_S,
            human_gaps=False,
        )  # fmt: skip

    found: dict[str, list[Size]] = {}
    rows: list[RunRow] = []
    for trace in traces_of(options.traces):
        name = trace_name(str(trace))
        kept = options.cache, options.jobs
        ((_, alone),) = run_kept([spec(trace, "unlimited", ALONE_PER_S)], *kept, row_and_log)
        rate_per_s, longest = scale(alone, LIVE)
        # This is more than the pool ever has to hold. A given pool size also sets the usual number of
        # programs.
        ample = spec(trace, "unlimited", rate_per_s, 1000 * longest, longest)
        ((_, undisturbed),) = run_kept([ample], *kept, row_and_log)
        demand = most_at_once(undisturbed)
        pools = sorted({int(max(share * demand, LEAST_POOL * longest)) for share in SHARES})
        console.print(
            f"{name}: contexts of up to {longest:,} tokens, {demand:,} of all at once, {rate_per_s:.3g} "
            f"programs a second; LRU and Bélády at {len(pools)} sizes",
            highlight=False,
        )
        stock = [spec(trace, "stock", rate_per_s, pool, longest) for pool in pools]
        recorded = run_kept(stock, *kept, stock_and_orders)
        sizes = [Size(pool, row, orders) for pool, (row, orders) in zip(pools, recorded, strict=True)]
        found[name] = sizes
        rows += [row for row, _ in recorded]
        worth = [size for size in sizes if size.counts]
        if not worth:
            continue
        compared = run_kept(
            [
                spec(trace, policy, rate_per_s, size.asked_tokens, longest)
                for size in worth
                for policy in POLICIES
            ],
            *kept,
            row_of,
        )
        rows += compared
        for row in compared:
            next(s for s in worth if s.stock.pool_blocks == row.pool_blocks).rows[row.policy] = row
    result.write_paper(options.out, document(rows, result.made), page(found, names))


def scale(log: RunLog, live: float) -> tuple[float, int]:
    """Return the arrivals per second that keep ``live`` programs alive, sub-agents included (Little's law),
    and the tokens of the longest context."""
    lasted_s = [program.completion_s for program in log.programs]
    if None in lasted_s:
        sys.exit(f"{log.trace}: {lasted_s.count(None)} programs did not finish alone; no scale can be told")
    arrived = sum(program.parent is None for program in log.programs)
    contexts = [turn.prompt_tokens + turn.output_tokens for program in log.programs for turn in program.turns]
    return live * arrived / sum(filter(None, lasted_s)), max(contexts)


def most_at_once(log: RunLog) -> int:
    """Return the largest total of the living programs' contexts, in tokens."""
    changes: list[tuple[float, int]] = []
    for program in log.programs:
        held = 0
        for turn in program.turns:
            context = turn.prompt_tokens + turn.output_tokens
            changes.append((turn.submitted_s, context - held))
            held = context
        changes.append((program.finished_s if program.finished_s is not None else math.inf, -held))
    return max(accumulate(tokens for _, tokens in sorted(changes)))


def page(found: dict[str, list[Size]], policies: Sequence[str]) -> list[str]:
    """Return the paragraphs of the result page; ``{by hand}`` marks the place of hand-written text."""
    first = next(size for sizes in found.values() for size in sizes).stock
    run_at = [(name, size) for name, sizes in found.items() for size in sizes if size.rows]
    return [
        f"{first.hardware}, {first.model}, {first.programs} programs a run arriving Poisson, as many "
        f"a second as keep {LIVE:g} alive where no KV is lost, until all have finished; seed {first.seed}. "
        "A cell is tokens computed again over those that Bélády's order computes again on stock's accesses. "
        "`lru` is stock, `prefix-lru` a replay. A policy that changes who runs when changes the accesses, "
        "so it may be below 1.",
        "Published (SAGA, Table 2; SWE-bench, WebArena): "
        + "; ".join(f"{name} {a}, {b}" for name, (a, b) in PUBLISHED.items())
        + f". Target for `saga`: {TARGET}.",
        f"## Sizes at which LRU recomputes {WORTH:g} times as many tokens as Bélády",
        marked(
            ["trace", "pool, tokens", "lru", "prefix-lru", *policies],
            [
                [
                    name, f"{size.pool_tokens:,}", number(size.lru), number(size.prefix_lru),
                    *(number(_ratio(size, policy)) for policy in policies),
                ]
                for name, size in run_at
            ],
        ),
        f"Geometric mean, what is below {LEAST} counted as that: "
        f"{', '.join(f'{policy} {number(_mean(found, policy))}' for policy in policies)}.",
        "## All sizes",
        marked(
            ["trace", "programs/s", "cut", "pool, tokens", "again, LRU", "of prompts", "LRU ÷ Bélády"],
            [
                [
                    name, f"{size.stock.rate_per_s:.3g}", f"{size.stock.programs_cut}",
                    f"{size.pool_tokens:,}",
                    f"{size.stock.regenerated_tokens:,}",
                    f"{size.stock.regenerated_tokens / size.stock.prompt_tokens:.1%}", number(size.lru),
                ]
                for name, sizes in found.items() for size in sizes
            ],
        ),
        "## Losses by mechanism",
        "{by hand}",
    ]  # fmt: skip


def _ratio(size: Size, policy: str) -> float | None:
    row = size.rows.get(policy)
    return None if row is None else size.ratio(row.regenerated_tokens)


def _mean(found: dict[str, list[Size]], policy: str) -> float | None:
    ratios = [r for sizes in found.values() for size in sizes if (r := _ratio(size, policy)) is not None]
    return math.exp(sum(math.log(max(LEAST, r)) for r in ratios) / len(ratios)) if ratios else None


if __name__ == "__main__":
    main()
