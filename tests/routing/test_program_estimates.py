"""Sizes, turns and durations of programs, as estimated from ended ones."""

from __future__ import annotations

import pytest
from sojourn_server.routing.program_estimates import MAX_STATISTICS, MIN_FINISHED_PROGRAMS, ProgramEstimator
from sojourn_server.routing.routing_records import RoutedProgram


def program(tenant: str = "t", kind: str | None = "coder", **more: int) -> RoutedProgram:
    return RoutedProgram((tenant, "p"), kind, None, 0.0, 1.0, **more)  # type: ignore[arg-type]


def ended(
    of: ProgramEstimator, tenant: str, tokens: int, kind: str = "coder", count: int = MIN_FINISHED_PROGRAMS
) -> None:
    for _ in range(count):
        of.ended(program(tenant, kind, context_tokens=tokens, turns=4), 10.0)


def size_tokens(of: ProgramEstimator, tenant: str, kind: str | None = "coder") -> int:
    return of.size_tokens(program(tenant, kind), 10, 100_000)


def test_an_estimate_is_of_the_type_or_else_of_the_tenant_or_else_of_all() -> None:
    it = ProgramEstimator()
    assert size_tokens(it, "t") == 10, "unknown"
    ended(it, "t", 50)
    ended(it, "t", 900, kind="clerk")
    assert (size_tokens(it, "t"), size_tokens(it, "t", "clerk")) == (50, 900)
    assert size_tokens(it, "t", "another") in (50, 900), "of all its types"
    assert size_tokens(it, "new") == 50, "of this type of all tenants"
    ended(it, "new", 30)
    assert size_tokens(it, "new") == 30


def test_tenants_and_types_take_bounded_memory() -> None:
    it = ProgramEstimator()
    for number in range(2 * MAX_STATISTICS):
        ended(it, f"tenant {number}", 50, kind=f"type {number}", count=1)
        ended(it, "t", 70, count=1)
    assert size_tokens(it, "t") == 70, "what is in use is not forgotten"
    assert it.life_s(program("tenant 0", "type 0")) == it.life_s(program("unknown", None)), "forgotten"


def test_work_is_the_pending_nodes_of_a_declared_graph_times_a_turn() -> None:
    """SAGA's W_remain: the declared graph's nodes where there is one, what was learned else."""
    it = ProgramEstimator()
    ended(it, "t", 50)
    it.observe_turn(program(), 3.0)
    one = program(turns=1)
    assert it.work_s(one) == pytest.approx(3 * 3.0)
    one.pending_steps, one.pending_at_turn = 7.0, 1
    assert it.work_s(one) == pytest.approx(7 * 3.0)
    one.turns = 3
    assert (it.turns_left(one), it.work_s(one)) == (5.0, pytest.approx(5 * 3.0))
