"""Routing, work stealing, and shares among tenants."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.cli.gateway import _WAITING_ORDERS
from sojourn_server.policies.cluster_preset import (
    POLICY_CLASSES,
    cluster_preset_names,
    load_cluster_preset,
    with_waiting_order,
)
from sojourn_server.policies.fairness_policies import (
    AgentFairShare,
    BlockedRequestView,
    PreemptibleRequestView,
    RunningTaskView,
    SharePolicy,
    TenantPreemptionPolicy,
    TenantStanding,
    UrgencyPreemption,
    WaitingTenantView,
)
from sojourn_server.policies.routing_policies import (
    NO_REPLICA,
    CapacityRouting,
    IdlenessOrder,
    LargestFirstOrder,
    LeastDelayRouting,
    PrefixAffinityRouting,
    RandomRouting,
    ReplicaView,
    ResidentProgramGroup,
    RoundRobinRouting,
    RoutingDecision,
    RoutingView,
    SessionAffinityRouting,
    StealDecision,
    StealingPolicy,
    WaitingOrderPolicy,
    WaitingProgramView,
    WorkStealing,
    mutual_delay,
    peak_resident_tokens,
)

EMPTY = ReplicaView("a", 0.0, 0, 1000)


def replica(name: str, load: float = 0.0, **more: Any) -> ReplicaView:
    return EMPTY._replace(replica_id=name, load=load, **more)


def request(**more: Any) -> RoutingView:
    return RoutingView("r", 0, 100, 400)._replace(**more)


EVERY = (
    RandomRouting(), RoundRobinRouting(), SessionAffinityRouting(), PrefixAffinityRouting(),
    CapacityRouting(), CapacityRouting(size_by="context"), LeastDelayRouting(),
)  # fmt: skip
replicas_of = st.lists(
    st.builds(
        ReplicaView,
        st.just(""),
        st.floats(0, 3),
        st.integers(0, 200),
        st.integers(-5000, 5000),
        st.integers(0, 3),
        st.booleans(),
    ),
    max_size=5,
).map(lambda views: [view._replace(replica_id=f"r{at}") for at, view in enumerate(views)])


@given(policy=st.sampled_from(EVERY), replicas=replicas_of, data=st.data())
def test_a_request_goes_to_a_present_replica_and_moves_into_none_that_is_closed(
    policy: Any, replicas: list[ReplicaView], data: Any
) -> None:
    some = st.none() | st.sampled_from(replicas) if replicas else st.none()
    view = request(
        home=data.draw(some), cached=data.draw(st.booleans()), parent_home=data.draw(some),
        number=data.draw(st.integers(0, 9)), size_tokens=data.draw(st.integers(100, 9000)),
        prefix_tokens={r.replica_id: data.draw(st.integers(1, 100)) for r in replicas[:2]},
    )  # fmt: skip
    route = policy.route(view, replicas, 0.0)
    assert route == policy.route(view, replicas, 99.0), "the same again"
    if route.replica_id is None:
        assert route.reason in ("no_room", "no_replica")
        assert (route is NO_REPLICA) == (not any(r.takes_new for r in replicas))
        return
    chosen = next(r for r in replicas if r.replica_id == route.replica_id)
    assert chosen.takes_new or chosen == view.home


@pytest.mark.parametrize(
    ("home", "cached", "route"),
    [
        (replica("b", 0.79), True, RoutingDecision("b", "home")),
        (replica("b", 0.8), True, RoutingDecision("c", "home_too_full")),
        (replica("b", 0.1), False, RoutingDecision("c", "least_loaded")),
        (None, False, RoutingDecision("c", "least_loaded")),
    ],
)
def test_affinity_is_equation_7(home: ReplicaView | None, cached: bool, route: RoutingDecision) -> None:
    replicas = [replica("a", 0.5), home or replica("b", 0.9), replica("c", 0.05)]
    assert SessionAffinityRouting().route(request(home=home, cached=cached), replicas, 0.0) == route


def test_a_closed_replica_keeps_its_own_programs() -> None:
    for load in (0.2, 2.0):
        home = replica("a", load, takes_new=False)
        assert SessionAffinityRouting().route(request(home=home, cached=True), [home], 0.0).replica_id == "a"


def test_a_child_begins_near_its_parent_unless_that_is_full() -> None:
    near, other = replica("a", 0.5), replica("b", 0.0)
    assert SessionAffinityRouting().route(request(parent_home=near), [near, other], 0.0).replica_id == "a"
    full = near._replace(load=0.8)
    assert SessionAffinityRouting().route(request(parent_home=full), [full, other], 0.0).replica_id == "b"


def test_the_longest_prefix_wins_unless_it_is_short_or_loads_differ_too_much() -> None:
    replicas = [replica("a", in_flight=3), replica("b", in_flight=1), replica("c", in_flight=2)]
    policy = PrefixAffinityRouting()

    def to(**prefix: int) -> str | None:
        return policy.route(request(prefix_tokens=prefix), replicas, 0.0).replica_id

    assert to(a=60, c=50) == "a"
    assert to(a=49) == "b", "less than half"
    assert to() == "b"
    replicas[0] = replica("a", in_flight=66)
    assert to(a=100) == "b"
    replicas[0] = replica("a", in_flight=65)
    assert to(a=100) == "a", "not more than 64 ahead"


def test_a_program_moves_to_the_most_free_replica_and_waits_without_one() -> None:
    replicas = [replica("a", room_tokens=500, homed=1), replica("b", room_tokens=900, homed=1)]
    assert CapacityRouting().route(request(), replicas, 0.0) == RoutingDecision("b", "fits")
    assert CapacityRouting().route(request(size_tokens=901), replicas, 0.0) == RoutingDecision(
        None, "no_room", 901
    )
    assert CapacityRouting(size_by="context").route(request(size_tokens=901), replicas, 0.0).replica_id == "b"
    empty = [*replicas, replica("c", room_tokens=10, homed=0)]
    assert CapacityRouting().route(request(size_tokens=901), empty, 0.0).replica_id == "c", (
        "no other ever will"
    )


def test_a_thief_has_to_be_idle_and_its_victim_loaded_twice_as_much() -> None:
    thief = ReplicaView("t", 0.2, 0, 0, idle_s=0.1)
    victim = ReplicaView("v", 0.5, 0, 0, queued=3, may_leave=2)
    assert WorkStealing().steal([thief, victim], 1.0) == StealDecision("t", "v", "idle")
    for spoilt in (
        [thief._replace(idle_s=0.09), victim],
        [thief._replace(queued=1), victim],
        [thief._replace(takes_new=False), victim],
        [thief, victim._replace(load=0.4)],
        [thief, victim._replace(may_leave=0)],
    ):
        assert WorkStealing().steal(spoilt, 1.0) is None
    assert StealingPolicy().steal([thief, victim], 1.0) is None


def test_victims_are_drawn_among_all_loaded_replicas() -> None:
    replicas = [
        ReplicaView("t", 0.0, 0, 0, idle_s=1.0),
        *(ReplicaView(name, 1.0, 0, 0, queued=3, may_leave=2) for name in "uvw"),
    ]
    drawn = {WorkStealing().steal(replicas, float(at)).victim for at in range(50)}  # type: ignore[union-attr]
    assert drawn == {"u", "v", "w"}


def test_afs_is_equation_8() -> None:
    policy = AgentFairShare()
    urgent = [RunningTaskView(10.0, 120.0), RunningTaskView(5.0, 105.0)]
    calm = [RunningTaskView(10.0, 1100.0)]
    assert policy.score(urgent, 100.0) == pytest.approx(10 / 20 + 5 / 5)
    shares = policy.shares({"urgent": urgent, "calm": calm}, 100.0)
    assert shares["urgent"] == pytest.approx(0.05 + 0.9 * 1.5 / 1.51)
    assert sum(shares.values()) == pytest.approx(1.0)


tasks_of = st.lists(st.builds(RunningTaskView, st.floats(0, 1e6), st.floats(-1e6, 1e6)), max_size=4)


@given(of=st.dictionaries(st.sampled_from("abcd"), tasks_of, max_size=4), now=st.floats(-1e6, 1e6))
def test_shares_add_up_and_every_tenant_has_some(of: dict[str, list[RunningTaskView]], now: float) -> None:
    shares = AgentFairShare().shares(of, now)
    assert shares.keys() == of.keys()
    if shares:
        assert math.fsum(shares.values()) == pytest.approx(1.0)
        assert min(shares.values()) >= 0.1 / len(shares) - 1e-9


def test_the_tenant_with_the_least_used_share_is_next_ties_by_waiting_time() -> None:
    policy = AgentFairShare()
    flood, light, new = (
        WaitingTenantView("flood", 0.6, 1.0),
        WaitingTenantView("light", 0.2, 5.0),
        WaitingTenantView("new", 0.0, 9.0),
    )
    shares = {"flood": 0.7, "light": 0.3}
    assert policy.order([flood, light], shares) == ["light", "flood"]
    assert policy.order([flood, light], {"flood": 0.95, "light": 0.05}) == ["flood", "light"]
    assert policy.order([flood, new], shares) == ["flood", "new"], (
        "a tenant that has no share yet waits for an epoch"
    )
    older = light._replace(tenant="older", since_s=0.0)
    assert policy.order([light, older], {"light": 0.5, "older": 0.5}) == ["older", "light"]
    assert SharePolicy().order([light, flood], shares) == ["flood", "light"]


def test_a_programs_turns_are_drawn_apart_though_their_ids_differ_in_one_character() -> None:
    replicas = [replica("a"), replica("b")]
    drawn = [
        RandomRouting().route(request(request_id=f"p{program}/{turn}"), replicas, 0.0).replica_id
        for program in range(100)
        for turn in range(4)
    ]
    alike = sum(len(set(drawn[at : at + 4])) == 1 for at in range(0, 400, 4))
    assert alike < 30, "an eighth would be all at one"
    assert 150 < drawn.count("a") < 250


# -- least delay -----------------------------------------------------------------------------------


def test_memory_lasts_where_programs_end_at_different_times() -> None:
    """Sizes come to 1,200 of 1,000, but the one there has ended before the newcomer has grown."""
    here = replica("a", in_flight=1, homed=1, memory_tokens=1000)
    residents = {"a": (ResidentProgramGroup(690, 700, 9, 1.0),)}
    view = request(size_tokens=500, turns_left=10.0, residents=residents)
    assert LeastDelayRouting().route(view, [here], 0.0) == RoutingDecision("a", "least_delay")


def test_a_program_stays_at_home_and_a_sub_agent_goes_to_its_parent() -> None:
    full, other = replica("a", 1.5, homed=4), replica("b")
    for view, expected in (
        (request(home=full, cached=True), RoutingDecision("a", "home")),
        (request(home=full, turns_left=10.0), RoutingDecision("b", "returns")),
        (request(parent_home=full), RoutingDecision("a", "near_parent")),
    ):
        assert LeastDelayRouting().route(view, [full, other], 0.0) == expected


residents = st.lists(
    st.builds(
        lambda context, more, turns, left: ResidentProgramGroup(context, context + more, turns, float(left)),
        st.integers(1, 500),
        st.integers(0, 500),
        st.integers(0, 50),
        st.integers(1, 50),
    ),
    min_size=1,
    max_size=6,
)


@given(programs=residents)
def test_the_most_that_residents_need_is_what_turn_after_turn_comes_to(
    programs: list[ResidentProgramGroup],
) -> None:
    def tokens(one: ResidentProgramGroup, turn: int) -> float:
        return one.context_tokens + (one.size_tokens - one.context_tokens) * turn / one.turns_left

    turns = range(1, 51)
    most = max(sum(tokens(one, at) for one in programs if one.turns_left >= at) for at in turns)
    assert peak_resident_tokens(programs) == pytest.approx(most)
    assert peak_resident_tokens(programs) <= sum(one.size_tokens for one in programs) + 1e-6


@given(
    there=st.lists(residents | st.just([]), min_size=1, max_size=5),
    newcomer=residents.map(lambda some: some[0]),
    in_flight=st.lists(st.integers(0, 1), min_size=5, max_size=5),
    loads=st.lists(st.sampled_from([0.1, 0.5]), min_size=5, max_size=5),
)
def test_a_program_goes_to_the_first_of_the_best_where_memory_lasts(
    there: list[list[ResidentProgramGroup]],
    newcomer: ResidentProgramGroup,
    in_flight: list[int],
    loads: list[float],
) -> None:
    names = [f"r{number}" for number in range(len(there))]
    replicas = [
        replica(name, load, in_flight=busy, homed=len(some), memory_tokens=1000)
        for name, some, busy, load in zip(names, there, in_flight, loads, strict=False)
    ]
    comes = ResidentProgramGroup(100, max(newcomer.size_tokens, 100), 0, newcomer.turns_left)
    view = request(
        size_tokens=comes.size_tokens,
        turns_left=comes.turns_left,
        residents=dict(zip(names, map(tuple, there), strict=True)),
    )
    alone, best, chosen = newcomer.turns_left <= 1.0, None, None
    for one, some in zip(replicas, there, strict=True):
        if some and not alone and one.in_flight and peak_resident_tokens([*some, comes]) > 0.9 * 1000:
            continue
        delayed = mutual_delay(comes, some)
        rank = (one.load, delayed, one.homed) if alone else (delayed, one.load, one.homed)
        if best is None or rank < best:
            best, chosen = rank, one.replica_id
    expected = RoutingDecision(chosen, "least_loaded" if alone else "least_delay", passes=alone)
    if chosen is None:
        expected = RoutingDecision(None, "no_room")  # and later requests wait behind it
    assert LeastDelayRouting().route(view, replicas, 0.0) == expected


# -- the order of requests that wait for capacity --------------------------------------------------


VIEWS = [
    WaitingProgramView(0, False, 0.0, 900, 5000),
    WaitingProgramView(1, True, 0.9, 100, 900),
    WaitingProgramView(2, True, 0.2, 800, 1000),
    WaitingProgramView(3, False, 0.0, 50, 9000),
    WaitingProgramView(4, True, 0.2, 700, 2000),
]


def order_of(policy: object) -> list[int]:
    mixed = random.Random(1).sample(VIEWS, len(VIEWS))
    return [view.number for view in sorted(mixed, key=policy.key)]  # type: ignore[attr-defined]


def test_returning_programs_go_first_by_idleness_then_size_and_new_ones_by_size() -> None:
    assert order_of(IdlenessOrder()) == [4, 2, 1, 3, 0]
    assert order_of(LargestFirstOrder()) == [3, 0, 4, 2, 1]
    assert order_of(WaitingOrderPolicy()) == [0, 1, 2, 3, 4]


def test_the_flag_names_every_order_and_only_mori_has_its_own() -> None:
    assert tuple(POLICY_CLASSES["waiting_order"]) == _WAITING_ORDERS
    for name in cluster_preset_names():
        preset = load_cluster_preset(name)
        usual = IdlenessOrder if name.startswith("mori") else WaitingOrderPolicy
        assert isinstance(preset.waiting_order, usual)
        assert isinstance(with_waiting_order(preset, "largest-first").waiting_order, LargestFirstOrder)


# -- requests that yield to a tenant with more urgent work -----------------------------------------


URGENT = BlockedRequestView("u", "urgent", 0.6, 0.1, 100)
OTHERS = [
    PreemptibleRequestView("first", "calm", 100, 0.1, 1.0),
    PreemptibleRequestView("last", "calm", 100, 0.1, 2.0),
]
STANDINGS = {"urgent": TenantStanding(0.8, 0.0), "calm": TenantStanding(0.2, 0.5)}


def made(blocked: BlockedRequestView = URGENT, others: Any = OTHERS, standings: Any = STANDINGS) -> list[str]:
    return list(UrgencyPreemption().preempt_less_urgent(blocked, others, standings))


def test_unsent_requests_yield_first_then_the_last_sent() -> None:
    assert made() == ["last"]
    assert made(others=[*OTHERS, PreemptibleRequestView("queued", "calm", 100, 0.1, None)]) == ["queued"]
    assert made(URGENT._replace(missing_tokens=150)) == ["last", "first"]
    assert made(URGENT._replace(missing_requests=2)) == ["last", "first"]
    large = PreemptibleRequestView("large", "calm", 500, 0.1, 0.5)
    assert made(URGENT._replace(missing_tokens=300), [*OTHERS, large]) == ["large"], "the others in vain"


@pytest.mark.parametrize(
    ("blocked", "others", "standings"),
    [
        (URGENT._replace(waited_s=0.4), OTHERS, STANDINGS),
        (URGENT, OTHERS, {"calm": TenantStanding(0.2, 0.5)}),
        (URGENT, OTHERS, {"urgent": TenantStanding(0.0, 0.0), "calm": TenantStanding(0.0, 0.5)}),
    ],
    ids=["soon", "no-share-yet", "no-shares"],
)
def test_no_request_yields(blocked: BlockedRequestView, others: Any, standings: Any) -> None:
    assert made(blocked, others, standings) == []
    assert list(TenantPreemptionPolicy().preempt_less_urgent(blocked, others, standings)) == []


standings_of = st.fixed_dictionaries(
    {tenant: st.builds(TenantStanding, st.floats(0, 1), st.floats(0, 2)) for tenant in "abc"}
)


@given(
    standings=standings_of,
    others=st.lists(
        st.builds(
            PreemptibleRequestView,
            st.uuids().map(str),
            st.sampled_from("bc"),
            st.integers(1, 500),
            st.floats(0.01, 0.5),
            st.none() | st.floats(0, 9),
        ),
        max_size=8,
    ),
    tokens=st.integers(0, 1500),
    requests=st.integers(0, 4),
    used=st.floats(0.01, 1),
)
def test_a_preempted_tenant_is_less_urgent_better_off_and_frees_enough(
    standings: dict[str, TenantStanding],
    others: list[PreemptibleRequestView],
    tokens: int,
    requests: int,
    used: float,
) -> None:
    blocked = BlockedRequestView("u", "a", 1.0, used, tokens, requests)
    names = made(blocked, others, standings)
    chosen = [other for other in others if other.request_id in names]
    assert len(names) == len(set(names)) == len(chosen)
    if not chosen:
        return
    assert sum(other.tokens for other in chosen) >= tokens
    assert len(chosen) >= requests
    mine = standings["a"]
    for tenant in {other.tenant for other in chosen}:
        theirs = standings[tenant]
        assert theirs.share < mine.share
        left = theirs.used - sum(other.used for other in chosen if other.tenant == tenant)
        # So they do not take it back: what one has of its share is no less than what the other has.
        assert left * mine.share >= (mine.used + used) * theirs.share - 1e-9
    for other in chosen:
        rest = [one for one in chosen if one is not other]
        assert not rest or sum(o.tokens for o in rest) < tokens or len(rest) < requests, "one too many"
