"""The baselines' policies on views made by hand: admit's order, Autellix §4.2, InferCept §3.2 and §4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from finished_turns import finished_turn
from hypothesis import assume, given
from hypothesis import strategies as st
from sojourn_server.policies.policy_protocols import DecisionReason, RetentionDecision
from sojourn_server.policies.policy_views import (
    BlockShortage,
    RunningRequestView,
    WaitingRequestView,
)
from sojourn_server.policies.preemption_policies import MostAttainedServiceVictim
from sojourn_server.policies.queue_order_policies import (
    PROMOTION_RATIO,
    LeastAttainedService,
    ProgramFcfs,
    StrictProgramFcfs,
    service_level,
)
from sojourn_server.policies.retention_policies import LeastWasteRetention


def test_a_preempted_later_program_stands_behind_an_earlier_one() -> None:
    """Otherwise it waits for blocks of the earlier program, which waits for its turn."""
    earlier, preempted = WaitingRequestView(False, False, 1, 9), WaitingRequestView(True, False, 2, 3)
    assert StrictProgramFcfs().key(earlier) < StrictProgramFcfs().key(preempted)
    assert ProgramFcfs().key(preempted) < ProgramFcfs().key(earlier)


# -- autellix -------------------------------------------------------------------------


def call(arrival: int = 1, **facts: Any) -> WaitingRequestView:
    return WaitingRequestView(facts.pop("preempted", False), False, arrival, arrival, **facts)


PLAS = LeastAttainedService()


@pytest.mark.parametrize(
    ("attained_s", "ran_s", "level"),
    [(0, 0, 0), (1.99, 0, 0), (2, 0, 1), (3.9, 0, 1), (4, 0, 2), (64, 0, 6), (1e9, 0, 6),
     (0, 0.99, 0), (0, 1, 1), (0, 2.9, 1), (0, 3, 2), (4, 3.9, 2), (4, 4, 3), (0, 1e9, 6)],
)  # fmt: skip
def test_a_call_enters_by_its_programs_service_and_sinks_by_its_own(
    attained_s: float, ran_s: float, level: int
) -> None:
    """Bounds 2, 4, … 64 s; quanta 1, 2, … 64 s."""
    assert service_level(attained_s, ran_s) == level


@given(st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 1e3), st.floats(0, 1e3))
def test_more_service_never_raises(attained_s: float, ran_s: float, more: float, longer: float) -> None:
    assert service_level(attained_s + more, ran_s) >= service_level(attained_s, ran_s)
    assert service_level(attained_s, ran_s + longer) >= service_level(attained_s, ran_s)


def test_waiting_beta_times_its_service_promotes_a_call_to_the_end_of_the_first_queue() -> None:
    starved = call(1, attained_s=10.0, waited_s=30.0, since_s=100.0, arrived_s=100.0)
    assert PLAS.promoted_s(starved) == 100.0 + 8 * 10.0 - 30.0
    before, after = starved._replace(now_s=149.9), starved._replace(now_s=150.0)
    first_queue = call(2, arrived_s=149.0)
    assert PLAS.key(before) > PLAS.key(first_queue)
    assert PLAS.key(first_queue) < PLAS.key(after) < PLAS.key(call(3, arrived_s=151.0))


@given(
    st.lists(st.tuples(st.floats(0, 200), st.floats(0, 50)), min_size=1, max_size=8),
    st.integers(0, 7),
    st.floats(0, 1000),
)
def test_no_request_waits_for_ever_behind_new_ones(
    lives: list[tuple[float, float]], index: int, later_s: float
) -> None:
    """A request that has waited beta times its service precedes all later arrivals."""
    attained_s, ran_s = lives[index % len(lives)]
    old = call(1, attained_s=attained_s, ran_s=ran_s, since_s=10.0, arrived_s=10.0)
    now = 10.0 + PROMOTION_RATIO * (attained_s + ran_s) + later_s
    newcomer = call(2, arrived_s=now + 1e-3, since_s=now + 1e-3, now_s=now + 1.0)
    assert PLAS.key(old._replace(now_s=now + 1.0)) < PLAS.key(newcomer)


def test_the_victim_is_in_the_lowest_queue_there_the_last_admitted() -> None:
    running = [
        RunningRequestView("long", 1, 0, 9, 100.0, 0.0),
        RunningRequestView("mine", 2, 1, 9, 0.0, 0.5),
        RunningRequestView("longer", 3, 2, 9, 90.0, 0.0),
        RunningRequestView("short", 4, 3, 9, 0.0, 0.1),
    ]
    assert MostAttainedServiceVictim().victim(running, BlockShortage(), 0.0) == "longer"
    assert MostAttainedServiceVictim().victim([running[1], running[3]], BlockShortage(), 0.0) == "short"


# -- infercept --------------------------------------------------------------------------

TURN = finished_turn(reload_s=2.0, mean_evicted_wait_s=99.0, chunked_reload_s=1.5, running_tokens=4000)


@given(
    context=st.integers(1, 200_000),
    running=st.integers(0, 500_000),
    reload_s=st.floats(0.01, 30.0),
    share=st.floats(0.1, 1.0),
    early=st.floats(0.0, 0.999),
    late=st.floats(1.001, 3.0),
)
def test_it_is_kept_as_long_as_keeping_wastes_less(
    context: int, running: int, reload_s: float, share: float, early: float, late: float
) -> None:
    turn = replace(
        TURN,
        context_tokens=context,
        running_tokens=running,
        reload_s=reload_s,
        chunked_reload_s=reload_s * share,
    )
    keep = LeastWasteRetention().keep(turn, 0.0)
    assume(keep.ttl_s < 300.0)
    assert keep.reason is DecisionReason.LEAST_WASTE
    for elapsed_s, pays in ((early * keep.ttl_s, True), (late * keep.ttl_s, False)):
        # InferCept's Eq. 2 and Eq. 4, in token-seconds: preserve, with T as long as it has taken; discard.
        preserve = elapsed_s * context
        discard = reload_s * context / 2 + reload_s * share * running
        assert (preserve < discard) is pays


@pytest.mark.parametrize(
    ("changes", "ttl_s", "reason"),
    [
        ({}, 2.0 / 2 + 1.5 * 4, DecisionReason.LEAST_WASTE),
        # It runs alone, and wastes only its own memory.
        ({"running_tokens": 0}, 1.0, DecisionReason.LEAST_WASTE),
        # Continuum §3.2: over a fast host cache preserving is rarely worth it.
        ({"host_reload_s": 0.05}, 0.05, DecisionReason.LEAST_WASTE),
        ({"host_reload_s": 50.0}, 7.0, DecisionReason.LEAST_WASTE),
        # No prefill was seen yet.
        ({"reload_s": 0.0, "chunked_reload_s": 0.0}, 0.0, DecisionReason.NOT_WORTH_IT),
        ({"tool": None}, 0.0, DecisionReason.NO_TOOL_CALL),
        # The bound is ours.
        ({"reload_s": 1e6}, 300.0, DecisionReason.LEAST_WASTE),
    ],
)
def test_the_numbers_of_one_turn(changes: dict[str, Any], ttl_s: float, reason: DecisionReason) -> None:
    found = LeastWasteRetention().keep(replace(TURN, **changes), 0.0)
    assert found == RetentionDecision(pytest.approx(ttl_s), reason)
