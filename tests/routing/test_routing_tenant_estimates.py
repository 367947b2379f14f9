"""Estimates of programs: what the ended programs of one tenant tell about those of another."""

from __future__ import annotations

import pytest
from routing_builders import seen
from sojourn_server.policies.cluster_preset import load_cluster_preset
from sojourn_server.routing import routing_events
from sojourn_server.routing.affinity_core import AffinityCore
from sojourn_server.routing.routed_programs import MIN_FINISHED_PROGRAMS, ProgramEstimator, RoutedProgram
from sojourn_server.routing.routing_from_preset import build_routing_core
from sojourn_server.routing.tenant_statistics import MEAN_WINDOW

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
    assert all(len(known["life_s"]) < 100 and len(known["peaks"]["keys"]) < 100 for _, known in tenants)
