"""A workload that overloads a small pool. Lengths, gaps and arrivals are plain numbers that tests can
change."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from sojourn_server.simulator.latency.latency_models import StepWork
from sojourn_server.simulator.run_log import RunLog, TurnLog
from sojourn_server.traces.prompt_builder import TurnPlan
from sojourn_server.traces.trace_schema import TraceToolRun

BLOCK = 16


@dataclass(slots=True)
class PlannedTurn:
    """One turn, in tokens and virtual seconds."""

    append: int
    output: int
    gap_s: float
    tool: str


@dataclass
class SmallProgram:
    """Has the interface of ``ProgramPlan``."""

    instance_id: str
    turns: list[PlannedTurn]
    arrival_s: float
    number: int
    agent_type: str | None = None
    tenant: str | None = None
    cut: bool = False
    parent_turn: int | None = None
    start_offset_s: float | None = None
    delay_s: float = 0.0
    blocks_parent: bool = False
    children: list[SmallProgram] = field(default_factory=list)

    @property
    def trace_id(self) -> str:
        return self.instance_id

    @property
    def plans(self) -> list[TurnPlan]:
        plans: list[TurnPlan] = []
        context = 0
        for index, turn in enumerate(self.turns):
            prompt = context + turn.append
            plans.append(TurnPlan(prompt, turn.output, context, 0, index - 1 if index else None))
            context = prompt + turn.output
        return plans

    def prompt(self, index: int) -> list[int]:
        ids: list[int] = []
        for past in range(index + 1):
            ids += self._ids(past, 0, self.turns[past].append)
            if past < index:
                ids += self.planned_output(past)
        return ids

    def planned_output(self, index: int) -> list[int]:
        return self._ids(index, 1, self.turns[index].output)

    def gap_s(self, index: int) -> float:
        return self.turns[index].gap_s

    def tool(self, index: int) -> str | None:
        return self.turns[index].tool

    def tool_runs(self, index: int) -> tuple[TraceToolRun, ...]:
        return (TraceToolRun(name=self.turns[index].tool),)

    def _ids(self, turn: int, part: int, count: int) -> list[int]:
        start = 1000 + self.number * 1_000_003 + turn * 10_007 + part * 5_003
        return [300 + (start + position * 7919) % 31_000 for position in range(count)]


@dataclass
class SmallLoop:
    """Arrival process in which every program runs once, at its own time."""

    programs: list[SmallProgram]

    def __post_init__(self):
        ordered = sorted(self.programs, key=lambda p: (p.arrival_s, p.number))
        self.initial = [(program.arrival_s, program) for program in ordered]
        self.following = iter(())


class FlatLatency:
    """Latency of a slow device, so that there is contention without long contexts."""

    def __init__(self, call_s: float = 0.0) -> None:
        self.call_s = call_s

    def step_s(self, work: StepWork) -> float:
        return 0.005 + work.tokens * 2e-4

    def copy_s(self, kv_bytes: int, *, to_host: bool) -> float:
        return kv_bytes * 1e-6

    def disk_s(self, kv_bytes: int, *, to_disk: bool) -> float:
        return kv_bytes * (2e-5 if to_disk else 1e-5)


def small_workload(seed: int = 0, programs: int = 12, turns: int = 6) -> SmallLoop:
    """Programs whose contexts together are several times as large as a pool of about 100 blocks."""
    rng = random.Random(f"small/{seed}")
    made = []
    for number in range(programs):
        made.append(
            SmallProgram(
                instance_id=f"p{number}",
                number=number,
                arrival_s=number * 0.4,
                turns=[
                    PlannedTurn(
                        append=rng.randint(20, 120),
                        output=rng.randint(4, 24),
                        gap_s=round(rng.expovariate(1.0) + 0.01, 6),
                        tool=rng.choice(("grep", "pytest", "ls")),
                    )
                    for _ in range(rng.randint(2, turns))
                ],
            )
        )
    return SmallLoop(made)


CROWDED_BLOCKS = 60


def crowded_workload(seed: int, programs: int = 24) -> tuple[SmallLoop, dict[str, SmallProgram]]:
    """Corner cases on a pool of few blocks: preemptions, one-token outputs and prompts, contexts as long as
    the pool, gaps of 0 s, sub-agents. Return the loop of the top-level programs, and all programs by id."""
    rng = random.Random(f"crowded/{seed}")
    made = [_crowded_program(rng, number) for number in range(programs)]
    roots: list[SmallProgram] = []
    for program in made:
        if not roots or rng.random() >= 0.3:
            roots.append(program)
            continue
        parent = rng.choice(roots)
        if rng.random() < 0.5:
            program.parent_turn = rng.randrange(len(parent.turns))
            program.delay_s = rng.choice((0.0, 0.1))
        else:
            program.start_offset_s = rng.choice((0.0, 0.5, 30.0))
        parent.children.append(program)
    return SmallLoop(roots), {program.instance_id: program for program in made}


def _crowded_program(rng: random.Random, number: int) -> SmallProgram:
    turns: list[PlannedTurn] = []
    left = (CROWDED_BLOCKS - 1) * BLOCK
    for _ in range(rng.randint(1, 6)):
        append = rng.choice((1, 1, 15, 16, 17, 40, 120, 300))
        output = rng.choice((1, 1, 2, 16, 30, 120, 200))
        if append + output > left:
            output = left - append
            if output < 1:
                break
        left -= append + output
        turns.append(
            PlannedTurn(
                append=append,
                output=output,
                gap_s=rng.choice((0.0, 0.0, 0.3, 2.0, 8.0)),
                tool=rng.choice(("grep", "pytest")),
            )
        )
    return SmallProgram(instance_id=f"p{number}", turns=turns, arrival_s=number * 0.2, number=number)


def turns(log: RunLog) -> list[TurnLog]:
    return [turn for program in log.programs for turn in program.turns]


def assert_played(log: RunLog, programs: Iterable[SmallProgram]) -> None:
    """Every program has come to its end as planned, and what its turns count adds up."""
    assert not log.notes
    assert log.hook_failures == log.refused_hints == 0
    planned = {program.instance_id: program for program in programs}
    assert {program.program_id for program in log.programs} == set(planned)
    for program in log.programs:
        plan = planned[program.program_id]
        assert [turn.output_tokens for turn in program.turns] == [turn.output for turn in plan.turns]
        assert [turn.prompt_tokens for turn in program.turns] == [p.prompt_tokens for p in plan.plans]
        assert program.finished_s == program.turns[-1].finished_s
    for turn in turns(log):
        assert turn.submitted_s <= turn.entered_s <= turn.admitted_s < turn.first_token_s <= turn.finished_s
        found = turn.device_tokens + turn.host_tokens
        if not turn.preemptions:
            assert turn.computed_tokens + found == turn.prompt_tokens
        assert turn.known_tokens % BLOCK == 0
        waited_s = turn.preempted_before_first_token_s + turn.preempted_after_s
        assert (waited_s > 0) <= (turn.preemptions > 0)
        assert turn.preempted_before_first_token_s <= turn.first_token_s - turn.admitted_s
        assert turn.preempted_after_s <= turn.finished_s - turn.first_token_s
        assert turn.known_tokens - found <= turn.regenerated_tokens <= turn.computed_tokens
