"""SAGA's two workloads: ten tenants (§9.1), and tools with a chosen variation of latency (Table 10)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from sojourn_server.traces.trace_schema import TraceProgram, TraceToolRun, TraceTurn

from .distributions import (
    Distribution,
    PercentileDistribution,
    log_normal_with,
    split,
    truncated_exponential,
    uniform,
)

TOOL_LATENCIES = {
    "code_execution": PercentileDistribution(((0.50, 0.180), (0.95, 2.400), (0.99, 28.000))),
    "file_operation": PercentileDistribution(((0.50, 0.045), (0.95, 0.320), (0.99, 1.200))),
    "web_api": PercentileDistribution(((0.50, 0.850), (0.95, 4.500), (0.99, 45.000))),
    "database_query": PercentileDistribution(((0.50, 0.120), (0.95, 0.890), (0.99, 3.500))),
}
"""Tool type → latency in seconds (SAGA Table 1)."""
TENANTS = (("heavy", 3, 100, 16.0), ("medium", 4, 30, 8.0), ("light", 3, 10, 4.0))
"""(class, number of tenants, steps of an agent, tasks per minute of each tenant), SAGA §9.1."""
_FIRST_PROMPT = (2_000, 4_000)
FIRST_PROMPT = uniform(*_FIRST_PROMPT)
"""Tokens of a program's first prompt (SAGA §2.1: a context grows from 2–4K tokens to 16–128K)."""
_LONGEST_CONTEXT = 128_000
_STEP_OUTPUT = uniform(100, 500)
"""Output tokens of a step (SAGA §9.1, SWE-bench)."""
SWE_STEPS = (37, 5, 150)
"""Mean, minimum and maximum number of steps of a SWE-bench task (SAGA §9.1 and §2.1)."""
CV_MEAN_TOOL_S = 1.2
"""Mean tool latency of SAGA's Table 10 in seconds, the same for every coefficient of variation."""
CV_RANGE = (0.5, 3.0)
"""Lowest and highest coefficient of variation in SAGA's Table 10."""


ProgramGenerator = Callable[[random.Random], Iterator[TraceProgram]]
"""Function that draws the programs of a synthetic workload, without end."""


def ten_tenants(rng: random.Random) -> Iterator[TraceProgram]:
    """Generate the tasks of SAGA's ten tenants (§9.1): 100, 30 or 10 steps, Poisson arrivals for each tenant.

    A task is a program, and a step is a turn with its tool call. The paper does not state the lengths of its
    requests (from BurstGPT). Here all contexts grow by the same amount per step on average: 100 steps end at
    128K tokens, and 10 steps at 15.5K. The paper states 16K to 128K (§2.1). Each step uses one of Table 1's
    four tools with equal probability. Tasks with the same number of steps have the same agent type.
    """
    tenants = [
        (f"{kind}-{number}", steps, rate)
        for kind, count, steps, rate in TENANTS
        for number in range(1, count + 1)
    ]
    rates = [rate for _, _, rate in tenants]
    at_s = 0.0
    while True:
        # All arrivals are one Poisson process. Each belongs to a tenant with probability in proportion to the
        # tenant's rate.
        at_s += rng.expovariate(sum(rates) / 60.0)
        tenant, steps, _ = rng.choices(tenants, weights=rates)[0]
        kinds = rng.choices(list(TOOL_LATENCIES), k=steps)
        lengths = _lengths(steps, 100, rng)
        tools = [draw_tool_run(kind, TOOL_LATENCIES[kind], rng) for kind in kinds]
        yield append_only(*lengths, tools, arrival_s=at_s, tenant=tenant, agent_type=f"{steps}-step-agent")


def latency_cv(cv: float) -> ProgramGenerator:
    """Return a generator function of the programs of SAGA's Table 10. ``cv`` is the coefficient of variation
    of the tool latencies. Their mean is always ``CV_MEAN_TOOL_S``."""
    tool_s = log_normal_with(CV_MEAN_TOOL_S, cv * CV_MEAN_TOOL_S)
    _, least, most = SWE_STEPS
    # With this rate the mean is that of ``SWE_STEPS``.
    draw_steps = truncated_exponential(least, most, rate=0.02933303908757992)

    def programs(rng: random.Random) -> Iterator[TraceProgram]:
        while True:
            steps = round(draw_steps(rng))
            # Latencies have a generator of their own, so that lengths are the same for every cv.
            times = random.Random(rng.random())
            lengths = _lengths(steps, most, rng)
            yield append_only(
                *lengths, [draw_tool_run("code_execution", tool_s, times) for _ in range(steps)]
            )

    return programs


def _lengths(steps: int, max_steps: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """Draw the lengths of a task of ``steps`` steps. Returns two lists with one element per step: new prompt
    tokens, and output tokens. A task of ``max_steps`` steps would have a final context of
    ``_LONGEST_CONTEXT`` tokens on average."""
    mean_first = sum(_FIRST_PROMPT) / 2
    growth = (_LONGEST_CONTEXT - mean_first) / max_steps
    first = round(FIRST_PROMPT(rng))
    outputs = [round(_STEP_OUTPUT(rng)) for _ in range(steps)]
    left = max(steps, round(growth * steps) - sum(outputs))
    return [first, *(split(rng, left, steps - 1) if steps > 1 else ())], outputs


def draw_tool_run(name: str, seconds: Distribution, rng: random.Random) -> TraceToolRun:
    """Return a call of the tool ``name``. Its duration in seconds is drawn from ``seconds``."""
    return TraceToolRun(name=name, s=round(seconds(rng), 6))


def append_only(
    appends: Sequence[int],
    outputs: Sequence[int],
    tools: Sequence[TraceToolRun],
    *,
    arrival_s: float | None = None,
    tenant: str | None = None,
    agent_type: str | None = None,
) -> TraceProgram:
    """Return a program in which each prompt continues the previous prompt and output.

    ``appends``, ``outputs`` and ``tools`` have one element for each turn: the number of new prompt tokens,
    the number of output tokens, and the tool call after the turn. The last turn calls no tool.
    """
    turns, context = [], 0
    for index, (append, output, tool) in enumerate(zip(appends, outputs, tools, strict=True)):
        context += append
        last = index + 1 == len(appends)
        turns.append(
            TraceTurn(
                prompt_tokens=context,
                output_tokens=output,
                append_tokens=append,
                tool=None if last else tool.name,
                tools=None if last else (tool,),
                tool_seconds=None if last else tool.s,
                gap_s=None if last else tool.s,
                gap_kind=None if last else "tool",
            )
        )
        context += output
    return TraceProgram(
        program_id="synthetic",
        turns=tuple(turns),
        arrival_s=arrival_s,
        tenant=tenant,
        group=agent_type or tenant,
        agent_type=agent_type,
    )
