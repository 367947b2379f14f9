"""The routing core: what becomes of requests, programs and replicas."""

from __future__ import annotations

from typing import Any

import pytest
from routing_builders import asked, kv_lost, only, seen, with_replicas
from routing_builders import build_core as core
from sojourn_server.policies.cluster_preset import load_cluster_preset
from sojourn_server.policies.routing_policies import (
    CapacityRouting,
    RoutingDecision,
    SessionAffinityRouting,
    WorkStealing,
)
from sojourn_server.routing import routing_events
from sojourn_server.routing.routing_core import RoutingCore
from sojourn_server.routing.routing_events import (
    ProbeReplica,
    RejectRequest,
    SendRequest,
)
from sojourn_server.routing.routing_from_preset import build_routing_core


def test_a_sub_agent_begins_near_its_parent() -> None:
    it = with_replicas(core(), "a", "b")
    home = only(it.take(asked("r0", 200, program_id="parent"), 0.0)).replica_id
    child = only(it.take(asked("r1", 200, program_id="child", parent_id="parent"), 1.0))
    assert (child.replica_id, child.reason) == (home, "near_parent")


def test_a_prompt_longer_than_any_replica_computes_is_rejected_with_the_reason() -> None:
    it = core()
    it.take(seen("a", max_context_tokens=500), 0.0)
    it.take(seen("b", max_context_tokens=800), 0.0)
    refused = only(it.take(asked("r0", 801, program_id="p", exact=True), 0.0))
    assert (refused.status, refused.code) == (400, "context_too_long")
    assert "801" in refused.message
    assert "800" in refused.message


def test_an_estimate_causes_no_rejection_and_counts_at_most_the_longest_context() -> None:
    it = core()
    it.take(seen("a", max_context_tokens=800), 0.0)
    assert isinstance(only(it.take(asked("r0", 5_000_000, program_id="p"), 0.0)), SendRequest)
    replica = it.fleet.get("a")
    assert (replica.used_tokens, replica.homed_tokens) == (800, 800)


def test_a_request_that_waits_too_long_is_refused_with_a_time_to_come_back() -> None:
    it = with_replicas(core(CapacityRouting(), wait_s=60.0), "a")
    it.take(asked("r0", 900, program_id="p"), 0.0)
    it.take(asked("r1", 900, program_id="q"), 1.0)
    it.take(seen("a"), 60.0)
    assert it.take(routing_events.Tick(), 60.9) == []
    refused = only(it.take(routing_events.Tick(), 61.0))
    assert (refused.request_id, refused.status) == ("r1", 503)
    assert refused.retry_after_s
    assert len(it.waiting) == 0


def test_a_full_queue_rejects_new_requests_and_leaves_running_ones_alone() -> None:
    it = with_replicas(core(CapacityRouting(), most_waiting=2), "a")
    it.take(asked("r0", 900, program_id="p"), 0.0)
    for name in ("r1", "r2"):
        assert it.take(asked(name, 900, program_id=name), 0.0) == []
    refused = only(it.take(asked("r3", 900, program_id="r3"), 0.0))
    assert (refused.request_id, refused.status) == ("r3", 429)


class Broken:
    """Answers no question."""

    reads_prefixes = False
    divides_capacity = True
    is_used = True
    epoch_s = 0.1
    blocked_s = 0.0

    def _breaks(self, *_: Any) -> Any:
        raise RuntimeError("broken")

    route = shares = order = steal = preempt_less_urgent = _breaks


class BreaksOn13(SessionAffinityRouting):
    """Breaks on a prompt of 13 tokens once there is a replica."""

    def route(self, view: Any, replicas: Any, now: float) -> RoutingDecision:
        if replicas and view.context_tokens == 13:
            raise RuntimeError("broken")
        return super().route(view, replicas, now)


def test_a_request_that_no_policy_can_place_is_refused_and_forgotten() -> None:
    it = with_replicas(core(Broken()), "a")
    refused = only(it.take(asked("r0", program_id="p"), 0.0))
    assert (refused.request_id, refused.status, refused.code) == ("r0", 500, "policy_failed")
    assert (it.waiting, it.requests) == ({}, {})
    assert it.counts.policy_failures == 1
    assert it.programs.get(("t", "p")) is None


