"""Layerwise transfer on a real pair: share of the transfer during which computation waits.

    python benchmarks/prefill_decode_layerwise.py --out benchmarks/results

A prefill and a decode engine run the model ``smol`` in float32. The decode engine's node reads a stored
context and sends it to the prefill engine over a compute network of ``--megabytes-s``. The prefill engine
computes the new tokens. In layerwise mode it starts when the first layer has arrived. In serial mode it
starts when all layers have arrived. A switch in the benchmark's connector sets the mode. The modes alternate,
``--rounds`` times, with the same prompts. Outputs must equal those that the same pair computed before any KV
was stored. *Prefilled* is the time until the client has the prefill engine's answer. Run it on an idle
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from prefill_decode_engines import PATIENCE_S, Engine, EngineSettings, all_idle, started
from prefill_decode_requests import PairResponse, http_client, text_of, through, whole
from result_pages import made_by, marked, write_result
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sojourn_server.models import resolve_model
from sojourn_server.policies.prefill_decode.prefill_decode_views import FULL_BLOCK_TOKENS
from sojourn_server.routing.routing_events import PairRole
from sojourn_server.simulator.report.results_file import made_with

WAYS = {"serial": False, "layerwise": True}
FIRST_ID, VOCABULARY = 10, 40_000
MOST_OFF = 1e-3
"""Maximum difference of a logprob. It is not 0, because the order of additions depends on how a prompt is
chunked."""


class Bench:
    """A pair of engines, a stored context, and prompts that begin with that context."""

    def __init__(
        self, engines: Sequence[Engine], model: str, options: argparse.Namespace, told: Callable[[str], None]
    ) -> None:
        self.prefill, self.decode = engines
        self.model = model
        self.options = options
        self.told = told
        draw = random.Random(options.seed)

        def tokens(count: int) -> list[int]:
            return draw.choices(range(FIRST_ID, VOCABULARY), k=count)

        blocks = options.hit_tokens // FULL_BLOCK_TOKENS
        self.context = tokens(blocks * FULL_BLOCK_TOKENS)
        self.prompts = [[*self.context, *tokens(options.new_tokens)] for _ in range(options.prompts)]
        self.expected: list[PairResponse] = []
        self._transfers = 0

    async def measure(self) -> list[dict[str, Any]]:
        """Run all measurements. Return them in order."""
        found = []
        async with http_client() as http:

            async def ask(prompt: Sequence[int], share: float, output_tokens: int) -> PairResponse:
                self._transfers += 1
                body = text_of(self.model, prompt, output_tokens)
                return await through(http, self.prefill, self.decode, body, f"t{self._transfers}", share)

            # Nothing is stored yet, so each prompt is computed in full.
            for number, prompt in enumerate(self.prompts):
                self.told(f"computing prompt {number + 1}")
                self.expected.append(await ask(prompt, 0.0, self.options.output_tokens))
                await self.settle()
            self.told("storing the context")
            # Only the prefill engine computes and stores the context. If the decode engine stored new blocks
            # as well, later runs would have less to do.
            await whole(http, self.prefill, text_of(self.model, self.context, self._store_tokens))
            await self.settle()
            for turn in range(self.options.rounds):
                for way, layerwise in WAYS.items():
                    self.prefill.look(layerwise=layerwise)
                    for number, prompt in enumerate(self.prompts):
                        self.told(f"round {turn + 1}: {way}")
                        before = self.prefill.look(), self.decode.look()
                        answered = await ask(prompt, 1.0, self.options.output_tokens)
                        await self.settle()
                        after = self.prefill.look(), self.decode.look()
                        self._check(number, answered)
                        read = after[1].read_bytes - before[1].read_bytes
                        expected = len(self.context) // FULL_BLOCK_TOKENS * after[1].block_bytes
                        if read != expected:
                            raise RuntimeError(f"the decode side read {read} bytes of {expected}")
                        times = {
                            name: after[0].times[name] - before[0].times[name] for name in after[0].times
                        }
                        found.append(
                            {
                                "way": way,
                                "prompt": number,
                                "prefilled_s": answered.prefilled_s,
                                "first_token_s": answered.first_s,
                                "streamed_bytes": after[1].sent_bytes - before[1].sent_bytes,
                                **times,
                            }
                        )
        return found

    async def settle(self) -> None:
        """Wait until no operation is open, then clear the engines' prefix caches."""
        deadline_s = time.monotonic() + PATIENCE_S
        engines = (self.prefill, self.decode)
        while not await asyncio.to_thread(all_idle, engines):
            if time.monotonic() > deadline_s:
                raise RuntimeError("engines do not come to rest")
            await asyncio.sleep(0.1)
        for engine in engines:
            await asyncio.to_thread(engine.forget)

    @property
    def _store_tokens(self) -> int:
        """Number of output tokens to generate while a context is stored, because each step stores 32
        blocks."""
        return len(self.context) // FULL_BLOCK_TOKENS // 32 + 2

    def _check(self, number: int, answered: PairResponse) -> None:
        expected = self.expected[number]
        if answered.tokens != expected.tokens:
            raise RuntimeError(f"prompt {number}: {answered.tokens} was said, {expected.tokens} expected")
        off = max(abs(a - b) for a, b in zip(answered.logprobs, expected.logprobs, strict=True))
        if off > MOST_OFF:
            raise RuntimeError(f"prompt {number}: logprobs are off by {off}")


