"""The list of all metrics, with their labels and label values. A metric that is not listed here is not
counted.

Label values are listed too, because each one is a time series that takes storage. A program, session or call
id is never a label. The values of an ``OpenLabel`` are not listed, but their number is bounded. The recorder
keeps ``MAX_TOOLS`` values of ``TOOL`` and counts the rest as ``other``. ``TEXT`` occurs only on gauges with
one value per process. The API server adds the label ``engine``, the engine's index, as vLLM does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import MappingProxyType

from sojourn_server.policies.placement.placement_policy import MoveReason, MoveTiming
from sojourn_server.policies.placement.placement_views import Tier
from sojourn_server.policies.preemption_policies import RecoveryMethod
from sojourn_server.programs.program_status import ProgramOutcome, ProgramStatus

from .turn_ledger import LossCause

MAX_TOOLS = 32
"""Maximum number of tool names used as label values, per engine."""
FIRST_TOOLS = 16
"""Number of tool names that become label values at once; one beyond them does after ``FREQUENT_CALLS``."""
FREQUENT_CALLS = 8
OTHER_TOOL = "other"
"""Value of the label for all tools beyond ``MAX_TOOLS``."""
MAX_TEXT_CHARS = 64
"""Maximum length of an open label's value; longer values are cut."""
ENGINE_LABEL = "engine"
SERIES_BUDGET = 3000
"""Maximum number of lines that one engine adds to the ``/metrics`` page, comments included."""


