"""Programs move in where delays are least and memory lasts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.policies.routing_policies import (
    NO_REPLICA,
    LeastDelayRouting,
    ReplicaView,
    ResidentProgramGroup,
    RoutingDecision,
    RoutingView,
    mutual_delay,
    peak_resident_tokens,
)

POOL = 1000


def replica(
    name: str, *there: ResidentProgramGroup, load: float = 0.0, takes_new: bool = True
) -> ReplicaView:
    return ReplicaView(name, load, 1, 0, homed=len(there), takes_new=takes_new, memory_tokens=POOL)


def request(
    turns_left: float = 10.0, size_tokens: int = 200, **residents: tuple[ResidentProgramGroup, ...]
) -> RoutingView:
    return RoutingView("r", 0, 100, size_tokens, turns_left=turns_left, residents=residents)


STAYS = ResidentProgramGroup(300, 300, 20, 100.0)


def test_memory_lasts_where_programs_end_at_different_times() -> None:
    """Sizes come to 1,200 of 1,000, but the one there has ended before the newcomer has grown."""
    there = ResidentProgramGroup(690, 700, 9, 1.0)
    route = LeastDelayRouting().route(request(10.0, 500, a=(there,)), [replica("a", there)], 0.0)
    assert route == RoutingDecision("a", "least_delay")


def test_it_stays_at_home_and_a_sub_agent_goes_to_its_parent() -> None:
    full = replica("a", *(STAYS,) * 4, load=1.5)
    replicas = [full, replica("b")]
    at_home = request()._replace(home=full, cached=True)
    assert LeastDelayRouting().route(at_home, replicas, 0.0) == RoutingDecision("a", "home")
    assert LeastDelayRouting().route(at_home._replace(cached=False), replicas, 0.0) == RoutingDecision(
        "b", "returns"
    )
    child = request()._replace(parent_home=full)
    assert LeastDelayRouting().route(child, replicas, 0.0) == RoutingDecision("a", "near_parent")
    shut = full._replace(takes_new=False)
    assert (
        LeastDelayRouting().route(child._replace(parent_home=shut), [shut, replicas[1]], 0.0).replica_id
        == "b"
    )
    assert LeastDelayRouting().route(request(), [shut], 0.0) == NO_REPLICA


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
def test_the_most_is_what_turn_after_turn_comes_to(programs: list[ResidentProgramGroup]) -> None:
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
def test_it_is_the_first_of_the_best_where_memory_lasts(
    there: list[list[ResidentProgramGroup]],
    newcomer: ResidentProgramGroup,
    in_flight: list[int],
    loads: list[float],
) -> None:
    names = [f"r{number}" for number in range(len(there))]
    replicas = [
        replica(name, *some, load=load)._replace(in_flight=busy)
        for name, some, busy, load in zip(names, there, in_flight, loads, strict=False)
    ]
    view = request(
        newcomer.turns_left, newcomer.size_tokens, **dict(zip(names, map(tuple, there), strict=True))
    )
    comes = ResidentProgramGroup(view.context_tokens, max(newcomer.size_tokens, 100), 0, newcomer.turns_left)
    view = view._replace(size_tokens=comes.size_tokens)
    alone, best, chosen = newcomer.turns_left <= 1.0, None, None
    for one, some in zip(replicas, there, strict=True):
        if some and not alone and one.in_flight and peak_resident_tokens([*some, comes]) > 0.9 * POOL:
            continue
        delayed = mutual_delay(comes, some)
        rank = (one.load, delayed, one.homed) if alone else (delayed, one.load, one.homed)
        if best is None or rank < best:
            best, chosen = rank, one.replica_id
    expected = RoutingDecision(chosen, "least_loaded" if alone else "least_delay", passes=alone)
    if chosen is None:
        expected = RoutingDecision(None, "no_room")  # and later requests wait behind it
    assert LeastDelayRouting().route(view, replicas, 0.0) == expected
