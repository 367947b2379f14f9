"""Frozen snapshots that policies decide from. They describe the past and the present only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sojourn.ids import ProgramId

from ..programs.execution_history import ToolHistory
from .placement.placement_views import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTurnView:
    """A turn that has just finished. Retention: how long to keep its KV?"""

    program_id: ProgramId
    tool: str | None
    """History key of the tool that the output calls; ``None``: it calls no tool."""
    context_tokens: int
    kv_blocks: int
    reload_s: float
    """Seconds to recompute this context if it is dropped now."""
    mean_evicted_wait_s: float
    """T̄: mean queueing delay of requests whose program was evicted."""
    memoryfulness: float
    """η in [-1, 1]."""
    history: ToolHistory
    hinted_ttl_s: float | None = None
    """The TTL that the client asked for, within its bounds; ``None``: the client did not ask."""
    chunked_reload_s: float = 0.0
    """Seconds to recompute this context in chunks of one engine step each, every chunk as if it ran alone:
    the delay this causes for other requests."""
    host_reload_s: float | None = None
    """Seconds to copy this context back from host memory; ``None``: no host tier."""
    running_tokens: int = 0
    """Prompt tokens of the requests that run now, without this one."""
    goes_on: float | None = None
    """Probability that another turn follows; ``None``: unknown, or the preset does not predict workflows."""
    used_share: float | None = None
    """Share of the pool that requests use or leases hold, this turn included; ``None``: unknown."""


class WaitingRequestView(NamedTuple):
    """A request in the waiting queue. Order: which request is next?"""

    preempted: bool
    leased: bool
    """Its program has a lease."""
    program_rank: int
    """Order of the program's first arrival; of its own arrival for a request without a program."""
    arrival: int
    """Order of the request's own arrival."""
    attained_s: float = 0.0
    """Seconds that the program's requests had run when this one arrived."""
    ran_s: float = 0.0
    """Seconds that this request ran before it was preempted."""
    waited_s: float = 0.0
    """Seconds that the program's requests have waited in this queue, without the present wait."""
    arrived_s: float = 0.0
    """Engine time of its arrival."""
    since_s: float = 0.0
    """Engine time at which the present wait began; later than the arrival if it was preempted."""
    now_s: float = 0.0
    """Engine time of this snapshot."""


class LeaseView(NamedTuple):
    """A lease. Reclaim: which lease ends early when blocks run short?"""

    program_id: ProgramId
    program_rank: int
    expires_s: float
    """Engine time; in the past for a lease that only waits for its program to be scheduled."""
    blocks: int
    reload_s: float
    waiting: bool
    """A request of the program is in the waiting queue."""
    score: tuple[float, ...] = ()
    """The program's place in the eviction order, lowest first; empty if the preset does not order by
    program."""
    hinted: bool = False
    """Its client chose the TTL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimRequest:
    """A request for blocks: which program needs how many."""

    program_id: ProgramId | None
    program_rank: int
    blocks: int
    """Missing blocks, an upper estimate."""
    running: bool
    """The request already runs; without these blocks another request is preempted."""
    anything_running: bool
    """False: the engine is idle until blocks are freed."""
    idle_s: float = 0.0
    """Seconds for which nothing has run although a request waited; 0 if something runs."""
    overdue: bool = False
    """Whether it has waited so long that it may take any lease, whatever the policy is."""


class RunningRequestView(NamedTuple):
    """A running request. Victim: which request to preempt? Also the input of demand forecasts."""

    request_id: str
    program_rank: int
    position: int
    """Index in the engine's running list; the engine's own victim is the last."""
    blocks: int
    """Blocks of the request, shared ones included."""
    attained_s: float = 0.0
    """Seconds that the program's requests had run when this one arrived."""
    ran_s: float = 0.0
    """Seconds that this request has run."""
    context_tokens: int = 0
    """Tokens whose KV it needs now: its prompt, computed or not, and its output so far."""
    output_tokens: int = 0
    """Output tokens so far."""
    most_tokens: int = 0
    """Maximum number of further output tokens."""
    remaining: tuple[float, ...] | None = None
    """Equally likely numbers of output tokens still to come, ascending; ``None``: unknown."""
    preemptions: int = 0
    """Number of its preemptions."""
    stayed_tokens: int = 0
    """Output tokens since it was last admitted."""
    recover_s: float = 0.0
    """Seconds until it can continue after a preemption: the cheaper of recomputing and copying."""
    of_program: bool = False
    """Whether it belongs to a program, so that there may be hints."""
    freed_blocks: int | None = None
    """Blocks that its preemption would free, because no other request uses them; ``None``: all."""

    @property
    def shared_blocks(self) -> int:
        """Blocks that stay in use by other requests when this one is preempted."""
        return 0 if self.freed_blocks is None else self.blocks - self.freed_blocks


