"""Thousands that wait for room: who is asked about, who goes first, and that nobody is passed for ever."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_builders import asked, build_core, kv_lost, seen, sends
from sojourn_server.policies.fairness_policies import AgentFairShare, SharePolicy
from sojourn_server.policies.routing_policies import (
    CapacityRouting,
    IdlenessOrder,
    LargestFirstOrder,
)
from sojourn_server.routing import routing_events
from sojourn_server.routing.routing_core import RoutingCore
from sojourn_server.routing.routing_records import RoutedRequest, WaitingQueue


def core(**more: Any) -> RoutingCore:
    return build_core(CapacityRouting(), **{"lease_s": 1e6, **more})


def ends(it: RoutingCore, name: str, now: float, program_id: str | None = None) -> list[str]:
    ended = routing_events.ProgramEnded(program_id or name, "t")
    return sends(it.take(routing_events.RequestFinished(name), now) + it.take(ended, now))


@pytest.mark.parametrize(
    ("sharing", "sizes"), [(SharePolicy(), range(900, 200, -1)), (AgentFairShare(), range(200, 900))]
)
def test_of_thousands_of_waiting_requests_only_eligible_ones_are_routed(
    monkeypatch: pytest.MonkeyPatch, sharing: Any, sizes: Any
) -> None:
    route, asked_about = CapacityRouting.route, list[Any]()
    monkeypatch.setattr(CapacityRouting, "route", lambda *told: asked_about.append(told) or route(*told))
    it = core(sharing=sharing)
    for number in range(16):
        it.take(seen(f"e{number}"), 0.0)
    for number in range(2_100):
        it.take(asked(f"r{number}", sizes[number % len(sizes)], f"t{number % 7}"), 0.0)
    assert len(it.waiting) > 2_000
    asked_about.clear()
    name = next(iter(it.fleet.get("e3").in_flight))
    for fact in (
        routing_events.FirstByteSent(name, "e3"),
        seen("e3"),
        routing_events.Tick(),
        routing_events.Tick(),
        routing_events.RequestFinished(name, replica_id="e3"),
        kv_lost(it, "nobody", "t", "e3"),
    ):
        it.take(fact, 1.0)
        assert not asked_about, f"{fact} makes no room"
    program = it.programs.get((next(p.tenant for p in it.programs.values() if p.key[1] == name), name))
    gone = sends(it.take(routing_events.ProgramEnded(name, program.tenant), 2.0))
    assert gone
    assert len(asked_about) == len(gone)


# -- nobody for ever ----------------------------------------------------------------------


def small_ones_pass(it: RoutingCore, most: int, *, wait: bool = True) -> int:
    """Two replicas full of small programs, a large one that waits, and small ones without end, that wait too
    or come just when there is room: how many of these are sent before the large one."""
    running = []
    for name in ("a", "b"):
        it.take(seen(name), 0.0)
    for number in range(20):
        running += sends(it.take(asked(f"s{number}", 100), 0.0))
    assert it.take(asked("large", 900), 0.0) == []
    passed = 0
    for number in range(20, 20 + most):
        now = (number - 20) / 10
        sent = sends(it.take(asked(f"s{number}", 100), now)) if wait else []
        sent += ends(it, running.pop(0), now) if running else []
        sent += sends(it.take(asked(f"s{number}", 100), now)) if not wait else []
        if "large" in sent:
            return passed
        passed += len(sent)
        running += sent
    return most


def test_a_large_request_is_passed_by_a_limited_number_and_then_gets_a_reserved_replica() -> None:
    # Of the 20 places, 18 at both replicas become free while nine of them are kept.
    assert small_ones_pass(core(queue_patience_requests=32), 500) <= 32 + 10
    assert small_ones_pass(core(queue_patience_requests=32), 500, wait=False) <= 32 + 10
    assert small_ones_pass(core(queue_patience_requests=0), 500) <= 10
    assert small_ones_pass(core(queue_patience_requests=10**9, queue_patience_s=5.0), 500) <= 50 + 10


# -- other orders than that of arrival ------------------------------------------------------------


def test_returning_programs_are_served_before_new_ones_the_least_idle_first() -> None:
    it = core(order=IdlenessOrder())
    it.take(seen("a"), 0.0)
    for name, acts_s in (("idle", 9.0), ("busy", 1.0)):
        assert sends(it.take(asked(name, 400), 10.0 - acts_s)) == [name]
        it.take(routing_events.RequestFinished(name, 1), 20.0 - acts_s)
        it.take(kv_lost(it, name, "t", "a"), 20.0 - acts_s)
    assert sends(it.take(asked("running", 1000), 20.0)) == ["running"]
    for name in ("new", "idle", "busy"):
        assert it.take(asked(f"{name}/2", 600, program_id=name), 20.0) == []
    served = []
    for now, name in ((21.0, "running"), (22.0, "busy"), (23.0, "idle")):
        last = name if name == "running" else f"{name}/2"
        served += ends(it, last, now, program_id=name)
    assert served == ["busy/2", "idle/2", "new/2"]


@pytest.mark.parametrize("order", [IdlenessOrder(), LargestFirstOrder()])
def test_no_order_keeps_a_request_waiting_for_ever(order: Any) -> None:
    """The unlucky one is last in either order; others come for as long as the test lasts."""
    unlucky, other = (990, 600) if isinstance(order, IdlenessOrder) else (600, 990)
    it = core(order=order, queue_patience_s=30.0, queue_patience_requests=10**6)
    it.take(seen("a"), 0.0)
    running = sends(it.take(asked("x0", other), 0.0))
    for name, tokens in (("x1", other), ("unlucky", unlucky)):
        assert it.take(asked(name, tokens), 0.0) == []
    now, number = 0.0, 2
    while "unlucky" not in running and now < 200.0:
        now += 1.0
        running += sends(it.take(asked(f"x{number}", other), now) + it.take(routing_events.Tick(), now))
        number += 1
        if running:
            running += ends(it, running.pop(0), now)
    assert "unlucky" in running
    assert 30.0 <= now <= 100.0, "the order counts until then"


@given(
    st.booleans(), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 400), st.integers(0, 5)), max_size=60)
)
def test_a_lane_is_a_sorted_list(by_arrival: bool, steps: list[tuple[int, int, int]]) -> None:
    queue, known = WaitingQueue(by_arrival=by_arrival), list[RoutedRequest]()
    for number, (kind, value, other) in enumerate(steps):
        if kind < 2 or not known:
            key = (number,) if by_arrival else (other, number)
            one = RoutedRequest(f"r{number}", number, "t", None, 1, 1, 0.0, 0.0, queue_key=key)
            assert not queue.remove(one)
            queue.add(one)
            known.append(one)
        else:
            assert queue.remove(known.pop(value % len(known)))
    assert list(queue) == sorted(known, key=lambda one: one.queue_key)
    if known:
        assert queue.first("") is min(known, key=lambda one: one.number)


# -- programs that wait in an engine --------------------------------------------------------------


def test_a_program_that_waits_in_its_engine_moves_once_where_another_has_room() -> None:
    it = core()
    it.take(seen("a"), 0.0)
    it.take(asked("p", 400), 0.0)
    it.take(routing_events.RequestFinished("p", 1), 1.0)
    assert sends(it.take(asked("p/2", 500, program_id="p"), 1.0)) == ["p/2"]
    dropped = kv_lost(it, "p", "t", "a")
    assert it.take(dropped, 10.0) == [], "no other replica"
    it.take(seen("b"), 10.0)
    assert it.take(dropped, 4.0) == [], "it may have been sent after the engine's report"
    recall, release, send = it.take(dropped, 11.0)
    assert recall == routing_events.RecallRequest("p/2", "a")
    assert release == routing_events.ReleaseProgramKv("p", "a", "t")
    assert (send.request_id, send.replica_id, send.reason) == ("p/2", "b", "relocated")
    assert it.programs.get(("t", "p")).home == "b"
    assert it.take(kv_lost(it, "p", "t", "b"), 30.0) == [], "never back and forth"
    it.take(routing_events.FirstByteSent("p/2", "b"), 31.0)
    it.take(routing_events.RequestFinished("p/2", 1, "b"), 32.0)
    assert it.programs[("t", "p")].moves == 1


def test_a_request_that_is_answered_stays_although_its_engine_reports_no_kv() -> None:
    it = core()
    for name in "ab":
        it.take(seen(name), 0.0)
    [send] = it.take(asked("p", 400), 0.0)
    it.take(routing_events.FirstByteSent("p", send.replica_id), 1.0)
    assert it.take(kv_lost(it, "p", "t", send.replica_id), 20.0) == []


def test_a_request_that_waits_for_a_home_without_its_kv_goes_where_there_is_room() -> None:
    """At ``a``, which is full, a program's next request waits for its home; ``b`` comes meanwhile."""
    it = build_core(send_below_load=1.0, lease_s=1e6)
    it.take(seen("a", capacity_tokens=300), 0.0)
    it.take(asked("p", 100), 0.0)
    it.take(routing_events.RequestFinished("p", 1), 1.0)
    it.take(asked("other", 300), 1.0)
    assert it.take(asked("p/2", 200, program_id="p"), 1.0) == []
    it.take(seen("b", capacity_tokens=300), 2.0)
    assert sends(it.take(kv_lost(it, "p", "t", "a"), 3.0)) == ["p/2"]
    assert it.programs.get(("t", "p")).home == "b"
