"""Placement (``placement`` in presets): which tier does each program's KV belong in? Moves between tiers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, NamedTuple

from msgspec import Meta
from sojourn.ids import ProgramId

from .placement_views import PlacementView, Tier

MAX_EXCHANGES = 64
"""Maximum number of programs that one answer of ``moves`` promotes in exchange for others. After an answer
with this many, the policy is asked again in the next step."""


class MoveTiming(str, Enum):
    NOW = "now"
    AFTER_TURN = "after_turn"
    """The program is ``pending`` until its running turn ends. Then the policy decides again whether the
    program moves, and where to."""


class MoveReason(str, Enum):
    """Why a program is moved."""

    OVER_CAPACITY = "over_capacity"
    """The program's tier was over capacity."""
    FREE_CAPACITY = "free_capacity"
    """The device had free blocks for the program."""
    OVERDUE = "overdue"
    """The program is overdue (it has waited too long), or makes way for an overdue program."""
    STANDSTILL = "standstill"
    """Nothing ran for ``standstill_s`` although a program was ready."""
    ABSENT = "absent"
    """A ready program replaces a program on the device whose tool has run for ``absent_s``. The moves of both
    programs have this reason."""
    EXCHANGE = "exchange"
    """A ready program replaces a program on the device whose tool runs. The moves of both programs have this
    reason."""
    HOST_FULL = "host_full"
    """A busier program needs the blocks that this program has in host memory."""
    KEPT = "kept"
    """The program was pending, and may now stay on the device."""
    GIVEN_UP = "given_up"
    """The policy failed or was switched off, and placement has stopped."""


class TierMove(NamedTuple):
    """A program's move to the queue of another tier.

    An ``AFTER_TURN`` move makes the program ``pending``. Its ``to`` is provisional: the tier that has room
    now. A move of a ``pending`` program to DEVICE makes the program stay: it is no longer pending.
    """

    program_id: ProgramId
    to: Tier
    when: MoveTiming
    reason: MoveReason
    terms: tuple[tuple[str, float], ...] = ()
    """Names and values of the quantities that decided, for the decision log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPolicy:
    """Decides in which tier each program's KV belongs. The base moves nothing: the engine evicts as usual.

    The scheduler calls ``moves`` after events and every ``tick_s`` seconds. All moves of an answer must be
    applied together, because one move may use blocks that another move frees.
    """

    is_used = False
    """Whether ``moves`` is called. If not, every program counts as on the device."""
    needs_tiers = False
    """Whether the policy needs host memory. If so, an engine without host memory starts only with
    ``allow_missing_tiers``."""
    reads_costs = False
    """Whether the policy reads the fields of ``ProgramTierView`` for durations, costs and service."""
    tick_s = math.inf
    idle_tick_s = math.inf
    """Replaces ``tick_s`` while nothing runs although a program waits."""

    def moves(self, view: PlacementView, now: float) -> Sequence[TierMove]:
        """Return the moves to make now, possibly none. The order of programs in the view does not matter."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedPlacement(PlacementPolicy):
    """Base of the policies that move programs between the queues of the tiers."""

    is_used = True
    patience_s: Annotated[float, Meta(ge=0)] = 300.0
    """Seconds until a waiting ready program is overdue; ``inf``: never, as in MORI."""
    overdue_gap_s: Annotated[float, Meta(ge=0)] = 60.0
    """Seconds between promotions of two overdue programs; 0: none."""
