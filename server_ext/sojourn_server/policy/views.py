"""Frozen snapshots a policy decides from. They hold the past only, never anything of the future."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sojourn.ids import ProgramId

from ..program.history import ToolHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """A turn that has just finished, for the retention question: how long to keep its KV?"""

    program_id: ProgramId
    tool: str | None
    """History key of the tool the output calls; None where it calls none."""
    context_tokens: int
    kv_blocks: int
    reload_s: float
    """Seconds to get this context back if it is dropped now (recompute)."""
    mean_evicted_wait_s: float
    """T̄: mean queueing delay of requests whose program had been evicted."""
    memoryfulness: float
    """η in [-1, 1]."""
    history: ToolHistory
    hinted_ttl_s: float | None = None
    """What the client asked for, already bounded; None where it did not ask."""


class WaitingView(NamedTuple):
    """A request in the waiting queue, for the order question: who goes next?"""

    preempted: bool
    leased: bool
    """Its program's KV is held for it."""
    program_rank: int
    """Order of the program's first arrival; of its own arrival for a request of no program."""
    arrival: int
    """Order of the request's own arrival."""


class LeaseView(NamedTuple):
    """A lease, for the room question: whose KV goes when somebody needs the space?"""

    program_id: ProgramId
    program_rank: int
    expires_s: float
    """Engine clock; in the past for a lease that only waits for its program to be scheduled."""
    blocks: int
    reload_s: float
    waiting: bool
    """A request of the program stands in the waiting queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomNeed:
    """Who needs space and how much."""

    program_id: ProgramId | None
    program_rank: int
    blocks: int
    """Blocks short. An estimate from above."""
    running: bool
    """It already runs and would otherwise preempt somebody."""
    anything_running: bool
    """False: unless room is made, the engine stands still."""


class VictimView(NamedTuple):
    """A running request, for the victim question: whom to preempt?"""

    request_id: str
    program_rank: int
    position: int
    """Place in the engine's running list; the engine's own choice is the last."""
    blocks: int
    """Blocks its preemption would free."""


class GrowthView(NamedTuple):
    """A program that holds KV, for the entry question: how much will it still grow?"""

    turns: int
    first_prompt_tokens: int
    context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryView:
    """A program that holds no KV and wants to enter, for the entry question."""

    need_blocks: int
    """Blocks of its prompt. An estimate from above."""
    free_blocks: int
    """Free blocks, and those of later programs' leases: they give way."""
    pool_blocks: int
    block_size: int
    max_context_tokens: int
    """No context grows beyond this."""
    anything_running: bool
    """False: unless it enters, the engine stands still."""
    earlier: tuple[GrowthView, ...]
    """Programs that arrived before it and hold KV: running, or leased."""
    turns_seen: int
    mean_growth_tokens: float
    """Tokens a turn has added to a context, on average."""
    programs_seen: int
    mean_turns: float
    """Turns of finished programs, on average."""


class OwnerView(NamedTuple):
    """A program that owns cached blocks, for the eviction question: what to drop first?"""

    program_rank: int
    over: bool
    last_turn_s: float
