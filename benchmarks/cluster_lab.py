"""Several replicas in the lab: MORI's DP = 3, SAGA's ten tenants, and how far it goes.

    python benchmarks/cluster_lab.py --traces traces --hours 0.2 --cache cluster-cache

Three parts, ``--only`` some of them:

mori     MORI §6.2 with three replicas: h200, qwen3-30b-a3b, a closed loop of 20, 50 and 80 programs a
         replica. Output tokens a second of ``mori`` against ThunderAgent's router before offloading
         engines (TA+O) and a prefix-aware router before the same; utilisation, and programs that move.
tenants  SAGA §9.6: ten tenants at 80 % load. What each policy does at most is found by having all
         programs there at once; the best of them is 100 %. Then Poisson arrivals: programs done within
         1.5 times what they take alone, for each tenant; utilisation with and without stealing; moves.
scale    64 replicas and 500 programs: what a virtual second costs.

Writes cluster_lab.json, .md and .svg into ``--out``; what is between the marks of the .md was written by hand
and stays. Finished runs are kept in ``--cache``, so that it goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from lab_pages import FIRST_WORDS, less, made_by, marked, write_page
from rich.console import Console
from sojourn_server.cli.console import write_json
from sojourn_server.cli.suite_progress import run_with_progress
from sojourn_server.lab.kept_runs import KeptRuns
from sojourn_server.lab.report.results import made_with
from sojourn_server.lab.report.row import OVERALL, RunRow
from sojourn_server.lab.run import RunSpec
from sojourn_server.lab.workloads.saga import TENANTS

PARTS = ("mori", "tenants", "scale")
MORI_POLICIES = (
    "mori/mori", "thunderagent/thunderagent-offload", "prefix-affinity/lru-offload", "prefix-affinity/stock",
)  # fmt: skip
BASELINES = MORI_POLICIES[1:3]
"""What ``mori`` is held against."""
PUBLISHED = "+54 to +79 % tokens a second over the baselines, ≥ 99 % busy at 80, ≤ 2.9 % of programs change"
TENANT_POLICIES = (
    "saga/saga", "saga-no-affinity/saga", "saga-no-stealing/saga", "saga-no-shares/saga", "sojourn/saga",
    "prefix-affinity/stock", "thunderagent/thunderagent", "random/stock",
)  # fmt: skip
AT_ONCE_PER_S = 1000.0
"""Arrivals a second that make all programs be there at once."""


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--traces", type=Path, help="folder of the recorded traces, for mori")
    parser.add_argument("--workloads", nargs="+", help="for mori, instead: traces, or synthetic:NAME")
    parser.add_argument("--hours", type=float, default=1.0, help="virtual, of each of mori's runs")
    parser.add_argument("--each", type=int, nargs="+", default=[20, 50, 80], help="mori's programs a replica")
    parser.add_argument("--replicas", type=int, default=3, help="mori's")
    parser.add_argument("--tenant-replicas", type=int, default=4)
    parser.add_argument("--tenant-programs", type=int, default=300, help="in all")
    parser.add_argument("--load", type=float, default=0.8, help="of what the best policy does at most")
    parser.add_argument("--scale-replicas", type=int, default=64)
    parser.add_argument("--scale-programs", type=int, default=500, help="at once, on all of them")
    parser.add_argument("--scale-s", type=float, default=60.0, help="virtual seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, help="processes; default: one a core")
    parser.add_argument("--cache", help="folder in which finished runs are kept")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder to write into")
    return parser.parse_args(given)


MORI_TRACES = ("kvct_v6_claude_code.jsonl.gz",)
"""MORI's own load."""
LONG_CONTEXTS = "synthetic:dualpath-64k"
"""Beside it, with the fewest programs a replica."""


def mori_specs(options: argparse.Namespace) -> list[RunSpec]:
    """Load after load, policies in their order."""
    workloads = options.workloads
    if workloads is None:
        if options.traces is None:
            sys.exit("mori needs --traces, a folder of recorded traces, or --workloads")
        workloads = [*(str(options.traces / name) for name in MORI_TRACES), LONG_CONTEXTS]
    return [
        RunSpec(
            policy=policy, workload=workload, hardware="h200", model="qwen3-30b-a3b",
            replicas=options.replicas, programs=options.replicas * each, until_s=3600.0 * options.hours,
            seed=options.seed,
        )
        for workload in workloads
        # Contexts of 64,000 tokens take an hour of these cores for each hour that is played.
        for each in (options.each[:1] if workload == LONG_CONTEXTS else options.each)
        for policy in MORI_POLICIES
    ]  # fmt: skip


