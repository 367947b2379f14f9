"""Replays sessions of coding agents and chats with program ids alone, on a real engine: stock beside sojourn.

    python benchmarks/session_replay.py --traces traces --rounds 2 --out benchmarks/results

Users send ``X-Session-ID`` and nothing else: no tools, no ends. Three cells, each with eight users at once:

- *sessions*: recorded sessions (``kvct`` traces) from their first prompt of 10,000 to 25,000 tokens on, with
  pauses of at most 10 s. Prompts share what they shared in the recording. On ``tiny`` computing is cheap, on
  ``smol`` it is dear; there all lengths are divided by five.
- *chats*: eight turns of 600 new tokens with pauses of 2 s. Each prompt repeats only the first 600 tokens,
  as if the template dropped earlier answers.

A run ends after ``--seconds``. Every second round reverses the order of the arms. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from result_pages import made_by, marked, write_result
from rich.console import Console
from sojourn_server.launch.engine_server import EngineServer
from sojourn_server.replay.completions_client import CompletionsClient
from sojourn_server.replay.program_announcer import NullAnnouncer
from sojourn_server.replay.replay_driver import Replay, ReplayOptions
from sojourn_server.simulator.report.results_file import Provenance, made_with
from sojourn_server.traces.trace_file import read_trace
from sojourn_server.traces.trace_schema import TraceProgram, TraceTurn

USERS = 8
MAX_PAUSE_S = 10.0
FIRST_PROMPT_TOKENS = range(10_000, 25_001)
MAX_CONTEXT_TOKENS = 25_000
MIN_TURNS = 6
"""Minimum number of a session's turns within ``MAX_CONTEXT_TOKENS``."""
CHATS, CHAT_TURNS, CHAT_TOKENS, CHAT_PAUSE_S = 200, 8, 600, 2.0
HEAD = (
    "cell", "arm", "requests", "turn, mean s", "TTFT, mean s", "TTFT, P95 s", "after the first turn",
    "prompt tokens found", "sessions ended", "stock ÷ it: turn", "TTFT, mean", "TTFT, P95",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Load:
    """Programs, and the engine that serves them."""

    name: str
    model: str
    blocks: int
    max_model_len: int
    token_scale: float = 1.0


LOADS = (
    Load(name="sessions", model="tiny", blocks=1500, max_model_len=32_768),
    Load(name="chats", model="tiny", blocks=430, max_model_len=8192),
    Load(name="sessions", model="smol", blocks=300, max_model_len=8192, token_scale=0.2),
)


class HeaderAnnouncer(NullAnnouncer):
    """Names the program in the header ``X-Session-ID``. Reports nothing else."""

    def __init__(self) -> None:
        self._program: ContextVar[str] = ContextVar("program")

    @asynccontextmanager
    async def program(self, name: str, program_id: str, parent_id: str | None) -> AsyncIterator[None]:
        token = self._program.set(program_id)
        try:
            yield
        finally:
            self._program.reset(token)

    def request_parts(self) -> tuple[dict[str, Any], dict[str, str]]:
        return {}, {"X-Session-ID": self._program.get()}


def sessions(folder: Path, seed: int) -> list[TraceProgram]:
    """Return the sessions that fit, in random order. A pause of a person or of a tool is idle time alike."""
    found = []
    for path in sorted(folder.glob("kvct*.jsonl*")):
        for program in read_trace(path):
            fitting = 0
            for turn in program.turns:
                if turn.prompt_tokens + turn.output_tokens > MAX_CONTEXT_TOKENS:
                    break
                fitting += 1
            first = program.turns[0].prompt_tokens
            if program.parent is None and first in FIRST_PROMPT_TOKENS and fitting >= MIN_TURNS:
                turns = (
                    replace(turn, gap_s=min(MAX_PAUSE_S, turn.gap_s or 0.0), tools=())
                    for turn in program.turns
                )
                found.append(replace(program, turns=tuple(turns)))
    random.Random(seed).shuffle(found)
    return found


def chats(seed: int) -> list[TraceProgram]:
    draw = random.Random(seed)
    programs = []
    for number in range(CHATS):
        prompt, turns = CHAT_TOKENS, []
        for turn in range(CHAT_TURNS):
            output = draw.randint(150, 250)
            kept = {"reset": True, "prefix_tokens": CHAT_TOKENS} if turn else {}
            turns.append(TraceTurn(prompt_tokens=prompt, output_tokens=output, gap_s=CHAT_PAUSE_S, **kept))
            prompt += output + CHAT_TOKENS
        programs.append(TraceProgram(program_id=f"chat-{number}", turns=tuple(turns)))
    return programs


def run(load: Load, arm: str, programs: Sequence[TraceProgram], seconds: float) -> dict[str, Any]:
    """Run a load once, on a server of its own. Returns the figures of the turns that ended in time."""
    flags = ("--num-gpu-blocks-override", str(load.blocks), "--max-model-len", str(load.max_model_len))
    policy = None if arm == "sojourn" else arm
    with EngineServer(load.model, policy=policy, serve_args=flags) as server:
        return asyncio.run(_replay(server.url, load, programs, seconds))


async def _replay(url: str, load: Load, programs: Sequence[TraceProgram], seconds: float) -> dict[str, Any]:
    options = ReplayOptions(
        concurrency=USERS, stagger_s=0.5, token_scale=load.token_scale,
        max_context_tokens=int(MAX_CONTEXT_TOKENS * load.token_scale),
    )  # fmt: skip
    async with CompletionsClient(url) as client:
        served = await client.discover(None)
        await client.complete(served.name, list(range(300, 1_300)), 8)  # the first request loads kernels
        replay = Replay(programs, client, served, HeaderAnnouncer(), options)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await replay.run()
    tally = replay.tally
    if tally.errors:
        raise RuntimeError(f"{load.name}: {dict(tally.errors)}; first: {tally.first_error}")
    done = [turn.completion for turn in tally.turns]
    ttfts_s = sorted(each.ttft_s for each in done)
    later_s = sorted(turn.completion.ttft_s for turn in tally.turns if turn.turn)
    prompt_tokens = sum(each.prompt_tokens for each in done)
    return {
        "requests": len(done),
        "turn_mean_s": statistics.fmean(each.latency_s for each in done),
        "ttft_mean_s": statistics.fmean(ttfts_s),
        "ttft_p95_s": ttfts_s[int(0.95 * len(ttfts_s))],
        "later_ttft_p95_s": later_s[int(0.95 * len(later_s))],
        "found_share": sum(each.cached_tokens or 0 for each in done) / prompt_tokens,
        "sessions_ended": len(tally.finished),
    }


def lines(cells: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table, as text: medians over the rounds, ratios of medians."""
    rows = []
    for cell in cells:
        arms: dict[str, list[dict[str, Any]]] = cell["arms"]

        def median(arm: str, figure: str, arms: Any = arms) -> float:
            return statistics.median(each[figure] for each in arms[arm])

        first = next(iter(arms))
        for arm, runs in arms.items():
            ratios = (median(first, f) / median(arm, f) for f in ("turn_mean_s", "ttft_mean_s", "ttft_p95_s"))
            rows.append(
                [
                    cell["cell"], arm, ", ".join(str(each["requests"]) for each in runs),
                    f"{median(arm, 'turn_mean_s'):.2f}", f"{median(arm, 'ttft_mean_s'):.2f}",
                    ", ".join(f"{each['ttft_p95_s']:.2f}" for each in runs),
                    ", ".join(f"{each['later_ttft_p95_s']:.2f}" for each in runs),
                    f"{median(arm, 'found_share'):.0%}",
                    ", ".join(str(each["sessions_ended"]) for each in runs),
                    *(f"{ratio:.2f}" for ratio in ratios),
                ]
            )  # fmt: skip
    return rows


def page(
    cells: Sequence[dict[str, Any]], options: argparse.Namespace, made: Provenance, wall_s: float
) -> str:
    """Return the result page in Markdown."""
    return f"""# Sessions and chats with program ids alone

{made_by(made, wall_s)}

{USERS} users at once, {options.seconds:g} s a run, on the CPU engine, without host memory. Rounds have seeds
0 to {options.rounds - 1} and alternate the order of the arms. Columns are medians over rounds; requests and
P95 have each round. *After the first turn* is P95 of TTFT of all turns but each session's first.

{marked(HEAD, lines(cells))}

{{by hand}}
"""


def main() -> None:
    """Run all cells; write the results after each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder of kvct*.jsonl.gz traces")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--arms", default="stock,sojourn", help="policies; the first one is compared with")
    parser.add_argument("--cells", default="sessions tiny,chats tiny,sessions smol")
    parser.add_argument("--out", type=Path, required=True, help="folder for session_replay.json and .md")
    options = parser.parse_args()
    arms, made, began = options.arms.split(","), made_with(sys.argv), time.monotonic()
    wanted = options.cells.split(",")
    loads = {f"{load.name} {load.model}": load for load in LOADS}
    cells: list[dict[str, Any]] = [{"cell": name, "arms": {arm: [] for arm in arms}} for name in wanted]
    for cell in cells:
        load = loads[cell["cell"]]
        for seed in range(options.rounds):
            programs = chats(seed) if load.name == "chats" else sessions(options.traces, seed)
            for arm in reversed(arms) if seed % 2 else arms:
                figures = run(load, arm, programs, options.seconds)
                cell["arms"][arm].append(figures)
                Console(stderr=True).print(f"{cell['cell']}, round {seed}, {arm}: {figures}", highlight=False)
            done = [each for each in cells if all(each["arms"].values())]
            text = page(done, options, made, time.monotonic() - began)
            write_result(options.out, "session_replay", made, {"cells": done}, text)


if __name__ == "__main__":
    main()
