"""The closed list of metrics: what may be counted, under which labels, and with which label values.

Closed, because every label value is a time series that somebody has to store. A
program, session or call id is never a label; the two open kinds of label are
bounded elsewhere: ``TOOL`` by the recorder (``MAX_TOOLS`` learnt names, the rest is
``other``), ``TEXT`` by occurring only on gauges that say one thing per process.
The API server adds ``engine`` to each of them, the engine's index, in vLLM's word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from sojourn_server.policy.placement import MoveReason, When
from sojourn_server.policy.placement_views import Tier
from sojourn_server.policy.recovery import Recovery
from sojourn_server.program.status import ProgramStatus

from .ledger import Lost

MAX_TOOLS = 32
"""Tool names that become label values of their own, per engine."""
OTHER_TOOL = "other"
"""The label of all tools beyond those."""
MAX_TEXT_CHARS = 64
"""Longest value of an open label, in characters; longer ones are cut."""
ENGINE_LABEL = "engine"
SERIES_BUDGET = 3000
"""Most lines one engine may add to the exposition, comments included."""


class Kind(str, Enum):
    """The three types of metric in use."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class OpenLabel(Enum):
    """Labels whose values are not known beforehand."""

    TOOL = "tool"
    TEXT = "text"


Values = frozenset[str] | OpenLabel
"""What a label may say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One metric."""

    name: str
    """As scraped; counters end in ``_total``, units are spelled out."""
    kind: Kind
    help: str
    labels: Mapping[str, Values] = field(default_factory=lambda: MappingProxyType({}))
    """Label name → its possible values, in the order in which they are kept."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, ascending, without +Inf."""
    shown_at_zero: frozenset[tuple[str, ...]] | None = None
    """Of a counter the label values that are there before anything is counted, in the order of ``labels``;
    ``None``: all combinations. Others appear as they are counted."""

    def series(self) -> int:
        """Most sample lines one engine can make of this metric."""
        combinations = 1
        for values in self.labels.values():
            if isinstance(values, frozenset):
                combinations *= len(values)
            elif values is OpenLabel.TOOL:
                combinations *= MAX_TOOLS + 1
        # A histogram has its buckets, +Inf, _sum, _count; the client adds _created to all but gauges.
        each = {Kind.COUNTER: 2, Kind.GAUGE: 1, Kind.HISTOGRAM: len(self.buckets) + 4}[self.kind]
        return combinations * each


