"""The papers' tables come out of the generators again."""

from __future__ import annotations

import random
import statistics
from bisect import bisect_right
from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.simulator.workloads.distributions import (
    Distribution,
    rounded_normal,
    split,
    through_percentiles,
)
from sojourn_server.simulator.workloads.synthetic_workloads import (
    AGENT_TOOLS,
    AGENT_TURNS,
    BFCL_SCALE,
    DUALPATH,
    R1_OUTPUT,
    SWE_TOOL_LIMIT_S,
    TENANTS,
    TOOL_LATENCIES,
    synthetic_names,
    synthetic_programs,
)
from sojourn_server.traces.prompt_builder import plan_turns
from sojourn_server.traces.trace_schema import TraceError, TraceProgram

COUNT = 2000


def gaps(programs: list[TraceProgram]) -> list[float]:
    return [turn.idle_s for program in programs for turn in program.turns[:-1]]


def close(values: list[float], mean: float, sd: float, rel: float = 0.04) -> None:
    assert statistics.mean(values) == pytest.approx(mean, rel=rel)
    assert statistics.stdev(values) == pytest.approx(sd, rel=rel)


def quantile(distribution: Distribution, probability: float) -> float:
    """The value below which a draw lies with this probability."""
    draw: Any = SimpleNamespace(random=lambda: probability)
    return distribution(draw)


@pytest.mark.parametrize(
    ("name", "turns", "tool_s", "tokens", "tool_rel"),
    [
        # Table 1. With a deviation of four means, even 20,000 tool times settle slowly.
        ("continuum-swe-bench", (10.9, 2.1), (0.925, 3.550), (70_126, 19_732), 0.10),
        ("continuum-bfcl", (6.3, 2.3), (1.923, 2.133), (93_256 * BFCL_SCALE, 68_687 * BFCL_SCALE), 0.04),
    ],
)
def test_continuum_table_1(name: str, turns: Any, tool_s: Any, tokens: Any, tool_rel: float) -> None:
    programs = synthetic_programs(name, count=COUNT)
    close([len(p.turns) for p in programs], *turns)
    close(gaps(programs), *tool_s, rel=tool_rel)
    close([p.max_context_tokens for p in programs], *tokens)
    if name == "continuum-swe-bench":
        assert max(gaps(programs)) == SWE_TOOL_LIMIT_S


@pytest.mark.parametrize(("name", "share"), [("", 0.2), (":0.05", 0.05), (":0.5", 0.5)])
def test_continuums_share_of_outputs_is_what_was_asked_for(name: str, share: float) -> None:
    programs = synthetic_programs(f"continuum-swe-bench{name}", count=COUNT)
    written = sum(turn.output_tokens for program in programs for turn in program.turns)
    assert written / sum(p.max_context_tokens for p in programs) == pytest.approx(share, rel=0.01)
    close([p.max_context_tokens for p in programs], 70_126, 19_732)


@pytest.mark.parametrize("name", DUALPATH)
def test_dualpath_table_2(name: str) -> None:
    limit, *published = DUALPATH[name]
    programs = synthetic_programs(name, count=COUNT)
    found = [
        (
            len(p.turns),
            sum(t.append_tokens or 0 for t in p.turns) / len(p.turns),
            sum(t.output_tokens for t in p.turns) / len(p.turns),
            p.max_context_tokens,
            sum(t.prompt_tokens - (t.append_tokens or 0) for t in p.turns) / len(p.turns),
        )
        for p in programs
    ]
    assert [*map(statistics.mean, zip(*found, strict=True))] == pytest.approx(published, rel=0.04)
    assert max(p.max_context_tokens for p in programs) <= limit
    assert set(gaps(programs)) == {0.0}


@pytest.mark.parametrize("cv", [0.5, 1.0, 1.5, 2.0])
def test_the_sweep_of_latencies_keeps_the_mean(cv: float) -> None:
    programs = synthetic_programs(f"latency-cv:{cv}", count=COUNT)
    # The spread of a long-tailed sample settles slowly.
    close(gaps(programs), 1.2, 1.2 * cv, rel=0.04 if cv <= 1.0 else 0.08)
    assert statistics.mean(len(p.turns) for p in programs) == pytest.approx(37, rel=0.04)
    lengths = [len(p.turns) for p in programs]
    assert 5 == min(lengths) < 140 < max(lengths) <= 150


def test_ten_tenants_come_as_often_and_run_as_long_as_said() -> None:
    programs = synthetic_programs("saga-ten-tenants", count=COUNT)
    tenants = Counter(p.tenant for p in programs)
    assert len(tenants) == 10
    minutes = (programs[-1].arrival_s or 0.0) / 60
    for kind, count, steps, per_minute in TENANTS:
        mine = [p for p in programs if (p.tenant or "").startswith(kind)]
        assert len({p.tenant for p in mine}) == count
        assert {len(p.turns) for p in mine} == {steps}
        assert {p.agent_type for p in mine} == {f"{steps}-step-agent"}
        assert len(mine) / minutes == pytest.approx(count * per_minute, rel=0.12)
    arrivals = [p.arrival_s or 0.0 for p in programs]
    assert arrivals == sorted(arrivals)
    heavy = [p.max_context_tokens for p in programs if len(p.turns) == 100]
    light = [p.max_context_tokens for p in programs if len(p.turns) == 10]
    assert statistics.mean(heavy) == pytest.approx(128_000, rel=0.01)
    assert statistics.mean(light) == pytest.approx(15_500, rel=0.02)
    assert max(heavy) <= 131_072
    by_tool: dict[str, list[float]] = {name: [] for name in TOOL_LATENCIES}
    for program in programs:
        for turn in program.turns[:-1]:
            assert turn.tool is not None
            by_tool[turn.tool].append(turn.idle_s)
    for name, values in by_tool.items():
        published = TOOL_LATENCIES[name]
        cuts = statistics.quantiles(values, n=100)
        assert cuts[49] == pytest.approx(quantile(published, 0.50), rel=0.03)
        assert cuts[94] == pytest.approx(quantile(published, 0.95), rel=0.06)
        assert max(values) == quantile(published, 0.99)


