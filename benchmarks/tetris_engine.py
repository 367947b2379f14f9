"""Long outputs that overflow a real engine's KV pool: stock beside Tetris, who is preempted and how often.

    python benchmarks/tetris_engine.py --json benchmarks/results/tetris_engine.json

Requests of two kinds on ``smol``, short answers and long reasoning, their lengths log-normal and drawn from
the seed (``--mean-short``, ``--mean-long``). All tokens are forced, so every arm writes the same, and no
request tells how long it will be. No arm has learned anything when it begins. ``observe`` decides as stock
does, with our counters: it tells stock's cascades. The arms take turns, ``--rounds`` times; figures are
medians. Run it while nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

COMMAND = "python benchmarks/tetris_engine.py --json benchmarks/results/tetris_engine.json"
BLOCK_TOKENS = 32
FOLDER = Path(__file__).parent / "tetris_without"
HOST = ("--kv-host-gib", "1")
ARMS: dict[str, tuple[str, ...]] = {
    "stock": ("stock",),
    "observe": ("observe",),
    "observe+host": ("observe", *HOST),
    "tetris": ("tetris",),
    "tetris+host": ("tetris", *HOST),
    "mean+host": (str(FOLDER / "mean-length.toml"), *HOST),
}
LATENCIES = ("tpot_s", "ttft_s", "completion_s")


def trace(target: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Write the load; returns what it holds."""
    draw = random.Random(options.seed)
    lengths: list[int] = []
    with target.open("w", encoding="utf-8") as file:
        for number in range(options.requests):
            kind, mean = draw.choice((("short", options.mean_short), ("long", options.mean_long)))
            output = draw.lognormvariate(math.log(mean) - options.sigma**2 / 2, options.sigma)
            tokens = max(2, min(options.longest, round(output)))
            prompt = draw.randint(32, 160)
            lengths.append(tokens)
            turn = {"prompt_tokens": prompt, "output_tokens": tokens, "append_tokens": prompt}
            line = {"program_id": f"{kind}-{number}", "source": "tetris", "agent_type": kind, "turns": [turn]}
            file.write(json.dumps(line) + "\n")
    return {"requests": len(lengths), "output_tokens": sum(lengths), "longest": max(lengths)}


def counted(url: str) -> dict[str, float]:
    """Preemptions, and how many of them follow another one, as the engine counts them."""
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


def run_arm(name: str, load: Path, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One server, one replay."""
    from sojourn_server.launch.command import FORCED_TOKENS
    from sojourn_server.launch.server import EngineServer

    policy, *more = ARMS[name]
    if policy.endswith(".toml"):
        more += ["--policy-file", policy]
        policy = "tetris"
    flags = (
        "--block-size", str(BLOCK_TOKENS),
        "--num-gpu-blocks-override", str(options.pool_tokens // BLOCK_TOKENS),
        "--kv-cache-memory-bytes", str(1 << 30),
        "--max-model-len", str(min(options.pool_tokens, 4096)),
        "--max-num-seqs", str(options.concurrency),
        "--max-num-batched-tokens", "512",
        "--logits-processors", FORCED_TOKENS,
        *more,
    )  # fmt: skip
    target = folder / "replay.json"
    with EngineServer("smol", policy=policy, serve_args=flags) as server:
        before = counted(server.url)
        command = [sys.executable, "-c", "from sojourn_server.cli import main; main()", "replay", str(load)]
        how = ("--force-tokens", "--hide-lengths", "--concurrency", str(options.concurrency))
        subprocess.run([*command, "--url", server.url, *how, "--json", str(target)], check=True)
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
    """Of each figure, the median over the runs of one arm."""
    return {key: median(run[key] for run in runs) for key in runs[0]}


def main() -> None:
    """Run, print, write after each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--pool-tokens", type=int, default=6144)
    parser.add_argument("--mean-short", type=float, default=60.0)
    parser.add_argument("--mean-long", type=float, default=700.0)
    parser.add_argument("--sigma", type=float, default=0.8)
    parser.add_argument("--longest", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in options.only}
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        load = folder / "load.jsonl"
        held = trace(load, options)
        for _ in range(options.rounds):
            for name in options.only:
                runs[name].append(run_arm(name, load, options, folder))
            result = {
                "command": COMMAND,
                "machine": {"system": platform.platform(), "cores": os.cpu_count()},
                "versions": {name: version(name) for name in ("sojourn", "torch")},
                "load": held,
                "options": {key: value for key, value in vars(options).items() if key != "json"},
                "medians": {name: medians(of) for name, of in runs.items() if of},
                "runs": runs,
            }
            if options.json:
                options.json.write_text(json.dumps(result, indent=2) + "\n")
    table = Table(
        "arm", "tokens/s", "preemptions", "in cascades", "TPOT mean ms", "P99 ms", "TTFT mean s", "P99 s"
    )
    for name, of in runs.items():
        arm = medians(of)
        table.add_row(
            name, f"{arm['output_tok_per_s']:.1f}", f"{arm['preemptions']:.0f}", f"{arm['chained']:.0f}",
            f"{1e3 * arm['tpot_mean_s']:.0f}", f"{1e3 * arm['tpot_p99_s']:.0f}",
            f"{arm['ttft_mean_s']:.1f}", f"{arm['ttft_p99_s']:.1f}",
        )  # fmt: skip
    Console().print(f"medians of {options.rounds} rounds; {held}")
    Console().print(table)


if __name__ == "__main__":
    main()
