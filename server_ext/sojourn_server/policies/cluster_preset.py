"""Cluster presets: one policy for each question of the gateway, such as routing, and the engines' preset."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from .fairness_policies import SharePolicy, TenantPreemptionPolicy
from .preset_store import (
    CustomClassLoader,
    PresetError,
    PresetStore,
    custom_class_loader,
    number_option,
    read_preset_text,
)
from .routing_policies import RoutingPolicy, StealingPolicy, WaitingOrderPolicy

POLICY_CLASSES: dict[str, dict[str, str]] = {
    "routing": {
        "random": "routing_policies:RandomRouting",
        "round-robin": "routing_policies:RoundRobinRouting",
        "prefix-affinity": "routing_policies:PrefixAffinityRouting",
        "session-affinity": "routing_policies:SessionAffinityRouting",
        "room-for-all": "routing_policies:CapacityRouting",
        "least-delay": "routing_policies:LeastDelayRouting",
    },
    "stealing": {
        "none": "routing_policies:NoStealing",
        "work-stealing": "routing_policies:WorkStealing",
    },
    "sharing": {
        "in-order": "fairness_policies:FcfsSharing",
        "agent-fair-share": "fairness_policies:AgentFairShare",
    },
    "waiting_order": {
        "arrival": "routing_policies:ArrivalOrder",
        "idleness": "routing_policies:IdlenessOrder",
        "largest-first": "routing_policies:LargestFirstOrder",
    },
    "tenant_preemption": {
        "none": "fairness_policies:NoTenantPreemption",
        "to-urgent": "fairness_policies:UrgencyPreemption",
    },
}
"""Question (a key of a preset) → policy name → ``module:class`` in this package, imported when chosen."""

DEFAULT_POLICIES = {
    "stealing": "none",
    "sharing": "in-order",
    "waiting_order": "arrival",
    "tenant_preemption": "none",
}
"""Question (a key of a preset) → name of the policy that applies if a preset lacks the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPreset:
    """The gateway's policies, one for each question such as ``routing``, and two settings of the gateway."""

    name: str
    paper: str
    """The paper and sections that the preset follows, or its purpose."""
    engine: str
    """Name of the preset that the cluster's engines use; ``stock``: plain vLLM."""
    routing: RoutingPolicy
    stealing: StealingPolicy
    sharing: SharePolicy
    waiting_order: WaitingOrderPolicy
    tenant_preemption: TenantPreemptionPolicy
    send_below_load: float = math.inf
    """Replica load from which requests wait at the gateway; ``inf``: they wait in the engine's queue."""
    size_quantile: float = 0.5
    """Desired probability that a program stays within its estimated size, between 0 and 1."""


_PRESETS = PresetStore(
    folder="cluster_presets",
    what="cluster policy",
    preset_class=ClusterPreset,
    classes=POLICY_CLASSES,
    default_policies=DEFAULT_POLICIES,
)


def with_waiting_order(preset: ClusterPreset, name: str) -> ClusterPreset:
    """Return the preset with another queue order for requests that wait for capacity. ``name``: the order's
    name in ``POLICY_CLASSES["waiting_order"]``. Raises ``PresetError`` if there is no such order."""
    return replace(
        preset, waiting_order=_PRESETS.build("waiting_order", {"waiting_order": name}, "the order", None)
    )


def cluster_preset_names() -> list[str]:
    """Return the names of the cluster presets that ship with sojourn."""
    return _PRESETS.names()


def load_cluster_preset(name: str) -> ClusterPreset:
    """Load a shipped cluster preset. For an unknown name, raises ``PresetError`` with the nearest known
    name."""
    return parse_cluster_preset(_PRESETS.text(name), source=f"{name}.toml")


def read_cluster_preset(path: Path, *, allowed_modules: str = "") -> ClusterPreset:
    """Read a cluster preset file, which may name policy classes in Python files beside it. Raises
    ``PresetError``.

    ``allowed_modules``: installed packages, separated by commas, whose classes the file may name too.
    """
    own = custom_class_loader(path.parent, allowed_modules)
    return parse_cluster_preset(read_preset_text(path), source=str(path), own=own)


def parse_cluster_preset(text: str, *, source: str, own: CustomClassLoader | None = None) -> ClusterPreset:
    """Build a cluster preset from TOML. ``extends = "NAME"`` starts from a shipped preset.

    ``source`` is the name of the text in error messages. ``own`` loads classes named as ``module:Class``;
    without it, only shipped classes are allowed. Raises ``PresetError``.
    """
    document = _PRESETS.document(text, source)
    send_below_load = number_option(document, "send_below_load", math.inf, source)
    if not send_below_load > 0:
        raise PresetError(f"{source}: send_below_load is {send_below_load}; expected > 0")
    size_quantile = number_option(document, "size_quantile", 0.5, source)
    if not 0 < size_quantile < 1:
        raise PresetError(f"{source}: size_quantile is {size_quantile}; expected between 0 and 1")
    return ClusterPreset(
        name=str(document.get("name", source)),
        paper=str(document.get("paper", "")),
        engine=str(document.get("engine", "stock")),
        send_below_load=send_below_load,
        size_quantile=size_quantile,
        **_PRESETS.policies(document, source, own),
    )
