"""Several engines in one virtual time: one alone is as before, and with more nothing is lost or made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from simulator_small_clusters import SmallCluster
from simulator_small_runs import SmallRun
from simulator_small_workload import (
    BLOCK,
    FlatLatency,
    PlannedTurn,
    SmallLoop,
    SmallProgram,
    copied_workload,
    small_workload,
)
from sojourn_server.policies.cluster_preset import load_cluster_preset
from sojourn_server.routing.affinity_strategy import AffinityStrategy
from sojourn_server.routing.routing_events import (
    FirstByteSent,
    RecallRequest,
    RequestReceived,
    SendRequest,
    Tick,
)
from sojourn_server.simulator.report.run_metrics import summarize_run
from sojourn_server.simulator.run_log import RunLog, TurnLog
from sojourn_server.simulator.simulated_clients import SimulatedClients
from sojourn_server.simulator.simulated_gateway import (
    DEFAULT_TENANT,
    SimulatedGateway,
    isolated_completion_s,
    prefix_hashes,
)
from sojourn_server.simulator.simulator_policies import ClusterPolicy, find_cluster_policy

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


def turns(log: RunLog) -> list[TurnLog]:
    return [turn for program in log.programs for turn in program.turns]


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


@pytest.mark.parametrize("engine", ["thunderagent", "thunderagent-offload"])
def test_thunderagents_router_before_one_backend_is_the_door_it_was(engine: str):
    loop = small_workload(seed=6)
    assert alike(SmallCluster(engine, loop, replicas=1).log) == alike(SmallRun(engine, loop).log)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_brings_every_program_to_its_end(policy: str):
    loop = small_workload(seed=1, programs=24)
    log = SmallCluster(policy, loop, call_s=0.01).log
    assert not log.notes
    assert log.hook_failures == log.refused_hints == 0
    planned = {program.instance_id: program for program in loop.programs}
    assert {program.program_id for program in log.programs} == set(planned)
    for program in log.programs:
        plan = planned[program.program_id]
        assert [turn.output_tokens for turn in program.turns] == [turn.output for turn in plan.turns]
        assert [turn.prompt_tokens for turn in program.turns] == [p.prompt_tokens for p in plan.plans]
        assert program.finished_s == program.turns[-1].finished_s
    for turn in turns(log):
        assert turn.replica in {"r0", "r1", "r2"}
        assert turn.submitted_s <= turn.entered_s <= turn.admitted_s < turn.first_token_s <= turn.finished_s
        found = turn.device_tokens + turn.host_tokens
        if not turn.preemptions:
            assert turn.computed_tokens + found == turn.prompt_tokens
        assert turn.regenerated_tokens <= turn.computed_tokens
        assert turn.known_tokens - found <= turn.regenerated_tokens
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


def test_who_keeps_its_replica_loses_nothing_to_moves():
    log = SmallCluster("saga/stock", small_workload(seed=2, programs=6), blocks=2000).log
    assert not any(turn.regenerated for turn in turns(log))
    row = summarize_run(log)
    assert row.replica_changes.programs_share == row.replica_changes.per_program == 0


def test_who_waits_for_a_full_replica_is_stolen_by_an_idle_one():
    loop = small_workload(seed=1, programs=40)
    for program in loop.programs:
        program.arrival_s *= 0.3
        for turn in program.turns:
            turn.gap_s *= 0.05
    saga = replace(load_cluster_preset("saga"), routing=load_cluster_preset("random").routing)
    chosen = find_cluster_policy("saga/stock")
    logs = {
        name: SmallCluster(policy, copied_workload(loop), max_num_seqs=3, blocks=60).log
        for name, policy in (("stealing", replace(chosen, preset=saga)), ("random", "random/stock"))
    }
    for log in logs.values():
        assert all(program.finished_s is not None for program in log.programs)
    assert logs["stealing"].routes["stolen_idle"] > 0
    assert set(logs["random"].routes) == {"random"}
    # A stolen turn was computed where it was stolen to.
    assert sum(logs["stealing"].routes.values()) == len(turns(logs["stealing"]))


def test_replicas_work_at_the_same_time():
    loop = small_workload(seed=5, programs=30)
    for program in loop.programs:
        program.arrival_s = 0.0
        for turn in program.turns:
            turn.gap_s = 0.0
    one, three = (SmallCluster("round-robin/stock", copied_workload(loop), replicas=n).log for n in (1, 3))
    assert three.virtual_s < 0.7 * one.virtual_s
    assert sum(replica.busy_s for replica in three.replicas) > three.virtual_s


def test_a_run_ends_with_the_steps_that_have_begun():
    log = SmallCluster("round-robin/stock", small_workload(seed=5, programs=30), until_s=3.0).log
    longest_s = 0.005 + 256 * 2e-4  # as FlatLatency has it
    assert 3.0 <= log.virtual_s <= 3.0 + longest_s
    assert all(replica.busy_s <= log.virtual_s for replica in log.replicas)
    assert not any(turn.submitted_s > log.virtual_s for turn in turns(log))


class _ChangedGateway(SimulatedGateway):
    """A gateway whose ``take`` may change what its routing core answers."""

    def __init__(self) -> None:
        super().__init__(load_cluster_preset("round-robin"))
        self.take_unchanged = self.core.take
        self.core.take = self.take

    def take(self, event: Any, now: float) -> list[Any]:
        raise NotImplementedError


class _Recaller(_ChangedGateway):
    """Takes each request of some programs back once, a moment after it was sent, and sends it elsewhere."""

    def __init__(self, after_s: float) -> None:
        super().__init__()
        self.tick_s = 0.01
        self._after_s = after_s
        self._due: dict[str, tuple[float, str]] = {}
        self._done: set[str] = set()
        self.recalled: list[str] = []

    def take(self, event: Any, now: float) -> list[Any]:
        actions = self.take_unchanged(event, now)
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


class _Jealous(_Recaller):
    """Whenever an answer begins, all others that have not begun on that replica leave it, once each."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self._at: dict[str, str] = {}

    def take(self, event: Any, now: float) -> list[Any]:
        actions = self.take_unchanged(event, now)
        if isinstance(event, RequestReceived):
            self._at |= {
                action.request_id: action.replica_id for action in actions if isinstance(action, SendRequest)
            }
        elif isinstance(event, FirstByteSent):
            replica = event.replica_id
            assert event.request_id not in self._at or self._at.pop(event.request_id) == replica
            for other in [name for name, at in self._at.items() if at == replica]:
                del self._at[other]
                self.recalled.append(other)
                elsewhere = f"r{(int(replica[1:]) + 1) % 3}"
                actions += [RecallRequest(other, replica), SendRequest(other, elsewhere, "elsewhere")]
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


