"""The routing core: what becomes of requests, programs and replicas."""

from __future__ import annotations

from typing import Any

from sojourn_server.gateway.core import facts
from sojourn_server.gateway.core.core import CoreLimits, RoutingCore
from sojourn_server.gateway.core.facts import Cut, Left, Probe, Refuse, Send
from sojourn_server.policy.fair_share import AgentFairShare, InOrder
from sojourn_server.policy.routing import RoundRobin, SessionAffinity
from sojourn_server.policy.routing_room import RoomForAll
from sojourn_server.policy.stealing import NoStealing, WorkStealing

CAPACITY = 1000


def core(routing: Any = None, stealing: Any = None, sharing: Any = None, **limits: Any) -> RoutingCore:
    return RoutingCore(
        routing or SessionAffinity(), stealing or NoStealing(), sharing or InOrder(), CoreLimits(**limits)
    )


def seen(name: str = "a", instance: str = "1", **more: Any) -> facts.ReplicaSeen:
    return facts.ReplicaSeen(
        **{"replica_id": name, "instance": instance, "capacity_tokens": CAPACITY, **more}
    )


def asked(name: str, program: str | None = None, tokens: int = 100, **more: Any) -> facts.Asked:
    return facts.Asked(
        **{"request_id": name, "tenant": "t", "program_id": program, "context_tokens": tokens, **more}
    )


def with_replicas(of: RoutingCore, *names: str) -> RoutingCore:
    for name in names:
        of.take(seen(name), 0.0)
    return of


def only(actions: list[Any]) -> Any:
    [action] = actions
    return action


# -- sending ------------------------------------------------------------------------------


def test_a_programs_turns_go_where_its_first_went() -> None:
    it = with_replicas(core(), "a", "b")
    first = only(it.take(asked("r0", "p"), 0.0))
    assert isinstance(first, Send)
    assert first.reason == "least_loaded"
    it.take(asked("other"), 0.5)
    it.take(facts.Ended("r0", output_tokens=10), 1.0)
    again = only(it.take(asked("r1", "p", 150), 2.0))
    assert (again.replica_id, again.reason) == (first.replica_id, "home")


def test_a_home_that_is_loaded_by_four_fifths_is_left_for_the_least_loaded() -> None:
    it = with_replicas(core(), "a", "b")
    home = only(it.take(asked("r0", "p"), 0.0)).replica_id
    it.take(facts.Ended("r0"), 1.0)
    elsewhere = only(it.take(asked("elsewhere", tokens=900), 1.0))
    assert elsewhere.replica_id == "b", "both are empty, and nobody is at home there"
    assert only(it.take(asked("fill", tokens=800), 1.0)).replica_id == home == "a"
    it.take(facts.Ended("elsewhere"), 1.0)
    moved = next(action for action in it.take(asked("r1", "p"), 2.0) if isinstance(action, Send))
    assert (moved.replica_id, moved.reason, moved.moved_from) == ("b", "home_too_full", home)
    assert it.counts.moves == 1


def test_a_program_that_moves_leaves_its_old_home() -> None:
    it = with_replicas(core(RoundRobin()), "a", "b")
    assert only(it.take(asked("r0", "p"), 0.0)).replica_id == "a"
    it.take(facts.Ended("r0"), 1.0)
    left, sent = it.take(asked("r1", "p"), 2.0)
    assert left == Left("p", "a", "t")
    assert (sent.replica_id, sent.moved_from) == ("b", "a")


def test_a_sub_agent_begins_near_its_parent() -> None:
    it = with_replicas(core(), "a", "b")
    home = only(it.take(asked("r0", "parent", 200), 0.0)).replica_id
    child = only(it.take(asked("r1", "child", 200, parent_id="parent"), 1.0))
    assert (child.replica_id, child.reason) == (home, "near_parent")


def test_programs_of_the_same_name_of_two_tenants_are_two() -> None:
    it = with_replicas(core(), "a", "b")
    it.take(asked("r0", "p", 300), 0.0)
    theirs = only(it.take(asked("r1", "p", 300, tenant="mallory"), 1.0))
    assert theirs.reason == "least_loaded", "not where the other's KV is"
    it.take(facts.ProgramEnded("p", "mallory"), 2.0)
    assert it.programs.get(("t", "p")) is not None
    assert it.programs.get(("mallory", "p")) is None


