"""Published lengths of what reasoning models write come out of the generators again."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import Counter

import pytest
from sojourn_server.simulator.workloads.distributions import LogNormal
from sojourn_server.simulator.workloads.reasoning_workloads import (
    AGENT_TOOLS,
    AGENT_TURNS,
    MIX,
    R1_OUTPUT,
    R1_PROMPT,
)
from sojourn_server.simulator.workloads.saga_workloads import TOOL_LATENCIES
from sojourn_server.simulator.workloads.synthetic_workloads import synthetic_programs
from sojourn_server.traces.trace_schema import TraceProgram

COUNT = 4000


def outputs(programs: list[TraceProgram]) -> list[int]:
    return [turn.output_tokens for program in programs for turn in program.turns]


def below(values: list[int], value: float) -> float:
    return bisect_right(sorted(values), value) / len(values)


@pytest.mark.parametrize(
    ("name", "mean", "most"),
    [
        ("reasoning-math", 6_000, 16 * 1024),
        ("reasoning-aime", 12_000, 32 * 1024),
        ("reasoning-aime-0528", 23_000, 64 * 1024),
    ],
)
def test_outputs_are_as_long_as_published(name: str, mean: int, most: int) -> None:
    programs = synthetic_programs(name, count=COUNT)
    assert {len(program.turns) for program in programs} == {1}
    written = outputs(programs)
    assert statistics.mean(written) == pytest.approx(mean, rel=0.03)
    assert max(written) == most
    assert statistics.median(written) < 0.8 * mean, "a long tail"
    assert max(program.turns[0].prompt_tokens for program in programs) <= 200


def test_three_quarters_of_the_problems_take_less_than_8k() -> None:
    written = outputs(synthetic_programs("reasoning-math", count=COUNT))
    assert below(written, 8 * 1024) == pytest.approx(0.75, abs=0.02)


def test_requests_of_a_service_have_its_percentiles() -> None:
    programs = synthetic_programs("reasoning-requests", count=COUNT)
    for published, values in (
        (R1_PROMPT, [program.turns[0].prompt_tokens for program in programs]),
        (R1_OUTPUT, outputs(programs)),
    ):
        for probability, value in published.points[:-1]:
            assert below(values, value) == pytest.approx(probability, abs=0.025)
        assert max(values) == published.points[-1][1]


def test_the_mix_has_every_type_as_often_and_each_its_own_lengths() -> None:
    programs = synthetic_programs("reasoning-mix", count=COUNT)
    types = Counter(program.agent_type for program in programs)
    assert types.keys() == set(MIX)
    assert min(types.values()) / COUNT == pytest.approx(1 / len(MIX), rel=0.1)
    means = {
        kind: statistics.mean(outputs([program for program in programs if program.agent_type == kind]))
        for kind in MIX
    }
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
    for probability, value in R1_OUTPUT.points[:-1]:
        assert below(thought, value) == pytest.approx(probability, abs=0.02)
    calls = [turn.tool_run for program in programs for turn in program.turns[:-1]]
    told = Counter(run.name for run in calls if run is not None)
    assert told.keys() == AGENT_TOOLS.keys()
    for name, kind in AGENT_TOOLS.items():
        times = [run.s or 0.0 for run in calls if run is not None and run.name == name]
        assert statistics.median(times) == pytest.approx(TOOL_LATENCIES[kind].quantile(0.5), rel=0.05)


def test_a_log_normal_through_a_point_has_mean_and_point() -> None:
    drawn = LogNormal.through(6_000, 0.75, 8_192, 16_384)
    assert drawn.moment(1) == pytest.approx(6_000)
    assert LogNormal(drawn.mu, drawn.sigma, 8_192).moment(1) < 6_000
    assert LogNormal.with_mean(12_000, drawn.sigma, 32_768).moment(1) == pytest.approx(12_000)
    with pytest.raises(ValueError, match="no log-normal up to 16384 has mean 9000"):
        LogNormal.through(9_000, 0.75, 8_192, 16_384)
    with pytest.raises(ValueError, match="mean 40000 is not between 0 and 32768"):
        LogNormal.with_mean(40_000, 1.0, 32_768)