TIERS = frozenset({"device"})
LOWER_TIERS = frozenset({"host", "disk"})
TIER_STATES = frozenset({"used", "free"})
TIER_MOVES = frozenset(
    {
        "saved",
        "stored",
        "kept",
        "no_room",
        "loaded",
        "failed",
        "discarded",
        "dropped",
        "dropped_on_disk",
        "disk_dropped",
    }
    | {"spilled", "spill_full", "spill_failed", "spill_missing"}
    | {"staged", "stage_missing", "stage_corrupt", "stage_failed", "gave_up"}
)
"""What became of blocks below the device; ``docs/tiers.md`` says what each means."""
LANES = frozenset({"to_host", "to_device", "to_disk", "from_disk"})
LINKS = frozenset({"storage", "compute"})
LINK_DIRECTIONS = frozenset({"read", "write", "sent", "received"})
LINK_LANES = frozenset(
    {("storage", "read"), ("storage", "write"), ("compute", "sent"), ("compute", "received")}
)
"""Links, each in its own directions."""
SLOT_STATES = frozenset({"used", "free"})
PATH_OUTCOMES = frozenset(
    {"loads_whole", "loads_short", "loads_aborted"}
    | {"pushes_complete", "pushes_failed", "pushes_refused", "prompts_complete", "prompts_failed"}
    | {"blocks_read", "blocks_unread", "blocks_merged", "blocks_not_filled"}
    | {"write_stored", "write_already", "write_full", "write_disk_full", "write_failed", "write_stalled"}
    | {"writes_refused", "leases_expired", "stalls", "refused", "stale", "too_large", "errors"}
)
"""What became of loads, pushes, contexts and blocks on the paths (``docs/dualpath-transport.md``)."""
PROGRAM_STATES = frozenset(status.value for status in ProgramStatus)
TURN_OUTCOMES = frozenset({"stopped", "length", "aborted", "error"})
PROGRAM_OUTCOMES = frozenset({"ok", "error", "cancelled", "silent"})
"""As the client reported it, or ``silent`` where the program was given up."""
PREEMPTION_MODES = frozenset(recovery.value for recovery in Recovery)
KV_STATES = frozenset({"running", "leased", "cached", "free"})
PREFETCH_OUTCOMES = frozenset({"in_place", "in_host", "from_disk", "no_tier"})
PROMPT_RESULTS = frozenset({"device", "host", "new", "tail", "lost"})
LOST_CAUSES = frozenset(cause.value for cause in Lost)
EVICTION_CAUSES = LOST_CAUSES - {Lost.CHANGED.value, Lost.PREEMPTED.value}
"""Why the evicted block was free to take, in the ledger's words. Blocks of no program are not counted."""
LEASE_ENDS = frozenset({"ttl", "return", "end", "silent", "pressure", "reset", "superseded", "placed"})
PLACES = frozenset(tier.value for tier in Tier)
MOVE_TIMES = frozenset(when.value for when in When)
MOVE_REASONS = frozenset(reason.value for reason in MoveReason)
_BELOW = (Tier.HOST, Tier.DISK, Tier.WAITING)
_UP = (
    MoveReason.FREE_CAPACITY, MoveReason.OVERDUE, MoveReason.STANDSTILL, MoveReason.ABSENT,
    MoveReason.EXCHANGE, MoveReason.KEPT, MoveReason.GIVEN_UP,
)  # fmt: skip
_DOWN = (MoveReason.OVER_CAPACITY, MoveReason.OVERDUE, MoveReason.STANDSTILL, MoveReason.ABSENT)
PLACEMENTS = frozenset(
    (to.value, when.value, reason.value)
    for to, when, reason in (
        *((Tier.DEVICE, When.NOW, reason) for reason in _UP),
        *((to, When.NOW, reason) for to in _BELOW for reason in _DOWN),
        # For these two also those who reason are told to leave.
        *((to, When.AFTER_TURN, reason) for to in _BELOW for reason in _DOWN[:2]),
        *((to, When.NOW, MoveReason.EXCHANGE) for to in (Tier.HOST, Tier.DISK)),
        (Tier.DISK, When.NOW, MoveReason.HOST_FULL),
        (Tier.WAITING, When.NOW, MoveReason.OVER),
    )
)
"""Where, when and why our own policies move programs: a third of what the labels could say. A policy of the
user's own may do more."""
GAP_SOURCES = frozenset({"reported", "inferred"})
EVENT_TYPES = frozenset(
    {"program_start", "tool_start", "tool_stop", "heartbeat", "aeg", "program_end", "unknown"}
)
OUTCOMES = frozenset({"applied", "deferred", "duplicate", "clipped", "rejected", "unsupported", "missing"})
HOOKS = frozenset({"retention", "event"})
DROP_REASONS = frozenset({"unknown_metric", "wrong_labels", "bad_value"})

GAP_BUCKETS_S = tuple(0.05 * 2**k for k in range(16))
"""0.05 s to 1,638 s, each twice the one before: tools last from milliseconds to half an hour."""
PROGRAM_BUCKETS_S = tuple(float(2**k) for k in range(16))
"""1 s to 32,768 s."""
CASCADE_BUCKETS = tuple(float(2**k) for k in range(9))
"""1 to 256 preemptions."""
RATIO_BUCKETS = tuple(2.0**k for k in range(-6, 7))
"""A 64th to 64 times."""
ATTENTION_BUCKETS_S = tuple(1e-3 * 2**k for k in range(13))
"""1 ms to 4.1 s."""
QUOTA_BUCKETS = (0.5, 0.8, 0.9, 0.95, 0.99, 1.0, 1.1, 1.5, 2.0)
"""Above 1 are steps that compute one block all the same."""
POLICY_BUCKETS_S = tuple(1e-6 * 4**k for k in range(11))
"""1 µs to 1.05 s, each four times the one before."""

