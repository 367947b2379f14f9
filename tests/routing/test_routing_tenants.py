"""Tenants that share replicas: floods, turns, and who makes way for whom."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import pytest
from routing_builders import asked, build_core, seen
from sojourn_server.policies.fairness_policies import AgentFairShare, UrgencyPreemption
from sojourn_server.policies.routing_policies import (
    CapacityRouting,
    RoundRobinRouting,
    SessionAffinityRouting,
)
from sojourn_server.routing import routing_events
from sojourn_server.routing.routing_core import RoutingCore
from sojourn_server.routing.routing_events import (
    RecallRequest,
    ReleaseProgramKv,
    SendRequest,
)


def core(routing: Any, **limits: Any) -> RoutingCore:
    limits = {"lease_s": 1e6, **limits}
    return build_core(routing, sharing=AgentFairShare(), preemption=UrgencyPreemption(), **limits)


def sends(actions: list[Any]) -> list[tuple[str, str]]:
    return [(action.request_id, action.replica_id) for action in actions if isinstance(action, SendRequest)]


# -- floods -------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", [RoundRobinRouting(), CapacityRouting()])
def test_a_flood_delays_others_by_no_more_than_its_share(routing: Any) -> None:
    """One tenant sends 10,000 requests at once. Then another always has one waiting. Programs end one by
    one."""
    it = core(routing, send_below_load=1.0, usual_life_s=60.0)
    for name in "abcd":
        it.take(seen(name), 0.0)
    running, order, now = deque[str](), list[str](), 1.0
    for number in range(10_000):
        running += [one for one, _ in sends(it.take(asked(f"flood {number}", tenant="flood"), 0.0))]
    assert len(running) == 40
    it.take(asked("light 0", tenant="light"), now)
    while len(order) < 2_000 and order.count("light") < 12:
        now += 0.05
        name = running.popleft()
        actions = it.take(routing_events.Tick(), now)
        actions += it.take(routing_events.RequestFinished(name, 10), now)
        actions += it.take(routing_events.ProgramEnded(name, name.split()[0]), now)
        for one, _ in sends(actions):
            running.append(one)
            order.append(one.split()[0])
            if order[-1] == "light":
                it.take(asked(f"light {order.count('light')}", tenant="light"), now)
    assert order.count("light") == 12
    assert order.index("light") <= 4, "it had nothing: the first place at its replica is its own"
    gaps = "".join("l" if tenant == "light" else "." for tenant in order).split("l")
    # Of two tenants the least share is 1/20: it has two of 40 places, each for 40 sends of others. Who needs
    # a little more room than they all may be passed by 32, and by those who get what others leave meanwhile.
    assert max(map(len, gaps)) <= (40 if isinstance(routing, RoundRobinRouting) else 40 + 32 + 40)


def test_requests_of_no_program_have_the_least_share_and_not_none() -> None:
    it = core(SessionAffinityRouting(), send_below_load=1.0)
    it.take(seen("a"), 0.0)
    for number in range(30):
        it.take(asked(f"f{number}", tenant="busy"), 0.0)
    it.take(routing_events.RequestReceived("stranger", "curl", 100), 0.0)
    it.take(routing_events.Tick(), 0.1)
    assert it.strategy.tenants.shares["curl"] == pytest.approx(0.5)
    assert sends(it.take(routing_events.RequestFinished("f0"), 0.2)) == [("stranger", "a")]


def worked(it: RoutingCore) -> RoutingCore:
    """A turn takes 60 s, as the core knows by now."""
    it.take(asked("before", tenant="before"), 0.0)
    it.take(routing_events.RequestFinished("before", 1), 60.0)
    it.take(routing_events.ProgramEnded("before", "before"), 60.0)
    return it


@pytest.mark.parametrize("late_s", [1e9, 30.0, 0.1])
def test_a_deadline_makes_no_program_more_urgent_than_computing_without_pause(late_s: float) -> None:
    it = core(RoundRobinRouting(), usual_life_s=60.0)
    it.take(seen("a", capacity_tokens=10**6), 0.0)
    worked(it)
    it.take(asked("honest", tenant="honest", deadline_s=100.0 + 60.0), 100.0)
    it.take(asked("liar", tenant="liar", deadline_s=100.0 + 60.0 - late_s), 100.0)
    it.take(routing_events.Tick(), 100.0)
    assert it.strategy.tenants.shares == {"honest": pytest.approx(0.5), "liar": pytest.approx(0.5)}
    it.take(routing_events.Tick(), 150.0)
    assert it.strategy.tenants.shares == {"honest": pytest.approx(0.5), "liar": pytest.approx(0.5)}


@pytest.mark.parametrize(("max_running", "most"), [(4, 4), (0, 64)])
def test_no_more_of_a_tenants_programs_count_than_are_computed_at_once(max_running: int, most: int) -> None:
    it = core(RoundRobinRouting(), usual_life_s=60.0)
    it.take(seen("a", capacity_tokens=10**6, max_running=max_running), 0.0)
    worked(it)
    it.take(asked("one", tenant="one", deadline_s=0.0), 100.0)
    for number in range(150):
        it.take(asked(f"m{number}", tenant="many", deadline_s=0.0), 100.0)
    for tenth in range(10):
        it.take(routing_events.Tick(), 100.0 + tenth / 10)
    assert it.strategy.tenants.shares["many"] == pytest.approx(0.05 + 0.9 * most / (most + 1))


def test_a_tenant_with_its_share_of_room_waits_for_its_own_programs() -> None:
    it = core(CapacityRouting())
    it.take(seen("a"), 0.0)
    for number in range(9):
        it.take(asked(f"h{number}", tenant="hoarder"), 0.0)
        it.take(routing_events.RequestFinished(f"h{number}"), 0.0)
    it.take(asked("late", 200, "hoarder"), 0.0)
    it.take(asked("other", 200, "other"), 1.0)
    it.take(routing_events.Tick(), 1.0)
    assert len(it.waiting) == 2
    # Nothing is in flight; but the hoarder's programs have nine tenths of all room.
    assert sends(it.take(routing_events.ProgramEnded("h0", "hoarder"), 2.0)) == [("other", "a")]


# -- making way ---------------------------------------------------------------------------


def blocked() -> RoutingCore:
    """At ``a`` two requests of a calm tenant run, one of them not yet answered; an urgent one waits there."""
    it = core(SessionAffinityRouting(most_load=math.inf), send_below_load=1.0)
    it.take(seen("a", max_running=2), 0.0)
    for tenant, deadline_s in (("calm", 1e6), ("urgent", 2.0)):
        it.take(asked(tenant, tenant=tenant, deadline_s=deadline_s), 0.0)
        it.take(routing_events.RequestFinished(tenant, 1), 1.0)
    for name in ("c0", "c1"):
        assert sends(it.take(asked(name, tenant="calm", deadline_s=1e6), 2.0)) == [(name, "a")]
    it.take(routing_events.FirstByteSent("c0", "a"), 2.0)
    assert it.take(asked("u", tenant="urgent", program_id="urgent"), 2.0) == [], "it is at home at a"
    return it


def test_a_calm_tenants_request_makes_way_for_an_urgent_one_after_half_a_second() -> None:
    it = blocked()
    assert it.take(routing_events.Tick(), 2.49) == []
    recall, send = it.take(routing_events.Tick(), 2.6)
    assert recall == RecallRequest("c1", "a"), "c0 is being answered"
    assert (send.request_id, send.replica_id) == ("u", "a")
    assert len(it.waiting) == 1
    assert sends(it.take(routing_events.RequestFinished("u", replica_id="a"), 4.0)) == [("c1", "a")], (
        "moved, not dropped"
    )


def test_programs_make_way_for_one_that_needs_room() -> None:
    it = core(CapacityRouting())
    it.take(seen("a"), 0.0)
    it.take(asked("first", tenant="urgent", deadline_s=2.0), 0.0)
    it.take(routing_events.RequestFinished("first", 1, "a"), 1.0)
    it.take(routing_events.ProgramEnded("first", "urgent"), 1.0)
    for at, name in enumerate(("c0", "c1", "c2")):
        assert sends(it.take(asked(name, 300, "calm", deadline_s=1e6), 1.0 + at / 10)) == [(name, "a")]
    it.take(routing_events.FirstByteSent("c2", "a"), 1.0)
    assert it.take(asked("u", 350, "urgent", deadline_s=3.0), 1.0) == []
    recall, send = it.take(routing_events.Tick(), 1.6)
    assert recall == RecallRequest("c1", "a"), (
        "the last sent of those that have not begun, and no more than needed"
    )
    assert (send.request_id, send.replica_id) == ("u", "a")
    assert len(it.waiting) == 1
    it.take(routing_events.RequestFinished("u", 1, "a"), 3.0)
    assert sends(it.take(routing_events.ProgramEnded("u", "urgent"), 3.0)) == [("c1", "a")]


def test_no_kv_is_thrown_away_to_make_room() -> None:
    """At ``a`` three in their second turns, of 300 tokens, not yet begun to be answered; ``b`` is new, and
    for 400."""
    it = core(CapacityRouting())
    it.take(seen("a"), 0.0)
    for at, name in enumerate(("c0", "c1", "c2")):
        it.take(asked(name, 299, "calm", deadline_s=1e6), 0.0)
        it.take(routing_events.RequestFinished(name, 1, "a"), 1.0)
        it.take(asked(f"{name}/2", 300, "calm", program_id=name), 1.0 + at / 10)
    it.take(seen("b", capacity_tokens=400), 1.3)
    for name, tokens in (("x", 60), ("other", 300)):
        assert sends(it.take(asked(name, tokens, "calm", deadline_s=1e6), 1.3)) == [(name, "b")]
    it.take(routing_events.FirstByteSent("x", "b"), 1.3)
    it.take(routing_events.FirstByteSent("other", "b"), 1.3)
    assert it.take(asked("u", 350, "urgent", deadline_s=3.0), 1.3) == []
    assert it.take(routing_events.Tick(), 2.0) == [], "nowhere else is room for them"
    it.take(routing_events.RequestFinished("other"), 2.1)
    it.take(routing_events.ProgramEnded("other", "calm"), 2.1)
    actions = it.take(routing_events.Tick(), 2.2)
    assert [type(action) for action in actions] == [RecallRequest, ReleaseProgramKv, SendRequest, SendRequest]
    assert sends(actions) == [("c2/2", "b"), ("u", "a")]


def test_no_request_is_preempted_twice() -> None:
    it = blocked()
    it.take(routing_events.Tick(), 2.6)
    assert sends(it.take(routing_events.RequestFinished("u", 1, "a"), 4.0)) == [("c1", "a")]
    assert it.take(asked("u2", tenant="urgent", program_id="urgent", deadline_s=5.0), 4.0) == []
    for tenth in range(20):
        assert it.take(routing_events.Tick(), 4.0 + tenth / 10) == []
