"""What engines report of the programs whose KV they have, and what a routing core makes of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from routing_builders import asked, build_core, expectations, seen, sends, with_replicas
from sojourn_server.policies.cluster_preset import parse_cluster_preset
from sojourn_server.policies.routing_policies import LeastDelayRouting
from sojourn_server.routing import routing_events
from sojourn_server.routing.affinity_strategy import MAX_REPLICAS_COMPARED
from sojourn_server.routing.routing_core import RoutingCore
from sojourn_server.routing.routing_events import (
    KvReported,
    ProgramEnded,
    RequestFinished,
    ResidentKv,
    SendRequest,
)


def asks(core: Any, name: str, program: str, now: float, tokens: int = 100) -> str | None:
    """Replica to which a request is sent; ``None``: it waits."""
    actions = core.take(asked(name, tokens, program_id=program), now)
    return next((one.replica_id for one in actions if isinstance(one, SendRequest)), None)


def turn(core: Any, name: str, program: str, now: float) -> str:
    at = asks(core, name, program, now)
    assert at is not None
    core.take(RequestFinished(name, 10, at), now + 0.5)
    return at


def report(at: str, *programs: str, tokens: int = 110, age_s: float = 0.0, **more: Any) -> KvReported:
    rows = tuple(ResidentKv("t", program, tokens, 110, 1.0) for program in programs)
    return KvReported(replica_id=at, instance="1", programs=rows, age_s=age_s, **more)


def test_a_program_whose_kv_is_gone_is_cached_nowhere() -> None:
    """SAGA's affinity follows KV and not memory of KV: what an engine has evicted keeps no program there."""
    core = with_replicas(build_core(), "a", "b")
    home = turn(core, "r1", "p", 0.0)
    core.take(report(home, "p"), 2.0)
    assert core.home("t", "p") == home
    core.take(report(home, "p", tokens=20), 4.0)
    assert core.home("t", "p") is None, "most of its KV is gone"


def test_a_report_from_before_the_turn_ended_takes_no_home() -> None:
    core = with_replicas(build_core(), "a")
    turn(core, "r1", "p", 0.0)
    core.take(report("a", age_s=1.0), 1.0)
    assert core.home("t", "p") == "a"
    core.take(report("a", complete=False), 5.0)
    assert core.home("t", "p") == "a", "an incomplete report says nothing of others"
    core.take(report("a"), 5.0)
    assert core.home("t", "p") is None


def test_a_gateway_that_starts_learns_homes_from_the_engines() -> None:
    core = with_replicas(build_core(), "a", "b")
    core.take(report("b", "p", "q"), 1.0)
    assert [core.home("t", name) for name in "pq"] == ["b", "b"]
    assert asks(core, "r1", "p", 2.0) == "b"
    core.take(ProgramEnded("q", "t"), 3.0)
    assert core.home("t", "q") is None


@pytest.mark.parametrize("instance", ["0", "1"])
def test_a_report_of_another_life_or_of_an_unknown_replica_is_ignored(instance: str) -> None:
    core = with_replicas(build_core(), "b")
    core.take(seen("a", instance="2"), 0.0)
    core.take(KvReported(replica_id="a", instance=instance, programs=(ResidentKv("t", "p", 9, 9),)), 1.0)
    core.take(KvReported(replica_id="nowhere", instance="1", programs=(ResidentKv("t", "p", 9, 9),)), 1.0)
    assert core.home("t", "p") is None


def test_load_from_elsewhere_counts_once_two_reports_show_it() -> None:
    """Several gateways share engines and nothing else."""
    core = with_replicas(build_core(), "a", "b")
    busy = report("a", requests=3, request_tokens=900)
    core.take(busy, 1.0)
    assert core.replica_statuses()[0].load == 0.0, "its own requests may have ended meanwhile"
    core.take(busy, 3.0)
    assert core.replica_statuses()[0].load == 0.9
    assert asks(core, "r1", "p", 3.0) == "b"
    core.take(report("a"), 5.0)
    assert core.replica_statuses()[0].load == 0.0


# -- What a routing that reads residents is told, and who waits where it says that no memory lasts


def core(routing: Any = None, replicas: int = 1) -> RoutingCore:
    it = build_core(routing or LeastDelayRouting(), estimator=expectations(), lease_s=1e6)
    return with_replicas(it, *(f"e{number}" for number in range(replicas)))


coder = partial(asked, agent_type="coder")


BUSY = routing_events.RequestReceived("busy", "nobody", 1)
"""A request of another program, which never ends."""


@pytest.mark.parametrize("resident_for_s", [300.0, 7.0])
def test_silent_residents_keep_no_program_out(resident_for_s: float) -> None:
    preset = f'routing = {{ policy = "least-delay", resident_for_s = {resident_for_s} }}'
    it = core(parse_cluster_preset(preset, source="x").routing)
    it.take(BUSY, 0.0)
    it.take(coder("a"), 0.0)
    it.take(routing_events.RequestFinished("a", 5, "e0"), 1.0)
    assert sends(it.take(coder("b"), 2.0)) == []
    assert sends(it.take(routing_events.Tick(), 1.0 + resident_for_s - 0.1)) == []
    assert sends(it.take(routing_events.Tick(), 1.0 + resident_for_s)) == ["b"]


def test_of_many_replicas_those_with_the_most_room_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    route, shown = LeastDelayRouting.route, list[Any]()
    monkeypatch.setattr(LeastDelayRouting, "route", lambda *told: shown.append(told[1]) or route(*told))
    it = core(replicas=MAX_REPLICAS_COMPARED + 4)
    for number in range(2 * MAX_REPLICAS_COMPARED):
        it.take(coder(f"a{number}", 100 + number), 0.0)
    homed = [len(replica.programs) for replica in it.fleet.values()]
    assert max(homed) == 1, "an empty one goes before all others"
    assert len(it.waiting) == 2 * MAX_REPLICAS_COMPARED - len(homed)
    assert all(len(view.residents) <= MAX_REPLICAS_COMPARED for view in shown)


def test_new_programs_wait_behind_one_for_which_no_memory_lasts() -> None:
    it = core()
    assert sends(it.take(BUSY, 0.0) + it.take(coder("a"), 0.0)) == ["busy", "a"]
    assert sends(it.take(coder("b"), 1.0)) == [], "both would come to 1,800 of 1,000"
    clerk = asked("c", 10, agent_type="clerk")
    assert sends(it.take(clerk, 2.0)) == [], "there is memory for it, but it came later"
    assert len(it.waiting) == 2
    assert sends(it.take(routing_events.RequestFinished("a", 5, "e0"), 3.0)) == []
    assert sends(it.take(routing_events.ProgramEnded("a", "t"), 3.0)) == ["b", "c"]
    assert len(it.waiting) == 0
    alone = core()
    assert sends(alone.take(coder("a"), 0.0) + alone.take(clerk, 2.0)) == ["a", "c"]


def test_requests_without_a_program_do_not_wait() -> None:
    """Hints are advice: who gives none is served as without those who do."""
    it = core()
    it.take(coder("a"), 0.0)
    assert sends(it.take(coder("b"), 1.0)) == []
    assert sends(it.take(routing_events.RequestReceived("plain", "t", 500), 2.0)) == ["plain"]
    assert sends(it.take(routing_events.RequestReceived("session", "t", 500, "s"), 2.0)) == ["session"]
    assert len(it.waiting) == 1