@pytest.mark.parametrize("engine", ["stock", "saga", "mori"])
def test_who_is_taken_back_as_its_first_token_is_made_has_made_none(engine: str):
    """Several begin in one step, and the first to do so drives the others out."""
    loop = small_workload(seed=8, programs=20)
    for program in loop.programs:
        program.arrival_s = 0.0
        for turn in program.turns:
            turn.output = max(1, turn.output % 3)  # some answers begin and end in that step
    jealous = _Jealous()

    class Policy(ClusterPolicy):
        def front(self, replicas: int) -> SimulatedGateway:
            return jealous

    known = find_cluster_policy(f"round-robin/{engine}")
    run = SmallCluster(Policy(routing=known.routing, engine=known.engine), loop)
    assert len(jealous.recalled) > 10
    for turn in turns(run.log):
        assert turn.submitted_s <= turn.entered_s <= turn.admitted_s < turn.first_token_s <= turn.finished_s
        assert turn.recalls == jealous.recalled.count(turn.request_id)
    assert run.log.hook_failures == run.log.refused_hints == 0
    assert not any(engine_.scheduler.requests for engine_, _ in run.engines)


@pytest.mark.parametrize("engine", ["stock", "saga", "lru-offload", "mori"])
@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.05])
def test_a_request_that_is_taken_back_is_answered_elsewhere(engine: str, after_s: float):
    """On its way, in a queue, or in the midst of its prefill: nothing is lost, no engine keeps any of it."""
    recaller = _Recaller(after_s)

    class Policy(ClusterPolicy):
        def front(self, replicas: int) -> SimulatedGateway:
            return recaller

    known = find_cluster_policy(f"round-robin/{engine}")
    loop = small_workload(seed=8, programs=20)
    run = SmallCluster(Policy(routing=known.routing, engine=known.engine), loop, call_s=0.015)
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


