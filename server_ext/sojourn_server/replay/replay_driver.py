"""Replays the programs of a trace against a live server. Sleeps replace the tools.

By default ``concurrency`` programs run at a time. When a program ends, the next program starts (a closed
loop). If ``ReplayOptions.arrivals`` is true, each program starts at its recorded time (an open loop).
Sub-agents do not count in ``concurrency``. A sub-agent starts at its recorded offset after its parent's
start. Without an offset, it starts after the recorded turn of its parent. A program ends at its first failed
turn, because later turns would have other prefixes than in the trace.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import sojourn
from sojourn.shell_command import is_shell_tool

from ..traces.prompt_builder import (
    DEFAULT_VOCABULARY,
    PromptBuilder,
    PromptPlan,
    TurnPlan,
    recomputed_tokens,
)
from ..traces.token_ids import FIRST_ID, TokenIdGenerator
from ..traces.trace_schema import TraceProgram, TraceTurn, replayed_id
from .completions_client import CompletionsClient, RequestError, ServedModel
from .replay_report import ReplayedProgram, ReplayedTurn, ReplayTally

DEFAULT_BLOCK_SIZE = 16
"""vLLM's default block size on CUDA, in tokens."""
DEFAULT_OUTPUT_BUDGET = 8192
"""Maximum tokens of an output if the server does not report its maximum context."""
STOP_ID = FIRST_ID - 1
"""Token id that ends a forced output. No prompt and no output of a trace has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Options of a replay. Raises ``ValueError`` unless ``speed`` and ``token_scale`` are above 0."""

    concurrency: int = 8
    """Number of top-level programs that run at the same time; ignored if ``arrivals`` is true."""
    stagger_s: float = 0.0
    """Seconds between the starts of the first ``concurrency`` programs; not used with ``arrivals``."""
    arrivals: bool = False
    """Whether programs start at their recorded times."""
    speed: float = 1.0
    """Number by which gaps, arrival times and sub-agents' start offsets are divided."""
    token_scale: float = 1.0
    """Factor for all lengths in tokens."""
    max_context_tokens: int | None = None
    """Maximum context in tokens. A program ends before its first turn with a longer context. If ``None``, a
    program with a turn that is too long for the server is skipped."""
    force_tokens: bool = False
    """Whether requests force the server to generate the planned tokens, so that prefixes are reused as in the
    trace."""
    oracle_lengths: bool = False
    """Whether ``max_tokens`` of a request is its exact output length, which a real client does not know. If
    false, ``max_tokens`` is the length of the trace's longest output, and the last forced token is a stop
    token, which ends the output. No effect without ``force_tokens``: then ``max_tokens`` is always the exact
    length, because nothing else ends the output."""
    vocabulary: int = DEFAULT_VOCABULARY
    """Exclusive upper bound of the token ids in prompts."""
    block_size: int | None = None
    """Tokens per KV block of the server, whose cache reuses only whole blocks. If ``None``, the size that the
    server reports is used."""

    def __post_init__(self) -> None:
        if not (self.speed > 0 and self.token_scale > 0):
            raise ValueError("speed and token scale must be above 0")


@contextmanager
def reporting(url: str | None, api_key: str | None = None) -> Iterator[None]:
    """Report the programs and tool calls of a replay to the server at ``url``, as an agent with the SDK does.
    ``None``: report nothing, so that all requests are unrelated to the server."""
    if url is None:
        sojourn.shutdown()  # also if SOJOURN_URL is set
    else:
        # For this process, so that the SDK's events bypass proxies, as ``CompletionsClient`` does.
        os.environ["no_proxy"] = "*"
        sojourn.init(url, api_key=api_key, dialect="sojourn")
    try:
        yield
    finally:
        sojourn.flush()
        sojourn.shutdown()