class MetricKind(str, Enum):
    """The Prometheus type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class OpenLabel(Enum):
    """Labels whose values are not known in advance."""

    TOOL = "tool"
    TEXT = "text"


LabelValues = frozenset[str] | OpenLabel
"""The allowed values of a label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """Definition of one metric: name, type, help text and allowed labels."""

    name: str
    """Name on the ``/metrics`` page; counters end in ``_total``, units are spelled out."""
    kind: MetricKind
    help: str
    labels: Mapping[str, LabelValues] = field(default_factory=dict)
    """Label name → its allowed values. A measurement's label values are stored in the order of these
    names."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, ascending, without +Inf."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TIER_MOVES = _words(
    "saved stored kept no_room loaded failed discarded dropped dropped_on_disk spilled spill_full "
    "spill_failed spill_missing staged stage_missing stage_corrupt stage_failed gave_up"
)
"""What happened to blocks in host memory and on disk; ``docs/kv-offload.md`` explains each value."""
LANES = _words("to_host to_device to_disk from_disk")
PATH_OUTCOMES = _words(
    "loads_whole loads_short loads_aborted pushes_complete pushes_failed pushes_refused prompts_complete "
    "prompts_failed blocks_read blocks_unread blocks_not_filled write_stored write_already write_full "
    "write_failed writes_refused leases_expired stalls refused too_large errors"
)
"""Results of KV transfers to and from storage and other engines (``docs/kv-transfer.md``). ``leases_expired``
counts leases on transfer buffers, not leases of programs."""
TURN_OUTCOMES = _words("stopped length prefilled aborted error")
PROMPT_RESULTS = _words("device host new tail lost unread")
LOST_CAUSES = frozenset(cause.value for cause in LossCause if cause is not LossCause.UNREAD)
EVICTION_CAUSES = LOST_CAUSES - {LossCause.CHANGED.value, LossCause.PREEMPTED.value}
"""Values of ``LossCause`` that say why no lease protected an evicted block. Evicted blocks without an owner
are not counted."""
LEASE_ENDS = _words("ttl return end silent pressure reset superseded placed switched_off")
EVENT_TYPES = _words("program_start tool_start tool_stop heartbeat aeg program_end unknown")
OUTCOMES = _words("applied deferred duplicate clipped rejected unsupported missing")

GAP_BUCKETS_S = tuple(0.05 * 2**k for k in range(16))
"""Bounds from 0.05 s to 1,638 s, doubling. Gaps between turns take from milliseconds to half an hour."""
PROGRAM_BUCKETS_S = tuple(float(2**k) for k in range(16))
"""Bounds from 1 s to 32,768 s, doubling."""
RATIO_BUCKETS = tuple(2.0**k for k in range(-6, 7))
"""Bounds from 1/64 to 64, doubling."""
ATTENTION_BUCKETS_S = tuple(1e-3 * 2**k for k in range(13))
"""Bounds from 1 ms to 4.1 s, doubling."""
QUOTA_BUCKETS = (0.5, 0.8, 0.9, 0.95, 0.99, 1.0, 1.1, 1.5, 2.0)
"""Bounds for the ratio of a step's attention time to the compute quota. The ratio exceeds 1 if not even one
block fits the quota, because the step then computes one block anyway."""
POLICY_BUCKETS_S = tuple(1e-6 * 4**k for k in range(11))
"""Bounds from 1 µs to 1.05 s, each 4 times the one before."""

METRICS_DROPPED = "sojourn_metrics_dropped_total"
"""Name of the counter of dropped measurements. A measurement is dropped if its metric or a label is not in
this catalogue, or if its value is invalid."""


_Values = str | Iterable[str] | OpenLabel


def _metric(
    kind: MetricKind, name: str, help: str, buckets: tuple[float, ...] = (), **labels: _Values
) -> MetricSpec:
    """Return a spec. The values of a label are words in a text, members of an enum, other texts, or open."""
    allowed: dict[str, LabelValues] = {}
    for label, values in labels.items():
        if isinstance(values, OpenLabel):
            allowed[label] = values
        else:
            listed = values.split() if isinstance(values, str) else values
            allowed[label] = frozenset(one.value if isinstance(one, Enum) else one for one in listed)
    return MetricSpec(name=name, kind=kind, help=help, buckets=buckets, labels=MappingProxyType(allowed))


_counter, _gauge, _histogram = (partial(_metric, kind) for kind in MetricKind)

_ALL = (
    _gauge("sojourn_programs", "Programs known to the engine.", state=ProgramStatus),
    _counter("sojourn_program_turns_total", "LLM requests of programs that finished.", outcome=TURN_OUTCOMES),
    _counter("sojourn_programs_finished_total", "Programs that ended.", outcome=ProgramOutcome),
    _histogram("sojourn_program_duration_seconds", "Time from a program's start to its end.",
        PROGRAM_BUCKETS_S),
    _gauge("sojourn_kv_blocks", "KV blocks by what holds them.",
        tier="device", state="running leased cached free"),
    _gauge("sojourn_kv_bytes", "KV bytes by what holds them.",
        tier="device", state="running leased cached free"),
    _gauge("sojourn_tier_blocks", "Blocks below the device.", tier="host disk", state="used free"),
    _counter("sojourn_tier_moves_total", "Blocks moved or lost below the device.", what=TIER_MOVES),
    _counter("sojourn_tier_bytes_total", "KV bytes copied.", lane=LANES),
    _counter("sojourn_tier_seconds_total", "Seconds during which copies ran.", lane=LANES),
    _counter("sojourn_tier_wait_seconds_total", "Seconds that forward passes waited for copies."),
    _gauge("sojourn_tier_jobs", "Copy jobs between tiers, running or queued."),
    _counter("sojourn_link_bytes_total", "KV bytes moved over a link: to and from storage or other engines.",
        link="storage compute", direction="read write sent received"),
    _gauge("sojourn_link_queued_seconds", "Seconds until a new transfer on a link would start; 0 if unknown.",
        link="storage compute", direction="read write sent received"),
    _gauge("sojourn_link_queued_bytes", "KV bytes queued or in flight on a link.",
        link="storage compute", direction="read write sent received"),
    _gauge("sojourn_path_slots", "Full Blocks in this engine's buffers.", state="used free"),
    _counter("sojourn_path_outcomes_total", "Loads, pushes, contexts and blocks between engines and storage.",
        what=PATH_OUTCOMES),
    _counter("sojourn_prompt_tokens_total",
        "Prompt tokens of programs' turns by origin, as in the turn ledger.", result=PROMPT_RESULTS),
    _counter("sojourn_lost_tokens_total",
        "Recomputed tokens, by why their KV was lost; outputs of preempted requests included.",
        cause=LOST_CAUSES),
    _counter("sojourn_evictions_total", "Cached KV blocks evicted, by why they were free.",
        tier="device", cause=EVICTION_CAUSES),
    _counter("sojourn_evicted_bytes_total", "Cached KV bytes evicted, by why they were free.",
        tier="device", cause=EVICTION_CAUSES),
    _counter("sojourn_evictions_regretted_total", "Evicted KV blocks that their program needed again.",
        tier="device"),
    _counter("sojourn_prefetches_total", "Prefixes to load back before their program's next request.",
        outcome="in_place in_host from_disk to_device no_tier"),
    _gauge("sojourn_placed_programs", "Programs by the tier of their placement queue.", tier=Tier),
    _counter("sojourn_placements_total",
        "Programs moved to another tier's queue, or marked to leave after their turn.",
        to=Tier, when=MoveTiming, reason=MoveReason),
    _gauge("sojourn_leases", "Programs whose KV is leased while their tool runs."),
    _counter("sojourn_lease_ends_total", "Leases that ended.", reason=LEASE_ENDS),
    _histogram("sojourn_lease_ttl_seconds", "TTL granted with a lease.", GAP_BUCKETS_S, tool=OpenLabel.TOOL),
    _histogram("sojourn_tool_gap_seconds", "Time between a turn's end and the program's next request.",
        GAP_BUCKETS_S, tool=OpenLabel.TOOL),
    _counter("sojourn_tool_gap_source_total", "Tool gaps, reported by the client or inferred from requests.",
        source="reported inferred"),
    _counter("sojourn_events_total", "Events received.", type=EVENT_TYPES, outcome=OUTCOMES),
    _counter("sojourn_hints_total", "Hints received.", outcome=OUTCOMES),
    _counter("sojourn_preemptions_total",
        "Requests that lost their blocks, by how they recover; load: KV was being loaded.",
        mode=[*RecoveryMethod, "load"]),
    _histogram("sojourn_step_attention_seconds",
        "Predicted attention time of a step with prompts. Only with a compute quota.", ATTENTION_BUCKETS_S),
    _histogram("sojourn_step_quota_ratio",
        "Attention time of a step that could not take all prompts over the compute quota.", QUOTA_BUCKETS),
    _counter("sojourn_quota_cuts_total", "Prompts cut by the compute quota, counted in each step."),
    _histogram("sojourn_output_length_ratio",
        "Final output tokens over the number predicted within the first 32.", RATIO_BUCKETS),
    _histogram("sojourn_policy_seconds", "CPU time of one policy call.",
        POLICY_BUCKETS_S, hook="retention event"),
    _counter("sojourn_client_silent_total", "Clients that announced heartbeats and stopped sending them."),
    _counter("sojourn_internal_errors_total",
        "Errors of sojourn in the engine, which goes on as stock vLLM would."),
    _gauge("sojourn_build_info", "Constant 1; the labels name the running versions.",
        version=OpenLabel.TEXT, vllm=OpenLabel.TEXT, preset=OpenLabel.TEXT, adapter=OpenLabel.TEXT),
    _counter(METRICS_DROPPED, "Measurements dropped: not in the catalogue.",
        reason="unknown_metric wrong_labels bad_value"),
)  # fmt: skip

METRIC_CATALOG: Mapping[str, MetricSpec] = MappingProxyType({spec.name: spec for spec in _ALL})
"""Every metric by its name."""
