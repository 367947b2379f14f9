"""Several engines in one virtual time: one alone is as before, and with more nothing is lost or made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from script_modules import benchmark
from simulator_small_runs import SmallCluster, SmallRun
from simulator_small_workload import BLOCK, SmallLoop, assert_played, small_workload, turns
from sojourn_server.policies.cluster_preset import load_cluster_preset
from sojourn_server.routing.program_estimates import MIN_FINISHED_PROGRAMS
from sojourn_server.routing.routing_events import (
    FirstByteSent,
    RecallRequest,
    RequestReceived,
    SendRequest,
    Tick,
)
from sojourn_server.routing.routing_records import RoutedProgram
from sojourn_server.simulator.run_log import RunLog
from sojourn_server.simulator.simulated_clients import DEFAULT_TENANT
from sojourn_server.simulator.simulated_gateway import SimulatedGateway
from sojourn_server.simulator.simulator_policies import find_cluster_policy

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

POLICIES = (
    "random",
    "round-robin",
    "prefix-affinity",
    "saga",
    "sojourn",
    "mori",
    "mori-paper",
    "thunderagent",
    "thunderagent-offload",
    "random/saga",
    "random/mori",
    "round-robin/lru-offload",
    "round-robin/tetris+host",
)


def alike(log: RunLog) -> bytes:
    """All that one engine by itself has too, but wall-clock time and looks, which it takes after steps."""
    programs = [
        msgspec.structs.replace(
            program,
            expected_s=None,
            turns=[msgspec.structs.replace(turn, replica=None) for turn in program.turns],
        )
        for program in log.programs
    ]
    same = msgspec.structs.replace(
        log, policy="", programs=programs, replicas=[], routes={}, wall_s=0.0, scheduler_s=0.0
    )
    return msgspec.json.encode(same)


ALONE = (
    "stock", "lru-offload", "admit", "continuum", "infercept", "saga", "mori", "tetris+host",
    "continuum+host",
)  # fmt: skip


@pytest.mark.parametrize("engine", ALONE)
@pytest.mark.parametrize("call_s", [0.0, 0.02])
def test_one_replica_lives_as_one_engine_does(engine: str, call_s: float):
    """To the byte: times, tokens, preemptions, what was found where, copies."""
    alone = SmallRun(engine, small_workload(seed=3), call_s=call_s, until_s=20.0)
    behind = SmallCluster(
        f"round-robin/{engine}", small_workload(seed=3), replicas=1, call_s=call_s, until_s=20.0
    )
    assert alike(behind.log) == alike(alone.log)
    assert behind.log.steps
    assert {turn.replica for turn in turns(behind.log)} == {"r0"}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_brings_every_program_to_its_end(policy: str):
    loop = small_workload(seed=1, programs=24)
    log = SmallCluster(policy, loop, call_s=0.01).log
    assert_played(log, loop.programs)
    assert {turn.replica for turn in turns(log)} <= {"r0", "r1", "r2"}
    assert len(log.replicas) == 3
    assert sum(replica.steps for replica in log.replicas) == log.steps
    assert all(0 < replica.busy_s <= log.virtual_s for replica in log.replicas)


@pytest.mark.parametrize("policy", ["random", "saga", "mori", "thunderagent-offload"])
def test_the_same_seed_gives_the_same_bytes(policy: str):
    logs = [SmallCluster(policy, small_workload(seed=4, programs=20), until_s=15.0).log for _ in range(2)]
    first, second = (
        msgspec.json.encode(msgspec.structs.replace(log, wall_s=0.0, scheduler_s=0.0)) for log in logs
    )
    assert first == second


def test_what_another_replica_computed_is_computed_again_and_said_to_have_moved():
    loop = small_workload(seed=2, programs=6)
    # Memory is never short: the only loss is that of a move.
    log = SmallCluster("round-robin/stock", loop, blocks=2000).log
    causes = {cause for turn in turns(log) for cause in turn.regenerated}
    assert causes == {"moved"}
    for program in log.programs:
        been: dict[str, int] = {}
        for turn in program.turns:
            # A replica has of a program's context what it had at the end of its last turn there.
            known = been.get(turn.replica, 0) // BLOCK * BLOCK
            assert turn.regenerated.get("moved", 0) == max(0, turn.known_tokens - known)
            # The last token that is made is never computed.
            been[turn.replica] = turn.prompt_tokens + turn.output_tokens - 1


class _Recaller(SimulatedGateway):
    """Takes each request of some programs back once, a moment after it was sent, and sends it elsewhere."""

    def __init__(self, after_s: float) -> None:
        super().__init__(load_cluster_preset("round-robin"))
        self.tick_s = 0.01
        self._after_s = after_s
        self._due: dict[str, tuple[float, str]] = {}
        self.recalled: list[str] = []

    def take(self, event: Any, now: float) -> list[Any]:
        actions = list(super().take(event, now))
        if isinstance(event, RequestReceived):
            for action in actions:
                if isinstance(action, SendRequest) and event.program_id in ("p1", "p4", "p7"):
                    self._due[action.request_id] = (now + self._after_s, action.replica_id)
        elif isinstance(event, FirstByteSent):
            self._due.pop(event.request_id, None)
        elif isinstance(event, Tick):
            for request_id, (due_s, replica) in list(self._due.items()):
                if due_s <= now:
                    del self._due[request_id]
                    self.recalled.append(request_id)
                    other = f"r{(int(replica[1:]) + 1) % 3}"
                    actions += [
                        RecallRequest(request_id, replica),
                        SendRequest(request_id, other, "elsewhere"),
                    ]
        return actions


@pytest.mark.parametrize(
    ("policy", "host_blocks"), [("mori/mori", 200), ("prefix-affinity/lru-offload", 0), ("saga/infercept", 0)]
)
def test_a_replica_has_the_kv_memory_that_its_engine_would_report(policy: str, host_blocks: int):
    """Engines report no disk to the gateway, and host memory in blocks only with sojourn's connector."""
    loop = small_workload(seed=8, programs=2)
    run = SmallCluster(policy, loop, replicas=1, blocks=100, host_blocks=200, disk_blocks=400)
    (replica,) = run.core.replica_statuses()
    assert (replica.capacity_tokens, replica.host_tokens) == (99 * BLOCK, host_blocks * BLOCK)


