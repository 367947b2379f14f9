"""What a routing that reads residents is told, and who waits where it says that no memory lasts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sojourn_server.gateway.core import facts
from sojourn_server.gateway.core.core import CoreLimits, RoutingCore
from sojourn_server.gateway.core.facts import Send
from sojourn_server.gateway.core.placing import LOOKED_AT, RESIDENT_FOR_S
from sojourn_server.gateway.core.programs import LEAST_ENDED, Expectations, Program
from sojourn_server.policy.fair_share import AgentFairShare, InOrder
from sojourn_server.policy.replica_views import ReplicaView, Resident, Route, RouteView
from sojourn_server.policy.routing_delay import LeastDelay
from sojourn_server.policy.stealing import NoStealing


@dataclass
class Noted:
    """Another policy, and what it was shown."""

    policy: Any = field(default_factory=LeastDelay)
    views: list[RouteView] = field(default_factory=list)
    reads_prefixes: bool = False
    reads_residents: bool = True

    def route(self, view: RouteView, replicas: Sequence[ReplicaView], now: float) -> Route:
        self.views.append(view)
        return self.policy.route(view, replicas, now)


def expectations() -> Expectations:
    """Enough have ended: coders after ten turns at 900 tokens, clerks after two at 20."""
    expected = Expectations()
    for kind, turns, tokens in (("coder", 10, 900), ("clerk", 2, 20)):
        for _ in range(LEAST_ENDED):
            expected.ended(
                Program(("t", "p"), kind, None, 0.0, 1.0, context_tokens=tokens, turns=turns), 10.0
            )
    return expected


def core(routing: Any, replicas: int = 1, sharing: Any = None, **more: Any) -> RoutingCore:
    it = RoutingCore(routing, NoStealing(), sharing or InOrder(), CoreLimits(lease_s=1e6), **more)
    for number in range(replicas):
        it.take(facts.ReplicaSeen(f"e{number}", "1", 1000), 0.0)
    return it


def asked(name: str, tokens: int = 100, tenant: str = "t", program: str | None = None) -> facts.Asked:
    return facts.Asked(name, tenant, tokens, program or name, agent_type="coder")


def keep_busy(it: RoutingCore) -> None:
    """Each replica with a request of nobody's, that does not end."""
    for number in range(len(it.fleet)):
        it.take(facts.Asked(f"busy {number}", "nobody", 1), 0.0)
    assert all(replica.in_flight for replica in it.fleet)


def sends(actions: list[Any]) -> list[str]:
    return [action.request_id for action in actions if isinstance(action, Send)]


def test_it_is_told_of_those_at_home_and_what_they_have_left() -> None:
    routing = Noted()
    it = core(routing, replicas=2, expected=expectations())
    it.take(asked("a"), 0.0)
    it.take(facts.Ended("a", 50, "e0"), 1.0)
    it.take(asked("b", 30), 2.0)
    assert routing.views[0].residents == {}
    assert routing.views[0].turns_left == 10.0
    assert routing.views[1].residents == {"e0": (Resident(150, 900, 1, 9.0),)}
    it.take(asked("a2", 160, program="a"), 3.0)
    assert routing.views[2].residents == {}, "it has its KV, and stays"
    it.take(facts.ProgramEnded("b", "t"), 4.0)
    it.take(asked("c"), 5.0)
    assert set(routing.views[3].residents) == {"e0"}
    it.take(facts.ReplicaGone("e0", "1"), 6.0)
    assert it.homes.residents.keys() == {"e1"}


def test_of_agents_of_which_nothing_is_known_as_much_is_left_as_was() -> None:
    routing = Noted()
    it = core(routing)
    for turn in range(3):
        it.take(asked(f"a{turn}", 100 + turn, program="a"), float(turn))
        it.take(facts.Ended(f"a{turn}", 5, "e0"), turn + 0.5)
    it.take(asked("b"), 9.0)
    assert routing.views[-1].residents == {}, "nobody knows whether it comes back"
    it.take(asked("a3", 110, program="a"), 10.0)
    it.take(asked("c"), 11.0)
    assert routing.views[-1].residents["e0"][0] == Resident(107, 110, 3, 3.0)


def test_who_was_not_heard_of_for_long_keeps_nobody_out() -> None:
    it = core(LeastDelay(), expected=expectations())
    keep_busy(it)
    it.take(asked("a"), 0.0)
    it.take(facts.Ended("a", 5, "e0"), 1.0)
    assert sends(it.take(asked("b"), 2.0)) == []
    assert sends(it.take(facts.Tick(), 1.0 + RESIDENT_FOR_S - 0.1)) == []
    assert sends(it.take(facts.Tick(), 1.0 + RESIDENT_FOR_S)) == ["b"]


