"""The placement question: the tier of each program's KV, and the moves between tiers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from sojourn.ids import ProgramId

from ...programs.idleness import WINDOW_CYCLES
from .placement_views import PlacementView, ProgramTierView, Tier

WaitingKey = tuple[int, float, float, str]


class MoveTiming(str, Enum):
    NOW = "now"
    AFTER_TURN = "after_turn"
    """The program moves after its running turn. At the end of the turn the policy is asked again and decides
    whether and where; until then the program is ``pending``."""


class MoveReason(str, Enum):
    """Why a program is moved."""

    OVER_CAPACITY = "over_capacity"
    """The program's tier was over capacity."""
    FREE_CAPACITY = "free_capacity"
    """The device had free blocks for it."""
    OVERDUE = "overdue"
    """This program waited for ``patience_s``, or makes way for one that did."""
    STANDSTILL = "standstill"
    """Nothing ran for ``standstill_s`` although a program was ready."""
    ABSENT = "absent"
    """The program ran a tool on the device for ``absent_s`` while another program was ready."""
    EXCHANGE = "exchange"
    """The program ran a tool on the device while another was ready, and the tiers below had free blocks for
    it."""
    HOST_FULL = "host_full"
    """A busier program needs the blocks that this program has in host memory."""
    KEPT = "kept"
    """The program need no longer leave the device after its turn."""
    OVER = "over"
    """The program has ended."""
    GIVEN_UP = "given_up"
    """The policy failed, and placement has stopped."""


class TierMove(NamedTuple):
    """A program's move to the queue of another tier. ``to`` DEVICE for a program on the device ends its
    ``pending``.

    With ``AFTER_TURN``, ``to`` is the tier to which the program would move now.
    """

    program_id: ProgramId
    to: Tier
    when: MoveTiming
    reason: MoveReason


class PlacementPolicy(Protocol):
    """In which tier each program's KV belongs. ``places`` False: never asked, every program is on the device.

    The policy is asked at events and every ``tick_s`` seconds. The moves of an answer keep the tiers within
    capacity only together: one move may use blocks that another move frees.
    """

    places: bool
    k: int
    """Number of cycles over which idleness is measured."""
    tick_s: float
    idle_tick_s: float
    """Replaces ``tick_s`` while nothing runs although a program waits."""

    def moves(self, view: PlacementView, now: float) -> Sequence[TierMove]: ...

    def waiting_key(self, program: ProgramTierView, now: float) -> WaitingKey:
        """Sort key in the Waiting queue, ascending. Valid until the program has an event."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPlacement:
    """Placement off: programs are not moved, and the engine evicts as usual."""

    places: bool = False
    k: int = WINDOW_CYCLES
    tick_s: float = math.inf
    idle_tick_s: float = math.inf

    def moves(self, view: PlacementView, now: float) -> Sequence[TierMove]:
        return ()

    def waiting_key(self, program: ProgramTierView, now: float) -> WaitingKey:
        return (0, program.waiting_since_s, program.arrived_s, program.program_id)