def tenant_spec(options: argparse.Namespace, policy: str, rate_per_s: float) -> RunSpec:
    """Ten tenants until all have finished."""
    return RunSpec(
        policy=policy, workload="synthetic:saga-ten-tenants", replicas=options.tenant_replicas,
        programs=options.tenant_programs, rate_per_s=rate_per_s, until_s=None, seed=options.seed,
    )  # fmt: skip


def scale_spec(options: argparse.Namespace) -> RunSpec:
    return RunSpec(
        policy="sojourn/stock", workload="synthetic:continuum-bfcl", replicas=options.scale_replicas,
        programs=options.scale_programs, until_s=options.scale_s, seed=options.seed,
    )  # fmt: skip


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    began = time.monotonic()
    kept = KeptRuns(options.cache) if options.cache else None

    def run(specs: list[RunSpec]) -> list[RunRow]:
        return run_with_progress(specs, processes=options.jobs, kept=kept).rows

    made = made_with(sys.argv)
    found: dict[str, Any] = {}
    sections: list[str] = []
    rows_of: dict[str, list[RunRow]] = {}
    if "mori" in options.only:
        rows_of["mori"] = run(mori_specs(options))
        sections += mori_section(rows_of["mori"])
    if "tenants" in options.only:
        at_once = run([tenant_spec(options, policy, AT_ONCE_PER_S) for policy in TENANT_POLICIES])
        most = max(row.programs_per_hour or 0.0 for row in at_once)
        rate_per_s = round(options.load * most / 3600.0, 6)
        under_load = run([tenant_spec(options, policy, rate_per_s) for policy in TENANT_POLICIES])
        rows_of["tenants_at_once"], rows_of["tenants"] = at_once, under_load
        found["tenants_rate_per_s"] = rate_per_s
        sections += tenant_section(at_once, under_load, options.load, rate_per_s)
    if "scale" in options.only:
        rows_of["scale"] = run([scale_spec(options)])
        sections += scale_section(rows_of["scale"][0])
    found |= {name: [msgspec.to_builtins(row) for row in rows] for name, rows in rows_of.items()}
    options.out.mkdir(parents=True, exist_ok=True)
    write_json({"made_with": msgspec.to_builtins(made), **found}, str(options.out / "cluster_lab.json"))
    drawn = draw(rows_of, options.out / "cluster_lab.svg")
    lines = [
        "# Several replicas in the lab",
        "",
        "Generated by the command below, but for what is between the marks.",
        "",
        made_by(made, time.monotonic() - began),
        "",
        *(["![tokens a second, and programs in time](cluster_lab.svg)", ""] if drawn else []),
        *sections,
        "## What this says",
        "",
        "{by hand}",
        "",
    ]
    text = "\n".join(lines)
    write_page(options.out / "cluster_lab.md", text, FIRST_WORDS)
    Console().print(text, highlight=False, markup=False)


def mori_section(rows: Sequence[RunRow]) -> list[str]:
    """A line a load and policy."""
    first = rows[0]
    lines = []
    for row in rows:
        same = {
            other.policy: other
            for other in rows
            if (other.workload, other.programs) == (row.workload, row.programs)
        }
        against = [
            less(row.output_tok_per_s or 0.0, same[name].output_tok_per_s or 0.0) if name in same else "–"
            for name in BASELINES
        ]
        lines.append(
            [
                row.trace,
                f"{row.programs // (row.replicas or 1)}",
                f"`{row.policy}`",
                f"{row.output_tok_per_s:,.0f}",
                *("" if row.policy == name else cell for name, cell in zip(BASELINES, against, strict=True)),
                f"{row.ttft_s.mean:.1f}" if row.ttft_s.mean is not None else "–",
                _busy(row),
                _changed(row),
                f"{row.regenerated_tokens / max(1, row.prompt_tokens):.1%}",
            ]
        )
    head = [
        "load", "a replica", "policy", "output tok/s", *(f"against `{name}`" for name in BASELINES),
        "TTFT, s", "busy: least, mean", "programs that moved; moves each", "computed again",
    ]  # fmt: skip
    return [
        "## MORI's DP = 3",
        "",
        f"{first.replicas} replicas of {first.hardware} with {first.model}, a KV pool of "
        f"{first.pool_blocks * first.block_size:,} tokens each, closed loop, {first.virtual_s:,.0f} virtual "
        f"s, seed {first.seed}. The paper: {PUBLISHED}.",
        "",
        marked(head, lines),
        "",
    ]


