"""Where memory suffices, no preset serves agents worse than stock vLLM does."""

from __future__ import annotations

import functools
import math

import pytest

pytest.importorskip("vllm")

from simulator_small_runs import SmallRun
from simulator_small_workload import BLOCK, PlannedTurn, SmallLoop, SmallProgram
from sojourn_server.policies.preset import preset_names
from sojourn_server.simulator.run_log import RunLog
from sojourn_server.simulator.workloads.synthetic_workloads import synthetic_names, synthetic_programs

GROWING = "continuum-bfcl:0.5"
"""A workload in which the gate of ``continuum`` kept programs waiting for room that was never used."""

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

AT_ONCE, PROGRAMS = 7, 11
MEAN_TOKENS = 400
"""Mean length to which contexts are scaled."""
MAX_TURNS, FEW_TURNS = 12, 4
"""The presets with a gate get programs of up to 12 turns, all others short ones."""
MAX_GAP_S = 0.05
"""Tools are short, as beside the turns of a loaded device: most programs run at the same time."""
WORKLOADS = [name for name in synthetic_names() if not name.endswith(":X")] + ["latency-cv:1", GROWING]
GATES = ["admit", "continuum", "mori", "saga", "sojourn", "tetris"]
"""One preset for each rule that keeps programs waiting."""
LEFT_OUT = {
    "tetris-learned",  # needs hidden states
}
STEP_S = 0.005
"""Duration of the shortest step, by which a time to first token may differ."""


@functools.cache
def scaled_programs(workload: str, most_turns: int) -> tuple[SmallProgram, ...]:
    """The workload's programs with shorter contexts, in the same proportions."""
    traced = [program.turns[:most_turns] for program in synthetic_programs(workload, count=PROGRAMS)]
    scale = (
        MEAN_TOKENS * PROGRAMS / sum(turns[-1].prompt_tokens + turns[-1].output_tokens for turns in traced)
    )
    made = []
    for number, turns in enumerate(traced):
        planned, context = [], 0
        for turn in turns:
            append = max(1, round(scale * (turn.prompt_tokens - context)))
            planned.append(
                PlannedTurn(
                    append=append,
                    output=max(1, round(scale * turn.output_tokens)),
                    gap_s=min(MAX_GAP_S, turn.idle_s),
                    tool=turn.tool_run.name if turn.tool_run is not None else "bash",
                )
            )
            context = turn.prompt_tokens + turn.output_tokens
        made.append(SmallProgram(f"p{number}", planned, arrival_s=number * 0.1, number=number))
    return tuple(made)


def played(policy: str, workload: str, most_turns: int, blocks: int) -> RunLog:
    """Keeps ``AT_ONCE`` programs in the engine until all have been started."""
    programs = scaled_programs(workload, most_turns)
    loop = SmallLoop(list(programs[:AT_ONCE]))
    loop.following = iter(programs[AT_ONCE:])
    return SmallRun(policy, loop, blocks=blocks).log


@functools.cache
def under_stock(workload: str, most_turns: int) -> tuple[int, dict[str, float]]:
    """A pool in which stock evicts nothing that is needed again, and its figures there."""
    programs = scaled_programs(workload, most_turns)
    finals = [sum(turn.append + turn.output for turn in program.turns) for program in programs]
    blocks = sum(math.ceil(tokens / BLOCK) + 1 for tokens in finals) * 2 // 5
    while True:
        log = played("stock", workload, most_turns, blocks)
        if not any(turn.regenerated or turn.preemptions for p in log.programs for turn in p.turns):
            return blocks, figures(log)
        blocks += blocks // 8


def figures(log: RunLog) -> dict[str, float]:
    """Mean completion time, mean time to the first token and the time until all are done, in seconds."""
    turns = [turn for program in log.programs for turn in program.turns]
    return {
        "completion": sum(p.finished_s - p.arrived_s for p in log.programs) / len(log.programs),
        "first token": sum(turn.first_token_s - turn.submitted_s for turn in turns) / len(turns),
        "makespan": max(p.finished_s for p in log.programs),
    }


def assert_as_good_as_stock(preset: str, workload: str, most_turns: int) -> None:
    blocks, stock = under_stock(workload, most_turns)
    for name, seconds in figures(played(preset, workload, most_turns, blocks)).items():
        assert seconds <= 1.02 * stock[name] + STEP_S, (preset, workload, name, seconds, stock[name])


@pytest.mark.parametrize("workload", WORKLOADS)
def test_no_gate_costs_anything_where_nothing_is_evicted(workload: str):
    for preset in GATES:
        assert_as_good_as_stock(preset, workload, MAX_TURNS)


@pytest.mark.parametrize("preset", sorted(set(preset_names()) - {*GATES, *LEFT_OUT}))
def test_no_other_preset_costs_anything_there(preset: str):
    assert_as_good_as_stock(preset, GROWING, MAX_TURNS)
    for workload in WORKLOADS:
        assert_as_good_as_stock(preset, workload, FEW_TURNS)