@pytest.mark.parametrize("engine", ["stock", "saga", "lru-offload", "mori"])
@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.05])
def test_a_request_that_is_taken_back_is_answered_elsewhere(engine: str, after_s: float):
    """On its way, in a queue, or in the midst of its prefill: nothing is lost, no engine keeps any of it."""
    recaller = _Recaller(after_s)
    policy = replace(find_cluster_policy(f"round-robin/{engine}"), request_router=lambda: recaller)
    run = SmallCluster(policy, small_workload(seed=8, programs=20), call_s=0.015)
    assert recaller.recalled
    lives = {turn.request_id: turn for turn in turns(run.log)}
    for request_id, turn in lives.items():
        assert turn.finished_s is not None
        assert turn.recalls == recaller.recalled.count(request_id)
    assert not run.log.notes
    assert run.log.hook_failures == run.log.refused_hints == 0
    for engine_, _ in run.engines:
        assert not engine_.scheduler.requests
        assert not engine_.scheduler.running
        assert not len(engine_.scheduler.waiting)


def test_tenants_reach_the_core_and_state_no_deadlines():
    loop = small_workload(seed=3, programs=9)
    for number, program in enumerate(loop.programs):
        program.tenant = f"t{number % 2}" if number < 8 else None
    run = SmallCluster("saga/saga", loop)
    lives = {program.program_id: program for program in run.log.programs}
    received = [event for event in run.routed if isinstance(event, RequestReceived)]
    assert {event.program_id for event in received} == set(lives)
    for event in received:
        assert event.tenant == (lives[event.program_id].tenant or DEFAULT_TENANT)
        assert event.deadline_s is None


def test_a_request_that_no_replica_could_ever_compute_is_refused_and_its_program_gives_up():
    loop = small_workload(seed=3, programs=4)
    loop.programs[1].turns[0].append = 5000
    child, *following = small_workload(seed=4, programs=5).programs
    child.parent_turn, loop.programs[1].children = 0, [child]
    for program in following:
        program.instance_id = f"next {program.number}"
    loop.following = iter(following)
    log = SmallCluster("prefix-affinity", loop).log
    assert [note for note in log.notes if note.startswith("p1/0 was refused: the prompt has 5,000 tokens")]
    assert [p.program_id for p in log.programs if p.finished_s is None] == ["p1"]
    assert len(log.programs) == 8, "another program takes the place of the refused one"


def test_a_gateway_that_holds_everybody_back_is_given_up():
    class Shut(SimulatedGateway):
        def take(self, event: Any, now: float) -> list[Any]:
            return [] if isinstance(event, RequestReceived) else super().take(event, now)

    shut = Shut(load_cluster_preset("round-robin"))
    shut.tick_s = 1.0
    policy = replace(find_cluster_policy("round-robin/stock"), request_router=lambda: shut)
    run = SmallCluster(policy, small_workload(seed=9, programs=3))
    assert len(run.log.notes) == 1
    assert "nothing happened for 3600 s although requests waited at the router" in run.log.notes[0]
    assert run.log.virtual_s < 20_000


def named(world: SmallLoop, prefix: str) -> SmallLoop:
    """Programs of two types."""
    for number, program in enumerate(world.programs):
        program.instance_id = f"{prefix}{number}"
        program.agent_type = "even" if number % 2 == 0 else "odd"
        if number % 2:
            del program.turns[2:]
    return world


def test_what_was_seen_is_known_when_the_first_program_comes():
    """What gateway and clients have seen before a run: agents of the same types that have ended."""
    learn = benchmark("cluster_simulation").learn
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