def test_without_a_replica_a_request_waits_and_goes_to_the_first() -> None:
    it = core()
    assert it.take(asked("r0", "p"), 0.0) == []
    assert only(it.take(seen("a"), 1.0)) == Send("r0", "a", "least_loaded")


# -- waiting ------------------------------------------------------------------------------


def test_a_program_waits_until_there_is_room_for_all_of_it() -> None:
    it = with_replicas(core(RoomForAll()), "a")
    assert only(it.take(asked("r0", "p", 700), 0.0)).reason == "fits"
    assert it.take(asked("r1", "q", 400), 1.0) == []
    assert it.take(facts.Ended("r0"), 2.0) == [], "p is still at home there"
    assert only(it.take(facts.ProgramEnded("p", "t"), 3.0)) == Send("r1", "a", "fits")


def test_who_fits_goes_before_who_does_not() -> None:
    it = with_replicas(core(RoomForAll()), "a")
    it.take(asked("r0", "p", 700), 0.0)
    assert it.take(asked("large", "q", 400), 1.0) == []
    assert only(it.take(asked("small", "s", 300), 2.0)).request_id == "small"


def test_what_no_replica_could_ever_hold_goes_where_nobody_is() -> None:
    it = with_replicas(core(RoomForAll()), "a")
    assert only(it.take(asked("r0", "p", 900, output_tokens=5 * CAPACITY), 0.0)).replica_id == "a"


def test_a_prompt_longer_than_any_replica_computes_is_refused_and_says_so() -> None:
    it = core()
    it.take(seen("a", max_context_tokens=500), 0.0)
    it.take(seen("b", max_context_tokens=800), 0.0)
    refused = only(it.take(asked("r0", "p", 801), 0.0))
    assert (refused.status, refused.code) == (400, "context_too_long")
    assert "801" in refused.message
    assert "800" in refused.message


def test_a_request_that_waits_too_long_is_refused_with_a_time_to_come_back() -> None:
    it = with_replicas(core(RoomForAll(), wait_s=60.0), "a")
    it.take(asked("r0", "p", 900), 0.0)
    it.take(asked("r1", "q", 900), 1.0)
    it.take(seen("a"), 60.0)
    assert it.take(facts.Tick(), 60.9) == []
    refused = only(it.take(facts.Tick(), 61.0))
    assert (refused.request_id, refused.status) == ("r1", 503)
    assert refused.retry_after_s
    assert it.waiting == 0


def test_too_many_that_wait_are_refused_and_those_who_run_are_not_touched() -> None:
    it = with_replicas(core(RoomForAll(), most_waiting=2), "a")
    it.take(asked("r0", "p", 900), 0.0)
    for name in ("r1", "r2"):
        assert it.take(asked(name, name, 900), 0.0) == []
    refused = only(it.take(asked("r3", "r3", 900), 0.0))
    assert (refused.request_id, refused.status) == ("r3", 429)


def test_an_id_that_is_in_use_is_refused_and_the_first_goes_on() -> None:
    it = with_replicas(core(), "a")
    it.take(asked("r0", "p"), 0.0)
    assert only(it.take(asked("r0", "p"), 1.0)).status == 409
    assert "r0" in it.fleet.get("a").in_flight


def test_a_request_given_up_while_it_waits_is_gone() -> None:
    it = with_replicas(core(RoomForAll()), "a")
    it.take(asked("r0", "p", 900), 0.0)
    it.take(asked("r1", "q", 900), 0.0)
    it.take(facts.Ended("r1"), 1.0)
    assert it.waiting == 0
    assert it.take(facts.ProgramEnded("p", "t"), 2.0) == []


def test_the_gateway_keeps_what_an_engine_would_only_queue() -> None:
    it = with_replicas(core(send_below_load=1.0), "a")
    for number in range(10):
        assert it.take(asked(f"r{number}", f"p{number}"), 0.0)
    assert it.take(asked("r10", "p10"), 0.0) == []
    assert only(it.take(facts.Ended("r3"), 1.0)).request_id == "r10"


