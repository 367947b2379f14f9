"""Synthetic workloads with the statistics of the papers' tables.

The published statistics hold over many programs. All other values are chosen here. The field ``source`` of
every program is ``synthetic:NAME``. The same name, count and seed give the same programs. The names:

    continuum-swe-bench         Continuum Table 1. Chosen: number of turns normal; tool times log-normal, up
                                to the harness' own limit; token totals gamma, independent of turns; one tool
    continuum-bfcl              the same table and choices, tokens × 0.4 (§6.1, see ``BFCL_SCALE``)
    continuum-bfcl-unscaled     continuum-bfcl without the factor 0.4
    continuum-…:X               one of the three above with X as ``OUTPUT_SHARE``, above 0 and below 1
    dualpath-32k, -48k, -64k    DualPath Table 2 (see ``_dualpath_program``); tools take no time, as in its §7
    saga-ten-tenants            SAGA §9.1, §2.1 and Table 1 (see ``ten_tenants``)
    latency-cv:X                SAGA Table 10 and §9.1. X: coefficient of variation of tool times, 0.5 to 3.0.
                                Chosen: tool times log-normal (mean 1.2 s); steps exponential between bounds
    reasoning-…                 long outputs, for Tetris, with published output lengths of reasoning models
                                (see ``reasoning_workloads``)

Programs share no prompts, since no paper states how much they share.
"""

from __future__ import annotations

import difflib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from sojourn_server.traces.trace_schema import TraceError, TraceProgram, TraceToolRun

from .distributions import (
    Distribution,
    bounded_power_law,
    gamma,
    log_normal,
    log_normal_with,
    rounded_normal,
    split,
)
from .reasoning_workloads import REASONING
from .saga_workloads import (
    CV_RANGE,
    ProgramGenerator,
    append_only,
    draw_tool_run,
    latency_cv,
    ten_tenants,
)

SYNTHETIC_PREFIX = "synthetic:"
DEFAULT_PROGRAMS = 500
"""Default number of programs, as many as DualPath has trajectories and SAGA has SWE-bench tasks."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Continuum:
    """One row of Continuum's Table 1."""

    turns: Distribution
    tool_s: Distribution
    tokens: Distribution
    tool: str


_SWE_BENCH = _Continuum(
    turns=rounded_normal(10.9, 2.1),
    # After clipping, the mean is 0.925 and the standard deviation 3.550.
    tool_s=log_normal(-1.9879452855002073, 1.9951980880292188, SWE_TOOL_LIMIT_S),
    tokens=gamma(70_126, 19_732),
    tool="bash",
)
_BFCL_UNSCALED = _Continuum(
    turns=rounded_normal(6.3, 2.3),
    tool_s=log_normal_with(1.923, 2.133),
    tokens=gamma(93_256, 68_687),
    tool="fetch_url",  # as in Continuum's Figure 5
)
_CONTINUUM = {
    "continuum-swe-bench": _SWE_BENCH,
    "continuum-bfcl": replace(_BFCL_UNSCALED, tokens=gamma(93_256 * BFCL_SCALE, 68_687 * BFCL_SCALE)),
    "continuum-bfcl-unscaled": _BFCL_UNSCALED,
}
"""Workloads whose name may end in ``:X``. The number X replaces ``OUTPUT_SHARE``."""


def _continuum_programs(table: _Continuum, output_share: float, rng: random.Random) -> Iterator[TraceProgram]:
    while True:
        turns = int(table.turns(rng))
        total = max(4 * turns, round(table.tokens(rng)))
        # On average all turns add equally many tokens, and the first prompt adds as many as a later tool
        # result.
        appends, outputs = [], []
        for growth in split(rng, total - turns, turns):
            output = max(1, round(growth * output_share))
            outputs.append(output)
            appends.append(growth + 1 - output)
        tools = [draw_tool_run(table.tool, table.tool_s, rng) for _ in range(turns)]
        yield append_only(appends, outputs, tools)


# -- DualPath, Table 2: turns, append and gen tokens a turn, total and context tokens -----------

DUALPATH = {
    "dualpath-32k": (32 * 1024, 60, 608, 148, 28_639, 17_183),
    "dualpath-48k": (48 * 1024, 106, 474, 172, 42_607, 25_120),
    "dualpath-64k": (64 * 1024, 157, 429, 176, 55_958, 32_721),
}
"""Workload → (maximum length, then Table 2's averages: turns, append, gen, total, context)."""


def _dualpath_programs(name: str, rng: random.Random) -> Iterator[TraceProgram]:
    while True:
        yield _dualpath_program(name, rng)


def _dualpath_program(name: str, rng: random.Random) -> TraceProgram:
    """Generate one trajectory of workload ``name``, from the averages in DualPath's Table 2: turns, append,
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
    total = max(4 * turns, round(bounded_power_law(mean_total, limit)(rng)))
    written = max(turns, round(total * gen / growth))
    # Mean over turns of (0, c, c + g, …, total − g): total·(1 + c/total − 2/turns)/2.
    after_first = total * (2 * (context + growth) / mean_total - 1)
    outputs = split(rng, written, turns)
    first = min(max(1, round(after_first) - outputs[0]), total - written - (turns - 1))
    appends = [first, *split(rng, total - written - first, turns - 1)]
    return append_only(appends, outputs, [TraceToolRun(name="sandbox", s=0.0)] * turns)


# -- common ---------------------------------------------------------------------------------------

_GENERATORS: dict[str, ProgramGenerator] = {
    **{name: partial(_continuum_programs, table, OUTPUT_SHARE) for name, table in _CONTINUUM.items()},
    "saga-ten-tenants": ten_tenants,
    **{name: partial(_dualpath_programs, name) for name in DUALPATH},
    **REASONING,
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
    source = SYNTHETIC_PREFIX + name
    made = []
    for number, program in zip(range(count), generator(rng), strict=False):
        arrival_s = None if program.arrival_s is None else round(program.arrival_s, 6)
        fields = {"program_id": f"{source}/{seed}/{number}", "source": source, "arrival_s": arrival_s}
        made.append(msgspec.structs.replace(program, **fields))
    return made


def _generator(name: str) -> ProgramGenerator:
    if name in _GENERATORS:
        return _GENERATORS[name]
    word, colon, text = name.partition(":")
    if colon and word in (_CV, *_CONTINUUM):
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if word in _CONTINUUM:
            if not 0 < number < 1:
                raise TraceError(
                    f"{SYNTHETIC_PREFIX}{name}: expected a number above 0 and below 1 behind {word}:"
                )
            return partial(_continuum_programs, _CONTINUUM[word], number)
        if not CV_RANGE[0] <= number <= CV_RANGE[1]:
            raise TraceError(
                f"{SYNTHETIC_PREFIX}{name}: expected a number from {CV_RANGE[0]} to {CV_RANGE[1]} "
                f"behind {_CV}:"
            )
        return latency_cv(number)
    near = difflib.get_close_matches(name, synthetic_names(), n=1)
    hint = f"did you mean {SYNTHETIC_PREFIX}{near[0]}? " if near else ""
    raise TraceError(
        f"{SYNTHETIC_PREFIX}{name} is unknown; {hint}expected one of {', '.join(synthetic_names())}"
    )
