"""The demo with contexts larger than the KV pool: stock, and host memory with LRU or our presets.

    python benchmarks/kv_offload_demo.py --json benchmarks/results/kv_offload_demo.json

Eight coding agents run; their final contexts together are ``--times`` the KV pool. All arms but stock have 1
GiB of host memory; tasks, seed, flags and pool are equal. ``lru`` is our offload connector with vLLM's
eviction order (``observe``). The arms alternate, ``--rounds`` times; figures are medians over the rounds. Run
it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

COMMAND = "python benchmarks/kv_offload_demo.py --json benchmarks/results/kv_offload_demo.json"
HOST = ("--kv-host-gib", "1")
PROGRAMS = 8
ARMS: dict[str, tuple[str, ...]] = {
    "stock": ("--arms", "stock"),
    "lru": ("--arms", "sojourn", "--policy", "observe", *HOST),
    "mori": ("--arms", "sojourn", "--policy", "mori", *HOST),
    "saga": ("--arms", "sojourn", "--policy", "saga", *HOST),
}
KEPT = ("completion_mean_s", "completion_p95_s", "ttft_mean_s", "prefill_again_tokens", "preemptions")


def run_arm(options: tuple[str, ...], times: float, target: Path) -> dict[str, Any]:
    """Run one arm. Return its figures, and machine, versions, seed and pool under ``facts``."""
    command = [sys.executable, "-c", "from sojourn_server.cli import main; main()", "demo"]
    resident = ("--resident", f"{PROGRAMS / times:.4f}")
    subprocess.run([*command, *options, *resident, "--json", str(target)], check=True)
    document = json.loads(target.read_text())
    (arm,) = document["arms"].values()
    facts = {key: document[key] for key in ("machine", "versions", "seed", "pool")}
    figures = {key: arm[key] for key in (*KEPT, "tiers")}
    return {**figures, "fixed": arm["repositories_fixed"], "facts": facts}


def medians(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median of each figure over the runs of one arm."""
    return {key: median(run[key] for run in runs) for key in KEPT}


def overlap(runs: list[dict[str, Any]]) -> str:
    """Return the median share of copies between device and host memory for which no request waited."""
    shares = [run["tiers"].get("traffic", {}).get("overlapped") for run in runs]
    known = [share for share in shares if share is not None]
    return f"{median(known):.0%}" if known else "–"


def main() -> None:
    """Run, print, and write the results after each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--times", type=float, default=3.0, help="contexts together, in KV pools")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in options.only}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for name in options.only:
                runs[name].append(run_arm(ARMS[name], options.times, Path(folder) / "arm.json"))
            if options.json:
                result = {
                    "command": COMMAND,
                    "times": options.times,
                    "medians": {name: medians(of) for name, of in runs.items()},
                    "runs": runs,
                }
                options.json.write_text(json.dumps(result, indent=2) + "\n")
    found = {name: medians(of) for name, of in runs.items()}
    table = Table("arm", "mean s", "× stock", "× lru", "P95 s", "TTFT s", "again", "% of stock's", "overlap")
    for name, arm in found.items():
        mean_s, again = arm["completion_mean_s"], arm["prefill_again_tokens"]

        def ratio(to: str, mean_s: float = mean_s) -> str:
            return f"{found[to]['completion_mean_s'] / mean_s:.2f}" if to in found else "–"

        share = f"{100 * again / found['stock']['prefill_again_tokens']:.1f}" if "stock" in found else "–"
        table.add_row(
            name, f"{mean_s:.1f}", ratio("stock"), ratio("lru"), f"{arm['completion_p95_s']:.1f}",
            f"{arm['ttft_mean_s']:.2f}", f"{again:,.0f}", share, overlap(runs[name]),
        )  # fmt: skip
    Console().print(f"medians of {options.rounds} rounds; {runs[options.only[0]][0]['facts']['pool']}")
    Console().print(table)


if __name__ == "__main__":
    main()