@pytest.mark.parametrize("after_s", [0.0, 0.05])
def test_events_of_a_recalled_request_are_delivered_once(monkeypatch: pytest.MonkeyPatch, after_s: float):
    """Also those of a request that was recalled before it reached its engine."""
    delivered: list[tuple[str, int]] = []
    apply_events = SimulatedClients._apply_events

    def record(clients: SimulatedClients, sim_replica: Any, events: list[dict[str, Any]]) -> None:
        delivered.extend((event["program_id"], event["seq"]) for event in events)
        apply_events(clients, sim_replica, events)

    monkeypatch.setattr(SimulatedClients, "_apply_events", record)
    recaller = _Recaller(after_s)

    class Policy(ClusterPolicy):
        def front(self, replicas: int) -> SimulatedGateway:
            return recaller

    known = find_cluster_policy("round-robin/saga")
    policy = Policy(routing=known.routing, engine=known.engine)
    SmallCluster(policy, small_workload(seed=8, programs=20), call_s=0.015)
    assert recaller.recalled
    own = [seqs for program_id, seqs in delivered if program_id == "p1"]
    assert own == list(range(1, len(own) + 1))


def test_the_future_changes_nothing_before_it():
    """A program's last answers are other ones: until then every request of all lives as it did."""
    for policy in ("prefix-affinity", "saga", "mori", "thunderagent"):
        loop = small_workload(seed=9, programs=20)
        changed = copied_workload(loop)
        target = changed.programs[5]
        target.turns[-1] = replace(target.turns[-1], output=target.turns[-1].output + 40)
        one, other = SmallCluster(policy, loop).log, SmallCluster(policy, changed).log
        until_s = min(
            next(p for p in log.programs if p.program_id == target.instance_id).turns[-1].first_token_s
            for log in (one, other)
        )
        told = [
            [
                (turn.request_id, turn.replica, turn.submitted_s, turn.entered_s)
                for turn in turns(log)
                if turn.entered_s is not None and turn.entered_s < until_s
            ]
            for log in (one, other)
        ]
        assert told[0] == told[1]
        assert len(told[0]) > 20


@pytest.mark.parametrize("seed", range(4))
def test_a_program_takes_alone_what_is_expected_of_it(seed: int):
    loop = small_workload(seed=seed, programs=1)
    loop.programs[0].arrival_s = 0.0
    log = SmallCluster("round-robin/stock", loop, replicas=1, blocks=400).log
    program = log.programs[0]
    assert program.expected_s == pytest.approx(isolated_completion_s(loop.programs[0], FlatLatency(), 256))
    # A cache has whole blocks only, and never the last token that was made: up to 16 tokens more a turn.
    more_s = program.completion_s - program.expected_s
    assert -1e-9 <= more_s <= len(program.turns) * 16 * 2e-4 + 1e-9


def test_tenants_reach_the_core_and_state_no_deadlines():
    loop = small_workload(seed=3, programs=9)
    for number, program in enumerate(loop.programs):
        program.tenant = f"t{number % 2}" if number < 8 else None
    told = []

    class Listening(SimulatedGateway):
        def take(self, event: Any, now: float) -> list[Any]:
            if isinstance(event, RequestReceived):
                told.append((event.program_id, event.tenant, event.deadline_s))
            return super().take(event, now)

    class Policy(ClusterPolicy):
        def front(self, replicas: int) -> SimulatedGateway:
            return Listening(load_cluster_preset("saga"))

    known = find_cluster_policy("saga/saga")
    run = SmallCluster(Policy(routing="saga", engine=known.engine), loop)
    lives = {program.program_id: program for program in run.log.programs}
    for program_id, tenant, deadline_s in told:
        life = lives[program_id]
        assert (life.tenant or DEFAULT_TENANT) == tenant
        assert deadline_s is None
    attained = summarize_run(run.log).slo_attainment
    assert set(attained) == {"overall", "t0", "t1"}
    for tenant in ("t0", "t1"):
        mine = [p for p in run.log.programs if p.tenant == tenant]
        met = [p.completion_s <= 1.5 * p.expected_s for p in mine]
        assert attained[tenant] == sum(met) / len(met)


