"""Several replicas in the simulator: MORI with DP = 3, SAGA's ten tenants, and scale.

    python benchmarks/cluster_simulation.py --only mori scale --traces traces --hours 0.2 --cache kept
    python benchmarks/cluster_simulation.py --only tenants --jobs 1 --cache cluster-cache

``--only`` selects parts:

mori     MORI §6.2 with three replicas: h200, qwen3-30b-a3b, a closed loop of 20, 50 and 80 programs per
         replica. Output tokens per second of ``mori`` against ThunderAgent's router and a prefix-aware
         router, both with offloading engines (TA+O); utilisation, and programs that move.
tenants  SAGA §9.6: ten tenants at 80 % load, on the paper's model and devices. A policy's capacity is its
         throughput with all programs present; the largest is 100 %. Then Poisson arrivals: programs per
         tenant that finish within 1.5 times their time alone, utilisation with and without stealing, moves,
         and SAGA's Table 4. Has its own page, cluster_tenants.
scale    64 replicas and 500 programs: CPU time per virtual second.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from kept_runs import run_arguments, run_kept
from result_pages import Result, less, marked
from sojourn_server.routing.routing_records import RoutedProgram
from sojourn_server.simulator.report.run_metrics import summarize_run
from sojourn_server.simulator.report.run_row import OVERALL, RunRow
from sojourn_server.simulator.simulated_clients import DEFAULT_TENANT, agent_type_of
from sojourn_server.simulator.simulated_gateway import SimulatedGateway
from sojourn_server.simulator.simulation import Simulation
from sojourn_server.simulator.simulation_run import RunSpec, run_simulation
from sojourn_server.simulator.workloads.arrival_processes import load_programs, open_loop
from sojourn_server.simulator.workloads.program_plans import PlaybackOptions, ProgramPlan, ProgramPlanner
from sojourn_server.simulator.workloads.synthetic_workloads import TENANTS

PARTS = ("mori", "tenants", "scale")
MORI_POLICIES = (
    "mori/mori", "thunderagent/thunderagent-offload", "prefix-affinity/lru-offload", "prefix-affinity/stock",
)  # fmt: skip
BASELINES = MORI_POLICIES[1:3]
"""Policies with which ``mori`` is compared."""
PUBLISHED = "+54 to +79 % tokens a second over the baselines, ≥ 99 % busy at 80, ≤ 2.9 % of programs change"
AT_MOST_POLICIES = ("sojourn/sojourn", "thunderagent/thunderagent", "saga/saga")
"""Policies whose maximum throughput is measured."""
HERE = Path(__file__).parent
TENANT_POLICIES = (
    "sojourn/sojourn", "saga/saga", "prefix-affinity/stock", "thunderagent/thunderagent",
    f"{HERE}/cluster_ablations/saga-no-affinity.toml",
)  # fmt: skip
"""Policies under load. They are whole systems, and SAGA without its gateway's affinity. Its other parts
change nothing at this load, where nothing is computed again."""
SEED_POLICIES = ("sojourn/sojourn", "thunderagent/thunderagent", "prefix-affinity/stock")
MORE_SEEDS = (1, 2, 3)
"""Policies that are also run with these seeds."""
LESS_POLICIES = TENANT_POLICIES[:2]
"""Policies that are also run at lower load."""
WHOLE = {"saga-no-": "saga/saga"}
"""Prefix of an ablation's name → the policy with which the ablation is compared."""
TENANT_HARDWARE, TENANT_MODEL, TENANT_TP = "a100-80gb", "llama-3.1-70b", 4
"""SAGA §8: Llama-3-70B on four A100 per instance."""
SEEN = 300
"""Number of finished programs that the policies know before the run, because SAGA profiles its agents
(§6.1)."""
HISTORY_SEED = 1_000_003
"""Added to a run's seed, this gives the seed of these programs."""
AT_ONCE_PER_S = 1000.0
"""Arrivals per second. At this rate all programs are present almost at once."""


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = run_arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--traces", type=Path, help="folder of the recorded traces, for mori")
    parser.add_argument("--hours", type=float, default=1.0, help="virtual, of each of mori's runs")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(given)


MORI_REPLICAS = TENANT_REPLICAS = 3
MORI_EACH = (20, 50, 80)
"""Programs per replica."""
SCALE_REPLICAS, SCALE_PROGRAMS, SCALE_S = 64, 500, 60.0
TENANT_PROGRAMS = 48
"""In all."""
LOAD, LESS_LOAD = 0.8, 0.56
"""Loads of the tenants, as shares of what the best policy does at most. The second is 0.8 of what pays
30 %."""
MORI_TRACE = "kvct_v6_claude_code.jsonl.gz"
"""The recorded trace of MORI's own experiments."""
LONG_CONTEXTS = "synthetic:dualpath-64k"
"""A second workload for MORI, with few long programs per replica."""


