"""Ten thousand that wait for room: who is asked about, who goes first, and that nobody is passed for ever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.gateway.core import facts
from sojourn_server.gateway.core.core import CoreLimits, RoutingCore
from sojourn_server.gateway.core.facts import Send
from sojourn_server.gateway.core.line import CHUNK, Row, Waiting
from sojourn_server.gateway.core.room import MOST_ASKED
from sojourn_server.policy.fair_share import AgentFairShare, InOrder
from sojourn_server.policy.replica_views import ReplicaView, Route, RouteView
from sojourn_server.policy.routing_room import RoomForAll
from sojourn_server.policy.stealing import NoStealing


@dataclass
class Counted:
    """Another policy, and how often it was asked."""

    policy: Any
    asked: int = 0
    reads_prefixes: bool = field(default=False)

    def route(self, view: RouteView, replicas: Sequence[ReplicaView], now: float) -> Route:
        self.asked += 1
        return self.policy.route(view, replicas, now)


def core(routing: Any = None, sharing: Any = None, **limits: Any) -> RoutingCore:
    return RoutingCore(
        routing or RoomForAll(), NoStealing(), sharing or InOrder(), CoreLimits(**{"lease_s": 1e6, **limits})
    )


def seen(name: str, tokens: int = 1000) -> facts.ReplicaSeen:
    return facts.ReplicaSeen(name, "1", tokens)


def asked(name: str, tokens: int, tenant: str = "t") -> facts.Asked:
    return facts.Asked(name, tenant, tokens, name)


def sends(actions: list[Any]) -> list[str]:
    return [action.request_id for action in actions if isinstance(action, Send)]


def ends(it: RoutingCore, name: str, now: float, tenant: str = "t") -> list[str]:
    return sends(it.take(facts.Ended(name), now) + it.take(facts.ProgramEnded(name, tenant), now))


# -- rows ---------------------------------------------------------------------------------


def waiting(number: int, needs_tokens: int) -> Waiting:
    return Waiting(f"r{number}", number, "t", None, 1, 1, 0.0, needs_tokens=needs_tokens)


@given(
    needs=st.lists(st.integers(0, 9), min_size=1, max_size=CHUNK * 4),
    gone=st.sets(st.integers(0, CHUNK * 4)),
    back=st.sets(st.integers(0, CHUNK * 4)),
    most=st.integers(0, 9),
)
def test_a_row_is_in_order_of_arrival_and_finds_the_first_that_fits(
    needs: list[int], gone: set[int], back: set[int], most: int
) -> None:
    row = Row()
    all_of_them = [waiting(number, need) for number, need in enumerate(needs)]
    for one in all_of_them:
        row.add(one)
    left = dict(enumerate(all_of_them))
    for number in gone & left.keys():
        assert row.remove(left.pop(number))
    for one in all_of_them:
        if one.number in back and one.number not in left:
            left[one.number] = one
            row.add(one)
    expected = [left[number] for number in sorted(left)]
    assert list(row) == expected
    assert bool(row) is bool(expected)
    fitting = [one for one in expected if one.needs_tokens <= most]
    assert row.first_needing(most) is (fitting[0] if fitting else None)
    assert (row.least <= most) is bool(fitting)
    assert not row.remove(waiting(0, 1)), "another one of the same number"
    if expected:
        assert row.first is expected[0]


# -- ten thousand -------------------------------------------------------------------------


def crowd(it: RoutingCore, replicas: int, waiting: int, sizes: list[int]) -> None:
    """Full replicas, and so many that wait."""
    for number in range(replicas):
        it.take(seen(f"e{number}"), 0.0)
    number = 0
    while it.waiting < waiting:
        it.take(asked(f"r{number}", sizes[number % len(sizes)], f"t{number % 7}"), 0.0)
        number += 1


@pytest.mark.parametrize("sharing", [InOrder(), AgentFairShare()])
@pytest.mark.parametrize("sizes", [list(range(900, 200, -1)), [700], list(range(200, 900))])
def test_of_ten_thousand_who_wait_only_those_are_asked_about_who_may_go(sharing: Any, sizes: Any) -> None:
    routing = Counted(RoomForAll())
    it = core(routing, sharing)
    crowd(it, 16, 10_000, sizes)
    routing.asked = 0
    name = next(iter(it.fleet.get("e3").in_flight))
    for fact in (
        facts.Began(name, "e3"),
        seen("e3"),
        facts.Tick(),
        facts.Tick(),
        facts.Ended(name, replica_id="e3"),
        facts.KvDropped("nobody", "t", "e3"),
    ):
        it.take(fact, 1.0)
        assert routing.asked == 0, f"{fact} makes no room"
    program = it.programs.get((next(p.tenant for p in it.programs if p.key[1] == name), name))
    gone = sends(it.take(facts.ProgramEnded(name, program.tenant), 2.0))
    assert gone
    assert routing.asked == len(gone)


def test_who_needs_the_same_is_not_asked_about_after_one_that_must_wait() -> None:
    class Never:
        def route(self, view: RouteView, replicas: Sequence[ReplicaView], now: float) -> Route:
            return Route(None, "full_moon")

    routing = Counted(Never())
    it = core(routing)
    crowd(it, 2, 500, [10])
    routing.asked = 0
    it.take(seen("new"), 1.0)
    assert routing.asked == 1


def test_what_those_need_who_came_before_any_replica_is_found_out_bit_by_bit() -> None:
    routing = Counted(RoomForAll())
    it = core(routing)
    for number in range(2 * MOST_ASKED):
        it.take(asked(f"r{number}", 10_000 - number), 0.0)
    routing.asked = 0
    assert sends(it.take(seen("a"), 1.0)) == ["r0"], "an empty replica takes anybody"
    assert routing.asked == 1 + MOST_ASKED
    it.take(facts.Began("nobody", "a"), 1.0)
    assert routing.asked == 2 * MOST_ASKED
    it.take(facts.Began("nobody", "a"), 1.0)
    assert routing.asked == 2 * MOST_ASKED


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


def test_who_needs_much_room_is_passed_by_so_many_and_then_a_replica_is_kept_for_it() -> None:
    # Of the 20 places, 18 at both replicas become free while nine of them are kept.
    assert small_ones_pass(core(line_patience_requests=32), 500) <= 32 + 10
    assert small_ones_pass(core(line_patience_requests=32), 500, wait=False) <= 32 + 10
    assert small_ones_pass(core(line_patience_requests=0), 500) <= 10
    assert small_ones_pass(core(line_patience_requests=10**9, line_patience_s=5.0), 500) <= 50 + 10


def test_without_patience_running_out_it_waits_for_ever() -> None:
    assert small_ones_pass(core(line_patience_requests=10**9, line_patience_s=1e9), 500) == 500


def test_only_one_replica_is_kept_and_the_other_goes_on() -> None:
    routing = Counted(RoomForAll())
    it = core(routing, line_patience_s=30.0)
    for name in ("a", "b"):
        it.take(seen(name), 0.0)
    for name in ("x", "y"):
        assert it.take(asked(name, 500), 0.0)
    assert it.take(asked("large", 600), 0.0) == []
    assert it.take(facts.Tick(), 31.0) == []
    assert sends(it.take(asked("s0", 300), 31.0)) == ["s0"]
    assert it.take(asked("s1", 300), 31.0) == [], "that room is kept"
    routing.asked = 0
    assert it.take(facts.Tick(), 31.1) == []
    assert routing.asked == 0, "and nobody is asked about it"
    assert ends(it, "x", 32.0) == ["large", "s1"], "what it leaves is anybody's"


def test_who_waits_too_long_is_refused_and_no_replica_is_kept_for_it() -> None:
    it = core(line_patience_s=30.0, wait_s=60.0)
    it.take(seen("a"), 0.0)
    it.take(asked("x", 500), 0.0)
    it.take(asked("large", 600), 0.0)
    it.take(facts.Tick(), 31.0)
    assert it.take(asked("s0", 300), 59.0) == []
    actions = it.take(facts.Tick(), 60.0)
    assert [action.request_id for action in actions] == ["large", "s0"]
    assert sends(actions) == ["s0"]


def test_no_replica_is_kept_from_those_whose_turn_comes_first() -> None:
    it = core(sharing=AgentFairShare(), line_patience_requests=0)
    it.take(seen("a"), 0.0)
    it.take(asked("h0", 500, "hoarder"), 0.0)
    it.take(asked("l0", 50, "light"), 0.0)
    it.take(facts.Tick(), 0.1)
    it.take(asked("h1", 600, "hoarder"), 0.2)
    it.take(facts.Tick(), 0.3)
    assert it.take(asked("h2", 100, "hoarder"), 0.4) == [], "room is kept for the one before it"
    assert sends(it.take(asked("l1", 100, "light"), 0.4)) == ["l1"]


def test_another_request_of_a_program_that_has_its_kv_somewhere_needs_no_room() -> None:
    it = core()
    it.take(seen("a"), 0.0)
    it.take(asked("full", 950), 0.0)
    it.take(facts.Asked("p/1", "t", 100, "p"), 0.0)
    it.take(facts.Asked("p/2", "t", 120, "p"), 0.0)
    assert it.waiting == 2
    assert sends(it.take(seen("b", 130), 1.0)) == ["p/1"], "an empty replica takes anybody"
    assert sends(it.take(facts.Ended("p/1", 0, "b"), 2.0)) == ["p/2"]


def test_a_request_that_failed_at_its_home_waits_for_room_elsewhere() -> None:
    it = core()
    for name in ("a", "b"):
        it.take(seen(name), 0.0)
    it.take(asked("p", 600), 0.0)
    home = it.programs.get(("t", "p")).home
    it.take(facts.Ended("p", 0, home), 1.0)
    other = "b" if home == "a" else "a"
    it.take(facts.Asked("fill", "t", 600, "q"), 1.0)
    assert sends(it.take(facts.Asked("p/2", "t", 600, "p"), 2.0)) == ["p/2"]
    assert sends(it.take(facts.Failed("p/2", home), 3.0)) == [], "not there again, and nowhere else is room"
    assert sends(it.take(seen(home), 4.0)) == [], "it lives, and failed it"
    assert it.programs.get(("t", "p")).home == home
    assert sends(it.take(facts.Asked("p/3", "t", 600, "p"), 5.0)) == ["p/3"], "its next request may go there"
    it.take(facts.Ended("p/3", 0, home), 5.0)
    assert ends(it, "q", 6.0) == ["p/2"]
    assert it.programs.get(("t", "p")).home == other
