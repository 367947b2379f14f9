"""Synthetic workloads with the statistics of the papers' tables.

The published statistics hold over many programs. All other values are chosen here. docs/traces.md has the
names, with what is published and what is chosen. The field ``source`` of every program is ``synthetic:NAME``.
The same name, count and seed give the same programs. Programs share no prompts, since no paper states how
much they share.
"""

from __future__ import annotations

import difflib
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from sojourn_server.traces.trace_schema import TraceError, TraceProgram, TraceToolRun, TraceTurn

from . import distributions as dist

SYNTHETIC_PREFIX = "synthetic:"
DEFAULT_PROGRAMS = 500
"""Default number of programs, as many as DualPath has trajectories and SAGA has SWE-bench tasks."""
ProgramGenerator = Callable[[random.Random], TraceProgram]
"""Function that draws the next program of a synthetic workload. ``arrival_s`` is the time since the program
before."""


def draw_tool_run(name: str, seconds: dist.Distribution, rng: random.Random) -> TraceToolRun:
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
        after: dict[str, Any] = {}
        if index + 1 < len(appends):
            after = dict(tool=tool.name, tools=(tool,), tool_seconds=tool.s, gap_s=tool.s, gap_kind="tool")
        turns.append(TraceTurn(prompt_tokens=context, output_tokens=output, append_tokens=append, **after))
        context += output
    return TraceProgram(
        program_id="synthetic",
        turns=tuple(turns),
        arrival_s=arrival_s,
        tenant=tenant,
        group=agent_type or tenant,
        agent_type=agent_type,
    )


OUTPUT_SHARE = 0.2
"""Output tokens ÷ all tokens that a turn adds to its context. Our choice, for papers that state only totals.
In DualPath the share is 148 of 756."""

# -- Continuum, Table 1: (mean, standard deviation) ---------------------------------

SWE_TOOL_LIMIT_S = 60.0
"""Time limit of a SWE-bench command in mini-swe-agent (swebench.yaml, ``environment: timeout``)."""
BFCL_SCALE = 0.4
"""Factor by which BFCL's token counts are scaled. Continuum §6.1 scales them "to fit at least 100 request in
the context window" of 128k. Table 1's 93,256 ± 68,687 tokens fit only after scaling, so we assume that they
are unscaled."""


class _Continuum(NamedTuple):
    """One row of Continuum's Table 1."""

    turns: dist.Distribution
    tool_s: dist.Distribution
    tokens: dist.Distribution
    tool: str


_CONTINUUM = {
    "continuum-swe-bench": _Continuum(
        turns=dist.rounded_normal(10.9, 2.1),
        # After clipping, the mean is 0.925 and the standard deviation 3.550.
        tool_s=dist.log_normal(-1.9879452855002073, 1.9951980880292188, SWE_TOOL_LIMIT_S),
        tokens=dist.gamma(70_126, 19_732),
        tool="bash",
    ),
    "continuum-bfcl": _Continuum(
        turns=dist.rounded_normal(6.3, 2.3),
        tool_s=dist.log_normal_with(1.923, 2.133),
        tokens=dist.gamma(93_256 * BFCL_SCALE, 68_687 * BFCL_SCALE),
        tool="fetch_url",  # as in Continuum's Figure 5
    ),
}
"""Workloads whose name may end in ``:X``. The number X replaces ``OUTPUT_SHARE``."""


def _continuum_program(table: _Continuum, output_share: float, rng: random.Random) -> TraceProgram:
    turns = int(table.turns(rng))
    total = max(4 * turns, round(table.tokens(rng)))
    # On average all turns add equally many tokens, and the first prompt adds as many as a later tool result.
    growths = dist.split(rng, total - turns, turns)
    outputs = [max(1, round(growth * output_share)) for growth in growths]
    appends = [growth + 1 - output for growth, output in zip(growths, outputs, strict=True)]
    return append_only(appends, outputs, [draw_tool_run(table.tool, table.tool_s, rng) for _ in range(turns)])


# -- DualPath, Table 2: turns, append and gen tokens a turn, total and context tokens -----------