class Replay:
    """Replays programs against one server. Call ``run()`` once, inside ``reporting``. ``tally`` may be read
    during the run. After each turn and each program, ``on_progress`` is called with the tally."""

    def __init__(
        self,
        programs: Sequence[TraceProgram],
        client: CompletionsClient,
        served: ServedModel,
        options: ReplayOptions,
        *,
        on_progress: Callable[[ReplayTally], None] = lambda tally: None,
    ) -> None:
        self.tally = ReplayTally()
        self._client = client
        self._served = served
        self._options = options
        self.block_size = options.block_size or served.block_size or DEFAULT_BLOCK_SIZE
        """Tokens per KV block of the server. Reusable tokens are counted in whole blocks."""
        self._on_progress = on_progress
        self._started_s = 0.0
        self._ids = TokenIdGenerator(options.vocabulary)
        # A server remembers ended programs, so a second replay of the same trace needs other ids.
        self._run_id = secrets.token_hex(3)
        longest = max((turn.output_tokens for program in programs for turn in program.turns), default=1)
        self._declared_tokens = max(1, math.ceil(longest * options.token_scale))
        """Value of ``max_tokens`` for requests that must not reveal their output length."""
        known = {program.program_id for program in programs}
        self._roots = [program for program in programs if program.parent not in known]
        self._children: dict[str | None, list[TraceProgram]] = defaultdict(list)
        for program in programs:
            self._children[program.parent].append(program)

    async def run(self) -> ReplayTally:
        """Replay all programs and return the tally. Failed requests are counted, not raised."""
        self._started_s = time.monotonic()
        await (self._open_loop() if self._options.arrivals else self._closed_loop())
        self.tally.wall_s = time.monotonic() - self._started_s
        return self.tally

    async def _closed_loop(self) -> None:
        waiting = iter(self._roots)

        async def worker(number: int) -> None:
            await asyncio.sleep(number * self._options.stagger_s)
            for program in waiting:
                await self._run_with_sub_agents(program, None)

        await asyncio.gather(*map(worker, range(min(self._options.concurrency, len(self._roots)))))

    async def _open_loop(self) -> None:
        first_s = min((p.arrival_s for p in self._roots if p.arrival_s is not None), default=0.0)

        async def one(program: TraceProgram) -> None:
            await asyncio.sleep(((program.arrival_s or first_s) - first_s) / self._options.speed)
            await self._run_with_sub_agents(program, None)

        await asyncio.gather(*map(one, self._roots))

    async def _run_with_sub_agents(self, program: TraceProgram, parent_id: str | None) -> None:
        """Run a program. Start each sub-agent of the program at the sub-agent's start time. Return when all
        have ended."""
        program_id = f"{replayed_id(program.program_id)}@{self._run_id}"
        turns_done = [asyncio.Event() for _ in program.turns]

        async def child(sub: TraceProgram) -> None:
            if sub.start_offset_s is not None:
                await asyncio.sleep(sub.start_offset_s / self._options.speed)
            elif sub.parent_turn is not None and sub.parent_turn < len(turns_done):
                await turns_done[sub.parent_turn].wait()
            await self._run_with_sub_agents(sub, program_id)

        async def own() -> None:
            try:
                outcome = await self._program(program, program_id, parent_id, turns_done)
            finally:
                for event in turns_done:  # a program that failed early must not keep its sub-agents waiting
                    event.set()
            self.tally.programs.append(outcome)
            self._on_progress(self.tally)

        await asyncio.gather(own(), *map(child, self._children.get(program.program_id, ())))

    async def _program(
        self, program: TraceProgram, program_id: str, parent_id: str | None, turns_done: list[asyncio.Event]
    ) -> ReplayedProgram:
        outline = PromptPlan(program, self._options.token_scale)
        builder = PromptBuilder(program, outline=outline, ids=self._ids)
        fitting, reason = self._count_fitting_turns(outline.plans)
        if not fitting:
            return ReplayedProgram(program.program_id, reason=reason)
        started = time.monotonic()
        agent_type = program.agent_type or program.group or program.source or "replay"
        async with sojourn.program(agent_type, id=program_id, parent=parent_id, agent_type=agent_type):
            for index, turn in enumerate(program.turns[:fitting]):
                try:
                    await self._turn(builder, index, program.program_id)
                except RequestError as error:
                    self.tally.add_error(error)
                    return ReplayedProgram(program.program_id, reason=error.reason, turns=index)
                turns_done[index].set()
                self._on_progress(self.tally)
                if index + 1 < fitting:  # the tool of the last turn delays nothing
                    await self._gap(turn)
        return ReplayedProgram(
            program.program_id,
            finished=True,
            completion_s=time.monotonic() - started,
            clipped=fitting < len(program.turns),
            turns=fitting,
        )

    def _count_fitting_turns(self, plans: Sequence[TurnPlan]) -> tuple[int, str]:
        """Return (number of the program's first turns to replay, why the next turn does not fit)."""
        limit, clip = self._served.max_context_tokens or math.inf, self._options.max_context_tokens
        for index, plan in enumerate(plans):
            needed = plan.prompt_tokens + plan.output_tokens
            if clip is not None and needed > clip:
                return index, "first turn above --max-context"
            if needed > limit:
                # Without --max-context a program is replayed as a whole or not at all, because a mean over
                # silently cut programs is not comparable.
                return (index if clip is not None else 0), "context too long for the server"
        return len(plans), ""

    async def _turn(self, builder: PromptBuilder, index: int, program_id: str) -> None:
        plan = builder.plans[index]
        prompt = builder.prompt(index)
        body, headers = sojourn.request_parts()
        forced = builder.planned_output(index) if self._options.force_tokens else None
        most_tokens = plan.output_tokens
        if forced is not None and not self._options.oracle_lengths:
            # The last output token's KV is never computed, so the next prompt may have another token there.
            forced = [*forced[:-1], STOP_ID]
            room = (self._served.max_context_tokens or len(prompt) + DEFAULT_OUTPUT_BUDGET) - len(prompt)
            most_tokens = min(self._declared_tokens, max(1, room))
            body = {**body, "stop_token_ids": [STOP_ID]}
        if forced is not None:
            body = {**body, "vllm_xargs": {**body.get("vllm_xargs", {}), "replay_ids": forced}}
        sent_s = time.monotonic() - self._started_s
        # Forced outputs are known. The first turn checks that the server forces them.
        asks_ids = forced is None or index == 0
        answer = await self._client.complete(
            self._served.name, prompt, most_tokens, body=body, headers=headers, return_token_ids=asks_ids
        )
        ids, cached, again = answer.output_ids, answer.cached_tokens, None
        if ids is not None:
            builder.replace_output(ids)
        if cached is not None:
            again = recomputed_tokens(builder.plans, index, cached, self.block_size)
        failed = forced is not None and ids is not None and list(ids) != forced
        known = ids is not None or forced is not None
        self.tally.turns.append(ReplayedTurn(answer, again, failed, known, program_id, index, sent_s))

    async def _gap(self, turn: TraceTurn) -> None:
        """Wait until the next turn is due. Report the tool call of the gap, if there is one. It lasts as long
        as in the trace, or for the whole gap if the trace has no duration."""
        idle_s, run = turn.idle_s, turn.tool_run
        if run is not None and turn.gap_kind != "human":
            tool_s = idle_s if run.s is None else min(run.s, idle_s)
            async with sojourn.tool_call(run.name, tool_class=run.cmd if is_shell_tool(run.name) else None):
                await asyncio.sleep(tool_s / self._options.speed)
            idle_s -= tool_s
        await asyncio.sleep(idle_s / self._options.speed)


def first_programs(programs: Sequence[TraceProgram], count: int | None) -> list[TraceProgram]:
    """Return the first ``count`` top-level programs and all their sub-agents. If ``count`` is ``None``,
    return all programs."""
    if count is None:
        return list(programs)
    known = {program.program_id for program in programs}
    chosen = set([p.program_id for p in programs if p.parent not in known][:count])
    # A sub-agent may have sub-agents, and may come before its parent in the file.
    while more := {p.program_id for p in programs if p.parent in chosen} - chosen:
        chosen |= more
    return [program for program in programs if program.program_id in chosen]
