"""Overhead of the extension without contention and without hints, on two real servers.

    python benchmarks/uncontended_overhead.py --json benchmarks/results/uncontended_overhead.json

A stock server and one with the extension run side by side. Only one gets requests at a time. The load is
eight conversations of plain requests without a program, in a pool that holds them all. Runs alternate
A B B A …. For each pair of runs, mean completion times are compared as stock ÷ sojourn. The result is the
median of these ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import time
from importlib.metadata import version
from typing import Any

import httpx
from rich.console import Console
from rich.progress import track
from rich.table import Table

CONVERSATIONS = 8
TURNS = 6
FIRST_PROMPT_TOKENS = 600
LATER_TOKENS = 120
OUTPUT_TOKENS = 48
BLOCKS = 2_000
BLOCK_SIZE = 32


async def conversation(client: httpx.AsyncClient, url: str, model: str, seed: int) -> float:
    """Run one conversation of ``TURNS`` requests, and return the seconds it took."""
    draw = random.Random(seed)
    context = [draw.randrange(100, 40_000) for _ in range(FIRST_PROMPT_TOKENS)]
    begin = time.perf_counter()
    for _ in range(TURNS):
        answer = await client.post(
            f"{url}/v1/completions",
            json={
                "model": model,
                "prompt": context,
                "max_tokens": OUTPUT_TOKENS,
                "ignore_eos": True,
                "temperature": 0,
            },
        )
        answer.raise_for_status()
        context += [draw.randrange(100, 40_000) for _ in range(LATER_TOKENS)]
    return time.perf_counter() - begin


async def load(url: str, model: str, seed: int) -> float:
    """Run all conversations at once, and return the mean of their seconds."""
    async with httpx.AsyncClient(timeout=300.0, trust_env=False) as client:
        seconds = await asyncio.gather(
            *(conversation(client, url, model, seed * 1_000 + number) for number in range(CONVERSATIONS))
        )
    return statistics.mean(seconds)


def main() -> None:
    """Start both servers, measure them in turn, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--policy", default="continuum")
    parser.add_argument("--pairs", type=int, default=15)
    options = parser.parse_args()
    from sojourn_server.launch.engine_server import EngineServer

    flags = (
        "--block-size",
        str(BLOCK_SIZE),
        "--num-gpu-blocks-override",
        str(BLOCKS),
        "--max-model-len",
        "4096",
    )
    runs: dict[str, list[float]] = {"stock": [], "sojourn": []}
    with (
        EngineServer(options.model, policy="stock", serve_args=flags) as stock,
        EngineServer(options.model, policy=options.policy, serve_args=flags) as ours,
    ):
        urls = {"stock": stock.url, "sojourn": ours.url}
        for url in urls.values():
            asyncio.run(load(url, options.model, 0))
        for pair in track(range(options.pairs), description="alternating runs"):
            order = ("stock", "sojourn") if pair % 2 else ("sojourn", "stock")
            for name in order:
                # Both servers get the same prompts, and each pair of runs gets new ones, so that no cache
                # helps either.
                runs[name].append(asyncio.run(load(urls[name], options.model, pair + 1)))
    ratios = [a / b for a, b in zip(runs["stock"], runs["sojourn"], strict=True)]
    result: dict[str, Any] = {
        "command": "python benchmarks/uncontended_overhead.py "
        f"--model {options.model} --pairs {options.pairs}",
        "machine": {"system": platform.platform(), "cores": os.cpu_count()},
        "versions": {"sojourn": version("sojourn"), "python": platform.python_version()},
        "model": options.model,
        "policy": options.policy,
        "seed": "pair number",
        "conversations": CONVERSATIONS,
        "turns": TURNS,
        "mean_completion_s": runs,
        "median_s": {name: statistics.median(values) for name, values in runs.items()},
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }
    table = Table(
        "", "stock s", "sojourn s", "stock ÷ sojourn", title="Mean completion, no hints, no contention"
    )
    table.add_row(
        f"median of {options.pairs} pairs",
        f"{result['median_s']['stock']:.3f}",
        f"{result['median_s']['sojourn']:.3f}",
        f"{result['ratio']:.3f}  ({min(ratios):.3f} to {max(ratios):.3f})",
    )
    Console().print(table)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.write(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