DUALPATH = {
    "dualpath-32k": (32 * 1024, 60, 608, 148, 28_639, 17_183),
    "dualpath-48k": (48 * 1024, 106, 474, 172, 42_607, 25_120),
    "dualpath-64k": (64 * 1024, 157, 429, 176, 55_958, 32_721),
}
"""Workload → (maximum length, then Table 2's averages: turns, append, gen, total, context)."""


def _dualpath_program(name: str, rng: random.Random) -> TraceProgram:
    """Return one trajectory of workload ``name``, from the averages in DualPath's Table 2: turns, append,
    gen, total and context. All five averages agree if they are read as follows:

    - ``total``: the length of the final context. Totals lie below the maximum length, most of them near it.
    - ``append`` and ``gen``: prompt and output tokens that a turn adds. The mean over a trajectory's turns is
      averaged over trajectories, so E[total/turns] = append + gen.
    - ``turns``: log-normal, independent of the total. E[total]/E[turns] is less than E[total/turns], because
      numbers of turns vary widely. A mean n and E[1/turns] = (append + gen)/total give
      e^σ² = n·(append + gen)/total, which is 1.58 to 1.70 in the three rows.
    - ``context``: the cached tokens of a turn, 0 for the first. They grow evenly from the end of the first
      turn to the total. Their average gives the length of the first prompt.
    """
    limit, mean_turns, append, gen, mean_total, context = DUALPATH[name]
    growth = append + gen
    sigma = math.sqrt(math.log(mean_turns * growth / mean_total))
    turns = max(2, round(rng.lognormvariate(math.log(mean_turns) - sigma * sigma / 2, sigma)))
    total = max(4 * turns, round(limit * math.pow(rng.random(), (limit - mean_total) / mean_total)))
    written = max(turns, round(total * gen / growth))
    # Mean over turns of (0, c, c + g, …, total − g): total·(1 + c/total − 2/turns)/2.
    after_first = total * (2 * (context + growth) / mean_total - 1)
    outputs = dist.split(rng, written, turns)
    first = min(max(1, round(after_first) - outputs[0]), total - written - (turns - 1))
    appends = [first, *dist.split(rng, total - written - first, turns - 1)]
    return append_only(appends, outputs, [TraceToolRun(name="sandbox", s=0.0)] * turns)


# -- SAGA -----------------------------------------------------------------------------------------

TOOL_LATENCIES = {
    "code_execution": dist.through_percentiles((0.50, 0.180), (0.95, 2.400), (0.99, 28.000)),
    "file_operation": dist.through_percentiles((0.50, 0.045), (0.95, 0.320), (0.99, 1.200)),
    "web_api": dist.through_percentiles((0.50, 0.850), (0.95, 4.500), (0.99, 45.000)),
    "database_query": dist.through_percentiles((0.50, 0.120), (0.95, 0.890), (0.99, 3.500)),
}
"""Tool type → latency in seconds (SAGA Table 1)."""
TENANTS = (("heavy", 3, 100, 16.0), ("medium", 4, 30, 8.0), ("light", 3, 10, 4.0))
"""(class, number of tenants, steps of an agent, tasks per minute of each tenant), SAGA §9.1."""
_FIRST_PROMPT = (2_000, 4_000)
FIRST_PROMPT = dist.uniform(*_FIRST_PROMPT)
"""Tokens of a program's first prompt (SAGA §2.1: a context grows from 2–4K tokens to 16–128K)."""
_LONGEST_CONTEXT = 128_000
_STEP_OUTPUT = dist.uniform(100, 500)
"""Output tokens of a step (SAGA §9.1, SWE-bench)."""
SWE_STEPS = (37, 5, 150)
"""Mean, minimum and maximum number of steps of a SWE-bench task (SAGA §9.1 and §2.1)."""
CV_MEAN_TOOL_S = 1.2
"""Mean tool latency of SAGA's Table 10 in seconds, the same for every coefficient of variation."""
CV_RANGE = (0.5, 3.0)
"""Lowest and highest coefficient of variation in SAGA's Table 10."""


