"""What a gateway and its clients have seen before a run: agents of the same types that have ended."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from script_modules import benchmark
from simulator_small_runs import SmallCluster
from simulator_small_workload import SmallLoop, small_workload
from sojourn_server.routing.program_estimates import MIN_FINISHED_PROGRAMS
from sojourn_server.routing.routing_records import RoutedProgram

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]
learn = benchmark("cluster_simulation").learn


def named(world: SmallLoop, prefix: str) -> SmallLoop:
    """Programs of two types."""
    for number, program in enumerate(world.programs):
        program.instance_id = f"{prefix}{number}"
        program.agent_type = "even" if number % 2 == 0 else "odd"
        if number % 2:
            del program.turns[2:]
    return world


def test_what_was_seen_is_known_when_the_first_program_comes() -> None:
    before = named(small_workload(seed=9, programs=2 * MIN_FINISHED_PROGRAMS), "before").programs
    for program in before:
        program.tenant = "t"
    run = SmallCluster(
        "sojourn/saga", named(small_workload(seed=3), "p"), until_s=0.001,
        prepare=lambda simulation: learn(simulation, before),
    )  # fmt: skip
    expected = run.core.estimator
    new = {kind: RoutedProgram(("t", kind), kind, None, 0.0, 0.0) for kind in ("even", "odd")}
    turns = sorted(len(program.turns) for program in before[::2])
    assert expected.turns_left(new["odd"]) == 2.0
    assert 2.0 < expected.turns_left(new["even"]) in turns
    peaks = [p.plans[-1].prompt_tokens + p.plans[-1].output_tokens for p in before[::2]]
    size_tokens = expected.size_tokens(new["even"], 1, 10**6)
    assert min(peaks) <= size_tokens <= max(peaks)
    assert expected.work_s(new["even"]) > expected.work_s(new["odd"]) > 0.0
