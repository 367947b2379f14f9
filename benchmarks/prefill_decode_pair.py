"""Gain of a second path to storage for pairs of real engines with slow storage links.

    python benchmarks/prefill_decode_pair.py --out benchmarks/results
    python benchmarks/prefill_decode_pair.py --pairs 2 --out benchmarks/results

Prefill and decode engines of vLLM run on this machine's CPU. ``MEGABYTES_S`` limits their storage links, so
that reading dominates. The model has the shape of ``tiny`` and weights that make each token depend on all
previous ones. First every request is computed without stored KV, and its KV is stored. These outputs are the
reference for every arm; a difference fails the run. Then all requests are sent at once, each as a prefill
request and a decode request, as the gateway does. The gateway's routing core chooses the side that reads,
from its own records. Each arm has another policy for this choice. One longer request is also sent alone.
Devices are cleared between arms and no new blocks are stored, so all arms do the same work. Arms alternate,
``--rounds`` times; figures are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import httpx
from prefill_decode_engines import MEGABYTES_S, PATIENCE_S, Engine, all_idle, loud_model, started
from prefill_decode_router import PairResponse, Router, RoutingQuery, http_client, text_of, through
from result_pages import marked, opening, show, write_result
from rich.progress import Progress
from sojourn_server.policies.prefill_decode.engine_pair_scheduler import (
    FULL_BLOCK_TOKENS,
    READ_SIDE_POLICIES,
)
from sojourn_server.simulator.report.results_file import made_with

VOCABULARY = range(10, 4000)
HIT_TOKENS, ALONE_TOKENS = 6_000, 8_000
"""Stored tokens of each request of a burst, and of the one that is alone."""
APPEND_TOKENS, OUTPUT_TOKENS = 50, 8
"""New tokens of a request. Together they stay below a Full Block: else it would be stored, and the next arm
had less to do. An engine stores 32 Full Blocks a step, so fewer outputs would not store all."""
SEED = 0
POLL_S = 0.1
"""Seconds between two looks at engines that come to rest."""
MOST_OFF = 1e-3
"""Maximum difference of a logprob. It is not 0, because the order of additions depends on the batch's other
requests."""

RUNS = {"burst": 1, "alone": 5}
"""Number of runs of each case per round. A single request takes only a second, so it is repeated."""


ARMS: dict[str, Callable[[float, float], bool]] = {
    "prefill side": READ_SIDE_POLICIES["prefill"],
    "decode side": lambda prefill_queue_s, decode_queue_s: True,
    "shorter queue": READ_SIDE_POLICIES["shorter"],
}


# -- one run of one arm -----------------------------------------------------------------


class Bench:
    """The engines, and the requests sent to them."""

    def __init__(
        self, engines: Sequence[Engine], model: str, options: argparse.Namespace, told: Callable[[str], None]
    ) -> None:
        self.engines = engines
        self.model = model
        self.options = options
        self.told = told
        self.cases = cases(options)
        self.expected: dict[str, PairResponse] = {}
        """Request name → expected answer, from a pair that found no stored KV and computed everything."""
        self._transfers = itertools.count()

    async def fill(self, http: httpx.AsyncClient) -> None:
        """Compute every request once and store its KV. The pairs take turns."""
        pairs = list(zip(self.engines[::2], self.engines[1::2], strict=True))
        questions = [question for asked in self.cases.values() for question in asked]
        for number, question in enumerate(questions):
            prefill, decode = pairs[number % len(pairs)]
            body = text_of(self.model, question.prompt, OUTPUT_TOKENS)
            self.expected[question.name] = await through(http, prefill, decode, body, f"fill {number}", False)
            self.told(f"computing {question.name}")
        await self.settle()

    async def settle(self) -> None:
        """Wait until no operation is open, then clear the engines' prefix caches."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not await asyncio.to_thread(all_idle, self.engines):
            if time.monotonic() > deadline_s:
                raise RuntimeError("engines do not come to rest")
            await asyncio.sleep(POLL_S)
        for engine in self.engines:
            await asyncio.to_thread(engine.forget)

    async def run(self, http: httpx.AsyncClient, case: str, arm: str) -> dict[str, Any]:
        """Send all requests of a case at once, and return the figures. Raises ``RuntimeError`` for an
        unexpected answer."""
        questions = self.cases[case]
        router = Router(self.engines, ARMS[arm], pool_tokens(self.options))
        for question in questions:
            router.know(question)
        before = {engine.name: engine.look() for engine in self.engines}
        began_s = time.monotonic()
        answers = await asyncio.gather(
            *(
                router.answer(http, self.model, question, f"{arm} {next(self._transfers)}", OUTPUT_TOKENS)
                for question in questions
            )
        )
        wall_s = time.monotonic() - began_s
        off = max(
            self._check(question, answered) for question, answered in zip(questions, answers, strict=True)
        )
        await self.settle()
        after = {engine.name: engine.look() for engine in self.engines}
        block_bytes = next(iter(after.values())).block_bytes
        read = {name: after[name].read_bytes - before[name].read_bytes for name in after}
        wanted = sum(question.stored_blocks for question in questions) * block_bytes
        if sum(read.values()) != wanted:
            counts = {name: look.counts for name, look in after.items()}
            raise RuntimeError(
                f"{case}, {arm}: {read} bytes were read, and {wanted} are stored; did something time out, on "
                f"a machine that is too busy? {counts}"
            )
        return {
            "wall_s": wall_s,
            "first_token_s": median(answered.first_s for answered in answers),
            "mean_first_token_s": mean(answered.first_s for answered in answers),
            "prefilled_s": median(answered.prefilled_s for answered in answers),
            "read_bytes": read,
            "max_over_mean": max(read.values()) / mean(read.values()),
            "most_off": off,
        }

    def _check(self, question: RoutingQuery, answered: PairResponse) -> float:
        """Return the largest difference of the answer's logprobs from the expected ones. Raises
        ``RuntimeError`` if it exceeds ``MOST_OFF`` or if tokens differ."""
        expected = self.expected[question.name]
        if answered.tokens != expected.tokens:
            raise RuntimeError(f"{question.name}: {answered.tokens} was said, and {expected.tokens} expected")
        off = max(abs(a - b) for a, b in zip(answered.logprobs, expected.logprobs, strict=True))
        if off > MOST_OFF:
            raise RuntimeError(f"{question.name}: logprobs are off by {off}")
        return off


