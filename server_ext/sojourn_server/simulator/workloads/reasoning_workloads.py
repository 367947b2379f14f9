"""Workloads with long outputs, for Tetris: published output lengths of reasoning models.

Tetris uses long outputs from NuminaMath and SWE-bench, but states no lengths except "hundreds of thousands"
(§1). The lengths here, in tokens, are from other sources. An output includes thinking. Every program has an
``agent_type``. The workloads, with what is published and what is chosen here:

    reasoning-math          DeepSeek-R1 on competition problems, one request each. Published: three quarters
                            are solved within 8K, limit 16K (OpenR1-Math-220k: huggingface.co/blog/open-r1/
                            update-2); mean 6,000 (OpenThoughts-114k, of the same model: …/update-1).
                            Chosen: log-normal
    reasoning-aime          the same model on AIME. Published: mean 12K (card of DeepSeek-R1-0528), limit
                            32,768 (card of DeepSeek-R1). Chosen: log-normal, as wide as reasoning-math
    reasoning-aime-0528     DeepSeek-R1-0528 on AIME. Published: mean 23K, limit 64K (card of the model)
    reasoning-requests      requests to a DeepSeek-R1 service: see ``R1_OUTPUT``. Chosen: prompts
                            independent of outputs; no length above the last percentile
    reasoning-mix           four agent types, equally likely (chosen): two kinds of chats, and the requests
                            of reasoning-math and of reasoning-aime. Outputs of chats: means of Tetris §1,
                            exponential like the outputs of services in ServeGen (arXiv 2505.09999).
                            Prompts of chats: means of WildChat (arXiv 2405.01470) Table 1, exponential
                            (chosen). Only one request of each conversation (chosen)
    reasoning-agent         thinks, calls a tool, and continues. Published: 23 steps on average, "over 50" in
                            long ones, with search, browser and code for tools (moonshotai.github.io/
                            Kimi-Researcher). Chosen: 2 to 50 steps, exponential in between; outputs as in
                            reasoning-requests; equally likely tools, with SAGA's latencies (Table 1);
                            first prompt of 2–4K tokens (SAGA §2.1), results of 100 to 1,000;
                            its reasoning stays in the context

Prompts of mathematical problems have 40 to 200 tokens (chosen).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from sojourn_server.traces.trace_schema import TraceProgram, TraceToolRun

from .distributions import (
    Distribution,
    PercentileDistribution,
    gamma,
    log_normal,
    truncated_exponential,
    uniform,
)
from .saga_workloads import FIRST_PROMPT, TOOL_LATENCIES, ProgramGenerator, append_only, draw_tool_run

R1_OUTPUT = PercentileDistribution(
    (
        (0.05, 225),
        (0.25, 427),
        (0.50, 792),
        (0.75, 1_499),
        (0.90, 3_432),
        (0.95, 5_701),
        (0.99, 12_607),
        (0.999, 20_833),
    )
)
"""Output tokens in ServeGen's reasoning workload (data/reason/deepseek-r1 of github.com/alibaba/ServeGen at
f891d11). It has 1,383,669 requests of 73 clients in one day. Each client's published six-hour histograms are
weighted by its requests. The mean is 1,527."""
R1_PROMPT = PercentileDistribution(
    (
        (0.05, 13),
        (0.25, 41),
        (0.50, 208),
        (0.75, 482),
        (0.90, 2_092),
        (0.95, 6_714),
        (0.99, 23_423),
        (0.999, 33_783),
    )
)
"""Prompt tokens of the requests in ``R1_OUTPUT``."""

_PROBLEM = uniform(40, 200)
_SIGMA = 0.8596474476788896
"""With ``_SIGMA``, the mean of reasoning-math is 6,000 after clipping, and its third quartile 8K."""


class _RequestLengths(NamedTuple):
    """Prompt and output lengths of one agent type, in tokens."""

    prompt: Distribution
    output: Distribution


_TYPES = {
    # A gamma distribution whose mean equals its standard deviation is exponential.
    "lmsys-chat": _RequestLengths(gamma(69.83, 69.83), gamma(182, 182)),
    "sharegpt-chat": _RequestLengths(gamma(94.46, 94.46), gamma(456, 456)),
    "math": _RequestLengths(_PROBLEM, log_normal(8.431089955037654, _SIGMA, 16 * 1024)),
    "aime": _RequestLengths(_PROBLEM, log_normal(9.1242371355976, _SIGMA, 32 * 1024)),
    "aime-0528": _RequestLengths(_PROBLEM, log_normal(9.765330623639361, _SIGMA, 64 * 1024)),
    "r1-request": _RequestLengths(R1_PROMPT, R1_OUTPUT),
}
MIX = ("lmsys-chat", "sharegpt-chat", "math", "aime")
"""Agent types of ``reasoning-mix``."""

AGENT_TURNS = (23, 2, 50)
"""Mean, minimum and maximum number of turns of ``reasoning-agent``."""
AGENT_TOOLS = {"search": "web_api", "browser": "web_api", "code": "code_execution"}
"""Tool of the agent → SAGA's tool type."""
_TOOL_RESULT = uniform(100, 1_000)


def _requests(*types: str) -> ProgramGenerator:
    """Return a generator function of programs with one request each. Each program has one of the agent types
    ``types``, with equal probability."""

    def programs(rng: random.Random) -> Iterator[TraceProgram]:
        while True:
            kind = rng.choice(types)
            prompt, output = (max(1, round(draw(rng))) for draw in _TYPES[kind])
            yield append_only([prompt], [output], [TraceToolRun()], agent_type=kind)

    return programs


def _agent(rng: random.Random) -> Iterator[TraceProgram]:
    # With this rate the mean is that of ``AGENT_TURNS``.
    draw_turns = truncated_exponential(*AGENT_TURNS[1:], rate=0.015773677940045062)
    while True:
        turns = round(draw_turns(rng))
        tools = [
            draw_tool_run(tool, TOOL_LATENCIES[AGENT_TOOLS[tool]], rng)
            for tool in rng.choices(list(AGENT_TOOLS), k=turns)
        ]
        outputs = [round(R1_OUTPUT(rng)) for _ in range(turns)]
        appends = [round(FIRST_PROMPT(rng)), *(round(_TOOL_RESULT(rng)) for _ in range(turns - 1))]
        yield append_only(appends, outputs, tools, agent_type="researcher")


REASONING: dict[str, ProgramGenerator] = {
    "reasoning-math": _requests("math"),
    "reasoning-aime": _requests("aime"),
    "reasoning-aime-0528": _requests("aime-0528"),
    "reasoning-requests": _requests("r1-request"),
    "reasoning-mix": _requests(*MIX),
    "reasoning-agent": _agent,
}
"""Name of a workload → its generator of programs."""
