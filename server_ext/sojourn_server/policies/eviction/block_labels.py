"""Labels of KV blocks, derived from the tier in which their program is placed (MORI §4.3.2; mechanism M5).

MORI also schedules requests of busy programs first. Here labels do not affect scheduling: only programs that
are placed on the device are admitted, and they all have the same label.
"""

from __future__ import annotations

from enum import Enum

from ..placement.placement_views import Tier


class BlockLabel(str, Enum):
    """Label of a KV block: how busy its program is. Each tier evicts blocks in its own order of labels.

    Blocks are INACTIVE if their program has ended, is unknown or is placed in no tier.
    """

    BUSY = "busy"
    IDLE = "idle"
    COLD = "cold"
    """The program is so idle that its KV belongs on disk. This label is ours, for the further tiers of MORI
    §7.1."""
    INACTIVE = "inactive"


LABEL_OF_TIER = {
    Tier.DEVICE: BlockLabel.BUSY,
    Tier.HOST: BlockLabel.IDLE,
    Tier.DISK: BlockLabel.COLD,
    Tier.WAITING: BlockLabel.INACTIVE,
}
"""Label of the blocks of a program, by the tier in which the program is placed."""
DEVICE_EVICTION_ORDER = (BlockLabel.INACTIVE, BlockLabel.COLD, BlockLabel.IDLE, BlockLabel.BUSY)
"""Eviction order on the device, first to last."""
HOST_EVICTION_ORDER = (BlockLabel.INACTIVE, BlockLabel.COLD, BlockLabel.BUSY, BlockLabel.IDLE)
"""Eviction order in host memory. IDLE is last, since placement puts the KV of idle programs there."""