def test_a_request_that_no_replica_could_ever_compute_is_refused_and_its_program_gives_up():
    loop = small_workload(seed=3, programs=4)
    loop.programs[1].turns[0].append = 5000
    log = SmallCluster("prefix-affinity", loop).log
    assert [note for note in log.notes if note.startswith("p1/0 was refused: the prompt has 5,000 tokens")]
    assert [p.program_id for p in log.programs if p.finished_s is None] == ["p1"]


def test_a_gateway_that_holds_everybody_back_is_given_up():
    class Shut(_ChangedGateway):
        def __init__(self) -> None:
            super().__init__()
            self.tick_s = 1.0

        def take(self, event: Any, now: float) -> list[Any]:
            return [] if isinstance(event, RequestReceived) else self.take_unchanged(event, now)

    class Policy(ClusterPolicy):
        def front(self, replicas: int) -> SimulatedGateway:
            return Shut()

    known = find_cluster_policy("round-robin/stock")
    run = SmallCluster(Policy(routing="shut", engine=known.engine), small_workload(seed=9, programs=3))
    assert len(run.log.notes) == 1
    assert "nothing happened for 3600 s although requests waited at the gateway" in run.log.notes[0]
    assert run.log.virtual_s < 20_000


def test_a_prefix_is_hashed_piece_by_piece():
    ids = list(range(1000))
    pieces = prefix_hashes(ids)
    assert len(pieces) == 3
    assert prefix_hashes(ids[:767]) == pieces[:2]
    other = [*ids[:300], 7, *ids[301:]]
    assert prefix_hashes(other)[0] == pieces[0]
    assert not set(prefix_hashes(other)[1:]) & set(pieces)


def test_endless_arrivals_are_replaced_on_whatever_replica_is_theirs():
    """A closed loop: who finishes is followed at once, wherever it was."""

    class Endless(SmallLoop):
        def __init__(self) -> None:
            super().__init__(small_workload(seed=4, programs=8).programs)
            self.copies = 0

        def finished(self, program: Any, now: float) -> Any:
            self.copies += 1
            return now, replace(program, instance_id=f"{program.trace_id}~{self.copies}")

    log = SmallCluster("mori", Endless(), until_s=30.0).log
    assert sum(program.finished_s is not None for program in log.programs) > 10
    assert len([p for p in log.programs if p.finished_s is None]) == 8


def test_a_program_that_waits_in_its_engine_moves_to_the_replica_that_has_become_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every second program ends early, so one replica has the growing contexts and the other has room."""
    growing, short = [PlannedTurn(90, 20, 0.5, "t")] * 7, [PlannedTurn(90, 20, 0.0, "t")]
    loop = SmallLoop([SmallProgram(f"p{n}", short if n % 2 else growing, n / 100, n) for n in range(16)])
    shape = {"replicas": 2, "blocks": 60, "host_blocks": 20}
    moving = SmallCluster("mori-paper", loop, **shape)
    monkeypatch.setattr(AffinityStrategy, "_relocate", lambda self, *arguments: None)
    staying = SmallCluster("mori-paper", loop, **shape)
    assert moving.core.counts.routes["relocated"] == sum(turn.recalls for turn in turns(moving.log)) > 0
    assert staying.core.counts.routes["relocated"] == 0
    assert max(turn.recalls for turn in turns(moving.log)) == 1
    for each in (moving, staying):
        assert all(program.finished_s is not None for program in each.log.programs)

    def longest_wait_s(of: SmallCluster) -> float:
        return max(turn.first_token_s - turn.submitted_s for turn in turns(of.log))

    assert longest_wait_s(moving) < longest_wait_s(staying)
