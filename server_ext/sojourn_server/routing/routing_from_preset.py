"""Builds routing cores: from a cluster preset, or for prefill and decode engines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..policies.cluster_preset import ClusterPreset
from ..policies.prefill_decode.engine_pair_scheduler import PairScheduler
from ..policies.prefill_decode.engine_pair_scheduler import PrefillDecodeRules as PrefillDecodeRules
from .affinity_strategy import PREEMPTED_REASON, RELOCATED_REASON, AffinityStrategy
from .pair_strategy import PairStrategy
from .program_estimates import ProgramEstimator
from .routing_core import STORED_REASON, RoutingCore
from .routing_limits import RoutingLimits

PAIR_POLICY = "dualpath"
"""Name of the policy that chooses a prefill and a decode engine."""
PAIR_REASONS = ("pair",)
"""All values of ``SendRequest.reason`` for pairs."""


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


def build_pair_core(rules: PrefillDecodeRules, limits: RoutingLimits | None = None) -> RoutingCore:
    """Build a core for pairs of a prefill and a decode engine. ``limits``: ``None`` for the defaults."""
    return RoutingCore(PairStrategy(PairScheduler(rules)), limits)


def routing_reasons(preset: ClusterPreset | PrefillDecodeRules) -> tuple[str, ...]:
    """Return all known values of ``SendRequest.reason`` for a core with these rules. The reasons of a
    custom policy class are known only if the class lists them in an attribute ``reasons``."""
    if isinstance(preset, PrefillDecodeRules):
        return PAIR_REASONS
    routed: Iterable[str] = getattr(preset.routing, "reasons", ())
    stolen: Iterable[str] = getattr(preset.stealing, "reasons", ())
    preempted = (PREEMPTED_REASON,) if preset.tenant_preemption.is_used else ()
    always = (RELOCATED_REASON, STORED_REASON)
    return (*routed, *(f"stolen_{reason}" for reason in stolen), *preempted, *always)