METRICS_DROPPED = "sojourn_metrics_dropped_total"
"""Where a measurement outside this catalogue ends up."""


def _counter(
    name: str, help: str, shown_at_zero: frozenset[tuple[str, ...]] | None = None, **labels: Values
) -> MetricSpec:
    return MetricSpec(
        name=name,
        kind=Kind.COUNTER,
        help=help,
        labels=MappingProxyType(labels),
        shown_at_zero=shown_at_zero,
    )


def _gauge(name: str, help: str, **labels: Values) -> MetricSpec:
    return MetricSpec(name=name, kind=Kind.GAUGE, help=help, labels=MappingProxyType(labels))


def _histogram(name: str, help: str, buckets: tuple[float, ...], **labels: Values) -> MetricSpec:
    return MetricSpec(
        name=name, kind=Kind.HISTOGRAM, help=help, buckets=buckets, labels=MappingProxyType(labels)
    )


_ALL = (
    _gauge("sojourn_programs", "Programs known to the engine.", state=PROGRAM_STATES),
    _counter("sojourn_program_turns_total", "LLM requests of programs that finished.", outcome=TURN_OUTCOMES),
    _counter("sojourn_programs_finished_total", "Programs that ended.", outcome=PROGRAM_OUTCOMES),
    _histogram(
        "sojourn_program_duration_seconds",
        "Time from a program's first request or start event to its end.",
        PROGRAM_BUCKETS_S,
    ),
    _gauge("sojourn_kv_blocks", "KV blocks by what holds them.", tier=TIERS, state=KV_STATES),
    _gauge("sojourn_kv_bytes", "KV bytes by what holds them.", tier=TIERS, state=KV_STATES),
    _gauge("sojourn_tier_blocks", "Blocks below the device.", tier=LOWER_TIERS, state=TIER_STATES),
    _counter(
        "sojourn_tier_moves_total",
        "Blocks moved or lost below the device, by what became of them.",
        what=TIER_MOVES,
    ),
    _counter("sojourn_tier_bytes_total", "KV bytes copied, by direction.", lane=LANES),
    _counter("sojourn_tier_seconds_total", "Seconds for which copies of a direction ran.", lane=LANES),
    _counter(
        "sojourn_tier_wait_seconds_total",
        "Seconds for which forward passes waited for copies between device and host memory.",
    ),
    _gauge("sojourn_tier_jobs", "Copies between tiers that are under way or queued, in jobs."),
    _counter(
        "sojourn_link_bytes_total",
        "KV bytes that a link of this engine has moved: to and from storage, to and from other engines.",
        LINK_LANES,
        link=LINKS,
        direction=LINK_DIRECTIONS,
    ),
    _gauge(
        "sojourn_link_queued_seconds",
        "Seconds until what is asked of a link now would begin; 0 too where its speed is not known yet.",
        link=LINKS,
        direction=LINK_DIRECTIONS,
    ),
    _gauge(
        "sojourn_link_queued_bytes",
        "KV bytes that wait for a link, or are under way.",
        link=LINKS,
        direction=LINK_DIRECTIONS,
    ),
    _gauge("sojourn_path_slots", "Full Blocks that fit this engine's buffers, by state.", state=SLOT_STATES),
    _counter(
        "sojourn_path_outcomes_total",
        "Loads, pushes, contexts and blocks between engines and storage, by what became of them.",
        what=PATH_OUTCOMES,
    ),
    _counter(
        "sojourn_prompt_tokens_total",
        "Prompt tokens of programs' turns: reused on the device or from host memory, new, in the last "
        "partial block, or computed again because they were lost.",
        result=PROMPT_RESULTS,
    ),
    _counter(
        "sojourn_lost_tokens_total",
        "Tokens computed again, by why their KV was gone; those of preempted requests include their output.",
        cause=LOST_CAUSES,
    ),
    _counter(
        "sojourn_evictions_total",
        "Cached KV blocks evicted, by why they could be.",
        tier=TIERS,
        cause=EVICTION_CAUSES,
    ),
    _counter(
        "sojourn_evicted_bytes_total",
        "Cached KV bytes evicted, by why they could be.",
        tier=TIERS,
        cause=EVICTION_CAUSES,
    ),
    _counter(
        "sojourn_evictions_regretted_total",
        "Evicted KV blocks that their program asked for again.",
        tier=TIERS,
    ),
    _counter(
        "sojourn_prefetches_total",
        "Prefixes that were to be brought back before they are asked for, by what became of it.",
        outcome=PREFETCH_OUTCOMES,
    ),
    _gauge("sojourn_placed_programs", "Programs by the tier in whose queue they stand.", tier=PLACES),
    _counter(
        "sojourn_placements_total",
        "Programs that were moved to the queue of another tier, or told to leave after their turn.",
        PLACEMENTS,
        to=PLACES,
        when=MOVE_TIMES,
        reason=MOVE_REASONS,
    ),
    _counter("sojourn_gate_timeouts_total", "Requests refused because placement had kept them out too long."),
    _gauge("sojourn_leases", "Programs whose KV is leased while their tool runs."),
    _counter("sojourn_lease_ends_total", "Leases that ended, by why.", reason=LEASE_ENDS),
    _histogram("sojourn_lease_ttl_seconds", "TTL granted with a lease.", GAP_BUCKETS_S, tool=OpenLabel.TOOL),
    _histogram(
        "sojourn_tool_gap_seconds",
        "Time between a turn's end and the program's next request.",
        GAP_BUCKETS_S,
        tool=OpenLabel.TOOL,
    ),
    _counter(
        "sojourn_tool_gap_source_total",
        "Tool gaps by whether the client reported them or the engine inferred them from requests.",
        source=GAP_SOURCES,
    ),
    _counter(
        "sojourn_events_total", "Events received, by what became of them.", type=EVENT_TYPES, outcome=OUTCOMES
    ),
    _counter("sojourn_hints_total", "Hints received, by what became of them.", outcome=OUTCOMES),
    _counter(
        "sojourn_preemptions_total",
        "Running requests that were preempted, by how they resume.",
        mode=PREEMPTION_MODES,
    ),
    _histogram(
        "sojourn_preemption_cascade_length",
        "Preemptions in a row, each within ten engine steps of the one before; 1: one alone.",
        CASCADE_BUCKETS,
    ),
    _histogram(
        "sojourn_step_attention_seconds",
        "Attention of a step that computes prompts, going by the profile. Only with a compute quota.",
        ATTENTION_BUCKETS_S,
    ),
    _histogram(
        "sojourn_step_quota_ratio",
        "Attention of a step in which not all prompts in line fitted, as a share of the compute quota.",
        QUOTA_BUCKETS,
    ),
    _counter("sojourn_quota_cuts_total", "Prompts that the compute quota cut, each step anew."),
    _histogram(
        "sojourn_output_length_ratio",
        "Tokens of outputs that ended, by how many were expected in their first 32 tokens: 1 is as expected.",
        RATIO_BUCKETS,
    ),
    _histogram(
        "sojourn_policy_seconds", "CPU time of one call into the policy.", POLICY_BUCKETS_S, hook=HOOKS
    ),
    _counter("sojourn_client_silent_total", "Clients that promised heartbeats and fell silent."),
    _gauge(
        "sojourn_build_info",
        "1, with what is running in its labels.",
        version=OpenLabel.TEXT,
        vllm=OpenLabel.TEXT,
        preset=OpenLabel.TEXT,
        adapter=OpenLabel.TEXT,
    ),
    _counter(METRICS_DROPPED, "Measurements dropped for not being in the catalogue.", reason=DROP_REASONS),
)

CATALOG: Mapping[str, MetricSpec] = MappingProxyType({spec.name: spec for spec in _ALL})
"""Every metric by its name."""
