"""No policy sees the future: change all that is still to come, and nothing before it changes."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm")

from simulator_small_runs import SmallRun
from simulator_small_workload import PlannedTurn, SmallLoop, copied_workload, small_workload
from sojourn_server.simulator.run_log import RunLog
from sojourn_server.simulator.simulator_policies import policy_names

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

POLICIES = policy_names()
"""All that decide anything while a run goes on; the offline optimum is there to know the future."""


def another_future(loop: SmallLoop, seen: RunLog, at_s: float, seed: int) -> SmallLoop:
    """``loop`` as it would look the same until ``at_s`` and otherwise after: lengths of turns not yet sent,
    what is left of outputs and gaps under way, arrivals still to come."""
    rng = random.Random(f"future/{seed}/{at_s}")
    lives = {program.program_id: program for program in seen.programs}
    changed = copied_workload(loop)
    for program in changed.programs:
        life = lives.get(program.instance_id)
        if life is None or life.arrived_s > at_s:
            program.arrival_s = at_s + 0.001 + rng.expovariate(1.0)
            program.turns = [other_turn(rng) for _ in range(rng.randint(1, 6))]
            continue
        turns: list[PlannedTurn] = []
        for index, turn in enumerate(program.turns):
            past = life.turns[index] if index < len(life.turns) else None
            if past is None or past.submitted_s > at_s:
                turns.append(other_turn(rng))
                continue
            if past.finished_s is None or past.finished_s > at_s:
                turn.output += rng.randint(1, 30)  # it had made fewer than all by then
                turn.gap_s = rng.expovariate(1.0)
            elif past.finished_s + turn.gap_s > at_s:
                turn.gap_s = at_s - past.finished_s + 0.001 + rng.expovariate(1.0)
            turns.append(turn)
        over = life.finished_s is not None and life.finished_s <= at_s
        if not over and len(turns) < 8:
            turns.append(other_turn(rng))
        program.turns = turns
    return changed


def other_turn(rng: random.Random) -> PlannedTurn:
    return PlannedTurn(
        append=rng.randint(10, 150),
        output=rng.randint(2, 30),
        gap_s=rng.expovariate(0.7) + 0.01,
        tool=rng.choice(("grep", "pytest", "cat")),
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_the_past_does_not_depend_on_the_future(policy: str):
    loop = small_workload(seed=3)
    run = SmallRun(policy, loop)
    end_s = run.log.virtual_s
    differed = 0
    for cut, share in enumerate((0.15, 0.35, 0.55, 0.8)):
        at_s = end_s * share
        other = SmallRun(policy, another_future(loop, run.log, at_s, cut))
        assert other.before(at_s) == run.before(at_s)
        assert run.before(at_s), "nothing had been decided by then"
        differed += other.decisions != run.decisions
    assert differed == 4  # the other futures are really others


def test_a_policy_that_peeks_is_caught(monkeypatch: pytest.MonkeyPatch):
    """The test above can fail: here the time-to-live is the gap itself, as an early probe once had it."""
    from sojourn_server.policies.policy_protocols import DecisionReason, RetentionDecision
    from sojourn_server.policies.retention_policies import ContinuumRetention

    plans: dict[str, list[float]] = {}
    turns: dict[str, int] = {}

    def peeks(self, turn, now):
        index = turns[turn.program_id] = turns.get(turn.program_id, -1) + 1
        gap_s = plans[turn.program_id][index % len(plans[turn.program_id])]
        return RetentionDecision(gap_s, DecisionReason.FIXED)

    monkeypatch.setattr(ContinuumRetention, "keep", peeks)

    def run(loop: SmallLoop) -> SmallRun:
        turns.clear()
        plans.clear()
        plans.update({p.instance_id: [turn.gap_s for turn in p.turns] for p in loop.programs})
        return SmallRun("continuum", loop)

    loop = small_workload(seed=3)
    first = run(loop)
    at_s = first.log.virtual_s * 0.5
    assert run(another_future(loop, first.log, at_s, 1)).before(at_s) != first.before(at_s)
