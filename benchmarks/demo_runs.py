"""The demo, several times and under several policies, and the medians.

    python benchmarks/demo_runs.py --rounds 3 --out benchmarks/results

Each round is ``sojourn demo`` with both arms, and then the same agents, seed and KV pool under the other arms
of ``OTHER_ARMS``, each in its own process. ``--add`` adds rounds to those of the existing result. Run it on
an idle machine: a round takes about 27 minutes, one without other arms about 8. The result is written after
each arm.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from result_pages import Result, marked, show

PROGRAMS = 8
HOST = ("--kv-host-gib", "1")
UNLIMITED = "stock, memory for all"
OTHER_ARMS: dict[str, tuple[str, ...]] = {
    "admit": ("--arms", "sojourn", "--policy", "admit"),
    "continuum": ("--arms", "sojourn", "--policy", "continuum"),
    "saga": ("--arms", "sojourn", "--policy", "saga"),
    "sojourn, host memory": ("--arms", "sojourn", "--policy", "sojourn", *HOST),
    "vLLM's order, host memory": ("--arms", "sojourn", "--policy", "observe", *HOST),
    "mori, host memory": ("--arms", "sojourn", "--policy", "mori", *HOST),
    UNLIMITED: ("--arms", "stock", "--resident", "100"),
}
"""Options of each arm beside ``stock`` and ``sojourn``. ``observe`` is our host memory under vLLM's
order. The last arm has a KV pool that never runs short, so that nothing is evicted."""
HEAD = (
    "arm", "rounds", "completion, mean, s", "each round", "stock ÷ it", "P95, s", "TTFT, mean, s",
    "computed again, tokens", "overlap of copies",
)  # fmt: skip


def run_demo(options: tuple[str, ...], seed: int) -> dict[str, Any]:
    """Run the demo once and return its JSON without the details of its turns. Raises ``CalledProcessError``
    if a repository was not fixed."""
    command = [sys.executable, "-c", "from sojourn_server.cli import main; main()", "demo"]
    fixed = ("--programs", str(PROGRAMS), "--seed", str(seed))
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "demo.json"
        subprocess.run([*command, *fixed, *options, "--json", str(target)], check=True)
        document: dict[str, Any] = json.loads(target.read_text())
    for arm in document["arms"].values():
        arm.pop("details", None)
    return document


def run_round(seed: int, others: list[str]) -> Iterator[dict[str, Any]]:
    """Run all arms once. Yields the demo's JSON after each process, with the other arms so far among its
    ``arms``."""
    # Every second round reverses the order of the arms, so that no arm always gets the warmer machine.
    document = run_demo(("--arms", "sojourn,stock" if seed % 2 else "stock,sojourn"), seed)
    yield document
    for name in reversed(others) if seed % 2 else others:
        other = run_demo(OTHER_ARMS[name], seed)
        if other["pool"] != document["pool"] and name != UNLIMITED:
            raise RuntimeError(f"arm {name}: a KV pool of {other['pool']}, expected {document['pool']}")
        (arm,) = other["arms"].values()
        arm |= {key: other[key] for key in ("command", "pool", "policy", "kv_host_gib")}
        document["arms"][name] = arm
        yield document


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median over the rounds, for each ratio of stock to sojourn and each figure of each arm."""
    arms: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(name for run in runs for name in run["arms"]):
        rounds = [run["arms"][name] for run in runs if name in run["arms"]]
        numbers = [key for key, value in rounds[0].items() if isinstance(value, int | float)]
        arms[name] = {key: statistics.median(each[key] for each in rounds) for key in numbers}
    ratio = {key: statistics.median(run["ratio"][key] for run in runs) for key in runs[0]["ratio"]}
    return {"arms": arms, "ratio": ratio}


def lines(runs: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table, as text. A ratio is the median of those of the rounds."""
    found = []
    for name, arm in medians(runs)["arms"].items():
        rounds = [run["arms"] for run in runs if name in run["arms"]]
        means = [arms[name]["completion_mean_s"] for arms in rounds]
        ratio = statistics.median(
            arms["stock"]["completion_mean_s"] / mean_s for arms, mean_s in zip(rounds, means, strict=True)
        )
        shares = [arms[name]["tiers"].get("traffic", {}).get("overlapped") for arms in rounds]
        known = [share for share in shares if share is not None]
        found.append(
            [
                name, str(len(means)), f"{arm['completion_mean_s']:.1f}",
                ", ".join(f"{mean_s:.1f}" for mean_s in means), f"{ratio:.2f}",
                f"{arm['completion_p95_s']:.1f}", f"{arm['ttft_mean_s']:.1f}",
                f"{arm['prefill_again_tokens']:,.0f}", f"{statistics.median(known):.0%}" if known else "–",
            ]
        )  # fmt: skip
    return found


def about(runs: list[dict[str, Any]]) -> str:
    """Return what the page says of its table."""
    seeds = ", ".join(str(run["seed"]) for run in runs)
    return (
        f"{PROGRAMS} coding agents at once on a real engine (CPU). {runs[0]['pool']}. Seeds {seeds}, one a "
        f"round. Host memory is 1 GiB; the arms without it have none. *{UNLIMITED}*: the KV pool holds all "
        "contexts. *Overlap*: the share of the copies' time in which no forward pass waited for them."
    )


def main() -> None:
    """Run and print; write the results after each arm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--others", nargs="*", choices=list(OTHER_ARMS), default=list(OTHER_ARMS))
    parser.add_argument("--add", action="store_true", help="add the rounds to those that --out has")
    parser.add_argument("--out", type=Path, required=True, help="folder to write demo.json and .md into")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; expected at least 1")
    others = list(dict.fromkeys(options.others))
    result = Result("demo", "The demo's agents under several policies")
    made = result.made
    runs: list[dict[str, Any]] = []
    if options.add:
        kept = options.out / "demo.json"
        try:
            before = json.loads(kept.read_text())
        except (OSError, ValueError) as error:
            parser.error(f"--add: {kept} cannot be read: {error}")
        if (before["machine"], before["versions"]) != (made.machine, made.versions):
            parser.error(f"--add: {kept} was made with another machine or other versions")
        runs, result.earlier_s = before["runs"], before["wall_s"]
        earlier = before["command"].removeprefix("python benchmarks/")
        result.made = msgspec.structs.replace(made, command=f"{earlier}\npython benchmarks/{made.command}")
    first = 1 + max((run["seed"] for run in runs), default=-1)
    for seed in range(first, first + options.rounds):
        kept_runs = list(runs)
        for document in run_round(seed, others):
            runs = [*kept_runs, document]
            found = {"median": medians(runs), "runs": runs, "wall_s": round(result.wall_s)}
            result.write(options.out, found, about(runs), marked(HEAD, lines(runs)), "{by hand}")
    show(HEAD, lines(runs))


if __name__ == "__main__":
    main()
