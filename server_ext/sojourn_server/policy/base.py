"""The questions a preset answers. Every policy is a plain object: frozen view and ``now`` in, decision out.

No clock, no I/O, no engine, no logging: the same object runs in vLLM, in the
gateway and in the simulator. Not being able to decide is a value, not an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from sojourn.ids import ProgramId

from .views import EntryView, LeaseView, OwnerView, RoomNeed, TurnView, VictimView, WaitingView


class Reason(str, Enum):
    """Why a decision was taken; lands in the decision log."""

    NO_TOOL_CALL = "no_tool_call"
    FINAL_TURN = "final_turn"
    COLD_START = "cold_start"
    ALL_TOOLS = "all_tools"
    THIS_TOOL = "this_tool"
    FIXED = "fixed"
    HINTED = "hinted"
    NOT_WORTH_IT = "not_worth_it"
    OVER_BUDGET = "over_budget"
    POLICY_OFF = "policy_off"
    NOTHING_CACHED = "nothing_cached"
    # how leases end
    TTL = "ttl"
    RETURN = "return"
    END = "end"
    SILENT = "silent"
    PRESSURE = "pressure"
    RESET = "reset"
    SUPERSEDED = "superseded"


class Keep(NamedTuple):
    """How long to keep a turn's KV. ``ttl_s`` 0 means not at all."""

    ttl_s: float
    reason: Reason


class RetentionPolicy(Protocol):
    """How long to keep the KV of a turn that has just ended in a tool call."""

    def keep(self, turn: TurnView, now: float) -> Keep: ...


class EntryPolicy(Protocol):
    """Whether a program that holds no KV may enter now. ``gates`` False: nobody is ever kept out."""

    gates: bool

    def may_enter(self, entry: EntryView, now: float) -> bool: ...


class QueueOrder(Protocol):
    """Who goes next: requests are admitted in ascending order of ``key``."""

    def key(self, request: WaitingView) -> tuple[float, ...]: ...


class RoomPolicy(Protocol):
    """Which leases to give up for somebody who needs space; None: none, let it wait."""

    def release(
        self, need: RoomNeed, leases: Sequence[LeaseView], now: float
    ) -> tuple[ProgramId, ...] | None: ...


class VictimPolicy(Protocol):
    """Which running request to preempt; None leaves the choice to the engine."""

    def victim(self, running: Sequence[VictimView], short_blocks: int, now: float) -> str | None: ...


class EvictionOrder(Protocol):
    """In what order cached blocks of programs are reused: ascending ``score``.

    ``by_program`` False keeps the engine's own least-recently-used order.
    """

    by_program: bool

    def score(self, owner: OwnerView) -> tuple[float, ...]: ...