class BlockShortage(NamedTuple):
    """The shortage that makes a preemption necessary."""

    short_blocks: int = 1
    """Blocks missing now."""
    available_blocks: int = 0
    """Blocks available to all running requests, shared ones counted for each; 0: unknown."""
    block_size: int = 16
    step_s: float = 0.0
    """Recent seconds per engine step; 0: unknown."""


class ProgramGrowthView(NamedTuple):
    """A program that holds KV, as admission forecasts its growth."""

    turns: int
    first_prompt_tokens: int
    context_tokens: int
    peak_tokens: int = 0
    """Longest context so far; 0: the present one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionView:
    """A program that holds no KV and waits for admission."""

    need_blocks: int
    """Blocks of its prompt, an upper estimate."""
    free_blocks: int
    """Free blocks, plus those of later programs' leases, which can be reclaimed. Without the blocks that
    running requests still need for their prompts if the policy ``reserves_prompt_blocks``."""
    pool_blocks: int
    block_size: int
    max_context_tokens: int
    """Maximum context length."""
    anything_running: bool
    """False: the engine is idle unless this program is admitted."""
    earlier: tuple[ProgramGrowthView, ...]
    """Programs that arrived earlier and hold KV, running or leased."""
    observed_turns: int
    mean_growth_tokens: float
    """Mean growth of a context per turn."""
    observed_programs: int
    mean_turns: float
    """Mean number of turns of finished programs."""
    idle_s: float = 0.0
    """Seconds for which nothing has run although a request waited; 0 if something runs."""
    own: RunningRequestView | None = None
    """The request itself as it would run; set if the policy ``forecasts``."""
    needed_blocks: tuple[float, ...] = ()
    """Demand of the running requests at each of ``kv_demand.STEP_POINTS``; set if the policy
    ``forecasts``."""
    available_blocks: int = 0
    """Blocks available to all running requests, shared ones counted for each."""


class EvictionCandidateView(NamedTuple):
    """A program that owns cached blocks. Eviction: which blocks go first?"""

    program_rank: int
    over: bool
    last_turn_s: float
    blocks: int = 0
    """Cached blocks that its last turn left, reused ones included."""
    wanted: bool = False
    """A request of the program is in the engine."""
    p_reuse: float | None = None
    """Probability that its next prompt reuses its context, times the reused share; ``None``: unknown."""
    tier: Tier = Tier.DEVICE
    """The tier its KV belongs in."""
    in_abandoned_branch: bool = False
    """Its newest turn did not use these blocks; ``last_turn_s`` and ``blocks`` describe the branch."""


class EvictionScoreScale(NamedTuple):
    """The units of eviction scores, the same for all programs. They change in discrete steps."""

    longest_gap_s: float = 0.0
    """τ_max: the longest recent gap between two turns; seconds."""
    most_blocks: float = 0.0
    """size_max: the most blocks that a program left recently."""
    branch_reuse: float = 1.0
    """Share of the blocks in abandoned branches that is used again before eviction."""


class AbandonedBranch(NamedTuple):
    """Free blocks that a program's newest turn did not use: another branch, or an older context."""

    used_s: float
    """Time at which the program last used the oldest of these blocks."""
    blocks: int


class WorkflowStepView(NamedTuple):
    """A turn that has just ended. Workflow prediction: what follows?"""

    final: bool = False
    """The client said that no request follows."""
    steps_left: float | None = None
    """Number of turns that the client expects to follow; ``None``: not given."""
    declared: tuple[tuple[str, float], ...] = ()
    """Successors of the current node with their probabilities, from the client's declared graph."""
    hints_reliable: bool = True
    """Hints for programs of this type have been accurate enough so far."""
    inferred: tuple[tuple[str, float], ...] = ()
    """Observed successors in programs of this type, most likely first; ``sojourn.aeg.END`` is the end."""
    tasks: int = 0
    """Number of finished programs of this type."""
    calls_tool: bool = False
    """The turn ended in a tool call, seen in its output or named by the client."""


class PrefetchView(NamedTuple):
    """A program whose tool runs. Prefetch: when is its prefix needed?"""

    successor: str
    """The most likely next step."""
    goes_on: float
    """Probability that another turn follows."""
    tool_durations_s: Sequence[float]
    """Earlier durations of this tool, ascending; of all tools if this one is new."""
    reload_s: float
    """Seconds to copy the context back from the tier below; 0: there is none."""
