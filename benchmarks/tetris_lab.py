"""Long outputs in the lab: Tetris beside stock, with every predictor and without each of its parts.

    python benchmarks/tetris_lab.py --traces traces --json benchmarks/results/tetris_lab.json

Synthetic requests with published output lengths of reasoning models, and real agent traces, closed loop,
half a virtual hour each. Of each load: output throughput, preemptions, cascades, time per output token and to
the first, as they are and against ``stock``. ``--only LOAD …`` and ``--policies …`` run some and keep the
others of the JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

COMMAND = "python benchmarks/tetris_lab.py --traces traces --json benchmarks/results/tetris_lab.json"
WITHOUT = Path(__file__).parent / "tetris_without"
LOADS: dict[str, tuple[str, ...]] = {
    "reasoning-mix": ("synthetic:reasoning-mix", "--programs", "120"),
    "reasoning-math": ("synthetic:reasoning-math", "--programs", "160"),
    "reasoning-agent": ("synthetic:reasoning-agent", "--programs", "80"),
    "claude-code": ("kvct_v6_claude_code.jsonl.gz", "--programs", "40", "--max-gap-s", "60"),
    "isobench": ("isobench_trae.jsonl.gz", "--programs", "60"),
}
DEVICE = ("--hardware", "a100-80gb", "--model", "llama-3.1-8b")
POLICIES = (
    "stock", "tetris", "tetris+host", "tetris+oracle", "mean-length", "no-prediction", "no-gate",
    "no-best-fit",
)  # fmt: skip


def named(policy: str) -> str:
    """As ``sojourn simulate`` knows it: what lies beside this file is a file."""
    file = WITHOUT / f"{policy}.toml"
    return str(file) if file.exists() else policy


def simulate(load: str, policies: list[str], options: argparse.Namespace, target: Path) -> dict[str, Any]:
    """The JSON of all policies on one load."""
    workload, *how = LOADS[load]
    if not workload.startswith("synthetic:"):
        workload = str(options.traces / workload)
    command = [sys.executable, "-c", "from sojourn_server.cli import main; main()", "simulate", workload]
    which = ("--policy", ",".join(named(policy) for policy in policies), "--hours", options.hours)
    subprocess.run([*command, *how, *DEVICE, *which, "--json", str(target)], check=True)
    document: dict[str, Any] = json.loads(target.read_text())
    return document


def figures(run: dict[str, Any]) -> dict[str, Any]:
    """What the table needs of a run."""
    return {
        **{key: run[key] for key in ("output_tok_per_s", "preemptions", "cascades", "regenerated_tokens")},
        "tpot_p50_s": run["tpot_s"]["p50"],
        "tpot_p99_s": run["tpot_s"]["p99"],
        "ttft_mean_s": run["ttft_s"]["mean"],
        "scheduler_ms_per_step": run["scheduler_ms_per_step"],
        "turns": run["tpot_s"]["count"],
    }


def less(value: float, than: float) -> str:
    """A change in percent."""
    return f"{value / than - 1:+.0%}" if than else "–"


def table(found: dict[str, dict[str, Any]]) -> Table:
    """All loads and policies, against stock."""
    made = Table(
        "load",
        "policy",
        "tokens/s",
        "× stock",
        "preemptions",
        "",
        "cascades",
        "",
        "TPOT P99 ms",
        "better ×",
        "TTFT s",
    )
    for load, of in found.items():
        stock = of.get("stock")
        for policy, run in of.items():
            base = stock or run
            made.add_row(
                load, policy, f"{run['output_tok_per_s']:.0f}",
                f"{run['output_tok_per_s'] / base['output_tok_per_s']:.3f}",
                f"{run['preemptions']}", less(run["preemptions"], base["preemptions"]),
                f"{run['cascades']}", less(run["cascades"], base["cascades"]),
                f"{1e3 * run['tpot_p99_s']:.0f}", f"{base['tpot_p99_s'] / run['tpot_p99_s']:.1f}",
                f"{run['ttft_mean_s']:.1f}",
            )  # fmt: skip
        made.add_section()
    return made


def main() -> None:
    """Run, print, write after each load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the traces")
    parser.add_argument("--only", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--hours", default="0.5")
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    kept = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    found: dict[str, dict[str, Any]] = kept.get("loads", {})
    with tempfile.TemporaryDirectory() as folder:
        for load in options.only:
            document = simulate(load, options.policies, options, Path(folder) / "run.json")
            of = found.setdefault(load, {})
            of.update({run["policy"]: figures(run) for run in document["runs"]})
            facts = {"hours": options.hours, "seed": 0, "made_with": document["made_with"]}
            if options.json:
                result = {"command": COMMAND, **facts, "device": DEVICE, "loads": found}
                options.json.write_text(json.dumps(result, indent=2) + "\n")
    Console(width=150).print(table(found))


if __name__ == "__main__":
    main()
