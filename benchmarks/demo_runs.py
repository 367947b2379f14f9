"""Several runs of the demo, and the median of their figures.

    python benchmarks/demo_runs.py --runs 3 --json benchmarks/results/demo.json

Each run is ``sojourn demo`` with both arms, in its own process. ``--from FILE …`` reads the JSON of earlier
runs instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def run_demo(seed: int, target: Path) -> dict[str, Any]:
    """Run the demo once and return its JSON. Raises ``CalledProcessError`` if a repository was not fixed."""
    command = [sys.executable, "-c", "from sojourn_server.cli import main; main()", "demo"]
    # Every second run reverses the order of the arms, so that no arm always gets the warmer machine.
    arms = "sojourn,stock" if seed % 2 else "stock,sojourn"
    subprocess.run([*command, "--json", str(target), "--seed", str(seed), "--arms", arms], check=True)
    return dict(json.loads(target.read_text()))


def without_details(document: dict[str, Any]) -> dict[str, Any]:
    """Return a run's figures without the details of its turns."""
    arms = {
        name: {key: value for key, value in arm.items() if key != "details"}
        for name, arm in document["arms"].items()
    }
    return {**document, "arms": arms}


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median over the runs, for each ratio and each numeric figure."""
    arms: dict[str, dict[str, float]] = {}
    for name, arm in runs[0]["arms"].items():
        numbers = [key for key, value in arm.items() if isinstance(value, int | float)]
        arms[name] = {key: statistics.median(run["arms"][name][key] for run in runs) for key in numbers}
    ratio = {key: statistics.median(run["ratio"][key] for run in runs) for key in runs[0]["ratio"]}
    return {"arms": arms, "ratio": ratio}


def main() -> None:
    """Run, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--from", dest="files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    if options.files:
        runs = [json.loads(path.read_text()) for path in options.files]
    else:
        with tempfile.TemporaryDirectory() as folder:
            runs = [run_demo(seed, Path(folder) / f"{seed}.json") for seed in range(options.runs)]
    if any(run.get("smoke") for run in runs):
        parser.error("a run of sojourn demo --quick is no measurement; expected runs without --quick")
    runs = [without_details(run) for run in runs]
    source = "--from " + " ".join(["FILE"] * len(runs)) if options.files else f"--runs {len(runs)}"
    result = {
        "command": f"python benchmarks/demo_runs.py {source} --json benchmarks/results/demo.json",
        "median": medians(runs),
        "runs": runs,
    }
    table = Table("run", *result["median"]["ratio"], title="stock ÷ sojourn")
    for number, run in enumerate(runs):
        table.add_row(str(number), *(f"{value:.2f}" for value in run["ratio"].values()))
    table.add_row("median", *(f"{value:.2f}" for value in result["median"]["ratio"].values()))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
