"""A workload of corner cases on a pool of few blocks: preemptions, one-token outputs and prompts, contexts as
long as the pool, gaps of 0 s, sub-agents."""

from __future__ import annotations

import random

from simulator_small_workload import BLOCK, PlannedTurn, SmallLoop, SmallProgram

CROWDED_BLOCKS = 60


def crowded_workload(seed: int, programs: int = 24) -> tuple[SmallLoop, dict[str, SmallProgram]]:
    """Return the loop of the workload's top-level programs, and all programs by id."""
    rng = random.Random(f"crowded/{seed}")
    made = [_program(rng, number) for number in range(programs)]
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


def _program(rng: random.Random, number: int) -> SmallProgram:
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