def mori_specs(options: argparse.Namespace) -> list[RunSpec]:
    """Return the specifications of MORI's runs: for each load in turn, one per policy."""
    if options.traces is None:
        sys.exit("mori needs --traces, a folder of recorded traces")
    return [
        RunSpec(
            policy=policy, workload=workload, hardware="h200", model="qwen3-30b-a3b",
            replicas=MORI_REPLICAS, programs=MORI_REPLICAS * each, until_s=3600.0 * options.hours,
            seed=options.seed,
        )
        for workload in (str(options.traces / MORI_TRACE), LONG_CONTEXTS)
        # With contexts of 64,000 tokens, a virtual hour takes a real hour.
        for each in (MORI_EACH[:1] if workload == LONG_CONTEXTS else MORI_EACH)
        for policy in MORI_POLICIES
    ]  # fmt: skip


def tenant_spec(
    options: argparse.Namespace, policy: str, rate_per_s: float, seed: int | None = None
) -> RunSpec:
    """Return the specification of a run of the ten tenants that lasts until all programs have finished."""
    return RunSpec(
        policy=policy, workload="synthetic:saga-ten-tenants", hardware=TENANT_HARDWARE, model=TENANT_MODEL,
        tp=TENANT_TP, replicas=TENANT_REPLICAS, programs=TENANT_PROGRAMS,
        rate_per_s=rate_per_s, until_s=None, seed=options.seed if seed is None else seed,
    )  # fmt: skip


def tenant_row(spec: RunSpec) -> RunRow:
    """The metrics of a run. Gateway and clients have seen ``SEEN`` programs of another seed before it."""
    seed = spec.seed + HISTORY_SEED

    def prepare(simulation: Simulation) -> None:
        limits = PlaybackOptions(max_context_tokens=simulation.replicas[0].engine.options.max_model_len)
        planner = ProgramPlanner(load_programs(spec.workload, seed), limits)
        learn(simulation, (plan for _, plan in open_loop(planner, 1.0, SEEN, seed).initial))

    return summarize_run(run_simulation(spec, prepare=prepare))


def learn(simulation: Simulation, plans: Iterable[ProgramPlan]) -> None:
    """Let clients and gateway know ``plans``, as if each had run alone on an engine."""
    for plan in plans:
        kind = agent_type_of(plan)
        simulation.clients.history.observe_end(kind, len(plan.plans))
        if isinstance(simulation.front, SimulatedGateway):
            took_s, turns, last = simulation.expected_s(plan), len(plan.plans), plan.plans[-1]
            program = RoutedProgram(
                (plan.tenant or DEFAULT_TENANT, ""), kind, None, 0.0, took_s,
                context_tokens=last.prompt_tokens + last.output_tokens, turns=turns,
            )  # fmt: skip
            tools_s = sum(map(plan.gap_s, range(turns - 1)))
            simulation.front.core.estimator.observe_turn(program, (took_s - tools_s) / turns)
            simulation.front.core.estimator.ended(program, took_s)


def scale_spec(options: argparse.Namespace) -> RunSpec:
    return RunSpec(
        policy="sojourn/stock", workload="synthetic:continuum-bfcl", replicas=SCALE_REPLICAS,
        programs=SCALE_PROGRAMS, until_s=SCALE_S, seed=options.seed,
    )  # fmt: skip


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    if {"mori", "scale"} & set(options.only):
        write_cluster(options)
    if "tenants" in options.only:
        write_tenants(options)


def write_cluster(options: argparse.Namespace) -> None:
    """Run the parts ``mori`` and ``scale``, and write their page."""
    result = Result("cluster_simulation", "Several replicas in the simulator")
    sections: list[str] = []
    found: dict[str, Any] = {}
    if "mori" in options.only:
        rows = run_kept(mori_specs(options), options.cache, options.jobs)
        found["mori"] = msgspec.to_builtins(rows)
        sections += mori_section(rows)
    if "scale" in options.only:
        [row] = run_kept([scale_spec(options)], options.cache, options.jobs)
        found["scale"] = msgspec.to_builtins([row])
        sections += scale_section(row)
    result.write_paper(options.out, found, [*sections, "## Summary", "{by hand}"])


