"""Break-even context length on this machine's CPU engine, for recomputing KV or copying it back (Tetris
§2.1).

    python benchmarks/break_even.py --out benchmarks/results

Two servers with the same model and pool run one after the other. On the first, ``sojourn profile`` measures
prefill and copies and predicts the break-even. The second also has host memory for KV. There, the time to
first token is measured two times for each context length, when the context is computed and when it is loaded
from host memory. Before each reload, a filler context as large as the pool is loaded, so neither measurement
waits for copies of evicted blocks. The cost of copying a context out comes from the engine's counters over
all copies of the run. Tetris compares computing with the sum of that cost and the reload. Figures are medians
over ``--rounds`` rounds. The first one or two rounds are slower, because they use the pages of host memory
for the first time. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx
from result_pages import FIRST_WORDS, made_by, write_page
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sojourn_server.api.engine_rpc import CACHE_TTL_S
from sojourn_server.cli.console import write_json
from sojourn_server.launch.engine_server import EngineServer
from sojourn_server.policies.costs.engine_profile import PrefillCurve
from sojourn_server.replay.completions_client import CompletionsClient
from sojourn_server.simulator.report.results_file import Provenance, made_with
from sojourn_server.traces.token_ids import FIRST_ID

BLOCK_TOKENS = 32
VOCABULARY = 8000
POLICY = "observe"
"""Preset that evicts in vLLM's own order, so that only the tiers differ from stock."""
HOST_POOLS = 5
"""Size of host memory as a multiple of the KV pool: two pools for the fillers, three for measured
contexts."""


class Point(NamedTuple):
    """Measurements at one context length, median seconds."""

    tokens: int
    computed_s: float
    reloaded_s: float
    out_s: float
    """Seconds to copy the context to host memory."""

    @property
    def offloaded_s(self) -> float:
        """Seconds to copy the context out and in again."""
        return self.out_s + self.reloaded_s


class Plan(NamedTuple):
    """Sizes of the measurement, in blocks."""

    lengths: tuple[int, ...]
    """Context lengths in blocks. A prompt has one token more, because at least one token is computed."""
    pool: int
    """Number of blocks of the KV pool that requests can use."""

    def serve_args(self) -> tuple[str, ...]:
        """Return the engine's flags, which are the same for both servers."""
        return (
            "--block-size", str(BLOCK_TOKENS),
            "--num-gpu-blocks-override", str(self.pool + 1),  # one is vLLM's null block
            # Without this flag the CPU engine reserves most of the machine's memory.
            "--kv-cache-memory-bytes", str(1 << 30),
            "--max-model-len", str(self.pool * BLOCK_TOKENS),
            "--max-num-seqs", "8",
            "--max-num-batched-tokens", "512",
        )  # fmt: skip


