"""MORI's single-replica set-ups in the simulator: ``mori`` against its baselines (MORI §6.2).

    python benchmarks/mori_setups.py --traces traces --json benchmarks/results/mori_setups.json

Each run is one virtual hour of the Claude Code trace in a closed loop: three set-ups, with 20, 50 and 80
concurrent programs, and with host memory of one and two times the KV pool. Reports output throughput and mean
TTFT, absolute and relative to ``thunderagent-offload``, the paper's baseline. ``--only SETUP …`` and
``--policies …`` run some of these and keep the other results of the JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from result_pages import less, show

COMMAND = "python benchmarks/mori_setups.py --traces traces --json benchmarks/results/mori_setups.json"
TRACE = "kvct_v6_claude_code.jsonl.gz"
SETUPS: dict[str, tuple[str, ...]] = {
    "h200-80gb, qwen2.5-7b": ("--hardware", "h200-80gb", "--model", "qwen2.5-7b"),
    "h200, qwen3-30b-a3b": ("--hardware", "h200", "--model", "qwen3-30b-a3b"),
    "b200, llama-3.1-70b, tp 2": ("--hardware", "b200", "--model", "llama-3.1-70b", "--tp", "2"),
}
BASELINE = "thunderagent-offload"
POLICIES = ("mori", BASELINE, "lru-offload", "admit", "stock")
RATIOS = ("1", "2")


def simulate(
    trace: Path, options: tuple[str, ...], policies: list[str], load: str, hours: str, target: Path
) -> dict[str, Any]:
    """Run one sweep over the size of host memory, and return its JSON."""
    command = [sys.executable, "-c", "from sojourn_server.cli import main; main()", "simulate", str(trace)]
    ratios = ("--sweep", f"cpu_ratio={','.join(RATIOS)}")
    more = ("--policy", ",".join(policies), "--programs", load, "--hours", hours, "--no-async-scheduling")
    subprocess.run([*command, *options, *more, *ratios, "--json", str(target)], check=True)
    document: dict[str, Any] = json.loads(target.read_text())
    return document


def cells(document: dict[str, Any]) -> dict[str, Any]:
    """Return the table's figures for each host memory ratio and policy."""
    runs = document["runs"]
    found: dict[str, Any] = {}
    for value in document["sweep"]["values"]:
        of = {runs[index]["policy"]: runs[index] for index in value["runs"]}
        found[f"{value['value']:g}"] = {
            name: {
                "output_tok_per_s": run["output_tok_per_s"],
                "ttft_mean_s": run["ttft_s"]["mean"],
                "ttft_p95_s": run["ttft_s"]["p95"],
                "finished": run["programs_finished"],
                "again_share": run["regenerated_tokens"] / max(1, run["prompt_tokens"]),
            }
            for name, run in of.items()
        }
    return found


def main() -> None:
    """Run, print, and write the results after each load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help=f"folder of {TRACE}")
    parser.add_argument("--only", nargs="+", choices=list(SETUPS), default=list(SETUPS))
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--programs", nargs="+", default=["20", "50", "80"])
    parser.add_argument("--hours", default="1")
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    kept = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    found: dict[str, Any] = kept.get("setups", {})
    with tempfile.TemporaryDirectory() as folder:
        for load in options.programs:
            for setup in options.only:
                target = Path(folder) / "run.json"
                document = simulate(
                    options.traces / TRACE, SETUPS[setup], options.policies, load, options.hours, target
                )
                of_load = found.setdefault(setup, {}).setdefault(load, {})
                for ratio, of in cells(document).items():
                    of_load.setdefault(ratio, {}).update(of)
                if options.json:
                    facts = {"hours": options.hours, "seed": 0, "made_with": document["made_with"]}
                    result = {"command": COMMAND, **facts, "setups": found}
                    options.json.write_text(json.dumps(result, indent=2) + "\n")
    print("output tokens a second / mean TTFT; the last two against " + BASELINE)
    lines = []
    for setup, loads in found.items():
        for load, ratios in loads.items():
            for ratio, of in ratios.items():
                if not set(POLICIES) <= set(of):
                    continue
                cell = [
                    f"{of[name]['output_tok_per_s']:.0f} / {of[name]['ttft_mean_s']:.0f} s"
                    for name in POLICIES
                ]
                compared = ("output_tok_per_s", "ttft_mean_s")
                changes = (less(of["mori"][key], of[BASELINE][key]) for key in compared)
                lines.append((setup, load, ratio, *cell, *changes))
    show(("set-up", "programs", "ratio", *POLICIES, "mori: tokens", "mori: TTFT"), lines)


if __name__ == "__main__":
    main()
