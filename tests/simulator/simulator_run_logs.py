"""Made-up run logs with the shape of real ones, for tests of code that only reads logs."""

from __future__ import annotations

import random
import zlib
from typing import Any, NamedTuple

from sojourn_server.simulator.run_log import ProgramLog, RunLog, TurnLog

BLOCK = 16
POOL_BLOCKS = 25_000
HOST_BLOCKS = 25_000


class PolicyBehavior(NamedTuple):
    """How a made-up policy treats its programs."""

    queue_s: float
    """Mean wait per turn at 20 programs. It grows with the square of the load."""
    lost: float
    """Share of the known prompt that is lost when a program returns, at 40 programs."""
    preempted: float
    host: float = 0.0
    """Share of the lost prompt that is loaded from host memory."""
    held: float = 0.0
    """Share of the wait that a router causes."""


POLICY_BEHAVIORS = {
    "stock": PolicyBehavior(16.0, 0.62, 0.08),
    "lru-offload": PolicyBehavior(9.0, 0.6, 0.06, host=0.6),
    "admit": PolicyBehavior(1.5, 0.04, 0.01, held=0.9),
    "thunderagent": PolicyBehavior(4.0, 0.2, 0.02, held=0.7),
    "mori": PolicyBehavior(2.5, 0.12, 0.02, host=0.8, held=0.5),
    "free-io": PolicyBehavior(1.2, 0.3, 0.0, host=1.0),
}


def turn_log(
    program_id: str, turn: int, *times_s: float, prompt_tokens: int, output_tokens: int, **more: Any
) -> TurnLog:
    """A turn. ``times_s``: submitted, entered, admitted, first token, finished; as many as have occurred."""
    names = ("submitted_s", "entered_s", "admitted_s", "first_token_s", "finished_s")
    more |= zip(names, times_s, strict=False)
    return TurnLog(
        program_id=program_id, turn=turn, prompt_tokens=prompt_tokens, output_tokens=output_tokens, **more
    )


def program_log(program_id: str, turns: list[TurnLog], *, arrived_s: float = 0.0, **more: Any) -> ProgramLog:
    """A program of these turns."""
    told = {"trace_id": program_id, "turns_total": len(turns), "turns": turns, **more}
    return ProgramLog(program_id=program_id, arrived_s=arrived_s, **told)


def run_log(*programs: ProgramLog, **more: Any) -> RunLog:
    """A run of these programs, by default a closed loop of 100 s under ``stock``."""
    told = {
        "policy": "stock", "programs_wanted": len(programs), "hardware": "h", "model": "m", "trace": "t",
        "seed": 0, "virtual_s": 100.0, **more,
    }  # fmt: skip
    return RunLog(programs=list(programs), **told)


def synthetic_run_log(policy: str, programs: int = 40, *, virtual_s: float = 3600.0) -> RunLog:
    """Log of a closed loop of ``programs``."""
    manner = POLICY_BEHAVIORS[policy]
    load = programs / 40
    generator = random.Random(zlib.crc32(f"{policy} {programs} None 1".encode()))
    run = run_log(
        policy=policy,
        programs_wanted=programs,
        trace="isobench_trae",
        seed=1,
        pool_blocks=POOL_BLOCKS,
        host_blocks=HOST_BLOCKS if manner.host else 0,
        virtual_s=virtual_s,
        busy_s=0.97 * virtual_s,
        steps=int(virtual_s * 30),
        scheduler_s=virtual_s * 0.03,
        wall_s=virtual_s / 70,
    )
    for slot in range(programs):
        at_s, number = 0.0, 0
        while at_s < virtual_s:
            life = _program(f"{slot}.{number}", at_s, run, manner, load, generator)
            run.programs.append(life)
            at_s, number = life.finished_s if life.finished_s is not None else virtual_s, number + 1
    run.programs.sort(key=lambda life: (life.arrived_s, life.program_id))
    steps = int(60 * manner.preempted * load * 10)
    run.preemption_steps = sorted(generator.randrange(run.steps) for _ in range(steps))
    return run


def _program(
    name: str, at_s: float, run: RunLog, manner: PolicyBehavior, load: float, generator: random.Random
) -> ProgramLog:
    turns = max(3, round(generator.gauss(24, 9)))
    context = 0
    life = program_log(f"swe-{name}", [], arrived_s=at_s, turns_total=turns)
    prompt = generator.randrange(3_000, 9_000)
    for number in range(turns):
        known = context // BLOCK * BLOCK
        gone = min(1.0, manner.lost * load) if generator.random() < 0.9 else 0.0
        lost = int(known * gone) // BLOCK * BLOCK
        host = int(lost * manner.host) // BLOCK * BLOCK
        again = {"preempted": prompt // 2} if generator.random() < manner.preempted * load else {}
        computed = prompt - (known - lost) - host + sum(again.values())
        output = generator.randrange(40, 700)
        wait_s = generator.expovariate(1.0) * manner.queue_s * load * load
        first_s = at_s + wait_s + computed / 6_000 + 0.05
        finished_s = first_s + output * 0.012 * (1 + load)
        times_s = (at_s, at_s + wait_s * manner.held, at_s + wait_s, first_s, finished_s)
        reached_s = [time_s for time_s in times_s if time_s <= run.virtual_s]
        turn = turn_log(
            life.program_id, number, *reached_s,
            prompt_tokens=prompt, output_tokens=output, known_tokens=known, tool="bash",
        )  # fmt: skip
        life.turns.append(turn)
        if len(reached_s) > 2:
            turn.device_tokens, turn.host_tokens, turn.computed_tokens = known - lost, host, computed
            turn.preemptions = len(again)
            turn.regenerated = again | ({"evicted": lost - host} if lost > host else {})
        if len(reached_s) < 5:
            so_far = (run.virtual_s - first_s) / (finished_s - first_s)
            turn.generated_tokens = max(0, int(output * so_far))
            return life
        context, at_s = prompt + output, finished_s
        prompt = context + generator.randrange(50, 1_500)
        if prompt > 31_000:
            life.cut = True
            break
        if number + 1 < turns:
            turn.gap_s = generator.lognormvariate(0.4, 1.3)
            at_s += turn.gap_s
            if at_s >= run.virtual_s:
                return life
    life.finished_s = at_s
    return life