def _ten_tenants(rng: random.Random) -> TraceProgram:
    """Draw a task of SAGA's ten tenants (§9.1): 100, 30 or 10 steps, Poisson arrivals for each tenant.

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
    # All arrivals are one Poisson process. Each belongs to a tenant with probability in proportion to the
    # tenant's rate.
    after_s = rng.expovariate(sum(rates) / 60.0)
    tenant, steps, _ = rng.choices(tenants, weights=rates)[0]
    kinds = rng.choices(list(TOOL_LATENCIES), k=steps)
    lengths = _lengths(steps, 100, rng)
    tools = [draw_tool_run(kind, TOOL_LATENCIES[kind], rng) for kind in kinds]
    return append_only(*lengths, tools, arrival_s=after_s, tenant=tenant, agent_type=f"{steps}-step-agent")


def _latency_cv(cv: float, rng: random.Random) -> TraceProgram:
    """Draw a program of SAGA's Table 10. ``cv`` is the coefficient of variation of the tool latencies. Their
    mean is always ``CV_MEAN_TOOL_S``."""
    tool_s = dist.log_normal_with(CV_MEAN_TOOL_S, cv * CV_MEAN_TOOL_S)
    _, least, most = SWE_STEPS
    # With this rate the mean is that of ``SWE_STEPS``.
    steps = round(dist.truncated_exponential(least, most, rate=0.02933303908757992)(rng))
    # Latencies have a generator of their own, so that lengths are the same for every cv.
    times = random.Random(rng.random())
    lengths = _lengths(steps, most, rng)
    return append_only(*lengths, [draw_tool_run("code_execution", tool_s, times) for _ in range(steps)])


def _lengths(steps: int, max_steps: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """Draw the lengths of a task of ``steps`` steps. Returns two lists with one element per step: new prompt
    tokens, and output tokens. A task of ``max_steps`` steps would have a final context of
    ``_LONGEST_CONTEXT`` tokens on average."""
    mean_first = sum(_FIRST_PROMPT) / 2
    growth = (_LONGEST_CONTEXT - mean_first) / max_steps
    first = round(FIRST_PROMPT(rng))
    outputs = [round(_STEP_OUTPUT(rng)) for _ in range(steps)]
    left = max(steps, round(growth * steps) - sum(outputs))
    return [first, *(dist.split(rng, left, steps - 1) if steps > 1 else ())], outputs


# -- long outputs -----------------------------------------------------------------------------------

R1_OUTPUT = dist.through_percentiles(
    *zip(
        (0.05, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 0.999),
        (225, 427, 792, 1_499, 3_432, 5_701, 12_607, 20_833),
        strict=True,
    )
)
"""Output tokens in ServeGen's reasoning workload (data/reason/deepseek-r1 of github.com/alibaba/ServeGen at
f891d11). It has 1,383,669 requests of 73 clients in one day. Each client's published six-hour histograms are
weighted by its requests. The mean is 1,527."""

_PROBLEM = dist.uniform(40, 200)
_SIGMA = 0.8596474476788896
"""With ``_SIGMA``, the mean of reasoning-math is 6,000 after clipping, and its third quartile 8K."""
_REQUESTS: dict[str, tuple[dist.Distribution, dist.Distribution]] = {
    # A gamma distribution whose mean equals its standard deviation is exponential.
    "lmsys-chat": (dist.gamma(69.83, 69.83), dist.gamma(182, 182)),
    "sharegpt-chat": (dist.gamma(94.46, 94.46), dist.gamma(456, 456)),
    "math": (_PROBLEM, dist.log_normal(8.431089955037654, _SIGMA, 16 * 1024)),
    "aime": (_PROBLEM, dist.log_normal(9.1242371355976, _SIGMA, 32 * 1024)),
}
"""Agent type of ``reasoning-mix`` → tokens of prompt and output."""

AGENT_TURNS = (23, 2, 50)
"""Mean, minimum and maximum number of turns of ``reasoning-agent``."""
AGENT_TOOLS = {"search": "web_api", "browser": "web_api", "code": "code_execution"}
"""Tool of the agent → SAGA's tool type."""
_TOOL_RESULT = dist.uniform(100, 1_000)


