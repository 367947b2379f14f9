"""Frozen snapshots for the placement question: in which tier does each program's KV belong? Sizes in blocks.

A program's snapshot holds until something happens to the program, since its idleness is what its clock
shows, read at ``now``: whoever keeps snapshots makes one anew for the program that a fact is about.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from sojourn.ids import ProgramId

from ..program.idleness import NOTHING_YET, Idleness


class Tier(str, Enum):
    """Where a program's KV lies, and so the queue that the program stands in (MORI §4.1, §7.1)."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    WAITING = "waiting"
    """Nowhere: given up, or never computed. It has to be computed from scratch."""


class Activity(str, Enum):
    """What a program does at this moment."""

    REASONING = "reasoning"
    """At least one of its requests runs, or was preempted and will run again."""
    READY = "ready"
    """None runs, at least one waits."""
    ACTING = "acting"
    """None is in the engine: a tool runs."""


class Occasion(str, Enum):
    """Why the question is asked now."""

    ARRIVAL = "arrival"
    """A new program's first request."""
    TOOL_ENDED = "tool_ended"
    """A known program's next request."""
    TURN_ENDED = "turn_ended"
    """A program acts now, has ended, or is forgotten."""
    TICK = "tick"
    CAPACITY = "capacity"
    """Somebody found a tier too full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedProgram:
    """A program and the queue it stands in: where it was last ordered to, even while its KV is on the way."""

    program_id: ProgramId
    tier: Tier
    activity: Activity
    idleness: Idleness = NOTHING_YET
    """What its clock shows (``program.idleness``)."""
    context_blocks: int = 0
    """Blocks of the context it has computed: what lies in a tier below, or would if it were demoted now. 0
    for one that never ran."""
    wants_blocks: int = 0
    """Blocks of the longest prompt that waits; 0 where none does."""
    resident_blocks: int = 0
    """Blocks that it has on the device; more than its context where branches of it run side by side."""
    turn_blocks: int = 0
    """What its context is predicted to take when the turn that runs or comes next is over; 0 where nothing is
    predicted."""
    peak_blocks: int = 0
    """What its longest context is predicted to take; 0 where nothing is predicted."""
    arrived_s: float = 0.0
    """When its first request came; seconds on the clock of ``now``, like all times here."""
    waiting_since_s: float = 0.0
    """When the request that has waited longest came; of no meaning unless READY."""
    last_active_s: float = 0.0
    """When one of its requests last ran; of one that never ran its arrival."""
    returning: bool = False
    """It ran before."""
    pending: bool = False
    """It is to leave the device after its turn. Whoever holds it to that lets those of its requests finish
    that were there when it was told, and keeps later ones out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierState:
    """How much a tier can hold."""

    capacity_blocks: int
    """0: there is no such tier."""
    others_blocks: int = 0
    """Blocks of it that are not programs' to have: requests of no program run in them."""

    @property
    def budget_blocks(self) -> int:
        """What all programs of the tier together may hold."""
        return self.capacity_blocks - self.others_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementView:
    """All programs by tier, each in exactly one group."""

    why: Occasion
    device: TierState
    host: TierState
    disk: TierState
    on_device: Sequence[PlacedProgram] = ()
    on_host: Sequence[PlacedProgram] = ()
    on_disk: Sequence[PlacedProgram] = ()
    waiting: Sequence[PlacedProgram] = ()
    """The Waiting queue. Those without a request, who wait for nothing, may be left out."""
    overdue_served_s: float = -math.inf
    """When a program was last let in since it had waited for too long."""
    waiting_ordered: bool = False
    """``waiting`` is in ascending order of the policy's ``waiting_key``, and may be cut after its first few
    hundred. Where thousands wait, an order that is kept costs less than one made for each question."""
    longest_waiting: Sequence[PlacedProgram] = ()
    """With ``waiting_ordered``: of the ready programs off the device the few that have waited longest, in
    that order. They may be in other groups too, or have been cut from ``waiting``."""
