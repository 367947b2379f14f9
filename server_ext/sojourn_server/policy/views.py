"""Frozen snapshots a policy decides from. They hold the past only, never anything of the future."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sojourn.ids import ProgramId

from ..program.history import ToolHistory
from .placement_views import Tier


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
    chunked_reload_s: float = 0.0
    """Seconds to compute this context again in pieces of one engine step each, every piece as if alone: how
    long the other requests are held up by it."""
    host_reload_s: float | None = None
    """Seconds to copy this context back from host memory; None where no host tier is known."""
    running_tokens: int = 0
    """Prompt tokens of the requests that run now, this one no more."""
    goes_on: float | None = None
    """Probability that another turn follows; ``None`` where nothing is known or no foresight is asked."""
    used_share: float | None = None
    """Share of the pool that requests use or leases hold, this turn's included; ``None``: not known."""


class WaitingView(NamedTuple):
    """A request in the waiting queue, for the order question: who goes next?"""

    preempted: bool
    leased: bool
    """Its program's KV is held for it."""
    program_rank: int
    """Order of the program's first arrival; of its own arrival for a request of no program."""
    arrival: int
    """Order of the request's own arrival."""
    attained_s: float = 0.0
    """Seconds that its program's requests had run when it arrived."""
    ran_s: float = 0.0
    """Seconds that it has itself run so far, before it was preempted."""
    waited_s: float = 0.0
    """Seconds that its program's requests have waited in this queue so far, this wait not counted."""
    arrived_s: float = 0.0
    """When it arrived; engine clock."""
    since_s: float = 0.0
    """When it began to wait, later than it arrived where it was preempted; engine clock."""
    now_s: float = 0.0
    """When this was looked at; engine clock."""


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
    score: tuple[float, ...] = ()
    """The program's place in the order in which cached blocks are reused, lowest first, where the preset has
    an order by program."""


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
    idle_s: float = 0.0
    """Seconds for which nothing has run although somebody asked; 0 where something runs."""


class RunningView(NamedTuple):
    """A running request, for the victim question, whom to preempt, and for forecasts of what is needed."""

    request_id: str
    program_rank: int
    position: int
    """Place in the engine's running list; the engine's own choice is the last."""
    blocks: int
    """Blocks it has, with those it shares."""
    attained_s: float = 0.0
    """Seconds that its program's requests had run when it arrived."""
    ran_s: float = 0.0
    """Seconds that it has itself run."""
    context_tokens: int = 0
    """Tokens whose KV it needs now: its prompt, computed or not, and what it has written."""
    output_tokens: int = 0
    """Those it has written."""
    most_tokens: int = 0
    """It may write so many more."""
    remaining: tuple[float, ...] | None = None
    """Equally likely numbers of tokens it has yet to write, ascending; ``None``: nothing is known."""
    preemptions: int = 0
    """How often it has been preempted."""
    stayed_tokens: int = 0
    """Tokens it has written since it was last taken in."""
    recover_s: float = 0.0
    """Seconds of work until it could go on after a preemption, computing or copying, whichever is less."""
    of_program: bool = False
    """A program sent it: there may be hints."""
    freed_blocks: int | None = None
    """Of its blocks, those that nobody else uses and its preemption would free; ``None``: all."""

    @property
    def shared_blocks(self) -> int:
        """Of its blocks, those that stay with others when it is preempted."""
        return 0 if self.freed_blocks is None else self.blocks - self.freed_blocks


class VictimNeed(NamedTuple):
    """Why somebody is to be preempted, for the victim question."""

    short_blocks: int = 1
    """Blocks that are missing now."""
    room_blocks: int = 0
    """Blocks that running requests may have in all, with what they share counted for each; 0: not known."""
    block_size: int = 16
    step_s: float = 0.0
    """Seconds that a step takes of late; 0: not known."""


class GrowthView(NamedTuple):
    """A program that holds KV, for the entry question: how much will it still grow?"""

    turns: int
    first_prompt_tokens: int
    context_tokens: int
    peak_tokens: int = 0
    """Its longest context so far; 0: the present one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryView:
    """A program that holds no KV and wants to enter, for the entry question."""

    need_blocks: int
    """Blocks of its prompt. An estimate from above."""
    free_blocks: int
    """Free blocks, and those of later programs' leases: they give way. Without those that running requests
    still need for their prompts, where the policy ``counts_promised``."""
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
    idle_s: float = 0.0
    """Seconds for which nothing has run although somebody asked; 0 where something runs."""
    own: RunningView | None = None
    """The request itself as it would run, where the policy ``forecasts``."""
    needed_blocks: tuple[float, ...] = ()
    """What running requests will need at each of ``demand.POINTS``, where the policy ``forecasts``."""
    room_blocks: int = 0
    """Blocks that running requests may have in all, with what they share counted for each."""


class OwnerView(NamedTuple):
    """A program that owns cached blocks, for the eviction question: what to drop first?"""

    program_rank: int
    over: bool
    last_turn_s: float
    blocks: int = 0
    """Cached blocks that its last turn left behind, reused ones among them."""
    wanted: bool = False
    """A request of it is in the engine."""
    p_reuse: float | None = None
    """Probability that its next prompt finds its context, times the share it finds; ``None``: not known."""
    tier: Tier = Tier.DEVICE
    """In which tier its KV belongs."""
    left_behind: bool = False
    """Its newest turn did without these blocks; ``last_turn_s`` and ``blocks`` are theirs."""


class Scale(NamedTuple):
    """What scores are measured in, the same for all owners. It moves in strides."""

    longest_gap_s: float = 0.0
    """τ_max: the longest time between two turns of late; seconds."""
    most_blocks: float = 0.0
    """size_max: the most blocks that any program left behind of late."""
    branch_reuse: float = 1.0
    """Of blocks that a turn did without, the share that is used again rather than evicted."""


class LeftBehind(NamedTuple):
    """Free blocks of a program that its newest turn did without: another branch, or an older context."""

    used_s: float
    """When the program last used the oldest of them."""
    blocks: int


class StepView(NamedTuple):
    """A turn that has just ended, for the foresight question: what follows?"""

    final: bool = False
    """The client said that no request follows."""
    steps_left: float | None = None
    """Turns the client expects to follow; ``None`` where it did not say."""
    declared: tuple[tuple[str, float], ...] = ()
    """What may follow the node that the client named, by the graph it declared."""
    hints_believed: bool = True
    """What was declared of programs of this type has been worth it so far."""
    inferred: tuple[tuple[str, float], ...] = ()
    """What followed such steps in programs of this type, likeliest first; ``sojourn.aeg.END`` for no more."""
    tasks: int = 0
    """Programs of this type that have ended."""
    calls_tool: bool = False
    """It ended in a tool call: its output showed one, or the client named one."""


class PrefetchView(NamedTuple):
    """A program whose tool runs, for the prefetch question: when is its prefix wanted?"""

    successor: str
    """The likeliest next step."""
    goes_on: float
    """Probability that another turn follows."""
    tool_durations_s: Sequence[float]
    """How long the tool took before, ascending; of any tool where it is new."""
    reload_s: float
    """Seconds to copy its context back from the tier below; 0 where none is known."""
