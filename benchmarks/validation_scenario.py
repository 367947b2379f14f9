"""The workload and engine of ``simulator_validation.py``, and the record that both sides return."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from sojourn_server.policies.costs.step_costs import StepCosts
from sojourn_server.traces.prompt_builder import TurnPlan, plan_turns
from sojourn_server.traces.trace_schema import TraceError, TraceProgram, TraceToolRun, TraceTurn

ORDERLY = "orderly"
"""Name of the workload made by ``orderly_programs``."""
ORDERLY_TURNS = 5

PACE = StepCosts(step_s=0.025, token_s=1.4e-3, pair_s=1e-7, kv_token_s=1e-6, request_s=1e-3)
"""Approximate step costs of the model ``smol`` on two idle cores: 700 prefill tokens and 30 decode steps per
second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The engine and its workload. Lengths are in tokens."""

    model: str = "smol"
    paced: StepCosts | None = None
    """Minimum duration of every step of the engine (``paced_steps.py``)."""
    blocks: int = 34
    """KV blocks, vLLM's null block included."""
    block_size: int = 32
    max_model_len: int = 1024
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 1024
    workload: str = "synthetic:continuum-bfcl"
    """A trace or synthetic workload of the simulator, or ``ORDERLY``."""
    token_scale: float = 0.012
    """Factor of all lengths. It is small, because the workload's programs have 37,302 tokens on average, but
    two cores compute only a few hundred tokens per second."""
    programs: int = 72
    """Number of programs; each is run once, to its end."""
    seed: int = 1
    loads: tuple[int, ...] = (12, 24)
    """Numbers of concurrent programs."""
    stagger_s: float = 1.0
    policies: tuple[str, ...] = ("stock", "continuum")
    repeats: int = 3
    """Number of repetitions of each run on the real engine."""
    lab_repeats: int = 11
    profile_budget_s: float = 240.0


SMOKE = Scenario(
    model="tiny",
    blocks=96,
    max_model_len=2048,
    workload=ORDERLY,
    token_scale=1.0,
    programs=6,
    loads=(6,),
    repeats=1,
    lab_repeats=3,
    profile_budget_s=20.0,
)


class TurnMeasurement(NamedTuple):
    """Measurements of one turn, on either side."""

    program: str
    turn: int
    sent_s: float
    """Time of sending, in seconds after the run's start."""
    ttft_s: float
    latency_s: float
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens found in the cache at the first admission."""
    output_tokens: int


@dataclass(slots=True)
class RunMeasurements:
    """Measurements of one run, on either side."""

    turns: list[TurnMeasurement] = field(default_factory=list)
    completions_s: list[float] = field(default_factory=list)
    """Seconds from each program's arrival to its last token."""
    wall_s: float = 0.0
    preemptions: int = 0
    decisions: dict[str, int] = field(default_factory=dict)
    """Number of sojourn's decisions by kind and reason; empty for stock."""


def programs_of(scenario: Scenario) -> list[TraceProgram]:
    """Return the programs that both sides run, in order. Each fits into the engine's longest context.

    Raises ``TraceError`` if there are too few.
    """
    from sojourn_server.simulator.workloads.arrival_processes import load_programs

    if scenario.workload == ORDERLY:
        return orderly_programs(scenario.programs, scenario.stagger_s)

    def fits(program: TraceProgram) -> bool:
        plans = plan_turns(program, scenario.token_scale)
        return all(plan.prompt_tokens + plan.output_tokens <= scenario.max_model_len for plan in plans)

    fitting = [p for p in load_programs(scenario.workload, scenario.seed) if p.parent is None and fits(p)]
    if len(fitting) < scenario.programs:
        raise TraceError(
            f"{scenario.workload}: {len(fitting)} programs fit {scenario.max_model_len} tokens; "
            f"expected {scenario.programs}"
        )
    return fitting[: scenario.programs]


def orderly_programs(count: int, every_s: float) -> list[TraceProgram]:
    """Return programs that take turns. They start ``every_s`` seconds apart, and each sends its next request
    after all others have sent one.

    As long as a turn takes no longer than ``every_s``, the machine's speed changes neither the order of
    requests nor the cache hits and losses. The contexts of six such programs grow from half of ``SMOKE``'s
    pool to twice its size.
    """
    gap_s = count * every_s
    wait = (TraceToolRun(name="wait", s=gap_s),)
    programs = []
    for number in range(count):
        turns, prompt = [], 180 + 30 * number
        for turn in range(ORDERLY_TURNS):
            turns.append(TraceTurn(prompt_tokens=prompt, output_tokens=6, gap_s=gap_s, tools=wait))
            prompt += 6 + 120 + 20 * ((number + turn) % 4)
        programs.append(TraceProgram(program_id=f"orderly/{number}", turns=tuple(turns), source=ORDERLY))
    return programs


def plans_of(programs: Iterable[TraceProgram], scenario: Scenario) -> dict[str, list[TurnPlan]]:
    """Return the lengths of each program's turns, by program id."""
    return {program.program_id: plan_turns(program, scenario.token_scale) for program in programs}