# -- faults -------------------------------------------------------------------------------


def test_a_request_that_failed_before_its_first_byte_is_sent_elsewhere() -> None:
    it = with_replicas(core(), "a", "b")
    first = only(it.take(asked("r0", "p"), 0.0)).replica_id
    probe, left, sent = it.take(facts.Failed("r0", first), 1.0)
    assert isinstance(probe, Probe)
    assert left == Left("p", first, "t"), "should it live after all"
    assert isinstance(sent, Send)
    assert sent.replica_id != first
    assert it.take(facts.Failed("r0", first), 1.1) == [], "an old failure says nothing of the new try"


def test_after_its_first_byte_it_is_cut_and_never_silently_begun_again() -> None:
    it = with_replicas(core(), "a", "b")
    first = only(it.take(asked("r0", "p"), 0.0)).replica_id
    it.take(facts.Began("r0", first), 0.5)
    actions = it.take(facts.Failed("r0", first), 1.0)
    assert Cut("r0", first) in actions
    assert not [action for action in actions if isinstance(action, Send)]


def test_nobody_is_sent_around_for_ever() -> None:
    it = with_replicas(core(most_failures=3), "a", "b", "c", "d")
    at = only(it.take(asked("r0", "p"), 0.0)).replica_id
    tried = [at]
    while True:
        actions = it.take(facts.Failed("r0", at), 1.0)
        sent = [action for action in actions if isinstance(action, Send)]
        if not sent:
            break
        at = sent[0].replica_id
        tried.append(at)
    assert len(tried) == len(set(tried)) == 3
    assert [a.status for a in actions if isinstance(a, Refuse)] == [502]


def test_a_dead_replica_takes_nothing_with_it() -> None:
    it = with_replicas(core(), "a", "b")
    began = only(it.take(asked("stream", "p"), 0.0))
    it.take(facts.Began("stream", began.replica_id), 0.0)
    home = began.replica_id
    silent = _sent_to(it, home)
    actions = it.take(facts.ReplicaGone(home, "1"), 1.0)
    assert Cut("stream", home) in actions
    resent = [action for action in actions if isinstance(action, Send)]
    assert {action.request_id for action in resent} == silent
    assert all(action.replica_id != home for action in resent)
    assert it.programs.get(("t", "p")).home is None


def _sent_to(it: RoutingCore, home: str) -> set[str]:
    """Requests until two are on their way there."""
    sent: set[str] = set()
    number = 0
    while len(sent) < 2:
        action = only(it.take(asked(f"s{number}", f"s{number}"), 0.0))
        if action.replica_id == home:
            sent.add(action.request_id)
        number += 1
    return sent


def test_a_late_word_of_an_earlier_life_kills_nobody() -> None:
    it = with_replicas(core(), "a")
    it.take(seen("a", "2"), 1.0)
    it.take(facts.ReplicaGone("a", "1"), 2.0)
    assert it.fleet.get("a") is not None


def test_a_replica_that_came_back_has_nothing_of_what_it_had() -> None:
    it = with_replicas(core(), "a", "b")
    home = only(it.take(asked("r0", "p"), 0.0)).replica_id
    it.take(facts.Ended("r0"), 1.0)
    it.take(seen(home, "2"), 2.0)
    assert it.programs.get(("t", "p")).home is None
    assert it.fleet.get(home).homed == 0


def test_a_slow_replica_is_probed_and_loses_nobody() -> None:
    it = with_replicas(core(lease_s=10.0), "a", "b")
    home = only(it.take(asked("r0", "p"), 0.0)).replica_id
    it.take(facts.Ended("r0"), 1.0)
    other = "b" if home == "a" else "a"
    it.take(seen(other), 9.0)
    assert it.take(facts.Tick(), 9.9) == []
    assert only(it.take(facts.Tick(), 10.0)) == Probe(home, "1")
    assert it.take(facts.Tick(), 11.0) == [], "once a lease"
    assert only(it.take(asked("new", "q"), 12.0)).replica_id == other
    assert only(it.take(asked("r1", "p"), 13.0)).replica_id == home, "its KV is there"
    it.take(seen(home), 14.0)
    assert it.fleet.view(home).takes_new


