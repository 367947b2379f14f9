"""Frozen snapshots for the placement question. Sizes in blocks.

A program's snapshot is valid until something happens to the program, since its idleness is a clock that is
read at ``now``. A caller that caches snapshots renews only those of programs with events.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from sojourn.ids import ProgramId

from ...programs.idleness import INITIAL_IDLENESS, Idleness


class Tier(str, Enum):
    """Where a program's KV belongs, and so the queue of the program (MORI §4.1, §7.1)."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    WAITING = "waiting"
    """No tier: dropped, or never computed. The KV has to be computed from scratch."""


class ProgramActivity(str, Enum):
    """What a program is doing now."""

    REASONING = "reasoning"
    """At least one of its requests runs, or was preempted and will run again."""
    READY = "ready"
    """No request runs, at least one waits."""
    ACTING = "acting"
    """It has no request in the engine: a tool runs."""


class PlacementTrigger(str, Enum):
    """Why the policy is asked now."""

    ARRIVAL = "arrival"
    """A new program's first request."""
    TOOL_ENDED = "tool_ended"
    """A known program's next request."""
    TURN_ENDED = "turn_ended"
    """A program starts to act, has ended, or is removed."""
    TICK = "tick"
    CAPACITY = "capacity"
    """A tier was found over capacity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramTierView:
    """A program and its queue: the last tier it was ordered to, even while its KV is being copied."""

    program_id: ProgramId
    tier: Tier
    activity: ProgramActivity
    idleness: Idleness = INITIAL_IDLENESS
    """The state of its idleness clock (``programs.idleness``)."""
    context_blocks: int = 0
    """Blocks of its computed context: what it takes in a lower tier, now or after a demotion. 0 if it never
    ran."""
    required_blocks: int = 0
    """Blocks of its longest waiting prompt; 0 if none waits."""
    resident_blocks: int = 0
    """Its blocks on the device; more than its context if branches run side by side."""
    turn_blocks: int = 0
    """Predicted blocks of its context at the end of the running or next turn; 0 without a prediction."""
    peak_blocks: int = 0
    """Predicted blocks of its longest context; 0 without a prediction."""
    arrived_s: float = 0.0
    """Arrival of its first request; seconds on the clock of ``now``, like all times here."""
    waiting_since_s: float = 0.0
    """Arrival of its longest-waiting request; meaningful only if READY."""
    last_active_s: float = 0.0
    """Time at which one of its requests last ran; its arrival if it never ran."""
    returning: bool = False
    """Whether it ran before."""
    pending: bool = False
    """Whether it leaves the device after its turn. Requests that were running at the decision finish; later
    ones are held back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCapacity:
    """Capacity of a tier."""

    capacity_blocks: int
    """0: the tier does not exist."""
    untracked_blocks: int = 0
    """Blocks used by requests without a program."""

    @property
    def budget_blocks(self) -> int:
        """Blocks available to all programs of the tier together."""
        return self.capacity_blocks - self.untracked_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementView:
    """All programs by tier, each in exactly one group."""

    why: PlacementTrigger
    device: TierCapacity
    host: TierCapacity
    disk: TierCapacity
    on_device: Sequence[ProgramTierView] = ()
    on_host: Sequence[ProgramTierView] = ()
    on_disk: Sequence[ProgramTierView] = ()
    waiting: Sequence[ProgramTierView] = ()
    """The Waiting queue. Programs without a request may be left out."""
    last_overdue_promotion_s: float = -math.inf
    """Time at which a program was last promoted because it was overdue."""
    waiting_sorted: bool = False
    """``waiting`` is in ascending order of ``waiting_key`` and may be cut after a few hundred. For thousands
    of programs, keeping an order costs less than sorting for each question."""
    longest_waiting: Sequence[ProgramTierView] = ()
    """The ready programs off the device that have waited longest, in that order, if ``waiting_sorted``.
    They may appear in other groups too, or be cut from ``waiting``."""