def rows_of(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row of medians for each mode."""
    rows = []
    for way in WAYS:
        of = [run for run in runs if run["way"] == way]
        row: dict[str, Any] = {"way": way}
        for name in of[0]:
            if name not in ("way", "prompt"):
                row[name] = median(run[name] for run in of)
        stood_s = row["waited_s"] + row["copied_s"]
        row["stood_still"] = stood_s / row["streamed_s"] if row["streamed_s"] else None
        rows.append(row)
    basis = rows[0]["prefilled_s"]
    for row in rows:
        row["of_serial"] = row["prefilled_s"] / basis
    return rows


HEAD = (
    "way", "prefilled s", "of serial", "first token s", "layers came in s", "waited s", "copied s",
    "stood still",
)  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a table row."""
    return [
        row["way"], f"{row['prefilled_s']:.2f}", f"{row['of_serial']:.2f}", f"{row['first_token_s']:.2f}",
        f"{row['streamed_s']:.2f}", f"{row['waited_s']:.3f}", f"{row['copied_s']:.3f}",
        f"{row['stood_still']:.0%}" if row["way"] == "layerwise" else "before computing",
    ]  # fmt: skip


def page(rows: Sequence[dict[str, Any]], options: argparse.Namespace, made: Any, wall_s: float) -> str:
    """Return the result as Markdown."""
    streamed = rows[0]["streamed_bytes"] / 1e6
    return (
        "# Layerwise transfer on a real pair\n\n"
        "Generated by the command below, but for what is between the marks.\n\n"
        f"{made_by(made, wall_s)}\n\n"
        f"The model `smol` in 32-bit floats; {options.hit_tokens // FULL_BLOCK_TOKENS * FULL_BLOCK_TOKENS:,} "
        f"stored tokens, {streamed:.0f} MB, that the decode side reads and sends at "
        f"{options.megabytes_s:g} MB/s, and {options.new_tokens:,} new ones that the prefill engine computes "
        f"on {options.threads} threads. Medians of {options.rounds} rounds of {options.prompts} prompts, "
        f"seed {options.seed}. Both ways say the tokens that the same pair says of each prompt before "
        "anything is stored, when it computes all of it.\n\n"
        f"{marked(HEAD, map(cells, rows))}\n\n"
        "*Layers came in* is from the first one's arrival to the last one's; *waited* and *copied* are what "
        "computing stood still for meanwhile, *stood still* both over the first.\n\n"
        "{by hand}\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hit-tokens", type=int, default=2_048, help="that are stored")
    parser.add_argument("--new-tokens", type=int, default=1_000, help="of each prompt")
    parser.add_argument("--output-tokens", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--megabytes-s", type=float, default=60.0, help="of the compute network")
    parser.add_argument("--threads", type=int, default=2, help="that compute in the prefill engine")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder to write prefill_decode_layerwise.json and .md into")
    options = parser.parse_args(arguments)
    if options.hit_tokens < FULL_BLOCK_TOKENS or min(options.prompts, options.rounds) < 1:
        parser.error(f"expected {FULL_BLOCK_TOKENS} stored tokens, one prompt and one round at least")
    began_s, made, console = time.monotonic(), made_with(sys.argv), Console()
    model = resolve_model("smol")
    with tempfile.TemporaryDirectory() as name, Progress(console=console) as progress:
        steps = options.prompts + 1 + options.rounds * len(WAYS) * options.prompts
        task = progress.add_task("starting engines", total=steps)

        def told(what: str) -> None:
            progress.update(task, description=what, advance=1)

        with started(1, settings_of(options, model), Path(name)) as engines:
            runs = asyncio.run(Bench(engines, model, options, told).measure())
    rows = rows_of(runs)
    table = Table(*HEAD)
    for row in rows:
        table.add_row(*cells(row))
    Console(width=140).print(table)
    if options.out is not None:
        settings = {key: value for key, value in vars(options).items() if key != "out"}
        document = {"options": settings, "rows": rows, "runs": runs}
        text = page(rows, options, made, time.monotonic() - began_s)
        write_result(options.out, "prefill_decode_layerwise", made, document, text)


def settings_of(options: argparse.Namespace, model: str) -> EngineSettings:
    """Return settings with which one step computes all new tokens. By default the step takes about as long
    as the layers need to arrive."""
    tokens = options.hit_tokens + options.new_tokens + 4 * FULL_BLOCK_TOKENS
    return EngineSettings(
        model=model,
        compute_rate=options.megabytes_s * 1e6,
        pool_tokens=2 * tokens,
        buffer_bytes=1 << 30,
        batched_tokens=max(1024, options.new_tokens),
        threads={PairRole.PREFILL: options.threads},
        storing=(PairRole.PREFILL,),
    )


if __name__ == "__main__":
    main()