def plan(longest: int) -> Plan:
    """Return a plan with contexts of 1, 2, 4, … blocks, up to ``longest`` tokens."""
    most = max(1, longest // BLOCK_TOKENS)
    lengths = tuple(1 << power for power in range(most.bit_length()) if 1 << power <= most)
    return Plan(lengths, lengths[-1] + 2)


def crossing(points: Sequence[Point], other: Callable[[Point], float]) -> dict[str, Any]:
    """Return ``tokens``, the context length from which on ``other`` is faster than computing, and ``faster``.

    ``other`` returns the seconds of the alternative at a point. ``faster`` is one of three texts. With
    ``from``, ``tokens`` is interpolated between two measured lengths. With ``from the shortest``, the
    alternative is faster at all measured lengths. With ``not measured``, the alternative is slower at the
    longest length, and ``tokens`` is ``None``.
    """
    wins = [other(point) < point.computed_s for point in points]
    if not wins[-1]:
        return {"faster": "not measured", "tokens": None, "longest": points[-1].tokens}
    first = len(wins) - next((back for back, won in enumerate(reversed(wins)) if not won), len(wins))
    if first == 0:
        return {"faster": "from the shortest", "tokens": points[0].tokens}
    before, after = points[first - 1], points[first]
    behind, ahead = other(before) - before.computed_s, after.computed_s - other(after)
    share = behind / (behind + ahead)
    return {"faster": "from", "tokens": before.tokens + share * (after.tokens - before.tokens)}


def words(found: dict[str, Any]) -> str:
    """Return a measured or predicted break-even as text."""
    tokens = found["tokens"]
    if found["faster"] == "from the shortest":
        return f"at or below {tokens:,} tokens, the shortest measured"
    if found["faster"] == "not measured":
        return f"above {found['longest']:,} tokens, the longest measured"
    if found["faster"] == "from":
        return f"{math.ceil(tokens):,} tokens"
    return str({"always": "0 tokens: copying is always faster"}.get(found["faster"], found["faster"]))


# -- on the engines -------------------------------------------------------------------


def predict(url: str, longest: int) -> dict[str, Any]:
    """Return the profile that ``sojourn profile`` measures, with the predicted break-even."""
    command = [sys.executable, "-c", "from sojourn_server.cli import main; main()", "profile"]
    options = ("--url", url, "--no-decode", "--json", "--max-context", str(longest + 1))
    done = subprocess.run([*command, *options], check=True, stdout=subprocess.PIPE)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


async def measure(
    url: str, model: str, plan: Plan, rounds: int, seed: int, progress: Progress
) -> tuple[dict[int, tuple[list[float], list[float]]], list[dict[str, Any]]]:
    """Measure all lengths. Returns, for each length in tokens, the seconds to first token when computed and
    when reloaded. Also returns the engine's copy counters before the first round and after each round."""
    rng = random.Random(seed)

    def fresh(tokens: int) -> list[int]:
        return rng.choices(range(FIRST_ID, VOCABULARY), k=tokens)

    samples: dict[int, tuple[list[float], list[float]]] = {
        blocks * BLOCK_TOKENS + 1: ([], []) for blocks in plan.lengths
    }
    # A filler and its output fill the pool to the last token.
    fillers = [fresh(plan.pool * BLOCK_TOKENS - 1) for _ in range(2)]
    found = 0
    """Number of cached tokens so far, including those of the fillers."""
    counted: list[dict[str, Any]] = []

    async def ask(prompt: list[int], expected: int) -> float:
        nonlocal found
        answer = await client.complete(model, prompt, 1)
        if answer.cached_tokens != expected:
            sys.exit(f"error: of {len(prompt)} tokens {answer.cached_tokens} were found; expected {expected}")
        found += expected
        return answer.ttft_s

    bar = progress.add_task("warming up", total=rounds * len(samples))
    async with CompletionsClient(url) as client:
        for prompt in (fresh(BLOCK_TOKENS), *fillers, *fillers):
            await client.complete(model, prompt, 1)
        counted.append(await tiers(url))
        for _ in range(rounds):
            for tokens, (computed, reloaded) in samples.items():
                progress.update(bar, description=f"{tokens:,} tokens")
                prompt = fresh(tokens)
                computed.append(await ask(prompt, 0))
                await ask(fillers[0], (plan.pool - 1) * BLOCK_TOKENS)
                fillers.reverse()  # the other one is in host memory only
                reloaded.append(await ask(prompt, tokens - 1))
                progress.update(bar, advance=1)
            counted.append(await tiers(url))
    loaded = (counted[-1]["moves"]["loaded"] - counted[0]["moves"]["loaded"]) * BLOCK_TOKENS
    if loaded != found:
        sys.exit(f"error: {found} tokens were found and {loaded} came from host memory; expected all")
    return samples, [of["traffic"] for of in counted]


async def tiers(url: str) -> dict[str, Any]:
    """Return the server's current statistics of host memory."""
    await asyncio.sleep(2 * CACHE_TTL_S)  # the server caches its answer for CACHE_TTL_S
    answer = httpx.get(f"{url}/sojourn/v1/stats", timeout=30.0, trust_env=False)
    found: dict[str, Any] = answer.raise_for_status().json()["tiers"]
    return found


def seconds_a_byte(traffic: Sequence[dict[str, Any]], lane: str) -> float:
    """Return the seconds per byte of copies in the direction ``lane``, as a median over the rounds."""
    totals = [(of["seconds"][lane], of["moved_bytes"][lane]) for of in traffic]
    return float(median((s1 - s0) / (b1 - b0) for (s0, b0), (s1, b1) in pairwise(totals)))


def run(model: str, plan: Plan, rounds: int, seed: int, console: Console) -> dict[str, Any]:
    """Run both servers. Return the predicted and the measured break-even."""
    longest = plan.lengths[-1] * BLOCK_TOKENS
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("", total=None)

        def say(seconds: float, stage: str) -> None:
            progress.update(bar, description=f"{stage}, {seconds:.0f} s")

        with EngineServer(model, policy=POLICY, serve_args=plan.serve_args(), progress=say) as server:
            progress.update(bar, description="sojourn profile")
            profile = predict(server.url, longest)
        kv_bytes = profile["limits"]["kv_bytes_per_token"]
        host_gib = HOST_POOLS * plan.pool * BLOCK_TOKENS * kv_bytes / (1 << 30)
        host = ("--kv-host-gib", f"{host_gib:.6f}")
        with EngineServer(
            model, policy=POLICY, serve_args=(*plan.serve_args(), *host), progress=say
        ) as server:
            progress.update(bar, visible=False)
            samples, traffic = asyncio.run(measure(server.url, model, plan, rounds, seed, progress))
    a_byte = {lane: seconds_a_byte(traffic, lane) for lane in ("to_host", "to_device")}
    points = [
        Point(tokens, median(computed), median(reloaded), (tokens - 1) * kv_bytes * a_byte["to_host"])
        for tokens, (computed, reloaded) in samples.items()
    ]
    return {
        "model": model,
        "seed": seed,
        "rounds": rounds,
        "pool_tokens": plan.pool * BLOCK_TOKENS,
        "kv_bytes_per_token": kv_bytes,
        "host_gib": host_gib,
        "measured": {
            "out_and_in": crossing(points, lambda point: point.offloaded_s),
            "in_alone": crossing(points, lambda point: point.reloaded_s),
            "to_host_bytes_per_s": 1 / a_byte["to_host"],
            "to_device_bytes_per_s": 1 / a_byte["to_device"],
            "points": [{**point._asdict(), "offloaded_s": point.offloaded_s} for point in points],
            "samples": {tokens: {"computed_s": of[0], "reloaded_s": of[1]} for tokens, of in samples.items()},
            "traffic": traffic,
        },
        "predicted": profile,
    }


# -- what is shown --------------------------------------------------------------------


def thresholds(result: dict[str, Any]) -> dict[str, str]:
    """Return the break-even of each method as text: two measured ones and two predicted ones."""
    measured, predicted = result["measured"], result["predicted"]["break_even"]
    return {
        "measured, out and in again": words(measured["out_and_in"]),
        "measured, in alone (copied out ahead)": words(measured["in_alone"]),
        "predicted by the measured curve": words(predicted["measured"]),
        "predicted by the closed form": words(predicted["closed_form"]),
    }


HEAD = ("tokens", "computed s", "reloaded s", "out s", "computed ÷ both", "curve s", "copies s")


def lines(result: dict[str, Any]) -> list[list[str]]:
    """Return the table's rows, one per context length."""
    curve = PrefillCurve(**result["predicted"]["prefill"])
    copy_s = result["predicted"]["break_even"]["copy_s_per_token"]
    return [
        [
            f"{point['tokens']:,}", f"{point['computed_s']:.4f}", f"{point['reloaded_s']:.4f}",
            f"{point['out_s']:.5f}", f"{point['computed_s'] / point['offloaded_s']:.2f}",
            f"{curve.seconds(point['tokens']):.4f}", f"{point['tokens'] * copy_s:.5f}",
        ]
        for point in result["measured"]["points"]
    ]  # fmt: skip


def page(result: dict[str, Any], made: Provenance, wall_s: float) -> str:
    """Return the result page in Markdown; ``{by hand}`` marks the place of hand-written text."""
    measured, predicted = result["measured"], result["predicted"]
    even = predicted["break_even"]
    return "\n".join(
        [
            "# Break-even: predicted against measured",
            "",
            "Generated by the command below, but for what is between the marks.",
            "",
            made_by(made, wall_s),
            "",
            f"Model `{result['model']}`, {result['kv_bytes_per_token']:,} bytes of KV a token, blocks of "
            f"{BLOCK_TOKENS} tokens, a pool of {result['pool_tokens']:,}; medians of {result['rounds']} "
            f"rounds, seed {result['seed']}.",
            "",
            "![seconds over context](break_even.svg)",
            "",
            "| break-even | |",
            "|---|---|",
            *(f"| {name} | {text} |" for name, text in thresholds(result).items()),
            "",
            f"| {' | '.join(HEAD)} |",
            f"|{'--:|' * len(HEAD)}",
            *(f"| {' | '.join(line)} |" for line in lines(result)),
            "",
            "Computed and reloaded are times to first token, measured; out is the copy to host memory, and "
            "both are out and reloaded. Curve and copies, both ways, are predicted. Copies, GB/s: predicted "
            f"{predicted['device_to_host_bytes_per_s'] / 1e9:.2f} out and "
            f"{predicted['host_to_device_bytes_per_s'] / 1e9:.2f} in, on the engine "
            f"{measured['to_host_bytes_per_s'] / 1e9:.2f} and {measured['to_device_bytes_per_s'] / 1e9:.2f}. "
            f"The closed form has {even['layers']} layers, hidden size {even['hidden_size']} and "
            f"{even['flops_per_s'] / 1e9:,.0f} GFLOP/s.",
            "",
            "{by hand}",
            "",
        ]
    )


def plot(result: dict[str, Any], path: Path) -> None:
    """Plot seconds over context length, measured and predicted."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "sojourn"
    import matplotlib.pyplot as plt

    points, predicted = result["measured"]["points"], result["predicted"]
    tokens = [point["tokens"] for point in points]
    curve, copy_s = PrefillCurve(**predicted["prefill"]), predicted["break_even"]["copy_s_per_token"]
    figure, axis = plt.subplots(figsize=(6.4, 4.4))
    for name, colour, label in (
        ("computed_s", "#D55E00", "computed"),
        ("offloaded_s", "#0072B2", "copied out and in again"),
        ("reloaded_s", "#009E73", "reloaded"),
    ):
        axis.plot(tokens, [point[name] for point in points], color=colour, marker="o", label=label)
    expected: dict[str, Any] = {"linestyle": "--", "linewidth": 1.0}
    axis.plot(
        tokens, [curve.seconds(n) for n in tokens], color="#D55E00", label="computed, predicted", **expected
    )
    axis.plot(tokens, [n * copy_s for n in tokens], color="#0072B2", label="copies, predicted", **expected)
    axis.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="seconds", title=result["model"])
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None})


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smol", help="smol, tiny or another small one (default: smol)")
    parser.add_argument("--longest", type=int, default=2048, help="context in tokens (default: 2048)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder to write break_even.json, .md and .svg into")
    options = parser.parse_args()
    began, console = time.monotonic(), Console()
    result = run(options.model, plan(options.longest), options.rounds, options.seed, console)
    table = Table(*HEAD, title=f"{options.model}: medians of {options.rounds} rounds")
    for line in lines(result):
        table.add_row(*line)
    console.print(table)
    for name, text in thresholds(result).items():
        console.print(f"break-even {name}: {text}")
    if options.out is not None:
        made = made_with(sys.argv)
        document = {"command": f"python benchmarks/{made.command}", "machine": made.machine,
                    "versions": made.versions, **result}  # fmt: skip
        write_json(document, str(options.out / "break_even.json"))
        plot(result, options.out / "break_even.svg")
        text = page(result, made, time.monotonic() - began)
        write_page(options.out / "break_even.md", text, FIRST_WORDS)


if __name__ == "__main__":
    main()
