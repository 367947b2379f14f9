"""Builds routing cores: from a cluster preset, or for prefill and decode engines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..policies.cluster_preset import ClusterPreset
from ..policies.prefill_decode.engine_pair_scheduler import (
    HIGH_TOKENS_RATIO,
    PairScheduler,
    PrefillSelectionLimits,
    ReadSidePolicy,
    ShorterQueueRead,
)
from .affinity_strategy import PREEMPTED_REASON, RELOCATED_REASON, AffinityStrategy, steal_reason
from .pair_strategy import PairStrategy
from .program_estimates import ProgramEstimator
from .routing_core import STORED_REASON, RoutingCore
from .routing_limits import RoutingLimits

PAIR_POLICY = "dualpath"
"""Name of the policy that chooses a prefill and a decode engine."""
PAIR_REASONS = ("pair",)
"""All values of ``SendRequest.reason`` for pairs."""
READ_SIDE_POLICIES: dict[str, type[ReadSidePolicy]] = {
    "shorter": ShorterQueueRead,
    "prefill": ReadSidePolicy,
}
"""Policies that choose which side of a pair reads KV from storage, by their names in the configuration."""


@dataclass(frozen=True, slots=True)
class PrefillDecodeRules:
    """An operator's settings for prefill and decode engines, used instead of a cluster preset."""

    read_side: str = "shorter"
    """A key of ``READ_SIDE_POLICIES``."""
    short_queue_s: float = 3.0
    """DualPath's α: the longest read queue, in seconds, that counts as short."""
    most_tokens_s: float = 5.0
    """DualPath's β, given as a time: a prefill engine with more unfinished tokens than it computes in this
    many seconds gets no new request. ``inf``: no limit."""
    high_tokens_ratio: float = HIGH_TOKENS_RATIO
    """DualPath's Z, given as a ratio: a decode engine counts as highly loaded if it has more than this
    multiple of its group's mean tokens per engine."""


def build_routing_core(preset: ClusterPreset, limits: RoutingLimits | None = None) -> RoutingCore:
    """Build a core from a cluster preset. The preset's ``send_below_load`` replaces that of ``limits``
    (``None``: the defaults)."""
    strategy = AffinityStrategy(
        preset.routing,
        preset.stealing,
        preset.sharing,
        preemption=preset.tenant_preemption,
        order=preset.waiting_order,
    )
    limits = replace(limits or RoutingLimits(), send_below_load=preset.send_below_load)
    return RoutingCore(strategy, limits, ProgramEstimator(preset.size_quantile))


def build_pair_core(
    rules: PrefillDecodeRules, limits: RoutingLimits | None = None, *, expects_engines: bool = False
) -> RoutingCore:
    """Build a core for pairs of a prefill and a decode engine. ``limits``: ``None`` for the defaults.
    ``expects_engines``: a supervisor starts missing engines. Raises ``ValueError`` for an unknown
    ``read_side``, and for rules out of range."""
    if rules.read_side not in READ_SIDE_POLICIES:
        raise ValueError(f"read_side is {rules.read_side!r}; expected {', '.join(READ_SIDE_POLICIES)}")
    pairs = PairScheduler(
        PrefillSelectionLimits(short_queue_s=rules.short_queue_s, most_tokens_s=rules.most_tokens_s),
        READ_SIDE_POLICIES[rules.read_side](),
        rules.high_tokens_ratio,
    )
    return RoutingCore(PairStrategy(pairs, expects_engines=expects_engines), limits)


def routing_reasons(preset: ClusterPreset | PrefillDecodeRules) -> tuple[str, ...]:
    """Return all known values of ``SendRequest.reason`` for a core with these rules. The reasons of a
    custom policy class are known only if the class lists them in an attribute ``reasons``."""
    if isinstance(preset, PrefillDecodeRules):
        return PAIR_REASONS
    routed: Iterable[str] = getattr(preset.routing, "reasons", ())
    stolen: Iterable[str] = getattr(preset.stealing, "reasons", ())
    preempted = (PREEMPTED_REASON,) if preset.tenant_preemption.is_used else ()
    always = (RELOCATED_REASON, STORED_REASON)
    return (*routed, *(steal_reason(reason) for reason in stolen), *preempted, *always)
