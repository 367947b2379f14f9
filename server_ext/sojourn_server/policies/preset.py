"""Engine presets: a TOML file that names one policy for each question, such as retention or eviction."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .forecasting import RemainingTokensPolicy, ShortageForecastPolicy
from .placement.placement_policy import PlacementPolicy
from .policy_protocols import (
    AdmissionPolicy,
    EndedKvHandling,
    EvictionPolicy,
    LeaseReclaimPolicy,
    PrefetchPolicy,
    QueueOrderPolicy,
    RetentionPolicy,
    VictimPolicy,
    WorkflowPredictionPolicy,
)
from .preemption_policies import RecoveryPolicy
from .preset_store import CustomClassLoader, PresetError, PresetStore, custom_class_loader, read_preset_text

POLICY_CLASSES: dict[str, dict[str, str]] = {
    "retention": {
        "none": "retention_policies:NoRetention",
        "fixed": "retention_policies:FixedRetention",
        "continuum": "retention_policies:ContinuumRetention",
        "until-the-end": "retention_policies:UntilProgramEndRetention",
        "least-waste": "retention_policies:LeastWasteRetention",
        "tool-type": "retention_policies:ToolTypeRetention",
    },
    "admission": {
        "everyone": "admission_policies:NoAdmissionControl",
        "forecast-fits": "admission_policies:DemandForecastAdmission",
        "room-to-grow": "admission_policies:ExpectedGrowthAdmission",
        "whole-program": "admission_policies:WholeProgramAdmission",
    },
    "order": {
        "request-fcfs": "queue_order_policies:RequestFcfs",
        "program-fcfs": "queue_order_policies:ProgramFcfs",
        "programs-in-line": "queue_order_policies:StrictProgramFcfs",
        "least-attained": "queue_order_policies:LeastAttainedService",
    },
    "lease_reclaim": {
        "latest-program-first": "lease_reclaim_policies:LatestProgramReclaim",
        "later-programs-first": "lease_reclaim_policies:LaterProgramsReclaim",
        "any-lease": "lease_reclaim_policies:SoonestExpiringReclaim",
        "least-wanted-first": "lease_reclaim_policies:EvictionOrderReclaim",
    },
    "victim": {
        "best-fit": "preemption_policies:BestFitVictim",
        "engine": "preemption_policies:EngineVictim",
        "latest-program": "preemption_policies:LatestProgramVictim",
        "most-attained": "preemption_policies:MostAttainedServiceVictim",
    },
    "eviction": {
        "lru": "eviction_policies:BlockLruEviction",
        "latest-program": "eviction_policies:LatestProgramEviction",
        "workflow-aware-lru": "eviction_policies:WorkflowAwareLruEviction",
        "typed-labels": "eviction_policies:TypedLabelEviction",
    },
    "workflow_prediction": {
        "none": "workflow_prediction:NoWorkflowPrediction",
        "three-tiers": "workflow_prediction:ThreeTierPrediction",
    },
    "placement": {
        "stay": "placement.placement_policy:NoPlacement",
        "relative-idleness": "placement.relative_idleness:RelativeIdlenessPlacement",
        "residency-price": "placement.residency_price:ResidencyPricePlacement",
    },
    "prefetch": {
        "none": "prefetch_policies:NoPrefetch",
        "tool-end": "prefetch_policies:ToolEndPrefetch",
        "likeliest-successor": "prefetch_policies:LikeliestSuccessorPrefetch",
    },
    "output_length": {
        "none": "forecasting:NoLengthPrediction",
        "mean": "forecasting:MeanLengthPrediction",
        "survival": "forecasting:SurvivalPrediction",
        "hidden-states": "forecasting:HiddenStatePrediction",
    },
    "forecast": {
        "none": "forecasting:NoShortageForecast",
        "expected-need": "forecasting:ExpectedDemandForecast",
    },
    "recovery": {
        "recompute": "preemption_policies:AlwaysRecompute",
        "offload": "preemption_policies:AlwaysOffload",
        "cheaper": "preemption_policies:CheaperRecovery",
    },
}
"""Question (a key of a preset) → policy name → ``module:class`` in this package, imported when chosen."""
DEFAULT_POLICIES = {
    "workflow_prediction": "none",
    "placement": "stay",
    "prefetch": "none",
    "output_length": "none",
    "forecast": "none",
    "recovery": "offload",
}
"""Question (a key of a preset) → name of the policy that applies if a preset lacks the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The policies of one engine, one for each question such as ``retention``."""

    name: str
    paper: str
    """The paper and sections that the preset follows, or its purpose."""
    retention: RetentionPolicy
    admission: AdmissionPolicy
    order: QueueOrderPolicy
    lease_reclaim: LeaseReclaimPolicy
    victim: VictimPolicy
    eviction: EvictionPolicy
    workflow_prediction: WorkflowPredictionPolicy
    prefetch: PrefetchPolicy
    placement: PlacementPolicy
    output_length: RemainingTokensPolicy
    forecast: ShortageForecastPolicy
    recovery: RecoveryPolicy
    ended: EndedKvHandling = EndedKvHandling.REUSED_FIRST

    def tier_mechanisms(self) -> list[str]:
        """Return the names of the preset's mechanisms that need host memory managed by sojourn."""
        needs = {
            "placement": self.placement.needs_tiers,
            "prefetch": self.prefetch.is_used,
            "early copies": self.forecast.is_used,
        }
        return [name for name, needed in needs.items() if needed]


_PRESETS = PresetStore(
    folder="presets",
    what="policy",
    preset_class=Preset,
    classes=POLICY_CLASSES,
    default_policies=DEFAULT_POLICIES,
)


def preset_names() -> list[str]:
    """Return the names of the presets that ship with sojourn. ``stock``, the unmodified engine, is not a
    preset."""
    return _PRESETS.names()


def load_preset(name: str) -> Preset:
    """Load a shipped preset. Raises ``PresetError`` with the nearest name for an unknown name."""
    return parse_preset(preset_text(name), source=f"{name}.toml")


def preset_text(name: str) -> str:
    """Return the TOML of a shipped preset. Raises ``PresetError`` with the nearest name for an unknown
    name."""
    return _PRESETS.text(name)


def read_preset(path: Path, *, allowed_modules: str = "") -> Preset:
    """Read a preset file, which may name policy classes (``module:Class``) in Python files beside it.

    ``allowed_modules``: installed packages, separated by commas, whose classes the file may name too. Raises
    ``PresetError``.
    """
    own = custom_class_loader(path.parent, allowed_modules)
    return parse_preset(read_preset_text(path), source=str(path), own=own)


def parse_preset(text: str, *, source: str, own: CustomClassLoader | None = None) -> Preset:
    """Build a preset from TOML. ``extends = "NAME"`` starts from a shipped preset.

    ``source`` is the name of the text in error messages. ``own`` loads classes named as ``module:Class``;
    without it, only shipped classes are allowed. Raises ``PresetError``.
    """
    document = _PRESETS.document(text, source)
    return Preset(
        name=str(document.get("name", source)),
        paper=str(document.get("paper", "")),
        ended=_ended_kv_handling(document, source),
        **_PRESETS.policies(document, source, own),
    )


def _ended_kv_handling(document: dict[str, Any], source: str) -> EndedKvHandling:
    chosen = document.get("ended", EndedKvHandling.REUSED_FIRST.value)
    if chosen not in [ended.value for ended in EndedKvHandling]:
        expected = ", ".join(repr(ended.value) for ended in EndedKvHandling)
        raise PresetError(f"{source}: ended is {chosen!r}; expected {expected}")
    return EndedKvHandling(chosen)
