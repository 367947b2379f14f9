"""Long outputs that exceed a real engine's KV pool: preemptions under stock and Tetris.

    python benchmarks/tetris_engine.py --out benchmarks/results

``smol`` answers requests of two kinds, short answers and long reasoning, with log-normal lengths drawn from
the seed (``--mean-short``, ``--mean-long``). All tokens are forced, so every arm writes the same tokens. Each
arm first answers ``--warm-up`` requests of another seed, to learn lengths; these are not counted. ``observe``
decides as stock does and counts stock's cascades. ``oracle+host`` is an upper bound: it gets each output's
true length as ``max_tokens``; other arms get the load's longest output. ``learned+host`` reads hidden states,
which carry no information for forced tokens and random prompts. It shows the cost of a network that does not
help. The arms alternate, ``--rounds`` times; figures are medians. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from result_pages import FIRST_WORDS, less, made_by, marked, write_page
from rich.console import Console
from rich.table import Table
from sojourn_server.cli.console import write_json
from sojourn_server.simulator.report.results_file import made_with

BLOCK_TOKENS = 32
FOLDER = Path(__file__).parent / "tetris_ablations"
HOST = ("--kv-host-gib", "1")
ARMS: dict[str, tuple[str, ...]] = {
    "stock": ("stock",),
    "observe": ("observe",),
    "observe+host": ("observe", *HOST),
    "tetris": ("tetris",),
    "tetris+host": ("tetris", *HOST),
    "mean+host": (str(FOLDER / "mean-length.toml"), *HOST),
    "learned+host": ("tetris-learned", *HOST),
    "oracle+host": ("tetris", *HOST),
}
TOLD = ("oracle+host",)
"""Arms whose clients declare the length of each output."""
LATENCIES = ("tpot_s", "ttft_s", "completion_s")


def max_model_len(options: argparse.Namespace) -> int:
    """Return the longest context in tokens. Such a request must fit into the pool, less vLLM's null block."""
    return min(options.pool_tokens - BLOCK_TOKENS, 4096)


def trace(target: Path, options: argparse.Namespace, requests: int, seed: int) -> dict[str, Any]:
    """Write a workload file, and return a summary of its content."""
    draw = random.Random(seed)
    lengths: list[int] = []
    with target.open("w", encoding="utf-8") as file:
        for number in range(requests):
            kind, mean = draw.choice((("short", options.mean_short), ("long", options.mean_long)))
            output = draw.lognormvariate(math.log(mean) - options.sigma**2 / 2, options.sigma)
            prompt = draw.randint(32, 160)
            tokens = max(2, min(options.longest, round(output), max_model_len(options) - 2 * prompt))
            lengths.append(tokens)
            turn = {"prompt_tokens": prompt, "output_tokens": tokens, "append_tokens": prompt}
            line = {"program_id": f"{kind}-{number}", "source": "tetris", "agent_type": kind, "turns": [turn]}
            file.write(json.dumps(line) + "\n")
    return {"requests": len(lengths), "output_tokens": sum(lengths), "longest": max(lengths, default=0)}


def counted(url: str) -> dict[str, float]:
    """Return the engine's counters of preemptions, and of preemptions that follow another one."""
    found = {"preemptions": 0.0, "chained": 0.0}
    for line in httpx.get(f"{url}/metrics", timeout=30.0, trust_env=False).text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("vllm:num_preemptions_total"):
            found["preemptions"] += float(value)
        elif name.startswith("sojourn_preemption_cascade_length_sum"):
            found["chained"] += float(value)
        elif name.startswith("sojourn_preemption_cascade_length_count"):
            found["chained"] -= float(value)
    return found


