"""The catalogue against the nouns it counts and against its own budget."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import get_args

from sojourn.wire_codec import Outcome
from sojourn.wire_events import AnyEvent
from sojourn_server import kv_offload
from sojourn_server.core.events_and_actions import TurnFinishReason
from sojourn_server.kv_offload.offload_jobs import CopyResult
from sojourn_server.metrics.metric_catalog import (
    ENGINE_LABEL,
    EVENT_TYPES,
    LEASE_ENDS,
    MAX_TOOLS,
    METRIC_CATALOG,
    OUTCOMES,
    SERIES_BUDGET,
    TIER_MOVES,
    TURN_OUTCOMES,
    MetricKind,
    OpenLabel,
)
from sojourn_server.policies.policy_protocols import DecisionReason


def test_label_sets_are_the_enums_of_other_packages() -> None:
    assert {outcome.value for outcome in TurnFinishReason} == TURN_OUTCOMES
    assert {reason.value for reason in DecisionReason} >= LEASE_ENDS
    assert {outcome.value for outcome in Outcome} == OUTCOMES
    wire_types = {event.__struct_config__.tag for event in get_args(AnyEvent)}
    assert wire_types | {"unknown"} == EVENT_TYPES


def test_each_name_that_the_planners_count_is_a_tier_move() -> None:
    """The key of a counter is a word, or a prefix and the result of a copy."""
    text = "".join(path.read_text(encoding="utf-8") for path in Path(kv_offload.__file__).parent.glob("*.py"))
    keys = " ".join(re.findall(r"\b_?counts\[(.*)\] [+]=", text))
    results = [each.value for each in CopyResult if each is not CopyResult.MOVED]
    counted = {word for word in re.findall(r'"(\w+)"', keys)}
    counted |= {prefix + result for prefix in re.findall(r'"(\w+)\{', keys) for result in results}
    # A write checks no content, and a read takes no space on the disk.
    assert counted - {"spill_corrupt", "stage_full"} == TIER_MOVES


def test_names_follow_prometheus() -> None:
    for name, spec in METRIC_CATALOG.items():
        assert name.startswith("sojourn_")
        assert name.endswith("_total") == (spec.kind is MetricKind.COUNTER)
        assert bool(spec.buckets) == (spec.kind is MetricKind.HISTOGRAM)
        assert list(spec.buckets) == sorted(set(spec.buckets))
        assert spec.help.endswith(".")
        assert not {ENGINE_LABEL, "le", "program_id", "session_id", "request_id"} & set(spec.labels)


def test_the_worst_case_of_an_engine_stays_within_the_budget() -> None:
    lines = 4 * len(METRIC_CATALOG)  # HELP and TYPE, once more for _created
    for spec in METRIC_CATALOG.values():
        combinations = (MAX_TOOLS + 1) ** [*spec.labels.values()].count(OpenLabel.TOOL)
        combinations *= math.prod(len(one) for one in spec.labels.values() if isinstance(one, frozenset))
        # A histogram has its buckets, +Inf, _sum and _count; the client adds _created to all but gauges.
        each = {MetricKind.COUNTER: 2, MetricKind.GAUGE: 1, MetricKind.HISTOGRAM: len(spec.buckets) + 4}
        lines += combinations * each[spec.kind]
    assert lines <= SERIES_BUDGET
