"""Typed labels: what a program's queue says of its blocks (M5; MORI §4.3.2).

That busy requests are scheduled before others needs no order: the others are parked.
"""

from __future__ import annotations

from enum import Enum

from .placement_views import Tier


class Label(str, Enum):
    """Of blocks. Those of programs that are over or unknown are INACTIVE."""

    BUSY = "busy"
    IDLE = "idle"
    COLD = "cold"
    """Idle for so long that they belong on disk: beyond the paper, for its further tiers (§7.1)."""
    INACTIVE = "inactive"


_LABELS = {
    Tier.DEVICE: Label.BUSY,
    Tier.HOST: Label.IDLE,
    Tier.DISK: Label.COLD,
    Tier.WAITING: Label.INACTIVE,
}
_DEVICE_ORDER = {Label.INACTIVE: 0, Label.COLD: 1, Label.IDLE: 2, Label.BUSY: 3}
HOST_ORDER = (Label.INACTIVE, Label.COLD, Label.BUSY, Label.IDLE)
"""The order in which host memory's blocks go: it keeps those longest who were placed in it, as the device
does."""


def label(tier: Tier) -> Label:
    """The label of what belongs to programs of a tier."""
    return _LABELS[tier]


def device_rank(marked: Label) -> int:
    """Ascending, the order in which the device's cached blocks go: inactive, cold, idle, busy."""
    return _DEVICE_ORDER[marked]