def write_tenants(options: argparse.Namespace) -> None:
    """Run the part ``tenants``, and write its page."""
    result = Result("cluster_tenants", "SAGA's ten tenants in the simulator")
    run = partial(run_kept, folder=options.cache, jobs=options.jobs, work=tenant_row)
    at_once = run([tenant_spec(options, policy, AT_ONCE_PER_S) for policy in AT_MOST_POLICIES])

    def under(load: float, policies: Sequence[str]) -> list[RunRow]:
        rate_per_s = rate_of(at_once, load)
        return run([tenant_spec(options, policy, rate_per_s) for policy in policies])

    rows, less_rows = under(LOAD, TENANT_POLICIES), under(LESS_LOAD, LESS_POLICIES)
    rate_per_s = rate_of(at_once, LOAD)
    seed_rows = run(
        [tenant_spec(options, policy, rate_per_s, seed) for seed in MORE_SEEDS for policy in SEED_POLICIES]
    )
    found = {
        "rates_per_s": {load: rate_of(at_once, load) for load in (LOAD, LESS_LOAD)},
        "at_once": [msgspec.to_builtins(row) for row in at_once],
        "under_load": [msgspec.to_builtins(row) for row in rows],
        "under_less_load": [msgspec.to_builtins(row) for row in less_rows],
        "more_seeds": [msgspec.to_builtins(row) for row in seed_rows],
    }
    sections = at_most_section(at_once)
    sections += tenant_section(rows, LOAD, rate_per_s)
    sections += seed_section([*(row for row in rows if row.policy in SEED_POLICIES), *seed_rows])
    sections += tenant_section(less_rows, LESS_LOAD, rate_of(at_once, LESS_LOAD))
    result.write_paper(options.out, found, [*sections, "## Summary", "{by hand}"])


def seed_section(rows: Sequence[RunRow]) -> list[str]:
    """Return the page's section on further seeds at the same rate: in time, and mean completion."""
    seeds = sorted({row.seed for row in rows})
    found = {(row.policy, row.seed): row for row in rows}
    lines = []
    for policy in SEED_POLICIES:
        of = [found[policy, seed] for seed in seeds]
        shares = [(row.slo_attainment or {}).get(OVERALL, 0.0) for row in of]
        each = [f"{_met(row, [OVERALL])}; {row.completion_s.mean:,.0f} s" for row in of]
        lines.append([f"`{policy}`", *each, f"{sum(shares) / len(shares):.1%}"])
    head = ["policy", *(f"seed {seed}" for seed in seeds), "in time, mean"]
    return ["In time and mean completion, by seed, at the same rate:", marked(head, lines)]


def rate_of(at_once: Sequence[RunRow], load: float) -> float:
    """Return ``load`` times the throughput of the best policy, in programs per second."""
    most = max(row.programs_per_hour or 0.0 for row in at_once)
    return round(load * most / 3600.0, 6)


Columns = dict[str, Callable[[RunRow], str]]
"""Head of a column → the cell of a row."""
POLICY: Columns = {"policy": lambda row: f"`{row.policy}`"}
TOKENS: Columns = {"output tok/s": lambda row: f"{row.output_tok_per_s:,.0f}"}
COMPLETION: Columns = {
    "completion, s": lambda row: "–" if row.completion_s.mean is None else f"{row.completion_s.mean:,.0f}"
}


def columns(rows: Sequence[RunRow], *parts: Columns) -> str:
    """Return a table with a line for each row."""
    cells = {head: cell for part in parts for head, cell in part.items()}
    return marked(list(cells), [[cell(row) for cell in cells.values()] for row in rows])


def devices(row: RunRow) -> str:
    return (
        f"{row.replicas} replicas of {row.hardware} with {row.model}, a KV pool of "
        f"{row.pool_blocks * row.block_size:,} tokens each"
    )


def mori_section(rows: Sequence[RunRow]) -> list[str]:
    """Return the page's section with MORI's results: one row per load and policy."""
    tokens = {(row.workload, row.programs, row.policy): row.output_tok_per_s or 0.0 for row in rows}

    def against(name: str, row: RunRow) -> str:
        theirs = tokens.get((row.workload, row.programs, name))
        mine = row.output_tok_per_s or 0.0
        return "" if row.policy == name else "–" if theirs is None else less(mine, theirs)

    first = rows[0]
    return [
        "## MORI's DP = 3",
        f"{devices(first)}, closed loop, {first.virtual_s:,.0f} virtual s, seed {first.seed}. The paper: "
        f"{PUBLISHED}.",
        columns(
            rows,
            {"load": lambda row: row.trace},
            {"a replica": lambda row: f"{row.programs // (row.replicas or 1)}"},
            POLICY,
            TOKENS,
            {f"against `{name}`": partial(against, name) for name in BASELINES},
            {"TTFT, s": lambda row: "–" if row.ttft_s.mean is None else f"{row.ttft_s.mean:.1f}"},
            {"busy: least, mean": _busy},
            MOVED,
            AGAIN,
        ),
    ]


