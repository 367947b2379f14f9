"""Frozen snapshots that placement policies decide from. All sizes are in blocks.

A program's snapshot holds the state of an idleness clock, from which the policy computes the idleness at
``now``. So the snapshot is valid until the program's next event, and a caller may cache it until then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from sojourn.ids import ProgramId

from ...programs.idleness import INITIAL_IDLENESS, Idleness


class Tier(str, Enum):
    """The tier in which a program's KV belongs, and so the program's queue (MORI §4.1, §7.1)."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    WAITING = "waiting"
    """No tier: the KV was dropped, or never computed, and has to be computed from scratch."""


class ProgramActivity(str, Enum):
    """What a program is doing now."""

    REASONING = "reasoning"
    """At least one of the program's requests runs, or was preempted and will run again."""
    READY = "ready"
    """None of the program's requests runs, and at least one waits."""
    ACTING = "acting"
    """None of the program's requests is in the engine, since a tool runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramTierView:
    """A program, as input of placement. ``tier`` is the tier to which the program was last moved, even while
    its KV is still being copied to that tier. Sizes leave out a prefix that another program has too."""

    program_id: ProgramId
    tier: Tier
    activity: ProgramActivity
    idleness: Idleness = INITIAL_IDLENESS
    """State of the program's idleness clock (``programs.idleness``)."""
    context_blocks: int = 0
    """Number of blocks of the program's computed context: its size in a lower tier. 0 if it never ran."""
    required_blocks: int = 0
    """Blocks on the device of the program's longest waiting prompt, or off the device of its context if that
    is longer; 0 if no request waits."""
    resident_blocks: int = 0
    """Blocks of the program's running requests together; 0 if none runs. More than ``context_blocks`` if
    branches run side by side."""
    turn_blocks: int = 0
    """Predicted blocks of the context at the end of the running or next turn; 0: no prediction."""
    peak_blocks: int = 0
    """Predicted blocks of the program's longest context; 0: no prediction."""
    arrived_s: float = 0.0
    """Arrival of the program's first request; seconds on the clock of ``now``, like all times in this
    class."""
    waiting_since_s: float = 0.0
    """Arrival of the program's longest-waiting request; for a retry, the arrival of the aborted request.
    Valid only if READY."""
    last_active_s: float = 0.0
    """Time at which a request of the program last ran; the program's arrival if none ever ran."""
    running_since_s: float = math.inf
    """Time at which the program's longest-running request began to run; ``inf``: none runs."""
    returning: bool = False
    """Whether any of the program's requests ran before."""
    importance: int = 0
    """The client's priority; a larger number is more important."""
    due_s: float = math.inf
    """The client's deadline; ``inf``: none."""
    gap_durations_s: tuple[float, ...] = ()
    """Equally likely durations of the gap in seconds, from ``gap_since_s`` on, ascending. They come from
    earlier calls or from the client's estimate. Empty: unknown."""
    gap_since_s: float = 0.0
    """Reported end of the tool call, else its reported start, else the end of the last turn."""
    rebuild_s: float = 0.0
    """Seconds to compute again what the next prompt is expected to reuse of the context; 0: unknown."""
    return_chance: float = 1.0
    """Probability that the program sends another request, as known at the end of its last turn."""
    service_s: tuple[float, ...] = ()
    """Equally likely seconds of service (running requests), ascending; empty: unknown. Of programs of this
    type from their begin on, or of this program since something was stated of its turns."""
    attained_s: float = 0.0
    """Seconds of service since then."""
    new_service_s: tuple[float, ...] = ()
    """Equally likely total seconds of service of a new program, ascending; empty: unknown."""
    work_stated: bool = False
    """Whether it is known for sure, from the client or a to-do list, how many turns the program has left."""
    pending: bool = False
    """Whether the policy has decided that the program leaves the device after its turn. Requests of this turn
    may finish. Later requests wait until the program has moved."""

    @property
    def device_blocks(self) -> int:
        """Blocks that the program needs on the device now; at least 1."""
        # In a lower tier other contexts share other prefixes, which ``context_blocks`` leaves out.
        comes = self.tier is not Tier.DEVICE and self.required_blocks > 0
        return max(0 if comes else self.context_blocks, self.required_blocks, self.resident_blocks, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCapacity:
    """Capacity of a tier."""

    capacity_blocks: int
    """Capacity in blocks; 0: the tier does not exist."""
    untracked_blocks: int = 0
    """Blocks used by requests without a program, and by prefixes that several contexts have in common."""
    load_s_per_block: float | None = None
    """Seconds to copy a block from this tier to the device; ``None`` for the device, and if unknown."""
    load_queue_s: float = 0.0
    """Seconds until the queued copies to the device are done."""

    @property
    def budget_blocks(self) -> int:
        """Blocks available to all programs of the tier together."""
        return self.capacity_blocks - self.untracked_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementView:
    """All programs by tier, each in exactly one group."""

    device: TierCapacity
    host: TierCapacity
    disk: TierCapacity
    on_device: Sequence[ProgramTierView] = ()
    on_host: Sequence[ProgramTierView] = ()
    on_disk: Sequence[ProgramTierView] = ()
    waiting: Sequence[ProgramTierView] = ()
    """The Waiting queue: programs of no tier with a waiting request."""
    mean_running: float = 0.0
    """Mean number of requests in the engine's recent steps; 0: unknown."""
    prefill_share: float = 0.0
    """Share of the device's recent busy time that went into computing prompts, 0 to 1."""
    kv_read_share: float = 0.0
    """Share of a decode step's time that grows with the contexts of its requests, 0 to 1; 0: unknown."""
    growth_observed: bool = True
    """Whether enough turns were observed to predict how contexts grow. If not, ``peak_blocks`` is a prior."""
    hold_cost: float = 0.0
    """What holding a context through a gap costs, as a share of what it saves: mean over recent returns of
    headroom · gap ÷ (N · C), each at most 1."""
    last_shortage_s: float = -math.inf
    """Time at which a program last lost its KV because the tiers were over capacity; ``-inf``: never."""
    last_overdue_promotion_s: float = -math.inf
    """Time at which a program was last promoted because it was overdue."""