def run_arm(
    name: str, load: Path, warm_up: Path, options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Run the server of one arm, replay the load, and return the figures."""
    from sojourn_server.launch.engine_server import EngineServer
    from sojourn_server.launch.serve_command import FORCED_TOKENS

    policy, *more = ARMS[name]
    if policy.endswith(".toml"):
        more += ["--policy-file", policy]
        policy = "tetris"
    flags = (
        "--block-size", str(BLOCK_TOKENS),
        "--num-gpu-blocks-override", str(options.pool_tokens // BLOCK_TOKENS),
        "--kv-cache-memory-bytes", str(1 << 30),
        "--max-model-len", str(max_model_len(options)),
        "--max-num-seqs", str(options.concurrency),
        "--max-num-batched-tokens", "512",
        "--logits-processors", FORCED_TOKENS,
        *more,
    )  # fmt: skip
    target = folder / "replay.json"
    with EngineServer("smol", policy=policy, serve_args=flags) as server:
        how = ["--force-tokens", "--concurrency", str(options.concurrency), "--url", server.url]
        if name in TOLD:
            how.append("--oracle-lengths")
        replay = [sys.executable, "-c", "from sojourn_server.cli import main; main()", "replay"]
        if options.warm_up:
            subprocess.run([*replay, str(warm_up), *how], check=True, stdout=subprocess.DEVNULL)
        before = counted(server.url)
        subprocess.run([*replay, str(load), *how, "--json", str(target)], check=True)
        after = counted(server.url)
    document = json.loads(target.read_text())
    return {
        **{key: after[key] - before[key] for key in after},
        "wall_s": document["wall_s"],
        "output_tok_per_s": document["output_tokens_per_s"],
        "finished": document["programs_finished"],
        **{f"{key[:-2]}_{at}_s": document[key][at] for key in LATENCIES for at in ("mean", "p50", "p99")},
    }


def medians(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median of each figure over the runs of one arm."""
    return {key: median(run[key] for run in runs) for key in runs[0]}


HEAD = (
    "arm", "rounds", "tokens/s", "", "preemptions", "", "cascades", "", "TPOT mean ms", "P99 ms", "better",
    "TTFT mean s", "completion mean s",
)  # fmt: skip


def lines(runs: dict[str, list[dict[str, Any]]]) -> list[tuple[str, ...]]:
    """Return the table's rows, one per arm, relative to ``observe`` or else to the first arm."""
    arms = {name: medians(of) for name, of in runs.items() if of}
    base = arms.get("observe") or next(iter(arms.values()))
    return [
        (
            name, f"{len(runs[name])}", f"{arm['output_tok_per_s']:.1f}",
            f"{arm['output_tok_per_s'] / base['output_tok_per_s'] - 1:+.1%}",
            f"{arm['preemptions']:.0f}", less(arm["preemptions"], base["preemptions"]),
            f"{arm['chained']:.0f}" if name != "stock" else "not told",
            less(arm["chained"], base["chained"]) if name != "stock" else "",
            f"{1e3 * arm['tpot_mean_s']:.0f}", f"{1e3 * arm['tpot_p99_s']:.0f}",
            f"{base['tpot_p99_s'] / arm['tpot_p99_s']:.1f} ×",
            f"{arm['ttft_mean_s']:.1f}", f"{arm['completion_mean_s']:.1f}",
        )
        for name, arm in arms.items()
    ]  # fmt: skip


def save(
    runs: dict[str, list[dict[str, Any]]], held: dict[str, Any], options: argparse.Namespace, wall_s: float
) -> None:
    """Write the page and the JSON."""
    made = made_with(sys.argv)
    settings = {key: value for key, value in vars(options).items() if key != "out"}
    document = {
        "command": f"python benchmarks/{made.command}", "machine": made.machine, "versions": made.versions,
        "load": held, "options": settings, "medians": {name: medians(of) for name, of in runs.items() if of},
        "runs": runs,
    }  # fmt: skip
    write_json(document, str(options.out / "tetris_engine.json"))
    told = (
        f"Model `smol`, a pool of {options.pool_tokens:,} tokens, {options.concurrency} requests at once; "
        f"{held['requests']} that count, of {held['output_tokens']:,} tokens of output, {held['longest']:,} "
        f"the longest, after {options.warm_up} that do not; seed {options.seed}."
    )
    text = f"""# Long outputs on a real engine

Generated by the command below, but for what is between the marks.

{made_by(made, wall_s)}

{told} Medians; percentages and factors are
against `observe`, which decides as stock does. A cascade is a preemption at most ten steps after another one.

{marked(HEAD, lines(runs))}

{{by hand}}
"""
    write_page(options.out / "tetris_engine.md", text, FIRST_WORDS)


def main() -> None:
    """Run, write after each arm, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--requests", type=int, default=144)
    parser.add_argument("--warm-up", type=int, default=48, help="requests before those that count")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--pool-tokens", type=int, default=6144)
    parser.add_argument("--mean-short", type=float, default=60.0)
    parser.add_argument("--mean-long", type=float, default=700.0)
    parser.add_argument("--sigma", type=float, default=0.8)
    parser.add_argument("--longest", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder to write tetris_engine.json and .md into")
    options = parser.parse_args()
    began_s = time.monotonic()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in options.only}
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        load, warm_up = folder / "load.jsonl", folder / "warm-up.jsonl"
        held = trace(load, options, options.requests, options.seed)
        trace(warm_up, options, options.warm_up, options.seed + 1)
        for _ in range(options.rounds):
            for name in options.only:
                runs[name].append(run_arm(name, load, warm_up, options, folder))
                if options.out is not None:  # after each arm, since a round takes most of an hour
                    save(runs, held, options, time.monotonic() - began_s)
    table = Table(*HEAD)
    for line in lines(runs):
        table.add_row(*line)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
