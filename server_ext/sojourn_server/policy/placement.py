"""In which tier each program's KV belongs: the question, and the moves that answer it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from sojourn.ids import ProgramId

from ..program.idleness import WINDOW_CYCLES
from .placement_views import PlacedProgram, PlacementView, Tier

WaitingKey = tuple[int, float, float, str]


class When(str, Enum):
    NOW = "now"
    AFTER_TURN = "after_turn"
    """Lazily: the turn that runs is finished first. The answer to the call at its end says whether and where
    the program goes; until then it is ``pending``."""


class MoveReason(str, Enum):
    """Why a program is moved."""

    OVER_CAPACITY = "over_capacity"
    """Its tier held more than it can."""
    FREE_CAPACITY = "free_capacity"
    """There was room for it on the device."""
    OVERDUE = "overdue"
    """One had waited for ``patience_s``: this one, or the one that this makes room for."""
    STANDSTILL = "standstill"
    """Nothing ran for ``standstill_s`` although somebody could have."""
    ABSENT = "absent"
    """A program had acted on the device for ``absent_s`` while somebody was ready."""
    EXCHANGE = "exchange"
    """A program acted on the device while another was ready, and there was room to spare below for it."""
    HOST_FULL = "host_full"
    """A busier program needs its place in host memory."""
    KEPT = "kept"
    """It need no longer leave after its turn."""
    OVER = "over"
    """It has ended: its requests wait for nobody."""
    GIVEN_UP = "given_up"
    """The policy has failed: nobody is placed any more."""


class Move(NamedTuple):
    """One program's way to another queue. ``to`` DEVICE for one on the device: it is ``pending`` no more.

    With ``AFTER_TURN``, ``to`` is where it would go if it went now.
    """

    program_id: ProgramId
    to: Tier
    when: When
    reason: MoveReason


class PlacementPolicy(Protocol):
    """Who goes to which tier. ``places`` False: nobody is ever asked, and every program is on the device.

    Asked at events and every ``tick_s`` seconds. All moves of an answer together keep the
    tiers within what they can hold; what one move frees another may already have taken.
    """

    places: bool
    k: int
    """Cycles that programs' idleness is taken over."""
    tick_s: float
    idle_tick_s: float
    """The same while nothing runs although somebody is kept out."""

    def moves(self, view: PlacementView, now: float) -> Sequence[Move]: ...

    def waiting_key(self, program: PlacedProgram, now: float) -> WaitingKey:
        """Its place in the Waiting queue, ascending. Holds until the next fact about it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """Nothing is ever moved: the engine evicts what it must."""

    places: bool = False
    k: int = WINDOW_CYCLES
    tick_s: float = math.inf
    idle_tick_s: float = math.inf

    def moves(self, view: PlacementView, now: float) -> Sequence[Move]:
        return ()

    def waiting_key(self, program: PlacedProgram, now: float) -> WaitingKey:
        return (0, program.waiting_since_s, program.arrived_s, program.program_id)
