"""The catalogue against the nouns it counts and against its own budget."""

from __future__ import annotations

import ast
import inspect
import math
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import get_args

from sojourn.ids import ProgramId
from sojourn.wire_codec import Outcome
from sojourn.wire_events import AnyEvent
from sojourn_server.core.events_and_actions import TurnFinishReason
from sojourn_server.kv_offload import host_block_pool, offload_scheduler
from sojourn_server.kv_offload.offload_jobs import CopyResult
from sojourn_server.metrics.metric_catalog import (
    ENGINE_LABEL,
    EVENT_TYPES,
    LEASE_ENDS,
    MAX_TOOLS,
    METRIC_CATALOG,
    OUTCOMES,
    PLACEMENTS,
    SERIES_BUDGET,
    TIER_MOVES,
    TURN_OUTCOMES,
    MetricKind,
    MetricSpec,
    OpenLabel,
)
from sojourn_server.policies.placement.placement_policy import MoveReason
from sojourn_server.policies.placement.placement_views import (
    PlacementView,
    ProgramActivity,
    ProgramTierView,
    Tier,
    TierCapacity,
)
from sojourn_server.policies.placement.relative_idleness import RelativeIdlenessPlacement
from sojourn_server.policies.policy_protocols import DecisionReason
from sojourn_server.programs.idleness import Idleness


def test_label_sets_are_the_enums_of_other_packages() -> None:
    assert {outcome.value for outcome in TurnFinishReason} == TURN_OUTCOMES
    ends = (
        DecisionReason.TTL, DecisionReason.RETURN, DecisionReason.END, DecisionReason.SILENT,
        DecisionReason.PRESSURE, DecisionReason.RESET, DecisionReason.SUPERSEDED, DecisionReason.PLACED,
        DecisionReason.SWITCHED_OFF,
    )  # fmt: skip
    assert {reason.value for reason in ends} == LEASE_ENDS
    assert {outcome.value for outcome in Outcome} == OUTCOMES
    wire_types = {event.__struct_config__.tag for event in get_args(AnyEvent)}
    assert wire_types | {"unknown"} == EVENT_TYPES


def test_each_name_that_the_planners_count_is_a_tier_move() -> None:
    counted = set()
    for module in (offload_scheduler, host_block_pool):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript):
                counter = node.target.value
                if isinstance(counter, ast.Attribute) and counter.attr in ("counts", "_counts"):
                    counted.update(names_of(node.target.slice))
    assert {"saved", "spilled", "stage_missing", "dropped_on_disk"} <= counted, "the code was read"
    # A write checks no content, and a read takes no space on the disk.
    assert counted - {"spill_corrupt", "stage_full"} == TIER_MOVES


def names_of(key: ast.expr) -> Iterator[str]:
    """Every value that the key of a counter can have."""
    if isinstance(key, ast.Constant):
        yield str(key.value)
    elif isinstance(key, ast.IfExp):
        yield from names_of(key.body)
        yield from names_of(key.orelse)
    else:
        assert isinstance(key, ast.JoinedStr), ast.unparse(key)
        prefix, result = key.values
        assert isinstance(prefix, ast.Constant)
        assert isinstance(result, ast.FormattedValue)
        assert ast.unparse(result.value) == "copy_result.value"
        yield from (f"{prefix.value}{each.value}" for each in CopyResult if each is not CopyResult.MOVED)


def test_what_is_shown_at_zero_can_be_counted() -> None:
    for spec in METRIC_CATALOG.values():
        for values in spec.shown_at_zero or ():
            assert spec.kind is MetricKind.COUNTER
            assert all(value in spec.labels[name] for name, value in zip(spec.labels, values, strict=True))
    assert {reason for _, _, reason in PLACEMENTS} == {reason.value for reason in MoveReason}


