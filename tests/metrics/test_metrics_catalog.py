"""The catalogue against the nouns it counts and against its own budget."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

from sojourn.events import AnyEvent
from sojourn.wire import Outcome
from sojourn_server.engine.desk import PROGRAM_OUTCOMES as PROGRAM_ENDS
from sojourn_server.engine.facts import TurnOutcome
from sojourn_server.metrics.catalog import (
    CATALOG,
    ENGINE_LABEL,
    EVENT_TYPES,
    LEASE_ENDS,
    OUTCOMES,
    PROGRAM_OUTCOMES,
    SERIES_BUDGET,
    TURN_OUTCOMES,
    Kind,
)
from sojourn_server.policy.base import Reason


def test_label_sets_are_the_enums_of_the_other_rooms() -> None:
    assert {outcome.value for outcome in TurnOutcome} == TURN_OUTCOMES
    assert {*PROGRAM_ENDS, "silent"} == PROGRAM_OUTCOMES
    assert {reason.value for reason in Reason} >= LEASE_ENDS
    assert {outcome.value for outcome in Outcome} == OUTCOMES
    wire_types = {event.__struct_config__.tag for event in get_args(AnyEvent)}
    assert wire_types | {"unknown"} == EVENT_TYPES


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
