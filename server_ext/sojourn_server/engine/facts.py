"""What an engine reports, and what it is told to do: plain data, the same for every engine and the lab."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from sojourn.ids import ProgramId

from ..policy.base import Reason
from ..policy.placement_views import Tier
from ..program.toolcalls import ToolCall
from .identity import Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request has reached the engine."""

    request_id: str
    identity: Identity
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A request got its blocks and runs from this step on."""

    request_id: str
    cached_tokens: int
    """Tokens found, on the device or below it."""
    tokens: int
    """Prompt tokens, plus those generated before a preemption."""
    block_hashes: Sequence[Any]
    """Chained hashes of the request's full blocks."""
    resumed: bool
    """It had been preempted."""
    host_tokens: int = 0
    """Those of the tokens found that were loaded from host memory."""
    most_tokens: int = 0
    """It may write so many more; 0: not told."""


class TurnOutcome(str, Enum):
    """How a request ended."""

    STOPPED = "stopped"
    LENGTH = "length"
    ABORTED = "aborted"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """A request has left the engine."""

    request_id: str
    outcome: TurnOutcome
    tool_calls: tuple[ToolCall, ...]
    prompt_tokens: int
    output_tokens: int
    cached_blocks: int
    """Full blocks it can leave in the prefix cache."""
    held_blocks: int | None = None
    """Distinct blocks that leases hold at this moment; None: as many as they were granted."""
    unheld_blocks: int | None = None
    """Of ``cached_blocks`` those that no lease holds yet; None: all."""
    used_blocks: int | None = None
    """Blocks that requests use or leases hold at this moment, its own among them; None: not known."""
    block_hashes: Sequence[Any]


class ActionKind(str, Enum):
    """What the engine is told to do."""

    RELEASE = "release"
    """Give back the blocks held for the program; they stay cached until reused."""
    DROP = "drop"
    """Release, and forget cached blocks that no other program owns."""
    PIN_CACHED = "pin_cached"
    """Hold what is still cached of the program's last turn, then report it with ``pinned``."""
    PREFETCH = "prefetch"
    """Bring back what is no longer on the device of its last turn, then report it with ``prefetched``."""
    PLACE = "place"
    """Its KV belongs in ``tier`` from now on, and its waiting requests may be parked there or let go."""


class Action(NamedTuple):
    """One order to the engine."""

    kind: ActionKind
    program_id: ProgramId
    reason: Reason
    tier: Tier | None = None
    """Where to, of a PLACE."""
