"""The demo's load under other policies: the gains of admission control, queue order and leases.

    python benchmarks/demo_variants.py --json benchmarks/results/demo_variants.json

Runs once each: stock, stock with ``--max-num-seqs 3``, and the presets ``program-fcfs``, ``static-ttl``,
``continuum-paper`` and ``continuum``, with the same tasks, seed, flags and KV pool. ``--only NAME …`` runs
some of them and keeps the other results of the file.
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

COMMAND = "python benchmarks/demo_variants.py --json benchmarks/results/demo_variants.json"

VARIANTS: dict[str, tuple[str, ...]] = {
    "stock": ("--arms", "stock"),
    "stock, 3 requests at once": ("--arms", "stock", "--max-num-seqs", "3"),
    "program-fcfs": ("--arms", "sojourn", "--policy", "program-fcfs"),
    "static-ttl": ("--arms", "sojourn", "--policy", "static-ttl"),
    "continuum-paper": ("--arms", "sojourn", "--policy", "continuum-paper"),
    "continuum": ("--arms", "sojourn", "--policy", "continuum"),
}
KEPT = (
    "completion_mean_s",
    "completion_p95_s",
    "ttft_mean_s",
    "prefill_tokens",
    "prefill_again_tokens",
    "hit_rate",
    "preemptions",
    "wall_s",
    "repositories_fixed",
    "decisions",
)


def run_variant(options: tuple[str, ...], target: Path) -> dict[str, Any]:
    """Run one arm. Return its figures, with machine, versions, seed and pool."""
    command = [sys.executable, "-c", "from sojourn_server.cli import main; main()", "demo"]
    subprocess.run([*command, *options, "--json", str(target)], check=True)
    document = json.loads(target.read_text())
    (arm,) = document["arms"].values()
    facts = {key: document[key] for key in ("machine", "versions", "seed", "pool")}
    return {"options": list(options), **{key: arm[key] for key in KEPT}, **facts}


def main() -> None:
    """Run, print, and write the results after each variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    kept = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    found: dict[str, Any] = kept.get("variants", {})
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            found[name] = run_variant(VARIANTS[name], Path(folder) / "arm.json")
            if options.json:
                result = {
                    "command": COMMAND,
                    "variants": {name: found[name] for name in VARIANTS if name in found},
                }
                options.json.write_text(json.dumps(result, indent=2) + "\n")
    table = Table("variant", "mean s", "P95 s", "TTFT s", "prefilled", "again", title="one run each")
    for name, arm in found.items():
        seconds = (arm["completion_mean_s"], arm["completion_p95_s"], arm["ttft_mean_s"])
        tokens = (arm["prefill_tokens"], arm["prefill_again_tokens"])
        table.add_row(name, *(f"{value:.1f}" for value in seconds), *(f"{value:,}" for value in tokens))
    Console().print(table)


if __name__ == "__main__":
    main()
