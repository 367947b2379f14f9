"""The catalogue against the nouns it counts and against its own budget."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import get_args

from sojourn.events import AnyEvent
from sojourn.ids import ProgramId
from sojourn.wire import Outcome
from sojourn_server.engine.desk import PROGRAM_OUTCOMES as PROGRAM_ENDS
from sojourn_server.engine.facts import TurnOutcome
from sojourn_server.metrics.catalog import (
    CATALOG,
    ENGINE_LABEL,
    EVENT_TYPES,
    LEASE_ENDS,
    OUTCOMES,
    PLACEMENTS,
    PROGRAM_OUTCOMES,
    SERIES_BUDGET,
    TURN_OUTCOMES,
    Kind,
)
from sojourn_server.policy.base import Reason
from sojourn_server.policy.placement import MoveReason
from sojourn_server.policy.placement_idleness import RelativeIdleness
from sojourn_server.policy.placement_views import (
    Activity,
    Occasion,
    PlacedProgram,
    PlacementView,
    Tier,
    TierState,
)
from sojourn_server.program.idleness import Idleness


def test_label_sets_are_the_enums_of_the_other_rooms() -> None:
    assert {outcome.value for outcome in TurnOutcome} == TURN_OUTCOMES
    assert {*PROGRAM_ENDS, "silent"} == PROGRAM_OUTCOMES
    assert {reason.value for reason in Reason} >= LEASE_ENDS
    assert {outcome.value for outcome in Outcome} == OUTCOMES
    wire_types = {event.__struct_config__.tag for event in get_args(AnyEvent)}
    assert wire_types | {"unknown"} == EVENT_TYPES


def test_what_is_shown_at_zero_can_be_counted() -> None:
    for spec in CATALOG.values():
        for values in spec.shown_at_zero or ():
            assert spec.kind is Kind.COUNTER
            assert all(value in spec.labels[name] for name, value in zip(spec.labels, values, strict=True))
    assert {reason for _, _, reason in PLACEMENTS} == {reason.value for reason in MoveReason}


def test_our_policy_moves_programs_as_the_metric_says() -> None:
    """On devices drawn at random, too full or too empty, with room below or none."""
    draw = random.Random(5)
    seen: set[tuple[str, str, str]] = set()
    for _ in range(4000):
        policy = RelativeIdleness(
            size_by=draw.choice(["context", "peak"]),
            standstill_s=draw.choice([0.5, math.inf]),
            patience_s=draw.choice([30.0, math.inf]),
            absent_s=draw.choice([60.0, math.inf]),
            exchange_reserve=draw.choice([0.0, 0.25, 1.0]),
        )
        moves = policy.moves(drawn_view(draw), now=1000.0)
        seen |= {(move.to.value, move.when.value, move.reason.value) for move in moves}
    assert seen <= PLACEMENTS
    by_the_placer = {MoveReason.GIVEN_UP.value, MoveReason.OVER.value}
    assert {reason for _, _, reason in PLACEMENTS - seen} <= by_the_placer, "all of these do happen"


def drawn_view(draw: random.Random) -> PlacementView:
    def programs(tier: Tier, most: int, activities: Sequence[Activity]) -> list[PlacedProgram]:
        return [
            PlacedProgram(
                program_id=ProgramId(f"{tier.value}{number}"),
                tier=tier,
                activity=draw.choice(activities),
                idleness=Idleness(
                    reasoning_s=draw.choice([1.0, 50.0]), acting_s=draw.choice([0.0, 50.0, 900.0])
                ),
                context_blocks=draw.choice([0, 4, 10]),
                wants_blocks=draw.choice([1, 12]),
                waiting_since_s=draw.choice([900.0, 999.0]),
                last_active_s=draw.choice([900.0, 999.0]),
                pending=tier is Tier.DEVICE and draw.random() < 0.2,
            )
            for number in range(draw.randrange(most))
        ]

    calm = draw.choice([[Activity.ACTING], list(Activity)])
    return PlacementView(
        why=Occasion.TICK,
        device=TierState(capacity_blocks=draw.choice([10, 40])),
        host=TierState(capacity_blocks=draw.choice([0, 15, 60])),
        disk=TierState(capacity_blocks=draw.choice([0, 15, 60])),
        on_device=programs(Tier.DEVICE, 5, calm),
        on_host=programs(Tier.HOST, 4, [Activity.ACTING, Activity.READY]),
        on_disk=programs(Tier.DISK, 3, [Activity.ACTING, Activity.READY]),
        waiting=programs(Tier.WAITING, 4, [Activity.READY]),
    )


def test_names_follow_prometheus() -> None:
    for name, spec in CATALOG.items():
        assert name.startswith("sojourn_")
        assert name.endswith("_total") == (spec.kind is Kind.COUNTER)
        assert bool(spec.buckets) == (spec.kind is Kind.HISTOGRAM)
        assert list(spec.buckets) == sorted(set(spec.buckets))
        assert spec.help.endswith(".")
        assert not {ENGINE_LABEL, "le", "program_id", "session_id", "request_id"} & set(spec.labels)


def test_the_worst_case_stays_within_the_budget() -> None:
    comments = 4 * len(CATALOG)  # HELP and TYPE, once more for _created
    assert sum(spec.series() for spec in CATALOG.values()) + comments <= SERIES_BUDGET


def test_the_engine_side_loads_no_metrics_library() -> None:
    code = (
        "import sys, sojourn_server.metrics.recorder as r; r.Recorder();"
        "print([m for m in ('prometheus_client', 'vllm', 'torch', 'fastapi') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"
