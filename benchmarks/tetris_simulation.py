"""Long outputs in the simulator, with stock, and with Tetris with each predictor and without each of its
parts.

    python benchmarks/tetris_simulation.py --traces traces --out benchmarks/results

Runs synthetic requests with published output lengths of reasoning models, and real agent traces, in a closed
loop for half a virtual hour each. Reports per load the output throughput, preemptions, preemptions within ten
steps of another one (cascades), time per output token and time to first token, absolute and relative to
``stock``. ``tetris+host+erring`` stands for the network on hidden states. It predicts the remaining output of
running requests with the network's mean error on a real engine (learned_length_prediction.md), and the output
of waiting requests like ``survival``.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from kept_runs import run_arguments, run_kept
from msgspec import to_builtins
from oracle_policies import oracle_row
from result_pages import Result, less, marked, show
from sojourn_server.simulator.report.run_row import RunRow
from sojourn_server.simulator.simulation_run import RunSpec

WITHOUT = Path(__file__).parent / "tetris_ablations"
LOADS = {
    "reasoning-mix": RunSpec(policy="", workload="synthetic:reasoning-mix", programs=120),
    "reasoning-math": RunSpec(policy="", workload="synthetic:reasoning-math", programs=160),
    "reasoning-agent": RunSpec(policy="", workload="synthetic:reasoning-agent", programs=80),
    "claude-code": RunSpec(policy="", workload="kvct_v6_claude_code", programs=40, max_gap_s=60.0),
    "isobench": RunSpec(policy="", workload="isobench_trae", programs=60),
}
DEVICE = {"hardware": "a100-80gb", "model": "llama-3.1-8b"}
POLICIES = (
    "stock", "tetris", "tetris+host", "tetris+host+oracle", "tetris+host+erring",
    "no-prediction", "no-gate", "no-best-fit",
)  # fmt: skip
ERROR = 1.17
"""Mean |ln(actual ÷ predicted)| of the remaining lengths that the network predicts
(learned_length_prediction.md)."""


def named(policy: str) -> str:
    """Return the policy's name for ``sojourn simulate``, or the path of its preset file in
    ``tetris_ablations``."""
    file = WITHOUT / f"{policy}.toml"
    if policy.endswith("+erring"):
        return f"{policy}={ERROR}"
    return str(file) if file.exists() else policy


def simulate(load: str, options: argparse.Namespace) -> dict[str, RunRow]:
    """Simulate all policies on one load. Return their rows by policy."""
    spec = LOADS[load]
    workload = spec.workload
    if not workload.startswith("synthetic:"):
        workload = str(options.traces / f"{workload}.jsonl.gz")
    specs = [
        replace(spec, policy=named(policy), workload=workload, until_s=3600.0 * options.hours, **DEVICE)
        for policy in POLICIES
    ]
    return dict(zip(POLICIES, run_kept(specs, options.cache, options.jobs, oracle_row), strict=True))


HEAD = (
    "load", "policy", "tokens/s", "", "preemptions", "", "cascades", "", "TPOT P99 ms", "better", "TTFT s",
)  # fmt: skip


def lines(found: dict[str, dict[str, RunRow]]) -> list[tuple[str, ...]]:
    """Return the table's rows for all loads and policies, relative to stock."""
    made = []
    for load, of in found.items():
        for policy, run in of.items():
            base = of.get("stock", run)
            figures = (
                f"{run.output_tok_per_s:.0f}", f"{run.output_tok_per_s / base.output_tok_per_s - 1:+.1%}",
                f"{run.preemptions:,}", less(run.preemptions, base.preemptions),
                f"{run.cascades:,}", less(run.cascades, base.cascades),
                f"{1e3 * run.tpot_s.p99:,.0f}", f"{base.tpot_s.p99 / run.tpot_s.p99:.1f} ×",
                f"{run.ttft_s.mean:.1f}",
            )  # fmt: skip
            made.append((load, policy, *figures))
    return made


def main() -> None:
    """Run, print, and write the results after each load."""
    parser = run_arguments(__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the traces")
    parser.add_argument("--hours", type=float, default=0.5)
    options = parser.parse_args()
    result = Result("tetris_simulation", "Tetris in the simulator")
    found: dict[str, dict[str, RunRow]] = {}
    about = (
        f"{' + '.join(DEVICE.values())} in virtual time, {options.hours} hours, seed 0. Percentages and "
        "factors are against `stock`."
    )
    for load in LOADS:
        found[load] = simulate(load, options)
        document = {
            "hours": options.hours, "seed": 0, "error": ERROR, "device": DEVICE, "loads": to_builtins(found),
        }  # fmt: skip
        result.write(options.out, document, about, marked(HEAD, lines(found)), "{by hand}")
    show(HEAD, lines(found))


if __name__ == "__main__":
    main()