@pytest.mark.parametrize("name", [name.replace(":X", ":0.6") for name in synthetic_names()])
def test_every_program_is_a_good_trace_marked_as_made_up(name: str) -> None:
    programs = synthetic_programs(name, count=60, seed=5)
    assert programs == synthetic_programs(name, count=80, seed=5)[:60]
    assert programs[0].turns != synthetic_programs(name, count=1, seed=6)[0].turns
    assert len({p.program_id for p in programs}) == 60
    for program in programs:
        msgspec.convert(msgspec.to_builtins(program), TraceProgram)
        assert program.source == f"synthetic:{name}"
        plans = plan_turns(program)
        assert [plan.prompt_tokens for plan in plans] == [turn.prompt_tokens for turn in program.turns]
        assert all(turn.output_tokens >= 1 for turn in program.turns)
        assert all((turn.append_tokens or 0) >= 1 for turn in program.turns)
        assert program.turns[-1].tool is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("continum-swe-bench", "did you mean synthetic:continuum-swe-bench"),
        ("nothing-like-it", "is unknown; expected one of continuum-swe-bench"),
        ("continuum-bfcl:", "expected a number above 0 and below 1 behind continuum-bfcl:"),
        ("continuum-bfcl:1", "expected a number above 0 and below 1 behind continuum-bfcl:"),
        ("dualpath-32k:0.5", "is unknown; did you mean"),
        ("latency-cv:4", "expected a number from 0.5 to 3.0"),
        ("latency-cv:x", "expected a number from 0.5 to 3.0"),
        ("latency-cv", "did you mean synthetic:latency-cv:X"),
    ],
)
def test_names_that_are_none_are_refused(name: str, reason: str) -> None:
    with pytest.raises(TraceError, match=reason):
        synthetic_programs(name)


@given(st.integers(1, 40), st.integers(0, 5000), st.integers(0, 2**32))
def test_a_split_adds_up(parts: int, more: int, seed: int) -> None:
    sizes = split(random.Random(seed), parts + more, parts)
    assert (len(sizes), sum(sizes)) == (parts, parts + more)
    assert min(sizes) >= 1


def test_the_shapes_hold_far_out() -> None:
    rng = random.Random(1)
    turns = rounded_normal(10.9, 2.1)
    drawn = [turns(rng) for _ in range(40_000)]
    assert statistics.stdev(drawn) == pytest.approx(2.1, rel=0.01)
    through = through_percentiles((0.5, 1.0), (0.95, 10.0), (0.99, 20.0))
    found = [quantile(through, p) for p in (0.05, 0.5, 0.95, 0.99, 0.999)]
    assert found == pytest.approx([0.1, 1.0, 10.0, 20.0, 20.0])


# -- Published lengths of what reasoning models write come out of the generators again.


REASONING_COUNT = 4000


def outputs(programs: list[TraceProgram]) -> list[int]:
    return [turn.output_tokens for program in programs for turn in program.turns]


def below(values: list[int], value: float) -> float:
    return bisect_right(sorted(values), value) / len(values)


def test_outputs_are_as_long_as_published() -> None:
    programs = synthetic_programs("reasoning-math", count=REASONING_COUNT)
    assert {len(program.turns) for program in programs} == {1}
    written = outputs(programs)
    assert statistics.mean(written) == pytest.approx(6_000, rel=0.03)
    assert max(written) == 16 * 1024
    assert below(written, 8 * 1024) == pytest.approx(0.75, abs=0.02)
    assert max(program.turns[0].prompt_tokens for program in programs) <= 200


def test_the_mix_has_every_type_as_often_and_each_its_own_lengths() -> None:
    programs = synthetic_programs("reasoning-mix", count=REASONING_COUNT)
    types = Counter(program.agent_type for program in programs)
    assert min(types.values()) / REASONING_COUNT == pytest.approx(1 / 4, rel=0.1)
    means = {kind: statistics.mean(outputs([p for p in programs if p.agent_type == kind])) for kind in types}
    assert means["lmsys-chat"] == pytest.approx(182, rel=0.1)
    assert means["sharegpt-chat"] == pytest.approx(456, rel=0.1)
    assert means["math"] == pytest.approx(6_000, rel=0.06)
    assert means["aime"] == pytest.approx(12_000, rel=0.06)


def test_the_agent_thinks_before_each_tool_call() -> None:
    programs = synthetic_programs("reasoning-agent", count=1000)
    mean, least, most = AGENT_TURNS
    lengths = [len(program.turns) for program in programs]
    assert statistics.mean(lengths) == pytest.approx(mean, rel=0.05)
    assert least == min(lengths) < max(lengths) <= most
    thought = outputs(programs)
    for probability in (0.05, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99):
        assert below(thought, quantile(R1_OUTPUT, probability)) == pytest.approx(probability, abs=0.02)
    calls = [turn.tool_run for program in programs for turn in program.turns[:-1]]
    told = Counter(run.name for run in calls if run is not None)
    assert told.keys() == AGENT_TOOLS.keys()
    for name, kind in AGENT_TOOLS.items():
        times = [run.s or 0.0 for run in calls if run is not None and run.name == name]
        assert statistics.median(times) == pytest.approx(quantile(TOOL_LATENCIES[kind], 0.5), rel=0.05)