def _request(types: Sequence[str], rng: random.Random) -> TraceProgram:
    """Draw a program with one request, of one of ``types``, which are equally likely."""
    kind = rng.choice(types)
    prompt, output = (max(1, round(draw(rng))) for draw in _REQUESTS[kind])
    return append_only([prompt], [output], [TraceToolRun()], agent_type=kind)


def _agent(rng: random.Random) -> TraceProgram:
    # With this rate the mean is that of ``AGENT_TURNS``.
    turns = round(dist.truncated_exponential(*AGENT_TURNS[1:], rate=0.015773677940045062)(rng))
    kinds = rng.choices(list(AGENT_TOOLS), k=turns)
    tools = [draw_tool_run(tool, TOOL_LATENCIES[AGENT_TOOLS[tool]], rng) for tool in kinds]
    outputs = [round(R1_OUTPUT(rng)) for _ in range(turns)]
    appends = [round(FIRST_PROMPT(rng)), *(round(_TOOL_RESULT(rng)) for _ in range(turns - 1))]
    return append_only(appends, outputs, tools, agent_type="researcher")


# -- names ---------------------------------------------------------------------------------------

_GENERATORS: dict[str, ProgramGenerator] = {
    **{name: partial(_continuum_program, table, OUTPUT_SHARE) for name, table in _CONTINUUM.items()},
    "saga-ten-tenants": _ten_tenants,
    **{name: partial(_dualpath_program, name) for name in DUALPATH},
    "reasoning-math": partial(_request, ("math",)),
    "reasoning-mix": partial(_request, tuple(_REQUESTS)),
    "reasoning-agent": _agent,
}
_CV = "latency-cv"


def synthetic_names() -> tuple[str, ...]:
    """Names that are valid after ``synthetic:``. A final X in a name stands for a number."""
    return (*_GENERATORS, *(f"{name}:X" for name in _CONTINUUM), f"{_CV}:X")


def synthetic_programs(name: str, *, count: int = DEFAULT_PROGRAMS, seed: int = 0) -> list[TraceProgram]:
    """Return ``count`` programs of the workload ``synthetic:name``. Raises ``TraceError`` for an unknown
    name, an invalid number in the name, or an invalid ``count``."""
    if count < 1:
        raise TraceError(f"{SYNTHETIC_PREFIX}{name}: {count} programs wanted; expected at least 1")
    generator = _generator(name)
    drawn = _CV if name.startswith(_CV) else name  # so that all variances have the same lengths
    rng = random.Random(f"{drawn}/{seed}")
    source, made, arrival_s = SYNTHETIC_PREFIX + name, [], 0.0
    for number in range(count):
        program = generator(rng)
        fields: dict[str, Any] = {"program_id": f"{source}/{seed}/{number}", "source": source}
        if program.arrival_s is not None:
            arrival_s += program.arrival_s
            fields["arrival_s"] = round(arrival_s, 6)
        made.append(msgspec.structs.replace(program, **fields))
    return made


def _generator(name: str) -> ProgramGenerator:
    if name in _GENERATORS:
        return _GENERATORS[name]
    word, colon, text = name.partition(":")
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if colon and word in _CONTINUUM:
        if 0 < number < 1:
            return partial(_continuum_program, _CONTINUUM[word], number)
        raise TraceError(f"{SYNTHETIC_PREFIX}{name}: expected a number above 0 and below 1 behind {word}:")
    if colon and word == _CV:
        if CV_RANGE[0] <= number <= CV_RANGE[1]:
            return partial(_latency_cv, number)
        expected = f"expected a number from {CV_RANGE[0]} to {CV_RANGE[1]} behind {_CV}:"
        raise TraceError(f"{SYNTHETIC_PREFIX}{name}: {expected}")
    near = difflib.get_close_matches(name, synthetic_names(), n=1)
    hint = f"did you mean {SYNTHETIC_PREFIX}{near[0]}? " if near else ""
    raise TraceError(
        f"{SYNTHETIC_PREFIX}{name} is unknown; {hint}expected one of {', '.join(synthetic_names())}"
    )
