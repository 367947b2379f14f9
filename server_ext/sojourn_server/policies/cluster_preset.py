"""Cluster presets: one policy for each question of the gateway, such as routing, and the engines' preset."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated

from msgspec import Meta

from . import routing_policies
from .fairness_policies import AgentFairShare, SharePolicy, TenantPreemptionPolicy, UrgencyPreemption
from .preset_store import PresetError as PresetError
from .preset_store import PresetStore
from .routing_policies import RoutingPolicy, StealingPolicy, WaitingOrderPolicy

POLICY_CLASSES: dict[str, dict[str, type]] = {
    "routing": {
        "random": routing_policies.RandomRouting,
        "round-robin": routing_policies.RoundRobinRouting,
        "prefix-affinity": routing_policies.PrefixAffinityRouting,
        "session-affinity": routing_policies.SessionAffinityRouting,
        "room-for-all": routing_policies.CapacityRouting,
        "least-delay": routing_policies.LeastDelayRouting,
    },
    "stealing": {"none": routing_policies.StealingPolicy, "work-stealing": routing_policies.WorkStealing},
    "sharing": {"in-order": SharePolicy, "agent-fair-share": AgentFairShare},
    "waiting_order": {
        "arrival": routing_policies.WaitingOrderPolicy,
        "idleness": routing_policies.IdlenessOrder,
        "largest-first": routing_policies.LargestFirstOrder,
    },
    "tenant_preemption": {"none": TenantPreemptionPolicy, "to-urgent": UrgencyPreemption},
}
"""Question (a key of a preset) → policy name → class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPreset:
    """The gateway's policies, one for each question such as ``routing``, and two settings of the gateway."""

    name: str
    paper: str
    """The paper and sections that the preset follows, or its purpose."""
    engine: str = "stock"
    """Name of the preset that the cluster's engines use; ``stock``: plain vLLM."""
    routing: RoutingPolicy
    stealing: StealingPolicy = field(default_factory=StealingPolicy)
    sharing: SharePolicy = field(default_factory=SharePolicy)
    waiting_order: WaitingOrderPolicy = field(default_factory=WaitingOrderPolicy)
    tenant_preemption: TenantPreemptionPolicy = field(default_factory=TenantPreemptionPolicy)
    send_below_load: Annotated[float, Meta(gt=0)] = math.inf
    """Replica load from which requests wait at the gateway; ``inf``: they wait in the engine's queue."""
    size_quantile: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """Desired probability that a program stays within its estimated size."""


CLUSTER_PRESETS = PresetStore(
    folder="cluster_presets", what="cluster policy", preset_class=ClusterPreset, classes=POLICY_CLASSES
)
cluster_preset_names, load_cluster_preset = CLUSTER_PRESETS.names, CLUSTER_PRESETS.load
read_cluster_preset, parse_cluster_preset = CLUSTER_PRESETS.read, CLUSTER_PRESETS.parse


def with_waiting_order(preset: ClusterPreset, name: str) -> ClusterPreset:
    """Return the preset with another queue order for requests that wait for capacity. ``name``: the order's
    name in ``POLICY_CLASSES["waiting_order"]``."""
    return replace(preset, waiting_order=POLICY_CLASSES["waiting_order"][name]())
