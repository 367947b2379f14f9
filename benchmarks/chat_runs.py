"""Chats whose client sends program ids and nothing else, on a real engine under several policies.

    python benchmarks/chat_runs.py --rounds 3 --out benchmarks/results

Eight programs begin within four seconds, each with eight turns. Their KV does not fit on the device. They
pause between turns: half of the pauses are below 2 s, one in 25 above 20 s, none above 40 s. Requests name
their program; no hint says when a tool runs, and no event when a program ends. Outputs are forced, so that
all runs have the same turns. Every second round reverses the order of the policies. Run it on an idle
machine: a round of two policies takes about seven minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from result_pages import made_by, marked, write_result
from rich.console import Console
from sojourn_server.launch.engine_server import EngineServer
from sojourn_server.launch.serve_command import FORCED_TOKENS
from sojourn_server.replay.completions_client import CompletionsClient
from sojourn_server.replay.replay_driver import Replay, ReplayOptions
from sojourn_server.simulator.report.results_file import Provenance, made_with
from sojourn_server.traces.trace_schema import TraceProgram, TraceTurn

PROGRAMS, TURNS = 8, 8
MODEL, BLOCK_SIZE, MAX_MODEL_LEN = "smol", 32, 8192
POOL_BLOCKS = 320
"""About a third of the blocks that all contexts have at their ends."""
HEAD = (
    "policy", "completion, mean, s", "each round", "first policy ÷ it", "P95, s", "TTFT, mean, s",
    "prompt tokens computed",
)  # fmt: skip


class IdAnnouncer:
    """Names the program in each request. Reports nothing else."""

    def __init__(self) -> None:
        self._program: ContextVar[str] = ContextVar("program")

    @asynccontextmanager
    async def program(self, name: str, program_id: str, parent_id: str | None) -> AsyncIterator[None]:
        token = self._program.set(program_id)
        try:
            yield
        finally:
            self._program.reset(token)

    @asynccontextmanager
    async def tool(self, name: str, tool_class: str | None) -> AsyncIterator[None]:
        yield

    def request_parts(self) -> tuple[dict[str, Any], dict[str, str]]:
        context = json.dumps({"program_id": self._program.get()})
        return {"vllm_xargs": {"agentic_context": context}}, {}

    def close(self) -> None: ...


def chats(seed: int) -> list[TraceProgram]:
    """Return the programs of one round."""
    draw = random.Random(seed)
    programs = []
    for number in range(PROGRAMS):
        prompt, turns = draw.randint(400, 1_200), []
        for turn in range(TURNS):
            output, last = draw.randint(20, 60), turn == TURNS - 1
            gap_s = None if last else min(40.0, draw.lognormvariate(0.7, 1.3))
            turns.append(TraceTurn(prompt_tokens=prompt, output_tokens=output, gap_s=gap_s))
            prompt += output + draw.randint(150, 600)
        programs.append(TraceProgram(program_id=f"chat-{number}", turns=tuple(turns)))
    return programs


def run_policy(policy: str, seed: int) -> dict[str, Any]:
    """Run the chats once under a policy, on a server of its own. Returns the replay's document."""
    flags = (
        "--block-size", str(BLOCK_SIZE),
        "--num-gpu-blocks-override", str(POOL_BLOCKS),
        "--max-model-len", str(MAX_MODEL_LEN),
        "--max-num-seqs", str(PROGRAMS),
        "--max-num-batched-tokens", "1024",
        "--logits-processors", FORCED_TOKENS,
    )  # fmt: skip
    with EngineServer(MODEL, policy=policy, serve_args=flags) as server:
        return asyncio.run(_replay(server.url, seed))


async def _replay(url: str, seed: int) -> dict[str, Any]:
    options = ReplayOptions(concurrency=PROGRAMS, stagger_s=0.5, force_tokens=True, block_size=BLOCK_SIZE)
    async with CompletionsClient(url) as client:
        served = await client.discover(None)
        await client.complete(served.name, list(range(300, 1_300)), 8)  # the first request loads kernels
        tally = await Replay(chats(seed), client, served, IdAnnouncer(), options).run()
    document = tally.document()
    if document["errors"] or document["notes"] or document["programs_finished"] != PROGRAMS:
        why = document["first_error"] or document["notes"]
        raise RuntimeError(f"{document['programs_finished']} of {PROGRAMS} ended: {why}")
    return document


def lines(runs: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table, as text: medians over the rounds."""
    found, policies = [], list(runs[0]["policies"])
    for policy in policies:
        rounds = [run["policies"][policy] for run in runs]
        means = [each["completion_s"]["mean"] for each in rounds]
        firsts = [run["policies"][policies[0]]["completion_s"]["mean"] for run in runs]
        ratio = statistics.median(first / mean for first, mean in zip(firsts, means, strict=True))
        found.append(
            [
                policy, f"{statistics.median(means):.1f}", ", ".join(f"{mean:.1f}" for mean in means),
                f"{ratio:.2f}",
                f"{statistics.median(each['completion_s']['p95'] for each in rounds):.1f}",
                f"{statistics.median(each['ttft_s']['mean'] for each in rounds):.2f}",
                f"{statistics.median(each['computed_tokens'] for each in rounds):,.0f}",
            ]
        )  # fmt: skip
    return found


def page(runs: list[dict[str, Any]], made: Provenance, wall_s: float) -> str:
    """Return the result page in Markdown."""
    seeds = ", ".join(str(run["seed"]) for run in runs)
    floor = ", ".join(f"{run['new_tokens']:,}" for run in runs)
    return f"""# Chats with program ids alone

{made_by(made, wall_s)}

{PROGRAMS} programs at once, {TURNS} turns each, on the CPU engine with `{MODEL}` and {POOL_BLOCKS} KV
blocks of {BLOCK_SIZE} tokens. Seeds {seeds}, one a round; the columns are medians over rounds, and
P95 is over the eight programs of a round. A perfect cache computes {floor} prompt tokens in these rounds.

{marked(HEAD, lines(runs))}

{{by hand}}
"""


def main() -> None:
    """Run all rounds; write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policies", default="continuum,sojourn", help="the first one is compared with")
    parser.add_argument("--out", type=Path, required=True, help="folder to write chat_runs.json and .md into")
    options = parser.parse_args()
    policies, made, began = options.policies.split(","), made_with(sys.argv), time.monotonic()
    runs: list[dict[str, Any]] = []
    for seed in range(options.rounds):
        run: dict[str, Any] = {"seed": seed, "policies": {}}
        for policy in reversed(policies) if seed % 2 else policies:
            run["policies"][policy] = document = run_policy(policy, seed)
            mean_s, computed = document["completion_s"]["mean"], document["computed_tokens"]
            Console(stderr=True).print(f"round {seed}, {policy}: {mean_s:.1f} s, {computed} tokens computed")
            run["new_tokens"] = computed - document["regenerated_tokens"]  # the same for each policy
        run["policies"] = {policy: run["policies"][policy] for policy in policies}
        runs.append(run)
        write_result(
            options.out, "chat_runs", made, {"runs": runs}, page(runs, made, time.monotonic() - began)
        )


if __name__ == "__main__":
    main()
