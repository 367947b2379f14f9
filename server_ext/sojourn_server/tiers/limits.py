"""What bounds the tiers below one engine's device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLimits:
    """What bounds the planner. Times in seconds."""

    host_slots: int
    disk_blocks: int = 0
    """0: no disk."""
    spill_below: float = 0.25
    """Spill while less than this share of host memory is free or on disk too."""
    max_spilling: int = 256
    """Blocks on their way to disk at once: a slow disk is not given more than it takes."""
    max_staging: int = 4096
    """Blocks on their way from disk at once."""
    max_stage_wait_s: float = 10.0
    """A request waits no longer for the disk; it computes the rest."""
    shared: bool = False
    """Other engines' stores may lie beside this one's, and are read."""
    min_probe_blocks: int = 8
    """Other stores are looked through for no fewer: so few are sooner computed than asked about."""
    max_probe_wait_s: float = 1.0
    """A request waits no longer until they have been looked through."""
