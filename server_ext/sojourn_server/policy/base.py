"""The questions a preset answers. Every policy is a plain object: frozen view and ``now`` in, decision out.

No clock, no I/O, no engine, no logging: the same object runs in vLLM, in the
gateway and in the simulator. Not being able to decide is a value, not an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from sojourn.ids import ProgramId

from .views import (
    EntryView,
    LeaseView,
    OwnerView,
    PrefetchView,
    RoomNeed,
    RunningView,
    Scale,
    StepView,
    TurnView,
    VictimNeed,
    WaitingView,
)

if TYPE_CHECKING:
    from .foresight import Expectation
    from .prefetch import Prefetch


class Reason(str, Enum):
    """Why a decision was taken; lands in the decision log."""

    NO_TOOL_CALL = "no_tool_call"
    FINAL_TURN = "final_turn"
    COLD_START = "cold_start"
    ALL_TOOLS = "all_tools"
    THIS_TOOL = "this_tool"
    FIXED = "fixed"
    LEAST_WASTE = "least_waste"
    HINTED = "hinted"
    NOT_WORTH_IT = "not_worth_it"
    OVER_BUDGET = "over_budget"
    POLICY_OFF = "policy_off"
    NOTHING_CACHED = "nothing_cached"
    # what becomes of a prefetch
    IN_PLACE = "in_place"
    NO_TIER = "no_tier"
    IN_HOST = "in_host"
    FROM_DISK = "from_disk"
    # how leases end
    TTL = "ttl"
    RETURN = "return"
    END = "end"
    SILENT = "silent"
    PRESSURE = "pressure"
    RESET = "reset"
    SUPERSEDED = "superseded"
    PLACED = "placed"
    """Its KV belongs in another tier."""


class Ended(str, Enum):
    """What becomes of the KV of a program that has ended."""

    REUSED_FIRST = "reused-first"
    """What only it used is next to be reused: of nobody is it known who would ask for it again."""
    LEFT = "left"
    """They stay cached until their turn comes, as in an engine that hears of no end."""


class Keep(NamedTuple):
    """How long to keep a turn's KV. ``ttl_s`` 0 means not at all."""

    ttl_s: float
    reason: Reason


class RetentionPolicy(Protocol):
    """How long to keep the KV of a turn that has just ended in a tool call."""

    def keep(self, turn: TurnView, now: float) -> Keep: ...


class EntryPolicy(Protocol):
    """Whether a program that holds no KV may enter now. ``gates`` False: nobody is ever kept out.

    ``counts_promised``: blocks that running requests will yet take for their
    prompts are not free. ``forecasts``: it is asked of every request of a
    program, of preempted ones and of those whose KV is held too, and told what
    all that run will need.
    """

    gates: bool
    counts_promised: bool
    forecasts: bool

    def may_enter(self, entry: EntryView, now: float) -> bool: ...


class QueueOrder(Protocol):
    """Who goes next: requests are admitted in ascending order of ``key``."""

    def key(self, request: WaitingView) -> tuple[float, ...]: ...

    def promoted_s(self, request: WaitingView) -> float:
        """When waiting alone lets it go first, on the engine's clock; ``inf``: never.

        From then on its key is another one, and what it has waited and run as
        this request before that time is forgotten.
        """
        ...


class RoomPolicy(Protocol):
    """Which leases to give up for somebody who needs space; None: none, let it wait."""

    def release(
        self, need: RoomNeed, leases: Sequence[LeaseView], now: float
    ) -> tuple[ProgramId, ...] | None: ...


class VictimPolicy(Protocol):
    """Which running request to preempt; None leaves the choice to the engine."""

    def victim(self, running: Sequence[RunningView], need: VictimNeed, now: float) -> str | None: ...


class EvictionOrder(Protocol):
    """In what order cached blocks of programs are reused: ascending ``score``.

    ``by_program`` False keeps the engine's own least-recently-used order. An
    owner's ``standing`` is asked for when something happens to it and kept;
    ``score`` places a standing in the present scale, and all of them are placed
    anew whenever that moves.
    """

    by_program: bool

    def standing(self, owner: OwnerView) -> tuple[float, ...]: ...

    def score(self, standing: tuple[float, ...], scale: Scale) -> tuple[float, ...]: ...


class ForesightPolicy(Protocol):
    """What follows a turn. ``looks`` False: programs' workflows are neither noted nor asked about."""

    looks: bool

    def expect(self, step: StepView, now: float) -> Expectation: ...


class PrefetchPolicy(Protocol):
    """When to bring a program's prefix back from the tier below. ``plans`` False: never."""

    plans: bool

    def plan(self, view: PrefetchView, now: float) -> Prefetch | None: ...
