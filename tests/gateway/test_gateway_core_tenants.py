"""Tenants that share replicas: floods, turns, and who makes way for whom."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import pytest
from sojourn_server.gateway.core import facts
from sojourn_server.gateway.core.core import CoreLimits, RoutingCore
from sojourn_server.gateway.core.facts import Left, Recall, Send
from sojourn_server.policy.fair_share import AgentFairShare, InOrder
from sojourn_server.policy.routing import RoundRobin, SessionAffinity
from sojourn_server.policy.routing_room import RoomForAll
from sojourn_server.policy.stealing import NoStealing
from sojourn_server.policy.yielding import YieldToUrgent

AT_HOME = SessionAffinity(most_load=math.inf)


def core(routing: Any, sharing: Any = None, **limits: Any) -> RoutingCore:
    return RoutingCore(
        routing,
        NoStealing(),
        sharing or AgentFairShare(),
        CoreLimits(**{"lease_s": 1e6, **limits}),
        yielding=YieldToUrgent(),
    )


def seen(name: str, **more: Any) -> facts.ReplicaSeen:
    return facts.ReplicaSeen(**{"replica_id": name, "instance": "1", "capacity_tokens": 1000, **more})


def asked(name: str, tenant: str, tokens: int = 100, **more: Any) -> facts.Asked:
    return facts.Asked(name, tenant, tokens, **{"program_id": name, **more})


def sends(actions: list[Any]) -> list[tuple[str, str]]:
    return [(action.request_id, action.replica_id) for action in actions if isinstance(action, Send)]


# -- floods -------------------------------------------------------------------------------


def sent_in_turn(it: RoutingCore, light: int, most: int) -> list[str]:
    """Tenants in the order in which their requests are sent: a flood of 10,000, then somebody who always
    has one waiting. One program after the other comes to its end."""
    for name in "abcd":
        it.take(seen(name), 0.0)
    running: deque[tuple[str, str]] = deque()
    for number in range(10_000):
        running += [(one, "flood") for one, _ in sends(it.take(asked(f"f{number}", "flood"), 0.0))]
    assert len(running) == 40
    it.take(asked("l0", "light"), 1.0)
    asked_for, now, order = 1, 1.0, []
    while len(order) < most and asked_for <= light:
        now += 0.05
        name, tenant = running.popleft()
        actions = it.take(facts.Tick(), now)
        actions += it.take(facts.Ended(name, 10), now)
        actions += it.take(facts.ProgramEnded(name, tenant), now)
        for one, _ in sends(actions):
            tenant = "light" if one.startswith("l") else "flood"
            running.append((one, tenant))
            order.append(tenant)
            if tenant == "light":
                it.take(asked(f"l{asked_for}", "light"), now)
                asked_for += 1
    return order


@pytest.mark.parametrize("routing", [RoundRobin(), RoomForAll()])
def test_a_flood_delays_nobody_by_more_than_its_share(routing: Any) -> None:
    order = sent_in_turn(core(routing, send_below_load=1.0, usual_life_s=60.0), light=12, most=2_000)
    assert order.count("light") == 12
    assert order.index("light") <= 4, "it had nothing: the first place at its replica is its own"
    gaps = "".join("l" if tenant == "light" else "." for tenant in order).split("l")
    # Of two tenants the least share is 1/20: it has two of 40 places, each for 40 sends of others. Who needs
    # a little more room than they all may be passed by 32, and by those who get what others leave meanwhile.
    assert max(map(len, gaps)) <= (40 if isinstance(routing, RoundRobin) else 40 + 32 + 40)


def test_first_come_first_served_lets_a_flood_go_first() -> None:
    it = core(RoundRobin(), InOrder(), send_below_load=1.0)
    assert "light" not in sent_in_turn(it, light=1, most=300)


def test_requests_of_no_program_have_the_least_share_and_not_none() -> None:
    it = core(SessionAffinity(), send_below_load=1.0)
    it.take(seen("a"), 0.0)
    for number in range(30):
        it.take(asked(f"f{number}", "busy"), 0.0)
    it.take(facts.Asked("stranger", "curl", 100), 0.0)
    it.take(facts.Tick(), 0.1)
    assert it.tenants.shares["curl"] == pytest.approx(0.5)
    assert sends(it.take(facts.Ended("f0"), 0.2)) == [("stranger", "a")]


def worked(it: RoutingCore) -> RoutingCore:
    """A turn takes 60 s, as the core knows by now."""
    it.take(asked("before", "before"), 0.0)
    it.take(facts.Ended("before", 1), 60.0)
    it.take(facts.ProgramEnded("before", "before"), 60.0)
    return it


@pytest.mark.parametrize("late_s", [1e9, 30.0, 0.1])
def test_no_client_makes_itself_more_urgent_than_who_is_computed_without_pause(late_s: float) -> None:
    it = core(RoundRobin(), usual_life_s=60.0)
    it.take(seen("a", capacity_tokens=10**6), 0.0)
    worked(it)
    it.take(asked("honest", "honest", deadline_s=100.0 + 60.0), 100.0)
    it.take(asked("liar", "liar", deadline_s=100.0 + 60.0 - late_s), 100.0)
    it.take(facts.Tick(), 100.0)
    assert it.tenants.shares == {"honest": pytest.approx(0.5), "liar": pytest.approx(0.5)}
    it.take(facts.Tick(), 150.0)
    assert it.tenants.shares == {"honest": pytest.approx(0.5), "liar": pytest.approx(0.5)}


@pytest.mark.parametrize(("max_running", "most"), [(4, 4), (0, 64)])
def test_no_more_of_a_tenants_programs_count_than_are_computed_at_once(max_running: int, most: int) -> None:
    it = core(RoundRobin(), usual_life_s=60.0)
    it.take(seen("a", capacity_tokens=10**6, max_running=max_running), 0.0)
    worked(it)
    it.take(asked("one", "one", deadline_s=0.0), 100.0)
    for number in range(150):
        it.take(asked(f"m{number}", "many", deadline_s=0.0), 100.0)
    for tenth in range(10):
        it.take(facts.Tick(), 100.0 + tenth / 10)
    assert it.tenants.shares["many"] == pytest.approx(0.05 + 0.9 * most / (most + 1))


def test_who_has_its_share_of_room_waits_for_its_own_programs() -> None:
    it = core(RoomForAll())
    it.take(seen("a"), 0.0)
    for number in range(9):
        it.take(asked(f"h{number}", "hoarder"), 0.0)
        it.take(facts.Ended(f"h{number}"), 0.0)
    it.take(asked("late", "hoarder", 200), 0.0)
    it.take(asked("other", "other", 200), 1.0)
    it.take(facts.Tick(), 1.0)
    assert it.waiting == 2
    # Nothing is in flight; but the hoarder's programs have nine tenths of all room.
    assert sends(it.take(facts.ProgramEnded("h0", "hoarder"), 2.0)) == [("other", "a")]


# -- making way ---------------------------------------------------------------------------


def blocked(*names: str, urgent_s: float = 2.0, calm_s: float = 1e6, **limits: Any) -> RoutingCore:
    """At ``a`` two requests of a calm tenant run, one of them not yet answered; an urgent one waits there."""
    it = core(AT_HOME, send_below_load=1.0, **limits)
    it.take(seen("a", max_running=2), 0.0)
    for tenant, deadline_s in (("calm", calm_s), ("urgent", urgent_s)):
        it.take(asked(tenant, tenant, deadline_s=deadline_s), 0.0)
        it.take(facts.Ended(tenant, 1), 1.0)
    for name in ("c0", "c1"):
        assert sends(it.take(asked(name, "calm", deadline_s=calm_s), 2.0)) == [(name, "a")]
    it.take(facts.Began("c0", "a"), 2.0)
    assert it.take(asked("u", "urgent", program_id="urgent"), 2.0) == [], "it is at home at a"
    for name in names:
        it.take(seen(name, max_running=2), 2.0)
    return it


def test_a_calm_tenants_request_makes_way_for_an_urgent_one_after_half_a_second() -> None:
    it = blocked()
    assert it.take(facts.Tick(), 2.49) == []
    recall, send = it.take(facts.Tick(), 2.6)
    assert recall == Recall("c1", "a"), "c0 is being answered"
    assert (send.request_id, send.replica_id) == ("u", "a")
    assert (it.waiting, it.counts.recalls) == (1, 1)
    assert sends(it.take(facts.Ended("u", replica_id="a"), 4.0)) == [("c1", "a")], "moved, not dropped"


def test_who_makes_way_goes_to_another_replica_if_it_can() -> None:
    it = blocked("b")
    actions = it.take(facts.Tick(), 2.6)
    assert actions[0] == Recall("c1", "a")
    assert sends(actions) == [("c1", "b"), ("u", "a")]
    assert Left("c1", "a", "calm") in actions
    assert it.programs.get(("calm", "c1")).home == "b"
    assert it.counts.moves == 1


def test_nobody_makes_way_twice() -> None:
    it = blocked()
    it.take(facts.Tick(), 2.6)
    assert sends(it.take(facts.Ended("u", 1, "a"), 4.0)) == [("c1", "a")]
    assert it.take(asked("u2", "urgent", program_id="urgent", deadline_s=5.0), 4.0) == []
    for tenth in range(20):
        assert it.take(facts.Tick(), 4.0 + tenth / 10) == []


def test_tenants_of_equal_standing_wait_for_each_other() -> None:
    it = blocked(urgent_s=1e6)
    assert it.take(facts.Tick(), 10.0) == []
    assert it.tenants.shares["calm"] > it.tenants.shares["urgent"] > 0
    assert it.counts.recalls == 0


def test_a_recall_that_came_too_late_changes_nothing() -> None:
    it = blocked("b")
    it.take(facts.Tick(), 2.6)
    assert "c1" in it.fleet.get("b").in_flight
    it.take(facts.Began("c1", "a"), 2.61)
    assert "c1" in it.fleet.get("a").in_flight
    assert "c1" not in it.fleet.get("b").in_flight
    assert it.programs.get(("calm", "c1")).home == "a"
    it.take(facts.Ended("c1", 5, "b"), 2.7)
    assert "c1" in it.requests.by_id, "it is not answered at b"
    it.take(facts.Ended("c1", 5, "a"), 2.8)
    assert "c1" not in it.requests.by_id


def test_an_answer_that_overtook_the_recall_is_an_answer() -> None:
    it = blocked()
    it.take(facts.Tick(), 2.6)
    assert it.waiting == 1
    assert it.take(facts.Ended("c1", 5, "a"), 2.61) == []
    assert it.waiting == 0
    assert it.programs.get(("calm", "c1")).turns == 1


def test_words_of_a_replica_it_was_recalled_from_say_nothing_once_it_is_answered_elsewhere() -> None:
    it = blocked("b")
    it.take(facts.Tick(), 2.6)
    assert it.take(facts.Failed("c1", "a"), 2.61) == []
    it.take(facts.Began("c1", "b"), 2.7)
    it.take(facts.Ended("c1", 5, "a"), 2.8)
    assert "c1" in it.fleet.get("b").in_flight


def test_programs_make_way_for_one_that_needs_room() -> None:
    it = core(RoomForAll())
    it.take(seen("a"), 0.0)
    it.take(asked("first", "urgent", deadline_s=2.0), 0.0)
    it.take(facts.Ended("first", 1, "a"), 1.0)
    it.take(facts.ProgramEnded("first", "urgent"), 1.0)
    for at, name in enumerate(("c0", "c1", "c2")):
        assert sends(it.take(asked(name, "calm", 300, deadline_s=1e6), 1.0 + at / 10)) == [(name, "a")]
    it.take(facts.Began("c2", "a"), 1.0)
    assert it.take(asked("u", "urgent", 350, deadline_s=3.0), 1.0) == []
    recall, send = it.take(facts.Tick(), 1.6)
    assert recall == Recall("c1", "a"), "the last sent of those that have not begun, and no more than needed"
    assert (send.request_id, send.replica_id) == ("u", "a")
    assert it.waiting == 1
    assert sends(it.take(facts.ProgramEnded("u", "urgent"), 3.0)) == [("c1", "a")]


def three_at_a_and_room_at_b() -> RoutingCore:
    """Each in its second turn, of 300 tokens, not yet begun to be answered; ``b`` is new, and for 400."""
    it = core(RoomForAll())
    it.take(seen("a"), 0.0)
    for at, name in enumerate(("c0", "c1", "c2")):
        it.take(asked(name, "calm", 299, deadline_s=1e6), 0.0)
        it.take(facts.Ended(name, 1, "a"), 1.0)
        it.take(asked(f"{name}/2", "calm", 300, program_id=name), 1.0 + at / 10)
    it.take(seen("b", capacity_tokens=400), 1.3)
    return it


def test_no_kv_is_thrown_away_to_make_room() -> None:
    it = three_at_a_and_room_at_b()
    for name, tokens in (("x", 60), ("other", 300)):
        assert sends(it.take(asked(name, "calm", tokens, deadline_s=1e6), 1.3)) == [(name, "b")]
    it.take(facts.Began("x", "b"), 1.3)
    it.take(facts.Began("other", "b"), 1.3)
    assert it.take(asked("u", "urgent", 350, deadline_s=3.0), 1.3) == []
    assert it.take(facts.Tick(), 2.0) == [], "nowhere else is room for them"
    it.take(facts.Ended("other"), 2.1)
    it.take(facts.ProgramEnded("other", "calm"), 2.1)
    actions = it.take(facts.Tick(), 2.2)
    assert [type(action) for action in actions] == [Recall, Left, Send, Send]
    assert sends(actions) == [("c2/2", "b"), ("u", "a")]


def test_of_two_that_could_move_and_cannot_both_one_stays_with_its_kv() -> None:
    it = three_at_a_and_room_at_b()
    it.take(asked("x", "calm", 60, deadline_s=1e6), 1.3)
    it.take(facts.Began("x", "b"), 1.3)
    assert it.take(asked("u", "urgent", 650, deadline_s=3.0), 1.3) == []
    assert sends(it.take(facts.Tick(), 2.2)) == [("c2/2", "b")]
    assert it.counts.recalls == 1
    assert [it.programs.get(("calm", name)).home for name in ("c0", "c1", "c2")] == ["a", "a", "b"]
    assert it.requests.by_id["u"].sent_s is None