def at_most_section(rows: Sequence[RunRow]) -> list[str]:
    """Return the page's section on the maximum throughput of the policies."""
    first = rows[0]
    most = max(row.programs_per_hour or 0.0 for row in rows)
    return [
        "## All programs present at once",
        f"{devices(first)}, {first.programs} programs in all, seed {first.seed}. Programs an hour until the "
        "last has ended; the best is taken for the batch-optimal order. SAGA pays 30 % of that (its table "
        "8).",
        columns(
            rows,
            POLICY,
            {"programs/h": lambda row: f"{row.programs_per_hour:,.1f}"},
            {"against the best": lambda row: less(row.programs_per_hour or 0.0, most)},
            TOKENS,
            COMPLETION,
            AGAIN,
            MOVED,
            SPREAD,
        ),
    ]


def tenant_section(rows: Sequence[RunRow], load: float, rate_per_s: float) -> list[str]:
    """Return the page's section on programs that finish in time, at ``load`` times the best throughput."""
    means = {row.policy: row.completion_s.mean for row in rows}

    def of_kind(kind: str, row: RunRow) -> str:
        return _met(row, [name for name in row.slo_attainment or {} if name.startswith(f"{kind}-")])

    return [
        f"## At {load:.0%} of the best",
        f"Poisson arrivals, {rate_per_s:.3g} programs a second. In time: within 1.5 times what a program "
        "takes alone on an empty replica; of a kind, the mean of its tenants. The paper: SAGA 99.2 % "
        "of all, 99.1, 99.4 and 98.7 % of heavy, medium and light tenants; vLLM 67.3 %. Its table 4: "
        "completion +96 % without affinity, +31 % without stealing, +8 % without shares, +54 % without its "
        "eviction, +42 % without times-to-live, +19 % without prefetch.",
        columns(
            rows,
            POLICY,
            {"in time: all": lambda row: _met(row, [OVERALL])},
            {f"{kind} tenants": partial(of_kind, kind) for kind, *_ in TENANTS},
            COMPLETION,
            {"against the whole": lambda row: _against_whole(row.policy, means)},
            SPREAD,
            MOVED,
            AGAIN,
        ),
    ]


def _against_whole(policy: str, means: dict[str, float | None]) -> str:
    """Return an ablation's mean completion time relative to the whole system; empty for other policies."""
    for begins, whole in WHOLE.items():
        mine, its = means.get(policy), means.get(whole)
        if policy.startswith(begins) and mine is not None and its is not None:
            return less(mine, its)
    return ""


def scale_section(row: RunRow) -> list[str]:
    """Return the page's section on the cost of one large run."""
    turns = sum(replica.turns for replica in row.per_replica)
    return [
        "## Scale",
        f"{row.replicas} replicas, {row.programs:,} programs at once under `{row.policy}`: "
        f"{row.virtual_s:,.0f} virtual s took {row.wall_s:,.0f} s, {row.steps:,} steps and {turns:,} turns; "
        f"{row.virtual_s / row.wall_s:.2f} virtual s a second on one core.",
    ]


def _met(row: RunRow, tenants: Sequence[str]) -> str:
    """Return the share of programs that finished in time, as the mean over ``tenants``."""
    known = [(row.slo_attainment or {})[name] for name in tenants if name in (row.slo_attainment or {})]
    return f"{sum(known) / len(known):.1%}" if known else "–"


def _busy(row: RunRow, *, spread: bool = False) -> str:
    used = row.utilisation
    if used is None:
        return "–"
    least, mean, most = (f"{used[name]:.1%}" for name in ("min", "mean", "max"))
    return f"{least} to {most}" if spread else f"{least}, {mean}"


def _changed(row: RunRow) -> str:
    changes = row.replica_changes
    return "–" if changes is None else f"{changes['programs_share']:.1%}; {changes['per_program']:.2f}"


AGAIN: Columns = {"computed again": lambda row: f"{row.regenerated_tokens / max(1, row.prompt_tokens):.1%}"}
MOVED: Columns = {"programs that moved; moves each": _changed}
SPREAD: Columns = {"busy: least to most": partial(_busy, spread=True)}


if __name__ == "__main__":
    main()
