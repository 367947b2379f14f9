"""Estimates of programs: what the ended programs of one tenant tell about those of another."""

from __future__ import annotations

import json

import pytest
from routing_builders import seen
from sojourn_server.policies.cluster_preset import load_cluster_preset
from sojourn_server.routing import routing_events
from sojourn_server.routing.affinity_core import AffinityCore
from sojourn_server.routing.routed_programs import MIN_FINISHED_PROGRAMS, ProgramEstimator, RoutedProgram
from sojourn_server.routing.routing_from_preset import build_routing_core
from sojourn_server.routing.tenant_statistics import (
    HALVING_OBSERVATIONS,
    LENGTH_WINDOW,
    MAX_TENANTS,
    MAX_TYPES_OF_ALL,
    MEAN_WINDOW,
)

MAX_TOKENS = 100_000


def ended(
    expected: ProgramEstimator,
    tenant: str,
    tokens: int,
    kind: str | None = "coder",
    count: int = MIN_FINISHED_PROGRAMS,
    life_s: float = 10.0,
) -> None:
    """Programs of a tenant end after one turn."""
    for _ in range(count):
        program = RoutedProgram((tenant, "p"), kind, None, 0.0, 1.0, context_tokens=tokens, turns=1)
        expected.ended(program, life_s)


def size_tokens(expected: ProgramEstimator, tenant: str, kind: str | None = "coder") -> int:
    """Estimated size of a tenant's program that has ten tokens."""
    return expected.size_tokens(RoutedProgram((tenant, "q"), kind, None, 0.0, 0.0), 10, MAX_TOKENS)


def life_s(expected: ProgramEstimator, tenant: str, kind: str | None) -> float | None:
    return expected.life_s(RoutedProgram((tenant, "q"), kind, None, 0.0, 0.0))


def sent(core: AffinityCore, tenant: str, programs: int, tokens: int, first: int = 0) -> list[str]:
    """Ids of the requests that are sent of so many new programs of agent type ``coder``, one turn each."""
    found: list[str] = []
    for number in range(first, first + programs):
        name = f"{tenant}{number}"
        asked = routing_events.RequestReceived(name, tenant, tokens, name, agent_type="coder")
        actions = core.take(asked, 0.0)
        found += [one.request_id for one in actions if isinstance(one, routing_events.SendRequest)]
    return found


def end(core: AffinityCore, tenant: str, names: list[str]) -> None:
    for name in names:
        core.take(routing_events.RequestFinished(name, 1, "a", True), 1.0)
        core.take(routing_events.ProgramEnded(name, tenant), 1.0)


@pytest.mark.parametrize("has_own", [False, True])
def test_large_programs_of_one_tenant_keep_no_small_ones_of_another_out(has_own: bool) -> None:
    core = build_routing_core(load_cluster_preset("mori"))
    core.take(seen("a", capacity_tokens=200_000, max_running=1000, max_context_tokens=32_000), 0.0)
    if has_own:
        end(core, "small", sent(core, "small", 20, 100))
    for number in range(500):
        end(core, "hostile", sent(core, "hostile", 1, 32_000, first=number))
    assert len(sent(core, "small", 150, 100, first=1000)) == 150


def test_a_tenant_has_its_own_estimates() -> None:
    expected = ProgramEstimator()
    ended(expected, "hostile", 90_000, count=500)
    ended(expected, "small", 50)
    assert size_tokens(expected, "small") == 50
    assert size_tokens(expected, "small", "another") == 50, "of all its types"
    assert size_tokens(expected, "hostile") == 90_000


def test_a_tenant_without_its_own_gets_those_of_several_others() -> None:
    expected = ProgramEstimator()
    assert size_tokens(expected, "new") == 10
    ended(expected, "a", 50)
    ended(expected, "hostile", 90_000, count=500)
    assert size_tokens(expected, "new") == 10, "two tenants are too few"
    ended(expected, "b", 60)
    assert 10 < size_tokens(expected, "new") <= 60
    ended(expected, "new", 30)
    assert size_tokens(expected, "new") == 30


def test_the_mean_of_all_types_is_not_dropped_for_invented_types() -> None:
    expected, again = ProgramEstimator(), ProgramEstimator()
    for number in range(1000):
        ended(expected, "t", 50, kind=f"type {number}", count=1, life_s=number)
        newest = range(max(0, number + 1 - MEAN_WINDOW), number + 1)
        assert life_s(expected, "t", "unknown") == pytest.approx(sum(newest) / len(newest))
    again.restore(expected.snapshot())
    assert life_s(again, "t", None) == life_s(expected, "t", None)


def test_invented_types_and_tenants_take_bounded_memory() -> None:
    expected = ProgramEstimator()
    ended(expected, "t", 50)
    for number in range(2000):
        ended(expected, "inventor", 90_000, kind=f"type {number}", count=1)
    assert size_tokens(expected, "t") == 50, "another tenant's types drop no estimate of its own"
    for number in range(2000):
        ended(expected, f"tenant {number}", 90_000, count=1)
    [_, tenants] = expected.snapshot().values()
    assert len(tenants) < 100
    assert all(len(known) < 100 for _, known in tenants)


def test_invented_types_of_all_tenants_take_bounded_memory_and_drop_no_other_tenants_types() -> None:
    expected, again = ProgramEstimator(), ProgramEstimator()
    ended(expected, "t", 50)
    ended(expected, "t", 90_000, kind="another", count=3 * LENGTH_WINDOW)
    for tenant in range(MAX_TENANTS - 1):
        for number in range(100):
            ended(expected, f"tenant {tenant}", 90_000, kind=f"type {number}", count=2)
    again.restore(expected.snapshot())
    for one in (expected, again):
        assert json.dumps(one.snapshot()).count('"type ') <= MAX_TYPES_OF_ALL
        [_, tenants] = one.snapshot().values()
        assert len(tenants) == MAX_TENANTS
        types = [kept for _, known in tenants for kept in known]
        assert len(types) <= MAX_TYPES_OF_ALL + MAX_TENANTS
        assert max(len(values) for _, *lists in types for values in lists) <= max(LENGTH_WINDOW, MEAN_WINDOW)
        assert size_tokens(one, "t") == 50, "the tenants with the most types lose some"


@pytest.mark.parametrize("more", [1, 2, 100])
def test_estimates_are_learned_of_more_tenants_than_are_kept(more: int) -> None:
    expected = ProgramEstimator()
    names = [f"tenant {number}" for number in range(MAX_TENANTS + more)]
    for _ in range(3 * MIN_FINISHED_PROGRAMS):
        for tenant in names:
            expected.observe_turn(RoutedProgram((tenant, "p"), "coder", None, 0.0, 1.0), 1.0)
            ended(expected, tenant, 50, count=1)
    assert [tenant for tenant in names if size_tokens(expected, tenant) != 50] == []


def test_tenants_that_have_left_keep_no_new_ones_out() -> None:
    expected = ProgramEstimator()
    for number in range(MAX_TENANTS):
        ended(expected, f"gone {number}", 50, count=500)
    for _ in range(10 * HALVING_OBSERVATIONS // 2):
        for tenant in ("a", "b"):
            ended(expected, tenant, 90_000, count=1)
    assert size_tokens(expected, "a") == size_tokens(expected, "b") == 90_000