def cases(options: argparse.Namespace) -> dict[str, list[RoutingQuery]]:
    """Return the requests of each case: many at once, and one longer request alone."""
    draw = random.Random(SEED)

    def question(name: str, tokens: int) -> RoutingQuery:
        blocks = math.ceil(tokens / FULL_BLOCK_TOKENS)
        prompt = draw.choices(VOCABULARY, k=blocks * FULL_BLOCK_TOKENS + APPEND_TOKENS)
        return RoutingQuery(name, prompt, blocks)

    return {
        "burst": [question(f"request {number}", HIT_TOKENS) for number in range(options.requests)],
        "alone": [question("the one alone", ALONE_TOKENS)],
    }


# -- all of them ------------------------------------------------------------------------


async def measure(bench: Bench, rounds: int) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Measure all cases and arms. Return the runs by case and arm."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    async with http_client() as http:
        await bench.fill(http)
        for turn in range(rounds):
            for case in bench.cases:
                for arm in [*ARMS] * RUNS[case]:
                    bench.told(f"round {turn + 1}: {case}, {arm}")
                    found.setdefault((case, arm), []).append(await bench.run(http, case, arm))
    return found


def rows_of(found: dict[tuple[str, str], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row of medians for each case and arm."""
    rows = []
    for (case, arm), runs in found.items():
        row: dict[str, Any] = {"case": case, "read by": arm}
        for name in ("wall_s", "first_token_s", "mean_first_token_s", "prefilled_s", "max_over_mean"):
            row[name] = median(run[name] for run in runs)
        row["most_off"] = max(run["most_off"] for run in runs)
        row["runs"] = runs
        rows.append(row)
    basis = {row["case"]: row for row in rows if row["read by"] == "prefill side"}
    for row in rows:
        row["times_as_fast"] = basis[row["case"]]["wall_s"] / row["wall_s"]
        row["times_as_soon"] = basis[row["case"]]["first_token_s"] / row["first_token_s"]
    return rows


HEAD = (
    "requests", "read by", "all answered s", "times as fast", "first token s", "times as soon",
    "max / mean",
)  # fmt: skip


def cells(row: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """Return the cells of a table row."""
    return [
        f"{options.requests} at once" if row["case"] == "burst" else "one alone",
        row["read by"],
        f"{row['wall_s']:.2f}", f"{row['times_as_fast']:.2f}",
        f"{row['first_token_s']:.2f}", f"{row['times_as_soon']:.2f}",
        f"{row['max_over_mean']:.2f}",
    ]  # fmt: skip


def page(rows: Sequence[dict[str, Any]], options: argparse.Namespace, made: Any, wall_s: float) -> str:
    """Return the result as Markdown."""
    engines = "a prefill and a decode engine" if options.pairs == 1 else f"{options.pairs} of each"
    return (
        f"{opening('Pairs of real engines on slow links', made, wall_s)}\n\n"
        f"Of vLLM's CPU engines {engines}, a model of the shape of `tiny` in 32-bit floats, each engine with "
        f"a storage link of {MEGABYTES_S:g} MB/s of its own. {options.requests} requests at once, of "
        f"{math.ceil(HIT_TOKENS / FULL_BLOCK_TOKENS) * FULL_BLOCK_TOKENS:,} stored tokens each and "
        f"{APPEND_TOKENS} new ones, and one alone of {ALONE_TOKENS:,}; "
        f"{OUTPUT_TOKENS} tokens of output. Medians of {options.rounds} rounds, "
        f"each with {RUNS['alone']} of the one alone, seed {SEED}. "
        "Who reads is chosen by the gateway's core with its own books alone: it is told exactly what is "
        "stored, and is not told what waits for the links, as a gateway is that polls engines. "
        "All arms say the tokens that the same pairs say of the same prompts before anything is stored, when "
        "all of each is computed; logprobs differ from those by "
        f"{max(row['most_off'] for row in rows):.0e} at most.\n\n"
        f"{marked(HEAD, (cells(row, options) for row in rows))}\n\n"
        "*First token* is the median of the requests, at the client; *max / mean* is what the busiest "
        "storage link has read over the mean of all.\n\n"
        "{by hand}\n"
    )


def file_name(options: argparse.Namespace) -> str:
    return "prefill_decode_pair" if options.pairs == 1 else f"prefill_decode_pair_{options.pairs}"


def pool_tokens(options: argparse.Namespace) -> int:
    """Return the tokens that all requests together may need on one engine, since reading is measured."""
    return max(options.requests * (HIT_TOKENS + 2 * FULL_BLOCK_TOKENS), ALONE_TOKENS + 2 * FULL_BLOCK_TOKENS)


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1, help="engines that prefill, and as many that decode")
    parser.add_argument("--requests", type=int, default=20, help="at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder to write prefill_decode_pair.json and .md into")
    options = parser.parse_args(arguments)
    if min(options.pairs, options.requests, options.rounds) < 1:
        parser.error("expected at least one pair, one request and one round")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the results."""
    options = read_options(arguments)
    began_s, made = time.monotonic(), made_with(sys.argv)
    questions = options.requests + 1
    steps = questions + sum(RUNS.values()) * len(ARMS) * options.rounds
    with tempfile.TemporaryDirectory() as name, Progress() as progress:
        folder = Path(name)
        task = progress.add_task("starting engines", total=steps)

        def told(what: str) -> None:
            progress.update(task, description=what, advance=1)

        model = loud_model(folder / "model")
        with started(options.pairs, model, pool_tokens(options), folder) as engines:
            bench = Bench(engines, model, options, told)
            found = asyncio.run(measure(bench, options.rounds))
            names = [engine.name for engine in engines]
    rows = rows_of(found)
    show(HEAD, [cells(row, options) for row in rows], title=f"{options.pairs} and {options.pairs} engines")
    if options.out is not None:
        made_of = {"pairs": options.pairs, "requests": options.requests, "rounds": options.rounds}
        document = {"options": made_of, "engines": names, "rows": rows}
        text = page(rows, options, made, time.monotonic() - began_s)
        write_result(options.out, file_name(options), made, document, text)


if __name__ == "__main__":
    main()
