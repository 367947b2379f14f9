"""A routing core with the policies of a cluster preset, and the reasons that those give."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ...policy.cluster_preset import ClusterPreset
from .core import RoutingCore
from .limits import CoreLimits
from .programs import Expectations
from .steals import stolen_for
from .yields import MADE_WAY


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


def reasons_of(preset: ClusterPreset) -> tuple[str, ...]:
    """Why a core with this preset sends a request where it does: all reasons that are known beforehand. A
    class of the operator's own need not list its own ones."""
    routed: Iterable[str] = getattr(preset.routing, "reasons", ())
    stolen: Iterable[str] = getattr(preset.stealing, "reasons", ())
    made_way = (MADE_WAY,) if preset.yielding.yields else ()
    return (*routed, *(stolen_for(reason) for reason in stolen), *made_way)