def tenant_section(
    at_once: Sequence[RunRow], rows: Sequence[RunRow], load: float, rate_per_s: float
) -> list[str]:
    """A line a policy: what it does at most, and who is in time at ``load`` of what the best does."""
    first = rows[0]
    most = max(row.programs_per_hour or 0.0 for row in at_once)
    lines = []
    for full, row in zip(at_once, rows, strict=True):
        lines.append(
            [
                f"`{row.policy}`",
                f"{full.programs_per_hour:,.0f} ({less(full.programs_per_hour or 0.0, most)})",
                _met(row, [OVERALL]),
                *(
                    _met(row, [name for name in row.slo_attainment or {} if name.startswith(f"{kind}-")])
                    for kind, *_ in TENANTS
                ),
                f"{row.completion_s.mean:,.0f}" if row.completion_s.mean is not None else "–",
                _busy(row, spread=True),
                _changed(row),
                f"{row.regenerated_tokens / max(1, row.prompt_tokens):.1%}",
            ]
        )
    kinds = [f"in time: {kind} tenants" for kind, *_ in TENANTS]
    head = [
        "policy", "programs/h at most", "in time: all", *kinds, "completion, s", "busy: least to most",
        "programs that moved; moves each", "computed again",
    ]  # fmt: skip
    return [
        "## SAGA's ten tenants",
        "",
        f"{first.replicas} replicas of {first.hardware} with {first.model}, {first.programs} programs in "
        f"all, seed {first.seed}. At most: all there at once. In time: within 1.5 times what a program takes "
        f"alone on an empty replica, at {load:.0%} of the most, {rate_per_s:.3g} programs a second. The "
        "paper has 99.2 % overall and 98.7 % of light tenants in time, and 30 % less throughput than batch "
        "scheduling.",
        "",
        marked(head, lines),
        "",
    ]


def scale_section(row: RunRow) -> list[str]:
    """What one large run took."""
    turns = sum(replica.turns for replica in row.per_replica)
    return [
        "## Scale",
        "",
        f"{row.replicas} replicas, {row.programs:,} programs at once under `{row.policy}`: "
        f"{row.virtual_s:,.0f} virtual s took {row.wall_s:,.0f} s, {row.steps:,} steps and {turns:,} turns; "
        f"{row.virtual_s / row.wall_s:.2f} virtual s a second on one core.",
        "",
    ]


def draw(rows_of: dict[str, list[RunRow]], path: Path) -> bool:
    """Tokens a second by load, and programs in time by policy. False: there is nothing to draw."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "sojourn"
    parts = [name for name in ("mori", "tenants") if name in rows_of]
    if not parts:
        return False
    figure = Figure(figsize=(6.5 * len(parts), 4.0), layout="constrained")
    axes = figure.subplots(1, len(parts), squeeze=False)[0]
    for axis, part in zip(axes, parts, strict=True):
        rows = rows_of[part]
        if part == "mori":
            trace = rows[0].trace
            for policy in dict.fromkeys(row.policy for row in rows):
                mine = [row for row in rows if (row.policy, row.trace) == (policy, trace)]
                axis.plot(
                    [row.programs / (row.replicas or 1) for row in mine],
                    [row.output_tok_per_s or 0.0 for row in mine],
                    marker="o",
                    label=policy,
                )
            axis.set(
                title=trace, xlabel="programs a replica", ylabel="output tokens a second", ylim=(0, None)
            )
            axis.legend(frameon=False)
        else:
            names = [row.policy for row in rows]
            shares = [100 * (row.slo_attainment or {}).get(OVERALL, 0.0) for row in rows]
            axis.barh(names, shares)
            axis.invert_yaxis()
            axis.set(title="ten tenants", xlabel="programs in time, %", xlim=(0, 100))
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    return True


def _met(row: RunRow, tenants: Sequence[str]) -> str:
    """The share in time, tenants alike whatever they sent."""
    known = [(row.slo_attainment or {})[name] for name in tenants if name in (row.slo_attainment or {})]
    return f"{sum(known) / len(known):.1%}" if known else "–"


def _busy(row: RunRow, *, spread: bool = False) -> str:
    used = row.utilisation
    if used is None:
        return "–"
    return f"{used.min:.1%} to {used.max:.1%}" if spread else f"{used.min:.1%}, {used.mean:.1%}"


def _changed(row: RunRow) -> str:
    changes = row.replica_changes
    return "–" if changes is None else f"{changes.programs_share:.1%}; {changes.per_program:.2f}"


if __name__ == "__main__":
    main()