def test_who_is_at_home_on_a_draining_replica_moves_at_its_next_turn() -> None:
    it = with_replicas(core(), "a", "b")
    home = only(it.take(asked("r0", "p"), 0.0)).replica_id
    assert it.take(facts.ReplicaDrains(home), 0.5) == []
    assert "r0" in it.fleet.get(home).in_flight, "it is answered there"
    it.take(facts.Ended("r0"), 1.0)
    sent = next(a for a in it.take(asked("r1", "p"), 2.0) if isinstance(a, Send))
    assert (sent.replica_id != home, sent.moved_from) == (True, home)


def test_a_clock_that_steps_back_does_no_harm() -> None:
    it = with_replicas(core(RoomForAll()), "a")
    it.take(asked("r0", "p", 900), 1000.0)
    it.take(asked("r1", "q", 900), 1000.0)
    it.take(facts.Tick(), -1e6)
    it.take(facts.Ended("r0"), -1e6)
    assert only(it.take(facts.ProgramEnded("p", "t"), -1e6)).request_id == "r1"


# -- load and shares ------------------------------------------------------------------------


def test_an_idle_replica_takes_the_oldest_who_may_leave_from_one_twice_as_loaded() -> None:
    it = core(SessionAffinity(most_load=10.0), WorkStealing(), send_below_load=1.0)
    it.take(seen("a"), 0.0)
    for number in range(13):
        it.take(asked(f"r{number}", f"p{number}"), 0.0)
    assert it.waiting == 3
    it.take(seen("b"), 1.0)
    assert it.take(facts.Tick(), 1.05) == [], "b has been idle for 50 ms"
    actions = it.take(facts.Tick(), 1.11)
    sent = [action for action in actions if isinstance(action, Send)]
    assert [(s.request_id, s.replica_id, s.reason, s.moved_from) for s in sent] == [
        (f"r{number}", "b", "stolen_idle", "a") for number in (10, 11, 12)
    ]
    assert it.programs.get(("t", "p10")).home == "b"


def test_who_queues_at_the_gateway_counts_where_it_waits() -> None:
    it = with_replicas(core(send_below_load=1.0), "a", "b", "c")
    for number in range(90):
        it.take(asked(f"r{number}", f"p{number}"), 0.0)
    assert it.waiting == 60
    assert {len(queue) for queue in it.requests.queues.values()} == {20}, "not all where one was first"


def test_a_replica_that_comes_steals_at_once_if_it_may() -> None:
    it = core(SessionAffinity(most_load=10.0), WorkStealing(idle_s=0.0), send_below_load=1.0)
    it.take(seen("a"), 0.0)
    for number in range(13):
        it.take(asked(f"r{number}", f"p{number}"), 0.0)
    sent = [action for action in it.take(seen("b"), 1.0) if isinstance(action, Send)]
    assert [one.request_id for one in sent] == ["r10", "r11", "r12"]


def test_who_has_a_request_at_home_is_not_torn_in_two() -> None:
    it = core(SessionAffinity(most_load=10.0), WorkStealing(idle_s=0.0), send_below_load=1.0)
    it.take(seen("a"), 0.0)
    for number in range(10):
        it.take(asked(f"r{number}", "p"), 0.0)
    it.take(asked("r10", "p"), 0.0)
    it.take(seen("b"), 1.0)
    assert it.take(facts.Tick(), 2.0) == []


def test_a_tenant_that_floods_waits_for_itself() -> None:
    it = core(RoomForAll(), sharing=AgentFairShare(), send_below_load=1.0)
    it.take(seen("a", host_tokens=10**6), 0.0)
    for number in range(50):
        it.take(asked(f"f{number}", f"f{number}", tenant="flood"), 0.0)
    assert it.take(asked("mine", "mine", tenant="light"), 1.0) == []
    it.take(facts.Tick(), 1.1)
    assert only(it.take(facts.Ended("f0"), 2.0)).request_id == "mine"
