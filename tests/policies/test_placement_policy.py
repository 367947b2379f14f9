"""Placement by relative idleness: the paper's rules on examples worked out by hand (M2–M6, M8, M9)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from sojourn.ids import ProgramId
from sojourn_server.policies.eviction_policies import DEVICE_EVICTION_ORDER, TypedLabelEviction
from sojourn_server.policies.placement.placement_policy import (
    MoveReason,
    MoveTiming,
    TierMove,
)
from sojourn_server.policies.placement.placement_views import (
    PlacementView,
    ProgramActivity,
    ProgramTierView,
    Tier,
    TierCapacity,
)
from sojourn_server.policies.placement.relative_idleness import RelativeIdlenessPlacement
from sojourn_server.policies.policy_views import EvictionCandidateView, EvictionScoreScale
from sojourn_server.programs.idleness import Idleness

NOW = 1000.0
DEVICE, HOST, DISK, WAITING = Tier
REASONING, READY, ACTING = ProgramActivity
PAPER = RelativeIdlenessPlacement(patience_s=math.inf, standstill_s=math.inf, absent_s=math.inf)


def program(
    name: str, tier: Tier, activity: ProgramActivity, idleness: float = 0.5, blocks: int = 10, **other: Any
) -> ProgramTierView:
    """One of constant idleness. A ready one has waited for a second."""
    made: dict[str, Any] = {
        "context_blocks": blocks,
        "required_blocks": blocks if activity is READY else 0,
        "resident_blocks": blocks if tier is DEVICE else 0,
        "waiting_since_s": NOW - 1.0,
        "last_active_s": NOW - 1.0,
        "returning": True,
    }
    shown = Idleness(1.0 - idleness, idleness)
    return ProgramTierView(
        program_id=ProgramId(name), tier=tier, activity=activity, idleness=shown, **{**made, **other}
    )


def newcomer(name: str, blocks: int = 10, **other: Any) -> ProgramTierView:
    return program(name, WAITING, READY, 0.0, 0, **{"required_blocks": blocks, "returning": False, **other})


def view(*programs: ProgramTierView, device: int = 100, host: int = 100, disk: int = 0) -> PlacementView:
    groups = {tier: [each for each in programs if each.tier is tier] for tier in Tier}
    return PlacementView(
        device=TierCapacity(capacity_blocks=device),
        host=TierCapacity(capacity_blocks=host),
        disk=TierCapacity(capacity_blocks=disk),
        on_device=groups[DEVICE],
        on_host=groups[HOST],
        on_disk=groups[DISK],
        waiting=groups[WAITING],
    )


def moved(policy: RelativeIdlenessPlacement, seen: PlacementView, now: float = NOW) -> dict[str, Tier]:
    """What moves at once, and where to."""
    return {move.program_id: move.to for move in policy.moves(seen, now) if move.when is MoveTiming.NOW}


# -- demotion (M3, §4.3.1) -------------------------------------------------------------------


def test_a_reasoning_victim_finishes_its_turn() -> None:
    """§4.3.1: "If only Reasoning programs remain, … the victim finishes its current inference step"."""
    a, b = program("a", DEVICE, REASONING, 0.7, 60), program("b", DEVICE, REASONING, 0.2, 60)
    assert PAPER.moves(view(a, b), NOW) == (
        TierMove(ProgramId("a"), HOST, MoveTiming.AFTER_TURN, MoveReason.OVER_CAPACITY),
    )
    pending = replace(a, pending=True)
    assert PAPER.moves(view(pending, b), NOW) == (), "marked once"
    over = replace(pending, activity=ACTING)
    assert moved(PAPER, view(over, b)) == {"a": HOST}
    returned = replace(pending, activity=READY)
    assert moved(PAPER, view(returned, b)) == {"a": HOST}, "its next request came in the meantime, and waits"


def test_ties_go_to_the_least_recently_active_program() -> None:
    a, b = program("a", DEVICE, ACTING, blocks=60), program("b", DEVICE, ACTING, blocks=60)
    assert moved(PAPER, view(a, b)) == moved(PAPER, view(b, a)) == {"a": HOST}
    assert moved(PAPER, view(a, replace(b, last_active_s=NOW - 9.0))) == {"b": HOST}


def test_host_memory_that_holds_too_much_drops_the_most_idle_first() -> None:
    """§4.1: "A CPU memory capacity constraint is enforced analogously"."""
    seen = view(
        program("busy", HOST, ACTING, 0.2, 30), program("idle", HOST, ACTING, 0.9, 30),
        program("ready", HOST, READY, 0.95, 30), program("there", DEVICE, REASONING, 0.1, 100),
        host=60,
    )  # fmt: skip
    assert moved(PAPER, seen) == {"idle": WAITING}
    assert moved(PAPER, replace(seen, disk=TierCapacity(capacity_blocks=30))) == {"idle": DISK}


# -- promotion (M4, §4.3.1) ------------------------------------------------------------------


def test_promotion_goes_host_then_returning_then_new_each_in_its_order() -> None:
    line = [
        program("host, busy", HOST, READY, 0.1),
        program("host, idle", HOST, READY, 0.9),
        program("disk, busy", DISK, READY, 0.0),
        program("returning, busy", WAITING, READY, 0.05),
        program("returning, idle", WAITING, READY, 0.5),
        newcomer("new, small", 10),
        newcomer("new, large", 20),
    ]
    for room in range(1, 8):
        seen = view(*reversed(line), device=10 * room, disk=10)
        assert list(moved(PAPER, seen)) == [each.program_id for each in line[:room]][:6]
    assert len(moved(PAPER, view(*line, device=80, disk=10))) == 7


def test_blocks_of_untracked_requests_are_not_available() -> None:
    seen = view(program("there", DEVICE, REASONING, 0.5, 50), program("a", HOST, READY, 0.5, 40))
    assert moved(PAPER, seen) == {"a": DEVICE}
    assert (
        PAPER.moves(replace(seen, device=TierCapacity(capacity_blocks=100, untracked_blocks=11)), NOW) == ()
    )


def test_size_is_the_context_and_what_is_already_known_to_come() -> None:
    there = program("there", DEVICE, REASONING, 0.5, 10, peak_blocks=80)
    ready = program("ready", HOST, READY, 0.5, 10, peak_blocks=30)
    assert moved(PAPER, view(there, ready)) == {"ready": DEVICE}, "predictions do not count"
    assert replace(ready, required_blocks=17).device_blocks == 17, "its answer and tool output come on top"
    assert replace(there, resident_blocks=25).device_blocks == 25, "branches side by side"
    assert newcomer("new", 0).device_blocks == 1


# -- disk (M9, §7.1) -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("idleness", "host", "disk", "to"),
    [
        (0.95, 60, 60, DISK),
        (0.89, 60, 60, HOST),
        (0.95, 60, 59, HOST),
        (0.89, 59, 60, DISK),
        (0.95, 59, 59, WAITING),
    ],
)
def test_the_most_idle_go_to_disk(idleness: float, host: int, disk: int, to: Tier) -> None:
    seen = view(
        program("a", DEVICE, ACTING, idleness, 60), program("b", DEVICE, REASONING, 0.1, 60),
        host=host, disk=disk,
    )  # fmt: skip
    assert moved(PAPER, seen) == {"a": to}


def test_the_idle_leave_host_memory_for_the_busier() -> None:
    victim, grown = program("victim", DEVICE, ACTING, 0.5, 60), program("grown", DEVICE, REASONING, 0.1, 60)
    below = [program("idlest", HOST, ACTING, 0.97, 40), program("idle", HOST, ACTING, 0.93, 40)]
    assert moved(PAPER, view(victim, grown, *below, disk=100)) == {
        "idlest": DISK, "victim": HOST,
    }, "one of them is enough"  # fmt: skip
    assert moved(PAPER, view(victim, grown, *below, disk=39)) == {"victim": WAITING}
    assert moved(PAPER, view(victim, grown, *below, host=99, disk=39)) == {"victim": WAITING}
    busy = [replace(each, idleness=Idleness(0.2, 0.8)) for each in below]
    assert moved(PAPER, view(victim, grown, *busy, disk=100)) == {"victim": DISK}
    ready = [replace(each, activity=READY, required_blocks=41) for each in below]
    assert moved(PAPER, view(victim, grown, *ready, device=100, disk=100))["victim"] is DISK


# -- no starvation ---------------------------------------------------------------------------

OURS = RelativeIdlenessPlacement(absent_s=math.inf, patience_s=120.0, standstill_s=2.0, overdue_gap_s=0.0)


def test_the_first_candidate_enters_an_empty_device_whatever_its_size() -> None:
    giant = program("giant", HOST, READY, 0.5, 500)
    assert moved(PAPER, view(giant, newcomer("new", 1), host=500)) == {"giant": DEVICE}
    alone = replace(giant, tier=DEVICE, resident_blocks=500)
    for activity in (READY, REASONING, ACTING):
        there = replace(alone, activity=activity)
        assert PAPER.moves(view(there), NOW) == (), "alone it may stay"
        assert PAPER.moves(view(there, newcomer("new", 1)), NOW) == (), "and stays alone"
    beside = view(replace(alone, activity=REASONING), program("b", DEVICE, READY))
    assert [(move.program_id, move.when) for move in PAPER.moves(beside, NOW)] == [
        ("giant", MoveTiming.AFTER_TURN)
    ]


def test_the_device_does_not_stand_still_for_long() -> None:
    """A parent that fills the device waits for a sub-agent that is new and cannot enter: rule 3."""
    parent = program("parent", DEVICE, ACTING, 0.9, 95, last_active_s=NOW)
    child = newcomer("child", 20)
    assert OURS.moves(view(parent, child), NOW + 1.9) == ()
    assert OURS.moves(view(parent, child), NOW + 2.0) == (
        TierMove(ProgramId("child"), DEVICE, MoveTiming.NOW, MoveReason.STANDSTILL),
        TierMove(ProgramId("parent"), HOST, MoveTiming.NOW, MoveReason.STANDSTILL),
    )
    assert PAPER.moves(view(parent, child), NOW + 1e6) == (), "as the paper has it"
    running = program("running", DEVICE, REASONING, 0.1, 5)
    assert OURS.moves(view(parent, running, child), NOW + 59.0) == (), "a program runs"
    assert OURS.moves(view(parent, replace(running, activity=READY), child), NOW + 59.0) == (), (
        "or is about to"
    )
    assert OURS.moves(view(parent), NOW + 60.0) == (), "no program is ready"


def test_a_long_absent_program_leaves_for_any_ready_one() -> None:
    policy = replace(PAPER, absent_s=60.0)
    gone = program("gone", DEVICE, ACTING, 0.9, 50, last_active_s=NOW - 60.0)
    away = program("away", DEVICE, ACTING, 0.95, 50, last_active_s=NOW - 59.0)
    full = view(gone, away, newcomer("new", 30), device=100)
    assert {(move.program_id, move.to, move.reason) for move in policy.moves(full, NOW)} == {
        ("new", DEVICE, MoveReason.ABSENT),
        ("gone", HOST, MoveReason.ABSENT),
    }
    assert policy.moves(view(gone, away, device=100), NOW) == (), "no program needs its place"
    assert policy.moves(view(gone, away, newcomer("new", 60), device=100), NOW) == (), "nor is it enough"


def test_acting_programs_leave_for_an_overdue_one_however_busy() -> None:
    there = [program("acting", DEVICE, ACTING, 0.1, 50), program("reasoning", DEVICE, REASONING, 0.9, 50)]
    waits = program("waits", HOST, READY, 0.9, 40)
    assert OURS.moves(view(*there, waits), NOW + 118.0) == ()
    assert OURS.moves(view(*there, waits), NOW + 119.0) == (
        TierMove(ProgramId("waits"), DEVICE, MoveTiming.NOW, MoveReason.OVERDUE),
        TierMove(ProgramId("acting"), HOST, MoveTiming.NOW, MoveReason.OVERDUE),
    )
    assert PAPER.moves(view(*there, waits), NOW + 1e6) == ()


def test_overdue_programs_wait_for_turns_to_end_and_are_not_overtaken() -> None:
    a, b = program("a", DEVICE, REASONING, 0.1, 45), program("b", DEVICE, REASONING, 0.2, 45)
    waits = program("waits", WAITING, READY, 0.9, 50)
    small = program("small", HOST, READY, 0.0, 10, waiting_since_s=NOW + 119.0)
    assert OURS.moves(view(a, b, waits, small), NOW + 120.0) == (
        TierMove(ProgramId("b"), HOST, MoveTiming.AFTER_TURN, MoveReason.OVERDUE),
    ), "the 10 free blocks are kept for it"
    b = replace(b, pending=True)
    assert OURS.moves(view(a, b, waits, small), NOW + 121.0) == ()
    b = replace(b, activity=ACTING)
    assert moved(OURS, view(a, b, waits, small), NOW + 130.0) == {"waits": DEVICE, "b": HOST}


# -- labels (M5, §4.3.2) ---------------------------------------------------------------------


def test_the_device_keeps_busy_programs_longest() -> None:
    """§4.3.2: "GPU HBM: evicts inactive first, then idle, then busy"."""
    busy, idle, cold, inactive = Tier
    assert (inactive, cold, idle, busy) == DEVICE_EVICTION_ORDER


def test_on_the_device_the_longest_unused_of_a_label_goes_first_and_what_is_over_is_inactive() -> None:
    order, scale = TypedLabelEviction(), EvictionScoreScale()
    owners = {
        "busy, old": EvictionCandidateView(1, False, 1.0, tier=DEVICE),
        "busy, new": EvictionCandidateView(2, False, 9.0, tier=DEVICE),
        "idle, new": EvictionCandidateView(3, False, 9.0, tier=HOST),
        "idle, on disk": EvictionCandidateView(4, False, 5.0, tier=DISK),
        "gone": EvictionCandidateView(5, False, 9.0, tier=WAITING),
        "over": EvictionCandidateView(6, True, 8.0, tier=DEVICE),
    }
    ranked = sorted(owners, key=lambda name: order.score(order.score_inputs(owners[name]), scale))
    assert ranked == ["over", "gone", "idle, on disk", "idle, new", "busy, old", "busy, new"]