def test_of_many_replicas_those_with_the_most_room_are_shown() -> None:
    routing = Noted()
    it = core(routing, replicas=LOOKED_AT + 4, expected=expectations())
    for number in range(2 * LOOKED_AT):
        it.take(asked(f"a{number}", 100 + number), 0.0)
    homed = [replica.homed for replica in it.fleet]
    assert max(homed) == 1, "an empty one goes before all others"
    assert it.waiting == 2 * LOOKED_AT - len(homed)
    assert all(len(view.residents) <= LOOKED_AT for view in routing.views)


def test_what_another_core_goes_on_with_is_judged_anew() -> None:
    it = core(LeastDelay(), expected=expectations())
    it.take(asked("a"), 0.0)
    it.take(facts.Ended("a", 5, "e0"), 1.0)
    after = RoutingCore(LeastDelay(), NoStealing(), InOrder(), CoreLimits(lease_s=1e6))
    after.restore(it.snapshot(2.0), 2.0)
    keep_busy(after)
    assert sends(after.take(asked("b"), 3.0)) == [], "it knows who is at home, and that it comes back"
    assert sends(after.take(facts.ProgramEnded("a", "t"), 4.0)) == ["b"]


def test_who_comes_new_waits_behind_one_for_whom_no_memory_lasts() -> None:
    it = core(LeastDelay(), expected=expectations())
    keep_busy(it)
    assert sends(it.take(asked("a"), 0.0)) == ["a"]
    assert sends(it.take(asked("b"), 1.0)) == [], "both would come to 1,800 of 1,000"
    clerk = facts.Asked("c", "t", 10, "c", agent_type="clerk")
    assert sends(it.take(clerk, 2.0)) == [], "there is memory for it, but it came later"
    assert it.waiting == 2
    assert sends(it.take(facts.Ended("a", 5, "e0"), 3.0)) == []
    assert sends(it.take(facts.ProgramEnded("a", "t"), 3.0)) == ["b", "c"]
    assert it.waiting == 0
    alone = core(LeastDelay(), expected=expectations())
    assert sends(alone.take(asked("a"), 0.0) + alone.take(clerk, 2.0)) == ["a", "c"]


def test_requests_of_nobody_wait_for_nobody() -> None:
    """Hints are advice: who gives none is served as without those who do."""
    it = core(LeastDelay(), expected=expectations())
    it.take(asked("a"), 0.0)
    assert sends(it.take(asked("b"), 1.0)) == []
    assert sends(it.take(facts.Asked("plain", "t", 500), 2.0)) == ["plain"]
    assert sends(it.take(facts.Asked("session", "t", 500, "s"), 2.0)) == ["session"]
    assert it.waiting == 1


def test_programs_that_never_say_that_they_are_over_hold_up_nobody_where_nothing_is_done() -> None:
    it = core(LeastDelay(), expected=expectations())
    for number in range(5):
        assert sends(it.take(asked(f"a{number}"), float(number))) == [f"a{number}"]
        it.take(facts.Ended(f"a{number}", 5, "e0"), number + 0.5)


def test_a_tenant_that_has_less_goes_first_among_those_that_wait() -> None:
    it = core(LeastDelay(), sharing=AgentFairShare(), expected=expectations())
    keep_busy(it)
    it.take(asked("a", tenant="busy"), 0.0)
    it.take(asked("b", tenant="busy"), 1.0)
    it.take(asked("c", tenant="calm"), 2.0)
    it.take(facts.Tick(), 2.1)
    it.take(facts.Ended("a", 5, "e0"), 3.0)
    it.take(facts.Tick(), 3.1)
    gone = it.take(facts.ProgramEnded("a", "busy"), 3.2)
    assert len(sends(gone)) == 1
    assert it.waiting == 1


def test_of_ten_thousand_who_wait_one_is_asked_about_at_a_time() -> None:
    routing = Noted()
    it = core(routing, replicas=4, expected=expectations())
    keep_busy(it)
    for number in range(10_000):
        it.take(asked(f"r{number}", tenant=f"t{number % 7}"), 0.0)
    assert it.waiting == 10_000 - 4
    routing.views.clear()
    assert sends(it.take(facts.Tick(), 1.0)) == []
    assert len(routing.views) == 1
    first = next(name for name in it.fleet.get("e2").in_flight if name.startswith("r"))  # type: ignore[union-attr]
    it.take(facts.Ended(first, 5, "e2"), 2.0)
    routing.views.clear()
    tenant = f"t{int(first[1:]) % 7}"
    assert len(sends(it.take(facts.ProgramEnded(first, tenant), 2.0))) == 1
    assert len(routing.views) == 2
