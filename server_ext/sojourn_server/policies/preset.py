"""Engine presets: a TOML file that names one policy for each question, such as retention or eviction."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from . import (
    admission_policies,
    eviction_policies,
    forecasting,
    lease_reclaim_policies,
    preemption_policies,
    prefetch_policies,
    queue_order_policies,
    retention_policies,
    workflow_prediction,
)
from .placement import placement_policy, relative_idleness, residency_price
from .policy_protocols import EndedKvHandling
from .preset_store import PresetError as PresetError
from .preset_store import PresetStore

POLICY_CLASSES: dict[str, dict[str, type]] = {
    "retention": {
        "none": retention_policies.RetentionPolicy,
        "fixed": retention_policies.FixedRetention,
        "continuum": retention_policies.ContinuumRetention,
        "least-waste": retention_policies.LeastWasteRetention,
        "tool-type": retention_policies.ToolTypeRetention,
    },
    "admission": {
        "everyone": admission_policies.AdmissionPolicy,
        "forecast-fits": admission_policies.DemandForecastAdmission,
        "room-to-grow": admission_policies.ExpectedGrowthAdmission,
        "whole-program": admission_policies.WholeProgramAdmission,
    },
    "order": {
        "request-fcfs": queue_order_policies.QueueOrderPolicy,
        "program-fcfs": queue_order_policies.ProgramFcfs,
        "programs-in-line": queue_order_policies.StrictProgramFcfs,
        "least-attained": queue_order_policies.LeastAttainedService,
    },
    "lease_reclaim": {
        "latest-program-first": lease_reclaim_policies.LatestProgramReclaim,
        "later-programs-first": lease_reclaim_policies.LaterProgramsReclaim,
        "any-lease": lease_reclaim_policies.LeaseReclaimPolicy,
        "least-wanted-first": lease_reclaim_policies.EvictionOrderReclaim,
    },
    "victim": {
        "best-fit": preemption_policies.BestFitVictim,
        "engine": preemption_policies.VictimPolicy,
        "latest-program": preemption_policies.LatestProgramVictim,
        "most-attained": preemption_policies.MostAttainedServiceVictim,
    },
    "eviction": {
        "lru": eviction_policies.EvictionPolicy,
        "workflow-aware-lru": eviction_policies.WorkflowAwareLruEviction,
        "typed-labels": eviction_policies.TypedLabelEviction,
    },
    "workflow_prediction": {
        "none": workflow_prediction.WorkflowPredictionPolicy,
        "three-tiers": workflow_prediction.ThreeTierPrediction,
    },
    "placement": {
        "stay": placement_policy.PlacementPolicy,
        "relative-idleness": relative_idleness.RelativeIdlenessPlacement,
        "residency-price": residency_price.ResidencyPricePlacement,
    },
    "prefetch": {
        "none": prefetch_policies.PrefetchPolicy,
        "likeliest-successor": prefetch_policies.LikeliestSuccessorPrefetch,
    },
    "output_length": {
        "none": forecasting.RemainingTokensPolicy,
        "survival": forecasting.SurvivalPrediction,
        "hidden-states": forecasting.HiddenStatePrediction,
    },
    "forecast": {
        "none": forecasting.ShortageForecastPolicy,
        "expected-need": forecasting.ExpectedDemandForecast,
    },
    "recovery": {
        "offload": preemption_policies.RecoveryPolicy,
        "cheaper": preemption_policies.CheaperRecovery,
    },
}
"""Question (a key of a preset) → policy name → class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The policies of one engine, one for each question such as ``retention``."""

    name: str
    paper: str
    """The paper and sections that the preset follows, or its purpose."""
    retention: retention_policies.RetentionPolicy
    admission: admission_policies.AdmissionPolicy
    order: queue_order_policies.QueueOrderPolicy
    lease_reclaim: lease_reclaim_policies.LeaseReclaimPolicy
    victim: preemption_policies.VictimPolicy
    eviction: eviction_policies.EvictionPolicy
    workflow_prediction: workflow_prediction.WorkflowPredictionPolicy = field(
        default_factory=workflow_prediction.WorkflowPredictionPolicy
    )
    prefetch: prefetch_policies.PrefetchPolicy = field(default_factory=prefetch_policies.PrefetchPolicy)
    placement: placement_policy.PlacementPolicy = field(default_factory=placement_policy.PlacementPolicy)
    output_length: forecasting.RemainingTokensPolicy = field(
        default_factory=forecasting.RemainingTokensPolicy
    )
    forecast: forecasting.ShortageForecastPolicy = field(default_factory=forecasting.ShortageForecastPolicy)
    recovery: preemption_policies.RecoveryPolicy = field(default_factory=preemption_policies.RecoveryPolicy)
    ended: EndedKvHandling = EndedKvHandling.REUSED_FIRST

    def tier_mechanisms(self) -> list[str]:
        """Return the names of the preset's mechanisms that need host memory managed by sojourn."""
        needs = {
            "placement": self.placement.needs_tiers,
            "prefetch": self.prefetch.is_used,
            "early copies": self.forecast.is_used,
        }
        return [name for name, needed in needs.items() if needed]


PRESETS = PresetStore(folder="presets", what="policy", preset_class=Preset, classes=POLICY_CLASSES)
preset_names, preset_text = PRESETS.names, PRESETS.text
load_preset, read_preset, parse_preset = PRESETS.load, PRESETS.read, PRESETS.parse


def switched_off(preset: Preset) -> Preset:
    """Return the preset of an engine whose policy, ``preset``, is switched off: vLLM's own decisions. Blocks
    keep the eviction order of ``preset``, in which they are queued."""
    return replace(load_preset("observe"), name="off", eviction=preset.eviction)
