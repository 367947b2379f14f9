"""Placement by price on examples worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from sojourn.ids import ProgramId
from sojourn_server.policies.placement.gittins_index import MAX_GAP_S, MIN_SPENT_S, gittins_index
from sojourn_server.policies.placement.placement_policy import MAX_EXCHANGES, MoveReason, MoveTiming, TierMove
from sojourn_server.policies.placement.placement_views import (
    PlacementView,
    ProgramActivity,
    ProgramTierView,
    Tier,
    TierCapacity,
)
from sojourn_server.policies.placement.residency_price import (
    MAX_HOLD_COST,
    MAX_WORTH,
    SMALL_PATIENCE_S,
    URGENT_S,
    ResidencyPricePlacement,
)
from sojourn_server.programs.idleness import Idleness

DEVICE, HOST, DISK, WAITING = Tier
REASONING, READY, ACTING = ProgramActivity
NOW = 1000.0


def program(name: str, tier: Tier, activity: ProgramActivity, blocks: int, **more: Any) -> ProgramTierView:
    more.setdefault("new_service_s", more.get("service_s", ()))
    return ProgramTierView(
        program_id=ProgramId(name), tier=tier, activity=activity,
        context_blocks=0 if tier is WAITING and not more.get("returning") else blocks,
        required_blocks=blocks if activity is READY else 0, peak_blocks=more.pop("peak", blocks),
        arrived_s=more.pop("arrived_s", 0.0), last_active_s=more.pop("last_active_s", NOW),
        waiting_since_s=more.pop("since_s", NOW), rebuild_s=more.pop("rebuild_s", 2.0), **more,
    )  # fmt: skip


def acting(name: str, blocks: int, durations: tuple[float, ...], since_s: float = NOW, **more: Any) -> Any:
    times_s = {"last_active_s": since_s, "gap_since_s": since_s, "gap_durations_s": durations}
    return program(name, DEVICE, ACTING, blocks, **times_s, **more)


def view_of(
    *programs: ProgramTierView, device: int = 20, untracked: int = 0, host: int = 0,
    load_s: float | None = None, queue_s: float = 0.0, shortage_s: float = NOW,
    overdue_s: float = float("-inf"), **more: Any,
) -> PlacementView:  # fmt: skip
    groups = {tier: [each for each in programs if each.tier is tier] for tier in Tier}
    return PlacementView(
        device=TierCapacity(capacity_blocks=device, untracked_blocks=untracked),
        host=TierCapacity(capacity_blocks=host, load_s_per_block=load_s, load_queue_s=queue_s),
        disk=TierCapacity(capacity_blocks=0),
        on_device=groups[DEVICE], on_host=groups[HOST], on_disk=groups[DISK], waiting=groups[WAITING],
        last_shortage_s=shortage_s, last_overdue_promotion_s=overdue_s, **more,
    )  # fmt: skip


def answer(
    *programs: ProgramTierView, policy: dict[str, Any] | None = None, **view: Any
) -> dict[str, TierMove]:
    moves = ResidencyPricePlacement(**(policy or {})).moves(view_of(*programs, **view), NOW)
    return {move.program_id: move for move in moves}


# -- the index of a gap -------------------------------------------------------------------------


def test_who_may_never_return_has_a_lower_rate_the_longer_it_is_away() -> None:
    durations = (1.0, 2.0, 3.0, 4.0)
    sure, likely, doubtful = (gittins_index(durations, 0.0, chance) for chance in (1.0, 0.9, 0.5))
    assert sure > likely > doubtful > 0
    assert gittins_index(durations, 0.0, 0.0) == 0.0
    late = gittins_index(durations, 3.5, 0.5) / gittins_index(durations, 3.5)
    assert late < doubtful / sure


@pytest.mark.parametrize(
    ("durations", "elapsed", "rate"),
    [
        # One second for certain, and the pseudo-sample as long again: (2 of 2) / 1 s.
        ((1.0,), 0.0, 1.0),
        # Three of four end in 1 s, the fourth and its copy in 100 s: 3/5 per 1 s beats 1 per 40.6 s.
        ((1.0, 1.0, 1.0, 100.0), 0.0, 0.6),
        # After 10 s only the long one is left: 90 s.
        ((1.0, 1.0, 1.0, 100.0), 10.0, 1 / 90),
        # Just before a duration of the past the rate is bounded.
        ((1.0, 1.0, 1.0, 100.0), 99.999, 1 / MIN_SPENT_S / 2),
        # Longer than any before: as long again.
        ((1.0, 1.0), 30.0, 1 / 30),
        # Never observed: five seconds, or as long again.
        ((), 0.0, 0.2),
        ((), 50.0, 0.02),
        # A client may report any number.
        ((1e308, 1e308), 0.0, 1 / MAX_GAP_S),
        ((0.0, 0.0), 0.0, 1 / MIN_SPENT_S),
    ],
)
def test_the_rate_is_the_best_chance_per_second(
    durations: tuple[float, ...], elapsed: float, rate: float
) -> None:
    assert gittins_index(durations, elapsed) == pytest.approx(rate, rel=0.5 if elapsed == 99.999 else 1e-6)


def test_a_program_that_should_be_over_soon_is_worth_more() -> None:
    new = program("p", WAITING, READY, 5)
    assert ResidencyPricePlacement().worth(new) == 1.0, "no program has ended yet"
    sizes = (10.0, 10.0, 10.0, 1000.0)
    young, near, old = (
        ResidencyPricePlacement().worth(
            program("p", WAITING, READY, 5, service_s=sizes, attained_s=attained_s)
        )
        for attained_s in (0.0, 9.0, 20.0)
    )
    assert young == 1.0, "a new program, whatever the sizes"
    assert near > young > old
    assert near <= MAX_WORTH


# -- what stays, and what makes way --------------------------------------------------------------


def test_what_fits_enters_whatever_it_is_worth() -> None:
    moves = answer(acting("a", 10, (600.0,)), program("b", WAITING, READY, 10))
    expected = TierMove(ProgramId("b"), DEVICE, MoveTiming.NOW, MoveReason.FREE_CAPACITY, (("worth", 1.0),))
    assert moves == {"b": expected}


def test_a_short_tool_keeps_its_place_and_a_long_one_does_not() -> None:
    # Computing 15 blocks takes 2 s: holding them is worth 2 · rate, and the waiting one makes 1.
    waiting = program("b", WAITING, READY, 10)
    assert answer(acting("a", 15, (1.0,)), waiting) == {}
    moves = answer(acting("a", 15, (60.0,)), waiting)
    assert (moves["a"].to, moves["a"].reason) == (WAITING, MoveReason.EXCHANGE)
    assert (moves["b"].to, moves["b"].reason) == (DEVICE, MoveReason.EXCHANGE)
    assert dict(moves["a"].terms) == pytest.approx({"hold_value": 2 / 15 / 60, "price": 1 / 10})
    assert dict(moves["b"].terms) == pytest.approx({"worth": 1.0, "price": 1 / 10})


WAITS, RUNS = program("b", WAITING, READY, 10), program("r", DEVICE, REASONING, 1)
TOOL, LONG_TOOL = acting("a", 15, (5.0,), rebuild_s=20.0), acting("a", 15, (30.0,), rebuild_s=10.0)
CHEAP, UNKNOWN = acting("a", 15, (20.0,)), acting("a", 15, (), NOW - 6.0, rebuild_s=0.0)
MANY = [program(f"r{n}", DEVICE, REASONING, 1) for n in range(8)]
BELOW: dict[str, Any] = {"host": 20, "load_s": 0.01}
DROPPED, COPIED = {"a": WAITING, "b": DEVICE}, {"a": HOST, "b": DEVICE}
FOUR = [acting(f"a{n}", 10, (5.0,), rebuild_s=20.0) for n in range(4)]
LARGE = program("b", WAITING, READY, 40)


@pytest.mark.parametrize(
    ("case", "programs", "view", "moved"),
    [
        ("20 s to compute again, 5 s of space", [TOOL, WAITS], {}, {}),
        ("little to copy", [TOOL, WAITS], BELOW, COPIED),
        ("15 s to copy", [TOOL, WAITS], {**BELOW, "load_s": 1.0}, {}),
        ("15 s until the link is free", [TOOL, WAITS], {**BELOW, "queue_s": 15.0}, {}),
        ("no room for it", [TOOL, WAITS], {**BELOW, "host": 14}, {}),
        ("an unknown copy costs as much as computing", [TOOL, WAITS], {"host": 20}, {}),
        ("nothing is dropped at an unknown cost", [acting("a", 15, (600.0,), rebuild_s=0.0), WAITS], {}, {}),
        ("but an engine that stands still does not wait for it", [UNKNOWN, WAITS], {}, DROPPED),
        ("this one does not stand still", [UNKNOWN, WAITS, RUNS], {}, {}),
        ("to compute again delays no other program", [LONG_TOOL, WAITS], {}, DROPPED),
        ("computing delays many", [LONG_TOOL, WAITS, *MANY], {"device": 28}, {}),
        # With steps that grow with each request, one more program only slows the others.
        ("the device has time for one more", [RUNS, CHEAP, WAITS], {}, DROPPED),
        ("it computes prompts all the time", [RUNS, CHEAP, WAITS], {"prefill_share": 1.0}, {}),
        ("it reads contexts all the time", [RUNS, CHEAP, WAITS], {"kv_read_share": 1.0}, {}),
        ("it reads contexts for a third of it", [RUNS, CHEAP, WAITS], {"kv_read_share": 0.3}, DROPPED),
        ("three would be dropped", [*FOUR, LARGE], {"device": 40, "host": 10, "load_s": 0.001}, {}),
        (
            "each victim has room of its own below",
            [*FOUR, LARGE],
            {"device": 40, "host": 40, "load_s": 0.001},
            {"b": DEVICE, **dict.fromkeys(("a0", "a1", "a2", "a3"), HOST)},
        ),
        (
            "the least valuable, and no more than needed",
            [acting("short", 5, (1.0,)), acting("long", 5, (600.0,)), acting("a", 5, (900.0,)), WAITS],
            {"device": 20},
            DROPPED,
        ),
        (
            "what will not come back goes first",
            [acting("likely", 5, (1.0,)), acting("a", 5, (1.0,), return_chance=0.0), WAITS],
            {"device": 15},
            DROPPED,
        ),
    ],
)
def test_a_place_is_taken_by_who_gains_more_by_it(
    case: str, programs: list[ProgramTierView], view: dict[str, Any], moved: dict[str, Tier]
) -> None:
    assert {name: move.to for name, move in answer(*programs, **view).items()} == moved, case


def test_of_many_ready_programs_below_the_device_the_first_may_take_anothers_place() -> None:
    leaves = acting("a", 9, (600.0,), rebuild_s=0.01)
    busy = program("busy", DEVICE, REASONING, 11)
    large = [program(f"l{number:03}", HOST, READY, 30) for number in range(2 * MAX_EXCHANGES)]
    small = program("small", HOST, READY, 9, arrived_s=1.0)
    assert "small" in answer(leaves, busy, *large[1:MAX_EXCHANGES], small, host=9000)
    assert "small" not in answer(leaves, busy, *large[:MAX_EXCHANGES], small, host=9000)
    new = program("new", WAITING, READY, 9, arrived_s=1.0)
    assert "new" in answer(leaves, busy, *large, new, host=9000), "the Waiting queue has a limit of its own"


def test_where_computing_again_is_cheap_no_program_waits_for_contexts_or_for_growth() -> None:
    def entered(hold_cost: float = 0.9, **view: Any) -> set[str]:
        found = answer(
            acting("long", 15, (60.0,)), acting("short", 15, (0.1,)),
            program("r", DEVICE, REASONING, 5, peak=30), program("back", WAITING, READY, 25, returning=True),
            program("large", WAITING, READY, 40), hold_cost=hold_cost, device=40, **view,
        )  # fmt: skip
        return {name for name, move in found.items() if move.to is DEVICE}

    assert entered() == {"back"}, "in place of both, although one returns at once"
    for other in (entered(hold_cost=MAX_HOLD_COST), entered(host=1)):
        assert other == set()


@pytest.mark.parametrize(
    ("blocks", "waited_s", "enters"), [(7, SMALL_PATIENCE_S, True), (7, 4.9, False), (8, 60.0, False)]
)
def test_a_small_program_waits_for_seconds_for_the_growth_of_others(
    blocks: int, waited_s: float, enters: bool
) -> None:
    resident = program("a", DEVICE, REASONING, 10, peak=60)  # reserves 45 of 40 blocks, and leaves 30 free
    small = program("b", WAITING, READY, 2, peak=blocks, since_s=NOW - waited_s)
    assert ("b" in answer(resident, small, device=40)) is enters


# -- room to grow --------------------------------------------------------------------------------


def test_growth_is_reserved_on_the_device_for_a_time_after_kv_was_lost() -> None:
    resident, waiting = program("a", DEVICE, REASONING, 10, peak=20), program("b", WAITING, READY, 5)
    for view, enters in (
        ({}, False),  # 10 + 0.7 · 10 + 5 > 20
        ({"policy": {"reserve": 0.5}}, True),
        ({"host": 20, "load_s": 0.01}, True),  # an eviction does not mean computing again
        ({"shortage_s": float("-inf")}, True),
        ({"shortage_s": NOW - 100.0}, False),  # 10 + 0.7 · 5/6 · 10 + 5 > 20
        ({"shortage_s": NOW - 400.0}, True),  # 10 + 0.7 · 1/3 · 10 + 5 < 20
    ):
        assert ("b" in answer(resident, waiting, **view)) is enters, view


def test_over_capacity_acting_programs_leave_before_reasoning_ones() -> None:
    moves = answer(
        acting("a", 8, (1.0,)), program("r", DEVICE, REASONING, 8, arrived_s=1.0),
        program("s", DEVICE, REASONING, 8, arrived_s=2.0), device=12,
    )  # fmt: skip
    assert moves["a"].when is MoveTiming.NOW
    assert moves["s"].when is MoveTiming.AFTER_TURN, "the latest of the reasoning ones"
    assert set(moves) == {"a", "s"}


# -- order and bounds ----------------------------------------------------------------------------


def test_saved_contexts_enter_before_dropped_ones_and_new_programs_each_in_the_order_of_arrival() -> None:
    line = [
        program("new", WAITING, READY, 5, arrived_s=1.0),
        program("dropped, later", WAITING, READY, 5, arrived_s=3.0, returning=True),
        program("dropped", WAITING, READY, 5, arrived_s=2.0, returning=True),
        program("saved, later", HOST, READY, 5, arrived_s=5.0, returning=True),
        program("saved", HOST, READY, 5, arrived_s=4.0, returning=True),
    ]
    order = [name.program_id for name in reversed(line)]
    for places in (1, 2, 3, 4, 5):
        assert list(answer(*line, device=5 * places, host=10)) == order[:places]
    overdue = program("dropped", WAITING, READY, 5, arrived_s=1.0, returning=True, since_s=NOW - 3601.0)
    assert "dropped" in answer(overdue, *line[3:], device=10, host=10), "not for ever"


# -- room in all tiers ---------------------------------------------------------------------------


CALM: dict[str, Any] = {"load_s": 0.01, "shortage_s": float("-inf")}


def least_host(*programs: ProgramTierView) -> int:
    """The least host memory, of as many blocks as the device or more, with which the new program begins."""
    return next(host for host in range(20, 400) if "b" in answer(*programs, host=host, **CALM))


def test_a_new_program_begins_only_where_no_context_must_be_dropped_later() -> None:
    new, here = program("b", WAITING, READY, 10), program("r", DEVICE, REASONING, 10)
    tool: dict[str, Any] = {"gap_durations_s": (5.0,), "gap_since_s": NOW, "rebuild_s": 100.0}
    below = [program(f"h{n}", HOST, ACTING, 10, **tool) for n in range(2)]
    assert least_host(here, *below, new) == 20, "10 are free"
    # 0.7 of what all contexts are expected to grow must be free too, also before KV was ever lost.
    grows = program("r", DEVICE, REASONING, 10, peak=20)
    new = program("b", WAITING, READY, 10, peak=20)  # 7 blocks for its growth, 7 for that of the other
    assert least_host(grows, *below, new) == 34
    # A prior alone keeps nothing out: before enough turns were observed, nothing is reserved without a loss.
    assert "b" in answer(grows, *below, new, host=20, growth_observed=False, **CALM)
    # A program that runs tools for nine tenths of its time counts with a tenth of its growth.
    idle = Idleness(reasoning_s=1.0, acting_s=9.0)
    assert least_host(program("r", DEVICE, REASONING, 10, peak=20, idleness=idle), *below, new) == 28
    # So must what the new program is expected to grow, 0.7 of 20 blocks.
    assert least_host(here, *below, program("b", WAITING, READY, 10, peak=30)) == 34
    # Without a tier below, the room on the device decides.
    assert "b" in answer(here, program("b", WAITING, READY, 10))


def test_the_growth_of_others_counts_while_the_new_program_is_there() -> None:
    """A short program is over before a long one has grown much. A long one sees all of this growth."""
    long = program("r", DEVICE, REASONING, 10, peak=200)
    # Beside them 10 + host blocks are free. 10, 0.7 of its growth, and 0.7 of the other's growth must fit.
    for peak, host in ((10, 20), (40, 21 + 21), (200, 133 + 133), (300, 203 + 133)):
        assert least_host(long, program("b", WAITING, READY, 10, peak=peak)) == host


def test_little_memory_below_reserves_little_in_all_tiers() -> None:
    """Without a tier below nothing is reserved before a loss. A small tier must not change that much."""
    here, new = (program("r", DEVICE, REASONING, 10, peak=35), program("b", WAITING, READY, 9, peak=34))
    # 1 + host blocks stay free beside both. 0.7 · 50 are needed, and host/20 of that while less is below than
    # the device's 20 blocks.
    for host, begins in ((0, True), (1, True), (2, False), (33, False), (34, True)):
        moves = answer(here, new, host=host, **CALM)
        assert ("b" in moves) is begins, host
    # After a loss of KV, at least the share that is then reserved on the device: 0.7 of 24 blocks, of 16.
    here, new = (program("r", DEVICE, REASONING, 10, peak=22), program("b", WAITING, READY, 9, peak=21))
    for lost_s, begins in ((float("-inf"), True), (NOW, False)):
        assert ("b" in answer(here, new, host=15, load_s=0.01, shortage_s=lost_s)) is begins


def test_a_new_program_begins_where_what_is_dropped_is_worth_less() -> None:
    new = program("b", WAITING, READY, 10)
    here = program("r", DEVICE, REASONING, 20)
    for gap_s, enters in ((5.0, False), (600.0, True)):
        idle = [acting(f"a{n}", 10, (gap_s,), rebuild_s=10.0) for n in range(2)]
        below = program("h", HOST, ACTING, 20, gap_durations_s=(gap_s,), gap_since_s=NOW, rebuild_s=10.0)
        moves = answer(here, *idle, below, new, device=40, host=20, load_s=0.01)
        assert ("b" in moves) is enters


SERVICE_S = (100.0, 101.0, 102.0)


def started(name: str = "r", *, tier: Tier = DEVICE, blocks: int = 12, **more: Any) -> ProgramTierView:
    """A program that is about to end."""
    more = {"peak": 20, "service_s": SERVICE_S, "attained_s": 99.0, **more}
    return program(name, tier, more.pop("activity", REASONING), blocks, **more)


HALF, IDLE = Idleness(reasoning_s=1.0, acting_s=1.0), Idleness(reasoning_s=0.0, acting_s=1.0)
LONG = started(blocks=8, service_s=(1.0, 1.0, 1.0, 1000.0), attained_s=2.0)
GAP: dict[str, Any] = {"gap_durations_s": (5.0,), "gap_since_s": NOW}
IN_HOST = [started(f"h{n}", tier=HOST, activity=READY, idleness=HALF, returning=True) for n in range(2)]
NEARLY_DONE = started(
    "h", tier=HOST, activity=ACTING, blocks=1, peak=1, idleness=IDLE, attained_s=99.99, **GAP
)
TOOLS = [acting(f"a{n}", 6, (5.0,), service_s=SERVICE_S, attained_s=99.0, peak=20) for n in range(2)]


@pytest.mark.parametrize(
    ("case", "others", "new", "enters"),
    [
        # Of 20 blocks, the first uses 16 on average until it ends, and the second would use 6.
        ("the others use the whole device", [started()], {}, False),
        ("13 and 6 fit", [started(peak=14)], {}, True),
        ("16 and 6, and no tier below", [started()], {"host": 0}, False),
        ("an hour later", [started()], {"since_s": NOW - 3601.0}, True),
        ("one that ran before takes turns too", [started()], {"returning": True, "attained_s": 50.0}, False),
        ("it ends first", [started(attained_s=50.0)], {"returning": True, "attained_s": 99.0}, True),
        ("not urgent yet", [started(attained_s=50.0)], {"due_s": NOW + URGENT_S + 1.0}, False),
        ("urgent", [started(attained_s=50.0)], {"due_s": NOW + URGENT_S - 1.0}, True),
        ("as much is left of both: first come, first served", [started(attained_s=0.0)], {}, False),
        ("the other may take long", [LONG], {}, True),
        ("beside that, 4 and 6 fit", [LONG, started("s", blocks=4, peak=4)], {}, True),
        ("beside that, 16 and 6 do not", [LONG, started("s")], {}, False),
        ("sizes are unknown", [started(service_s=())], {"service_s": ()}, True),
        ("the size of its own type is known", [started(service_s=())], {}, False),
        ("of the device the other uses half of 16, and the new one of 6", [started(idleness=HALF)], {}, True),
        ("those in host memory return", [started(idleness=HALF), *IN_HOST], {}, False),
        ("one that uses no blocks is nearly done", [started(peak=14), NEARLY_DONE], {}, True),
        ("the others run tools", TOOLS, {}, True),
    ],
)
def test_a_new_program_waits_for_others_that_use_the_whole_device_and_are_worth_as_much(
    case: str, others: list[ProgramTierView], new: dict[str, Any], enters: bool
) -> None:
    """A new program of 6 blocks, a device of 20, and room for it in all tiers."""
    own = {"service_s": SERVICE_S, **new}
    host = own.pop("host", 100)
    moves = answer(*others, program("b", WAITING, READY, 6, **own), host=host, **CALM)
    assert ("b" in moves) is enters, case


def test_new_programs_that_enter_together_count_for_each_other() -> None:
    """Programs that are worth less than new ones do not let in any number of them at once."""
    long = started(blocks=4, peak=4, service_s=(1.0, 1.0, 1.0, 1000.0), attained_s=2.0)
    new = [program(f"b{n}", WAITING, READY, 3, service_s=SERVICE_S, peak=17) for n in range(4)]
    moves = answer(long, *new, device=20, host=100, **CALM)
    assert [name for name, move in moves.items() if move.to is DEVICE] == ["b0", "b1"], "10 blocks each"


def test_in_a_burst_of_new_programs_a_move_values_its_program_alone() -> None:
    class Counted(ResidencyPricePlacement):
        def worth(self, program: ProgramTierView) -> float:
            valued.append(program)
            return ResidencyPricePlacement().worth(program)

    valued: list[ProgramTierView] = []
    worth_little = {"peak": 20, "service_s": (1.0, 1.0, 1.0, 1000.0), "attained_s": 2.0}
    here = [program(f"r{n}", DEVICE, REASONING, 4, **worth_little) for n in range(100)]
    new = [program(f"b{n}", WAITING, READY, 3, service_s=SERVICE_S, peak=17) for n in range(48)]
    view = view_of(*here, *new, device=1000, host=1000, **CALM)
    assert len(Counted().moves(view, NOW)) == 48
    assert len(valued) < 400, "a hundred here and a few for each that enters"


def test_one_new_program_enters_while_the_others_run_tools() -> None:
    new = [program(f"b{n}", WAITING, READY, 3, service_s=SERVICE_S) for n in range(4)]
    moves = answer(*TOOLS, *new, host=100, **CALM)
    assert [name for name, move in moves.items() if move.to is DEVICE] == ["b0"], (
        "the next would take turns from it"
    )


def test_of_several_dropped_programs_one_a_minute_passes_the_contexts_below() -> None:
    saved = [program(f"saved{n}", HOST, READY, 5, arrived_s=10.0 + n, returning=True) for n in range(4)]
    dropped = [
        program(f"dropped{n}", WAITING, READY, 5, arrived_s=n, returning=True, since_s=NOW - 3610.0 + n)
        for n in range(3)
    ]
    for last_s, enter in ((NOW - 59.0, ["saved0", "saved1"]), (NOW - 61.0, ["dropped0", "saved0"])):
        assert list(answer(*saved, *dropped, device=10, host=20, overdue_s=last_s)) == enter


def test_of_new_programs_those_of_the_smallest_size_class_enter_first_and_of_these_the_earliest() -> None:
    line = [
        program("large", WAITING, READY, 15, arrived_s=1.0),
        program("less", WAITING, READY, 8, arrived_s=2.0),
        program("small", WAITING, READY, 7, arrived_s=3.0),
    ]
    assert list(answer(*line, device=15)) == ["small", "less"]
    assert list(answer(*line[:2], device=15)) == ["large"], "8 to 15 blocks count as equal"


def test_a_program_that_waited_for_too_long_enters_whatever_it_costs() -> None:
    for tier, patience_s in ((HOST, 300.0), (WAITING, 3600.0)):
        for waited_s in (patience_s - 1.0, patience_s + 1.0):
            waiting = program("b", tier, READY, 20, since_s=NOW - waited_s)
            here = acting("a", 15, (1.0,), rebuild_s=100.0)
            moves = answer(here, waiting, host=20 if tier is HOST else 0)
            entry = moves.get("b")
            assert (entry is not None and entry.reason is MoveReason.OVERDUE) is (waited_s > patience_s)
            assert ("a" in moves) is (waited_s > patience_s)
    moves = answer(program("r", DEVICE, REASONING, 15), waiting)
    assert moves["r"].when is MoveTiming.AFTER_TURN
    assert "b" not in moves, "it enters when that turn has ended"


def test_who_is_due_soon_or_more_important_than_most_enters_first() -> None:
    here = program("r", DEVICE, REASONING, 15)

    def first(**hints: Any) -> str:
        line = [program(f"b{n}", WAITING, READY, 5, since_s=NOW - 9.0 + n) for n in range(3)]
        return next(iter(answer(here, *line, program("hinted", WAITING, READY, 5, **hints))))

    assert first() == "b0"
    assert first(importance=1) == "hinted"
    assert first(importance=-1) == "b0"
    assert first(due_s=NOW + URGENT_S - 1.0) == "hinted"
    assert first(due_s=NOW + URGENT_S + 1.0) == "b0"
    assert first(due_s=NOW - 1.0) == "hinted"
    assert first(due_s=NOW - URGENT_S - 1.0) == "b0", "its deadline has long passed"


def test_an_urgent_program_is_worth_more() -> None:
    for due_s, leaves in ((NOW + 10.0, True), (NOW + 9999.0, False)):
        waiting = program("b", WAITING, READY, 19, due_s=due_s)
        # Its value per second is between one and ``URGENT_WORTH``.
        here = acting("a", 15, (1.0,), rebuild_s=2.0)
        assert ("a" in answer(here, program("r", DEVICE, REASONING, 1), waiting)) is leaves


def test_where_the_work_left_is_stated_the_least_enters_first() -> None:
    new_s = (100.0,)
    line = [
        program(name, WAITING, READY, blocks, service_s=(left_s,), new_service_s=new_s, work_stated=True)
        for name, blocks, left_s in (("long", 5, 100.0), ("short", 5, 10.0), ("large", 10, 30.0))
    ]
    assert list(answer(*line, device=20)) == ["short", "large", "long"]


def test_an_overdue_program_does_not_keep_others_out_while_it_waits_for_a_long_turn() -> None:
    """One answer of 10 blocks and one large context kept eight programs out for 20 minutes."""
    overdue = program("overdue", HOST, READY, 19, since_s=NOW - 400.0)
    other = program("other", HOST, READY, 5)
    for ran_s, first in ((299.0, "runs"), (300.0, "other")):
        runs = program("runs", DEVICE, REASONING, 2, running_since_s=NOW - ran_s)
        found = answer(runs, overdue, other, host=30)
        assert found.keys() == {first}
    assert answer(other, overdue, host=30).keys() == {"overdue"}, "it waits for no turn"


@pytest.mark.parametrize("untracked", [0, 19, 20, 30])
def test_one_program_enters_beside_requests_without_a_program_that_fill_the_device(untracked: int) -> None:
    waiting = [program(f"w{number}", WAITING, READY, 18) for number in range(5)]
    assert len(answer(*waiting, untracked=untracked)) == 1


def test_the_example_of_the_documentation() -> None:
    """docs/policy.md decides it by hand."""
    calls_s = (1.0, 1.0, 1.0, 60.0)
    waiting = program("b", WAITING, READY, 500)
    others = [program(f"r{number}", DEVICE, REASONING, 100) for number in range(4)]
    for elapsed_s, host, hold, moves in (
        (2.0, 0, 0.00034, True),
        (2.0, 1000, 0.00000086, True),
        (0.0, 0, 0.012, False),
        (0.0, 1000, 0.00003, True),
    ):
        tool = acting("a", 600, calls_s, NOW - elapsed_s, rebuild_s=3.0)
        found = answer(
            tool, *others, waiting,
            device=1000, host=host, load_s=0.0002, prefill_share=0.5, kv_read_share=0.5,
        )  # fmt: skip
        assert ("b" in found) is moves
        if moves:
            terms = {"hold_value": hold, "price": 0.0005}
            assert dict(found[tool.program_id].terms) == pytest.approx(terms, rel=0.05)