def test_a_waiting_request_whose_policy_fails_blocks_no_other() -> None:
    it = core(BreaksOn13())
    assert it.take(asked("bad", 13), 0.0) == it.take(asked("good", 14), 0.0) == []
    actions = it.take(seen("a"), 1.0)
    assert [(type(a), a.request_id) for a in actions] == [(RejectRequest, "bad"), (SendRequest, "good")]


def test_without_shares_turns_or_steals_requests_go_as_they_came() -> None:
    broken = Broken()
    routing = SessionAffinityRouting(most_load=10.0)
    it = core(routing, broken, broken, preemption=broken, send_below_load=1.0, lease_s=1e6)
    it.take(seen("a"), 0.0)
    for number in range(12):
        it.take(asked(f"r{number}", program_id=f"p{number}", tenant=f"t{number % 2}"), float(number))
    it.take(seen("b"), 20.0)
    it.take(routing_events.Tick(), 21.0)
    assert len(it.waiting) == 2
    assert it.counts.policy_failures >= 2
    assert only(it.take(routing_events.RequestFinished("r0"), 22.0)).request_id == "r10"


# -- faults -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_gone_first", [False, True])
def test_a_request_that_two_replicas_took_in_and_failed_is_not_given_to_a_third(is_gone_first: bool) -> None:
    it = with_replicas(core(most_failures=9), "a", "b", "c")
    actions = it.take(asked("r0", program_id="p"), 0.0)
    for now in (1.0, 2.0):
        at = actions[-1].replica_id
        actions = it.take(routing_events.ReplicaGone(at, "1"), now) if is_gone_first else []
        actions += it.take(routing_events.RequestFailed("r0", at, computing=True), now)
    refused = [one for one in actions if isinstance(one, RejectRequest)]
    if is_gone_first:  # it is at the third by then, and may go to no other
        refused += it.take(routing_events.RequestFailed("r0", actions[-1].replica_id), 3.0)[-1:]
    assert (refused[-1].status, refused[-1].code) == (502, "replicas_failed")
    assert "accepted by a replica 2 times" in refused[-1].message


def test_a_replica_that_failed_a_request_and_lives_is_not_sent_it_again() -> None:
    it = with_replicas(core(most_failures=9), "a", "b")
    first = only(it.take(asked("r0", program_id="p"), 0.0)).replica_id
    it.take(seen(first), 0.0)
    second = it.take(routing_events.RequestFailed("r0", first), 1.0)[-1].replica_id
    it.take(seen(first), 1.1)
    assert {first, second} == {"a", "b"}
    assert [type(one) for one in it.take(routing_events.RequestFailed("r0", second), 2.0)] == [
        ProbeReplica
    ], "second may be dead"
    refused = only(it.take(seen(second), 3.0))
    assert (refused.status, refused.code) == (502, "replicas_failed")
    assert len(it.waiting) == 0


def test_a_slow_replica_is_probed_and_loses_no_request() -> None:
    it = with_replicas(core(lease_s=10.0), "a", "b")
    home = only(it.take(asked("r0", program_id="p"), 0.0)).replica_id
    it.take(routing_events.RequestFinished("r0"), 1.0)
    other = "b" if home == "a" else "a"
    it.take(seen(other), 9.0)
    assert it.take(routing_events.Tick(), 9.9) == []
    assert only(it.take(routing_events.Tick(), 10.0)) == ProbeReplica(home, "1")
    assert it.take(routing_events.Tick(), 11.0) == [], "once a lease"
    assert only(it.take(asked("new", program_id="q"), 12.0)).replica_id == other
    assert only(it.take(asked("r1", program_id="p"), 13.0)).replica_id == home, "its KV is there"
    it.take(seen(home), 14.0)
    assert it.fleet.get(home).view().takes_new


def test_programs_of_a_draining_replica_move_at_their_next_turn() -> None:
    it = with_replicas(core(), "a", "b")
    home = only(it.take(asked("r0", program_id="p"), 0.0)).replica_id
    assert it.take(routing_events.ReplicaDrainStarted(home), 0.5) == []
    assert "r0" in it.fleet.get(home).in_flight, "it is answered there"
    it.take(routing_events.RequestFinished("r0"), 1.0)
    sent = next(a for a in it.take(asked("r1", program_id="p"), 2.0) if isinstance(a, SendRequest))
    assert (sent.replica_id != home, sent.moved_from, sent.left_because) == (True, home, "drain")


