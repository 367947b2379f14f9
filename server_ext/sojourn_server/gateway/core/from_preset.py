"""A routing core with the policies of a cluster preset."""

from __future__ import annotations

from dataclasses import replace

from ...policy.cluster_preset import ClusterPreset
from .core import RoutingCore
from .limits import CoreLimits
from .programs import Expectations


def core_of(preset: ClusterPreset, limits: CoreLimits | None = None, *, life: str = "") -> RoutingCore:
    """``limits``: all but ``send_below_load``, which is the preset's. ``life`` as ``RoutingCore`` has it."""
    return RoutingCore(
        preset.routing,
        preset.stealing,
        preset.sharing,
        replace(limits or CoreLimits(), send_below_load=preset.send_below_load),
        yielding=preset.yielding,
        expected=Expectations(preset.size_quantile),
        life=life,
    )
