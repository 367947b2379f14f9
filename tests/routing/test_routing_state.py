"""What outlives a core, and the copies of homes that gateways keep."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_builders import build_core, seen
from sojourn_server.policies.fairness.fair_share import AgentFairShare
from sojourn_server.policies.routing.baseline_routing import RoundRobinRouting
from sojourn_server.policies.routing.capacity_routing import CapacityRouting
from sojourn_server.routing import routing_events, routing_snapshot
from sojourn_server.routing.affinity_core import AffinityCore
from sojourn_server.routing.home_change_log import HomeChange, HomeChangeLog, HomeChanges
from sojourn_server.routing.replica_fleet import ReplicaHealth
from sojourn_server.routing.routed_programs import RoutedProgram
from sojourn_server.routing.routing_events import ProbeReplica, ReleaseProgramKv, SendRequest
from sojourn_server.routing.routing_snapshot import RoutingState, SavedProgram


def core(routing: Any = None, life: str = "first", **limits: Any) -> AffinityCore:
    return build_core(routing, sharing=AgentFairShare(), life=life, **limits)


def asked(name: str, program: str, tokens: int = 100) -> routing_events.RequestReceived:
    return routing_events.RequestReceived(name, "t", tokens, program, agent_type="coder")


def lived(programs: int = 6) -> AffinityCore:
    """Two replicas, programs at home at both, and histories."""
    it = core()
    for name in ("a", "b"):
        it.take(seen(name), 0.0)
    for number in range(programs):
        it.take(asked(f"r{number}", f"p{number}"), float(number))
    for number in range(programs):
        it.take(routing_events.RequestFinished(f"r{number}", 10), number + 3.0)
    it.take(routing_events.ProgramEnded("p0", "t"), 20.0)
    return it


def restored(it: AffinityCore, now: float, elapsed_s: float | None = None, **more: Any) -> AffinityCore:
    written = msgspec.json.encode(it.snapshot(20.0))
    after = core(life="second", **more)
    after.restore(msgspec.json.decode(written, type=RoutingState), now, elapsed_s)
    return after


# -- checkpoints --------------------------------------------------------------------------


def test_homes_stand_and_what_was_learnt_is_known() -> None:
    before = lived()
    after = restored(before, 25.0)
    assert after.snapshot(20.0) == before.snapshot(20.0)
    for program in before.programs:
        again = after.programs.get(program.key)
        assert again is not None
        assert (again.home, again.cached, again.turns) == (program.home, True, 1)
        [sent] = [a for a in after.take(asked(f"x{program.key[1]}", program.key[1]), 25.0)]
        assert (sent.replica_id, sent.reason) == (program.home, "home")


def test_a_program_that_its_client_has_ended_has_no_home_after_a_restart() -> None:
    before = lived()
    before.take(asked("open", "p1"), 20.0)
    before.take(routing_events.ProgramEnded("p1", "t"), 20.0)
    assert before.programs.get(("t", "p1")) is not None, "until its request has ended"
    after = restored(before, 25.0)
    assert after.programs.get(("t", "p1")) is None
    assert len(after.programs) == len(before.programs) - 1
    assert sum(replica.homed_tokens for replica in after.fleet) == sum(
        program.size_tokens for program in after.programs
    )


def test_a_replica_that_never_registers_again_is_probed_and_then_loses_its_programs() -> None:
    after = restored(lived(), 100.0, lease_s=10.0)
    after.take(seen("a"), 101.0)
    assert after.take(routing_events.Tick(), 109.0) == []
    assert after.take(routing_events.Tick(), 110.0) == [ProbeReplica("b", "1")]
    homes = {program.home for program in after.programs}
    assert homes == {"a", "b"}, "not at once"
    after.take(routing_events.ReplicaGone("b", "1"), 111.0)
    assert {program.home for program in after.programs} == {"a", None}


def test_a_replica_that_was_gone_while_it_was_drained_is_drained_for_the_next_core_too() -> None:
    before = lived()
    before.take(routing_events.ReplicaDrainStarted("b"), 15.0)
    before.take(routing_events.ReplicaGone("b", "1"), 16.0)
    after = restored(before, 100.0)
    after.take(seen("b"), 101.0)
    assert after.fleet.get("b").health is ReplicaHealth.DRAINING


def test_a_replica_that_was_started_anew_meanwhile_has_nothing() -> None:
    after = restored(lived(), 100.0)
    after.take(seen("b", "2"), 101.0)
    assert {program.home for program in after.programs} == {"a", None}


def test_gateways_report_requests_in_flight_to_a_restored_core() -> None:
    after = restored(lived(), 30.0)
    program = after.programs.get(("t", "p1"))
    assert after.take(routing_events.RequestSent("r9", program.home, "t", 300, "p1"), 30.0) == []
    assert after.fleet.get(program.home).in_flight == {"r9": 300}
    assert (program.in_flight, program.waiting) == (1, 0)
    assert after.take(routing_events.RequestSent("r9", program.home, "t", 300, "p1"), 30.0) == [], (
        "said twice"
    )
    after.take(routing_events.RequestFinished("r9", 50, program.home), 31.0)
    assert (program.turns, program.context_tokens) == (2, 350)
    assert after.counts.routes == {"sent_by_gateway": 1}


def test_a_request_sent_to_a_replica_that_registers_later_counts_there_then() -> None:
    it = core()
    it.take(routing_events.RequestSent("r0", "a", "t", 300, "p"), 0.0)
    assert it.tenants.in_flight_tokens == {"t": 300}
    it.take(seen("a"), 1.0)
    assert it.fleet.get("a").in_flight == {"r0": 300}
    it.take(routing_events.RequestSent("r1", "b", "t", 300, "q"), 1.0)
    [sent] = it.take(routing_events.RequestFailed("r1", "b"), 2.0)
    assert (sent.request_id, sent.replica_id) == ("r1", "a")


def test_a_request_that_a_gateway_sent_while_the_core_made_it_wait_is_where_it_was_sent() -> None:
    it = core(CapacityRouting())
    it.take(seen("a"), 0.0)
    it.take(asked("r0", "p", 900), 0.0)
    assert it.take(asked("r1", "q", 900), 0.0) == []
    it.take(routing_events.RequestSent("r1", "a", "t", 900, "q"), 0.1)
    assert it.waiting == 0
    assert set(it.fleet.get("a").in_flight) == {"r0", "r1"}


def test_a_gateway_whose_copy_is_old_changes_no_home() -> None:
    it = core(RoundRobinRouting())
    for name in ("a", "b"):
        it.take(seen(name), 0.0)
    it.take(asked("r0", "p"), 0.0)
    it.take(routing_events.RequestFinished("r0"), 0.0)
    assert ReleaseProgramKv("p", "a", "t") in it.take(asked("r1", "p"), 0.0)
    it.take(routing_events.RequestSent("r2", "a", "t", 100, "p"), 0.0)
    assert it.programs.get(("t", "p")).home == "b"
    assert set(it.fleet.get("a").in_flight) == {"r2"}


@given(before=st.floats(0, 1e6), after=st.floats(0, 1e6), elapsed_s=st.floats(0, 1e4))
def test_times_are_moved_to_the_new_clock(before: float, after: float, elapsed_s: float) -> None:
    it = core()
    it.take(routing_events.RequestReceived("r", "t", 10, "p", deadline_s=before + 5.0), before)
    again = core()
    again.restore(it.snapshot(before), after, elapsed_s)
    program = again.programs.get(("t", "p"))
    assert program is not None
    assert program.deadline_s is not None
    assert after - program.began_s == pytest.approx(elapsed_s, abs=1e-6)
    assert program.deadline_s - after == pytest.approx(5.0 - elapsed_s, abs=1e-6)


def test_a_core_that_has_begun_restores_nothing() -> None:
    it = lived()
    with pytest.raises(ValueError, match="expected a new one"):
        it.restore(it.snapshot(20.0), 20.0)


@pytest.mark.parametrize(
    "changed",
    [
        {"version": 2},
        {"expected": {}},
        {"expected": {"version": 3, "tenants": None}},
        {"expected": {"version": 3, "tenants": [["t", None]]}},
        {"expected": {"version": 3, "tenants": [["t", []]]}},
        {"expected": {"version": 3, "tenants": [["t", [[None, [0], [], [], []]]]]}},
        {"expected": {"version": 3, "tenants": [["t", [[None, [], [True], [], []]]]]}},
        {"expected": {"version": 3, "tenants": [["t", [[None, [], [], [-1.0], []]]]]}},
        {"expected": {"version": 3, "tenants": [["t", [[None, [], [], [], []], [1, [], [], [], []]]]]}},
        {"replicas": [{"replica_id": "a", "instance": "1", "capacity_tokens": 0}]},
        {"replicas": [{"replica_id": "a", "instance": "1", "capacity_tokens": 9}] * 2},
        {"replicas": [{"replica_id": "a", "instance": "1", "capacity_tokens": 9, "health": "fine"}]},
        {"programs": [{"tenant": "t", "program_id": "p", "began_s": 0, "last_s": 0, "size_tokens": -1}]},
    ],
)
def test_a_state_that_makes_no_sense_is_refused(changed: dict[str, Any]) -> None:
    document = {**msgspec.to_builtins(lived().snapshot(20.0)), **changed}
    with pytest.raises(ValueError, match=r"expected|below 0|valid"):
        core().restore(msgspec.convert(document, RoutingState), 20.0)


@pytest.mark.parametrize("version", [1, 2])
def test_statistics_of_an_older_release_are_left_out_and_homes_stand(version: int) -> None:
    old = {"version": version, "peaks": {}, "turns": {}, "turn_s": [], "life_s": [], "tenants": [["t", {}]]}
    document = {**msgspec.to_builtins(lived().snapshot(20.0)), "expected": old}
    after = core()
    assert after.restore(msgspec.convert(document, RoutingState), 20.0) == 5
    assert after.expected.snapshot() == {"version": 3, "tenants": []}


def test_a_replica_without_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="expected ≥ 1"):
        core().take(seen("a", capacity_tokens=0), 0.0)


# -- copies of homes ----------------------------------------------------------------------


def apply(copy: dict[tuple[str, str], tuple[str | None, str | None]], changes: HomeChanges) -> None:
    if changes.full:
        copy.clear()
    for change in changes.changes:
        key = (change.tenant, change.program_id)
        copy.pop(key, None)
        if change.replica_id is not None:
            copy[key] = (change.replica_id, change.instance)


def test_changes_come_in_batches_after_ten_milliseconds_or_a_hundred() -> None:
    it = core()
    it.take(seen("a", capacity_tokens=10**9), 0.0)
    assert not it.journal.flush(0.0)
    for number in range(99):
        it.take(asked(f"r{number}", f"p{number}"), 1.0)
    assert not it.journal.flush(1.005)
    assert it.journal.due_s(1.005) == pytest.approx(0.005)
    it.take(asked("r99", "p99"), 1.005)
    assert it.journal.flush(1.005)
    batch = it.changes_since(0, "first")
    assert (len(batch.changes), batch.since, batch.version) == (100, 0, 100)
    it.take(routing_events.RequestFinished("r3", 1, "a"), 2.0)
    it.take(routing_events.ProgramEnded("p3", "t"), 2.0)
    assert not it.journal.flush(2.009)
    assert it.journal.flush(2.01)
    assert it.changes_since(100, "first").changes == (HomeChange("t", "p3", 101),)
    assert not it.journal.flush(3.0)


def test_several_changes_of_one_program_are_one() -> None:
    it = core(RoundRobinRouting())
    for name in ("a", "b"):
        it.take(seen(name), 0.0)
    for number in range(5):
        it.take(asked(f"r{number}", "p"), 0.0)
    [change] = it.changes_since(0, "first").changes
    assert (change.replica_id, change.version) == ("a", it.journal.version)
    assert it.journal.version > 5


def test_an_outdated_copy_or_one_of_another_life_gets_all_homes() -> None:
    it = lived()
    again = it.changes_since(it.journal.version, "first")
    assert (again.full, again.changes) == (False, ())
    for version, life in ((0, "another"), (it.journal.version + 1, "first")):
        told = it.changes_since(version, life)
        assert told.full
        assert {change.program_id for change in told.changes} == {"p1", "p2", "p3", "p4", "p5"}


def test_a_clock_that_steps_back_holds_no_batch_up() -> None:
    journal = HomeChangeLog()
    journal.record_home(("t", "p"), ("a", "1"), 1e6)
    assert journal.due_s(0.0) == 0.0
    assert journal.flush(0.0)


@given(
    notes=st.lists(
        st.tuples(st.sampled_from("pqrstu"), st.sampled_from((None, "a", "b")), st.booleans()), max_size=60
    ),
    most=st.integers(1, 8),
)
def test_copies_that_ask_now_and_then_are_right(notes: list[tuple[str, str | None, bool]], most: int) -> None:
    journal = HomeChangeLog("life", flush_s=0.0, most_logged=most)
    homes: dict[tuple[str, str], tuple[str, str]] = {}
    told: dict[tuple[str, str], Any] = {}
    asks: dict[tuple[str, str], Any] = {}
    version = flushed = 0
    for now, (program, replica, look) in enumerate(notes):
        key = ("t", program)
        journal.record_home(key, (replica, "1") if replica is not None else None, float(now))
        homes.pop(key, None)
        if replica is not None:
            homes[key] = (replica, "1")
        assert journal.flush(float(now))
        batch = journal.since(flushed, "life", homes.items)
        flushed = batch.version
        apply(told, batch)
        assert told == homes, "who hears every batch"
        if look:
            changes = journal.since(version, "life", homes.items)
            apply(asks, changes)
            version = changes.version
            assert asks == homes, "who asks"


def test_a_dead_replicas_programs_are_at_home_nowhere_in_the_copies() -> None:
    it = lived()
    version = it.journal.version
    it.take(routing_events.ReplicaGone("b", "1"), 40.0)
    batch = it.changes_since(version, "first")
    assert batch.changes
    assert not batch.full
    assert {change.replica_id for change in batch.changes} == {None}


def test_a_later_registration_has_a_higher_epoch() -> None:
    it = core()
    it.take(seen("a"), 0.0)
    it.take(seen("b"), 0.0)
    first = it.fleet.get("a").epoch
    it.take(seen("a"), 1.0)
    assert it.fleet.get("a").epoch == first
    it.take(seen("a", "2"), 2.0)
    assert it.fleet.get("a").epoch > it.fleet.get("b").epoch > first


def test_facts_and_actions_travel() -> None:
    for fact in (
        routing_events.RequestSent("r", "a", "t", 10, "p", began=True),
        routing_events.RequestFinished("r", 3, "a"),
        routing_events.ReplicaDrainCancelled("a"),
    ):
        assert msgspec.json.decode(msgspec.json.encode(fact), type=routing_events.AnyRoutingEvent) == fact
    for action in (routing_events.RecallRequest("r", "a"), SendRequest("r", "a", "home")):
        assert (
            msgspec.json.decode(msgspec.json.encode(action), type=routing_events.AnyRoutingAction) == action
        )


def test_a_lost_replica_of_many_programs_costs_gateways_only_its_own_programs() -> None:
    it = core()
    for name in ("a", "b"):
        it.take(seen(name, capacity_tokens=10**9), 0.0)
    for number in range(6_000):
        it.take(asked(f"r{number}", f"p{number}"), 1.0)
    version = it.journal.version
    lost = {key for key, home in it._all_homes() if home[0] == "a"}
    assert len(lost) > 2_000
    it.take(routing_events.ReplicaGone("a", "1"), 2.0)
    batch = it.changes_since(version, "first")
    assert not batch.full
    assert lost <= {(change.tenant, change.program_id) for change in batch.changes}


def test_gateways_with_the_same_copy_share_one_answer() -> None:
    journal = HomeChangeLog("life", most_logged=1)
    homes = {("t", program): ("a", "1") for program in "pqr"}
    for now, (key, home) in enumerate(homes.items()):
        journal.record_home(key, home, float(now))
    listed = []

    def everything() -> Any:
        listed.append(1)
        return homes.items()

    assert journal.flush(5.0)
    assert not listed, "whether a batch is due needs no homes"
    answers = [journal.since(version, "life", everything) for version in (0, 0, -1)]
    assert all(answer is answers[0] for answer in answers)
    assert listed == [1]
    journal.life = "another"
    assert journal.since(0, "life", everything).life == "another"
    journal.record_home(("t", "p"), None, 6.0)
    del homes["t", "p"]
    assert len(journal.since(0, "", everything).changes) == 2
    partial = [journal.since(3, "another", everything) for _ in range(2)]
    assert partial[0] is partial[1]
    assert partial[0].changes == (HomeChange("t", "p", 4),)


# -- copies in steps ----------------------------------------------------------------------


def result_of(steps: Generator[None, None, RoutingState]) -> RoutingState:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            state: RoutingState = end.value
            return state


def test_a_step_of_a_snapshot_copies_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_snapshot, "SNAPSHOT_SLICE", 3)
    copied: list[str] = []
    copy = routing_snapshot._saved_program

    def counted(program: RoutedProgram) -> SavedProgram:
        copied.append(program.key[1])
        return copy(program)

    monkeypatch.setattr(routing_snapshot, "_saved_program", counted)
    it = lived(10)
    steps, counts = it.snapshot_steps(20.0), []
    for _ in steps:
        counts.append(len(copied))
    assert counts == [3, 6]
    assert len(copied) == 9
    assert result_of(it.snapshot_steps(20.0)) == it.snapshot(20.0)


def test_events_between_the_steps_of_a_snapshot_leave_it_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_snapshot, "SNAPSHOT_SLICE", 1)
    it = lived(8)
    at_a = [program.key[1] for program in it.programs if program.home == "a"]
    assert len(at_a) > 1
    steps = it.snapshot_steps(20.0)
    next(steps)
    it.take(routing_events.ProgramEnded("p5", "t"), 21.0)
    it.take(routing_events.ProgramEnded("p6", "t"), 21.0)
    it.take(asked("again", "p6"), 21.0)
    it.take(routing_events.ReplicaGone("a", "1", "restarted"), 22.0)
    it.take(msgspec.structs.replace(seen("a"), instance="2"), 22.0)
    it.take(seen("c"), 22.0)
    for number in (1, 2, 3):
        it.take(asked(f"more{number}", f"p{number}"), 22.0 + number)
        it.take(routing_events.RequestFinished(f"more{number}", 10), 22.0 + number)
    state = result_of(steps)

    assert sorted(program.program_id for program in state.programs) == ["p1", "p2", "p3", "p4", "p7"]
    assert {(one.replica_id, one.instance) for one in state.replicas} == {("a", "1"), ("b", "1")}
    after = core(life="second")
    after.restore(state, 30.0)
    times = [program.last_s for program in after.programs]
    assert times == sorted(times)
    assert {program.home for program in after.programs} <= {"a", "b", None}
    after.take(msgspec.structs.replace(seen("a"), instance="2"), 30.0)
    assert all(program.home in ("b", None) for program in after.programs)
    for replica in after.fleet:
        homed = [program for program in after.programs if program.home == replica.replica_id]
        assert (replica.homed, replica.homed_tokens) == (len(homed), sum(one.size_tokens for one in homed))