# -- load and shares ------------------------------------------------------------------------


def test_an_idle_replica_steals_the_oldest_movable_request_of_one_twice_as_loaded() -> None:
    it = core(SessionAffinityRouting(most_load=10.0), WorkStealing(), send_below_load=1.0)
    it.take(seen("a"), 0.0)
    for number in range(13):
        it.take(asked(f"r{number}", program_id=f"p{number}"), 0.0)
    assert len(it.waiting) == 3
    it.take(seen("b"), 1.0)
    assert it.take(routing_events.Tick(), 1.05) == [], "b has been idle for 50 ms"
    actions = it.take(routing_events.Tick(), 1.11)
    sent = [action for action in actions if isinstance(action, SendRequest)]
    assert [(s.request_id, s.replica_id, s.reason, s.moved_from) for s in sent] == [
        (f"r{number}", "b", "stolen_idle", "a") for number in (10, 11, 12)
    ]
    assert it.programs.get(("t", "p10")).home == "b"


def test_a_program_with_a_request_at_home_is_not_split() -> None:
    it = core(SessionAffinityRouting(most_load=10.0), WorkStealing(idle_s=0.0), send_below_load=1.0)
    it.take(seen("a"), 0.0)
    for number in range(10):
        it.take(asked(f"r{number}", program_id="p"), 0.0)
    it.take(asked("r10", program_id="p"), 0.0)
    it.take(seen("b"), 1.0)
    assert it.take(routing_events.Tick(), 2.0) == []


# -- requests that continue a stored conversation: only the replica that stores it may serve them


def busy_core(preset: str) -> RoutingCore:
    """Replica ``a`` is full and has a queue, in which ``stored`` is last; ``b`` is idle."""
    core = build_routing_core(load_cluster_preset(preset))
    for name in "ab":
        core.take(seen(name, capacity_tokens=10_000, max_running=2), 0.0)
    for number in range(6):
        core.take(asked(f"r{number}", 4000, program_id=f"p{number}", only_replica_id="a"), 0.0)
    assert not core.take(asked("stored", 4000, program_id="conversation", only_replica_id="a"), 0.0)
    return core


@pytest.mark.parametrize("preset", ["saga", "sojourn"])
def test_a_stored_conversation_waits_for_its_replica_and_no_other(preset: str) -> None:
    core = busy_core(preset)
    core.take(kv_lost(core, "conversation", "t", "a"), 0.1)
    core.take(routing_events.ReplicaDrainStarted("a"), 0.2)
    actions = [one for tenth in range(3, 203) for one in core.take(routing_events.Tick(), tenth / 10)]
    for request in list(core.requests.values()):
        actions += core.take(routing_events.RequestFinished(request.request_id), 30.0)
        actions += core.take(seen("a", capacity_tokens=10_000, max_running=2), 30.0)
    sent = [one for one in actions if isinstance(one, routing_events.SendRequest)]
    assert {one.replica_id for one in sent} == {"a"}
    assert "stored" in {one.request_id for one in sent}
    assert not any(isinstance(one, routing_events.RecallRequest) for one in actions)


@pytest.mark.parametrize("fault", ["failed", "gone"])
def test_a_stored_conversation_whose_replica_fails_is_rejected(fault: str) -> None:
    core = busy_core("saga")
    in_flight = [one.request_id for one in core.requests.values() if one.sent is not None]
    if fault == "failed":
        actions = core.take(routing_events.RequestFailed(in_flight[0], "a", computing=False), 0.1)
        expected = {in_flight[0]}
    else:
        actions = core.take(routing_events.ReplicaGone("a", "1"), 0.1)
        expected = {f"r{number}" for number in range(6)} | {"stored"}
    rejected = {one.request_id: one for one in actions if isinstance(one, routing_events.RejectRequest)}
    assert rejected.keys() == expected
    assert {(one.status, one.code) for one in rejected.values()} == {(502, "replicas_failed")}
    sent = [one.replica_id for one in actions if isinstance(one, routing_events.SendRequest)]
    assert set(sent) <= {"a"}


def test_a_stored_conversation_whose_replica_is_unknown_goes_anywhere() -> None:
    core = busy_core("saga")
    [sent] = core.take(asked("late", 4000, program_id="other", only_replica_id="c"), 0.1)
    assert sent.replica_id == "b"