def test_our_policy_moves_programs_as_the_metric_says() -> None:
    """On random devices, over or under capacity, with and without room below."""
    draw = random.Random(5)
    seen: set[tuple[str, str, str]] = set()
    for _ in range(4000):
        policy = RelativeIdlenessPlacement(
            standstill_s=draw.choice([0.5, math.inf]),
            patience_s=draw.choice([30.0, math.inf]),
            absent_s=draw.choice([60.0, math.inf]),
        )
        moves = policy.moves(drawn_view(draw), now=1000.0)
        seen |= {(move.to.value, move.when.value, move.reason.value) for move in moves}
    assert seen <= PLACEMENTS
    by_others = {
        reason.value
        for reason in (MoveReason.GIVEN_UP, MoveReason.OVER, MoveReason.FUTILE, MoveReason.EXCHANGE)
    }
    assert {reason for _, _, reason in PLACEMENTS - seen} <= by_others, "all of these do happen"


def drawn_view(draw: random.Random) -> PlacementView:
    def programs(tier: Tier, most: int, activities: Sequence[ProgramActivity]) -> list[ProgramTierView]:
        return [
            ProgramTierView(
                program_id=ProgramId(f"{tier.value}{number}"),
                tier=tier,
                activity=draw.choice(activities),
                idleness=Idleness(
                    reasoning_s=draw.choice([1.0, 50.0]), acting_s=draw.choice([0.0, 50.0, 900.0])
                ),
                context_blocks=draw.choice([0, 4, 10]),
                required_blocks=draw.choice([1, 12]),
                waiting_since_s=draw.choice([900.0, 999.0]),
                last_active_s=draw.choice([900.0, 999.0]),
                pending=tier is Tier.DEVICE and draw.random() < 0.2,
            )
            for number in range(draw.randrange(most))
        ]

    calm = draw.choice([[ProgramActivity.ACTING], list(ProgramActivity)])
    return PlacementView(
        device=TierCapacity(capacity_blocks=draw.choice([10, 40])),
        host=TierCapacity(capacity_blocks=draw.choice([0, 15, 60])),
        disk=TierCapacity(capacity_blocks=draw.choice([0, 15, 60])),
        on_device=programs(Tier.DEVICE, 5, calm),
        on_host=programs(Tier.HOST, 4, [ProgramActivity.ACTING, ProgramActivity.READY]),
        on_disk=programs(Tier.DISK, 3, [ProgramActivity.ACTING, ProgramActivity.READY]),
        waiting=programs(Tier.WAITING, 4, [ProgramActivity.READY]),
    )


def test_names_follow_prometheus() -> None:
    for name, spec in METRIC_CATALOG.items():
        assert name.startswith("sojourn_")
        assert name.endswith("_total") == (spec.kind is MetricKind.COUNTER)
        assert bool(spec.buckets) == (spec.kind is MetricKind.HISTOGRAM)
        assert list(spec.buckets) == sorted(set(spec.buckets))
        assert spec.help.endswith(".")
        assert not {ENGINE_LABEL, "le", "program_id", "session_id", "request_id"} & set(spec.labels)


def sample_lines(spec: MetricSpec) -> int:
    """Maximum number of sample lines of this metric for one engine."""
    combinations = 1
    for values in spec.labels.values():
        if isinstance(values, frozenset):
            combinations *= len(values)
        elif values is OpenLabel.TOOL:
            combinations *= MAX_TOOLS + 1
    # A histogram has its buckets, +Inf, _sum and _count; the client adds _created to all but gauges.
    each = {MetricKind.COUNTER: 2, MetricKind.GAUGE: 1, MetricKind.HISTOGRAM: len(spec.buckets) + 4}
    return combinations * each[spec.kind]


def test_the_worst_case_stays_within_the_budget() -> None:
    comments = 4 * len(METRIC_CATALOG)  # HELP and TYPE, once more for _created
    assert sum(map(sample_lines, METRIC_CATALOG.values())) + comments <= SERIES_BUDGET


def test_the_engine_side_loads_no_metrics_library() -> None:
    code = (
        "import sys, sojourn_server.metrics.metrics_recorder as r; r.MetricsRecorder();"
        "print([m for m in ('prometheus_client', 'vllm', 'torch', 'fastapi') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"
