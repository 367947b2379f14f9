"""Frozen snapshots that policies decide from. They describe the past and the present only.

Engine time is in seconds on the engine's monotonic clock, like a policy's argument ``now``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sojourn.ids import ProgramId

from ..programs.windowed_history import ToolHistory
from .costs.reload_estimate import restore_s
from .placement.placement_views import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTurnView:
    """A turn that has just finished, as input of the retention policy: for how long is its KV kept?"""

    program_id: ProgramId
    tool: str | None
    """History key of the tool that the output calls, e.g. ``bash:pytest``; ``None``: it calls no tool."""
    context_tokens: int
    reload_s: float
    """Seconds to recompute this context if it is dropped now."""
    mean_evicted_wait_s: float
    """T̄: mean queueing delay of requests whose program's KV was evicted."""
    memoryfulness: float
    """η in [-1, 1]: minus the correlation of past and remaining turns (Continuum §4.1)."""
    history: ToolHistory
    hinted_ttl_s: float | None = None
    """The TTL that the client asked for, within its bounds; ``None``: the client did not ask."""
    chunked_reload_s: float = 0.0
    """Seconds to recompute this context in chunks of one engine step each: the delay of other requests."""
    host_reload_s: float | None = None
    """Seconds to copy this context back from host memory, wait included; ``None``: no host tier, or its speed
    is unknown."""
    running_tokens: int = 0
    """Prompt tokens of the running requests, without the request of this turn."""
    continuation_probability: float | None = None
    """Probability that another turn follows; ``None``: unknown, or the preset does not predict workflows."""

    @property
    def restore_s(self) -> float:
        """Seconds to restore this context if it is dropped now, by recomputing or copying: the faster way."""
        return restore_s(self.reload_s, self.host_reload_s)


class WaitingRequestView(NamedTuple):
    """A request in the waiting queue, as input of the queue order policy, which computes its sort key."""

    preempted: bool
    leased: bool
    """Whether the request's program has a lease."""
    program_rank: int
    """Rank of the program by the arrival of its first request. Without a program: rank of this request."""
    arrival: int
    """Number of the request in order of arrival."""
    attained_s: float = 0.0
    """Seconds that the program's requests had run when this request arrived."""
    ran_s: float = 0.0
    """Seconds that this request ran, before it was preempted."""
    waited_s: float = 0.0
    """Seconds that the program's requests have waited in this queue, without the present wait."""
    arrived_s: float = 0.0
    """Engine time at which the request arrived."""
    since_s: float = 0.0
    """Engine time at which the request's present wait began: at its arrival, or at its last preemption."""
    now_s: float = 0.0
    """Engine time of this snapshot."""


class LeaseView(NamedTuple):
    """A lease, as input of the lease reclaim policy: which leases end early when blocks run short?"""

    program_id: ProgramId
    program_rank: int
    expires_s: float
    """Engine time of expiry. May be past: a lease does not end while a request of its program waits."""
    blocks: int
    reload_s: float
    waiting: bool
    """Whether a request of the program is in the waiting queue."""
    score: tuple[float, ...] = ()
    """Eviction score of the program; the lowest is evicted first. Empty if the eviction policy is not
    ``by_program``."""
    hinted: bool = False
    """Whether the client chose the TTL."""
    ttl_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimRequest:
    """A request that needs blocks, as input of the lease reclaim policy."""

    program_id: ProgramId | None
    """``None``: the request belongs to no program. Then ``program_rank`` is the request's own rank."""
    program_rank: int
    blocks: int
    """Estimated number of missing blocks, at least 1."""
    running: bool
    """Whether the request runs already. If it runs and gets no blocks, the engine preempts a request."""
    anything_running: bool
    """Whether any request runs; if none does, the engine is idle until blocks are freed."""
    idle_s: float = 0.0
    """Seconds for which nothing has run although a request waited; 0 if something runs."""
    overdue: bool = False
    """Whether the request, or one that it holds up, has waited too long: leases end under every policy."""
    priority: int | None = None
    """The user's priority of a waiting request; a larger number is less important. ``None`` if the engine
    does not schedule by priority."""


class RunningRequestView(NamedTuple):
    """A running request, as input of the victim policy and the demand forecast."""

    request_id: str
    program_rank: int
    position: int
    """Index among the requests that can be preempted: first running requests, then requests whose KV is being
    loaded. The engine itself would preempt the last of these requests."""
    blocks: int
    """Number of the request's blocks, shared ones included."""
    attained_s: float = 0.0
    """Seconds that the program's requests had run when this request arrived."""
    ran_s: float = 0.0
    """Seconds that this request has run."""
    context_tokens: int = 0
    """Tokens whose KV the request needs now: its prompt, computed or not, and its output so far."""
    output_tokens: int = 0
    """Output tokens so far."""
    most_tokens: int = 0
    """Maximum number of further output tokens."""
    remaining: tuple[float, ...] | None = None
    """Equally likely numbers of tokens still to generate, ascending; ``None``: unknown."""
    preemptions: int = 0
    """Number of times that the request was preempted."""
    stayed_tokens: int = 0
    """Output tokens since the request's last admission."""
    recover_s: float = 0.0
    """Seconds to restore the request's KV after a preemption, by recomputing or copying, whichever is
    faster."""
    of_program: bool = False
    """Whether the request belongs to a program, so that hints are possible."""
    shared_blocks: int = 0
    """Number of the request's blocks that other requests use too. A preemption does not free them."""


class BlockShortage(NamedTuple):
    """The shortage that makes a preemption necessary."""

    available_blocks: int = 0
    """Free blocks plus all blocks of the running requests; 0: unknown. A shared block counts once for each
    request that uses it."""
    block_size: float = 16
    """Tokens of context per block."""
    step_s: float = 0.0
    """Seconds per recent engine step; 0: unknown."""


class ProgramGrowthView(NamedTuple):
    """A program that holds KV, and the data to forecast its growth."""

    turns: int
    first_prompt_tokens: int
    context_tokens: int
    peak_tokens: int = 0
    """Longest context so far; 0: the present one."""


class GrowthStatistics(NamedTuple):
    """An engine's observations of the growth of its programs' contexts."""

    observed_turns: int = 0
    mean_growth_tokens: float = 0.0
    """Mean growth of a context per turn."""
    observed_programs: int = 0
    mean_turns: float = 0.0
    """Mean number of turns of finished programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionView:
    """A program that holds no KV and waits for admission, as input of the admission policy."""

    need_blocks: int
    """Blocks of the program's prompt, an upper estimate."""
    free_blocks: int
    """Free blocks plus blocks leased to later programs, which can be reclaimed. If the policy has
    ``reserves_prompt_blocks``, blocks that running requests still need for their prompts are subtracted."""
    pool_blocks: int
    block_size: float
    """Tokens of context per block."""
    max_context_tokens: int
    anything_running: bool
    """Whether any request runs; if none does, the engine is idle unless this program is admitted."""
    earlier: tuple[ProgramGrowthView, ...]
    """Earlier-arrived programs with KV, running or leased; empty if the policy ``forecasts``."""
    growth: GrowthStatistics
    idle_s: float = 0.0
    """Seconds for which nothing has run although a request waited; 0 if something runs."""
    own: RunningRequestView | None = None
    """The waiting request in the form of a running request, as input of the forecast; set if the policy
    ``forecasts``."""
    needed_blocks: tuple[float, ...] = ()
    """Demand of the running requests at each of ``forecasting.STEP_POINTS``; set if the policy
    ``forecasts``."""
    available_blocks: int = 0
    """Free blocks plus all blocks of the running requests; set if the policy ``forecasts``. A shared block
    counts once for each request that uses it."""
    since_shortage_s: float = 0.0
    """Seconds since a living program last lost KV because memory was short; ``inf``: that never happened."""


class EvictionCandidateView(NamedTuple):
    """A program that owns cached blocks: how soon are the blocks evicted?"""

    program_rank: int
    over: bool
    """Whether the program has ended or expired."""
    last_turn_s: float
    """Engine time at which the program's last turn ended; before the first end, the program's arrival."""
    blocks: int = 0
    """Number of cached blocks that the program's last turn used, reused ones included."""
    has_request: bool = False
    """Whether a request of the program is in the engine."""
    p_reuse: float | None = None
    """Probability of another turn, times the share of its prompt that the cached context covers; ``None``:
    unknown."""
    tier: Tier = Tier.DEVICE
    """The tier in which the program's KV is placed."""
    in_abandoned_branch: bool = False
    """Whether this view is about blocks that the program's newest turn did not use. Then ``last_turn_s`` is
    the time at which this branch was last used, and ``blocks`` its number of blocks."""


class EvictionScoreScale(NamedTuple):
    """Statistics over all programs, for scores. They change in steps, so scores are rarely computed again."""

    longest_gap_s: float = 0.0
    """τ_max: the longest recent gap between two turns; seconds."""
    most_blocks: float = 0.0
    """size_max: the largest recent context of a program at the end of a turn; blocks."""
    branch_reuse: float = 1.0
    """Share of the blocks in abandoned branches that is used again before eviction."""


class AbandonedBranch(NamedTuple):
    """Cached free blocks that a program's newest turn did not use: another branch or an older context."""

    used_s: float
    """Engine time of the last use of the branch; for merged branches, the earliest of these times."""
    blocks: int


class WorkflowStepView(NamedTuple):
    """A turn that has just ended, as input of the workflow prediction policy."""

    final: bool = False
    """Whether the client said that no request follows."""
    steps_left: float | None = None
    """Number of turns that the client expects to follow; ``None``: not given."""
    declared: tuple[tuple[str, float], ...] = ()
    """Successors of the current node with their probabilities, in the graph that the client declared."""
    hints_reliable: bool = True
    """Whether hints for programs of this type have been accurate enough so far."""
    inferred: tuple[tuple[str, float], ...] = ()
    """Observed successors of the current node in programs of this type, with their probabilities, most likely
    first; ``sojourn.aeg.END`` is the end."""
    tasks: int = 0
    """Number of finished programs of this type."""
    calls_tool: bool = False
    """Whether the turn ended in a tool call, seen in its output or named by the client."""
    resumes: bool = False
    """Whether the client expects another turn (``expected_resume``)."""


class PrefetchView(NamedTuple):
    """A program whose tool runs: when is the program's prefix loaded back?"""

    continuation_probability: float | None
    """Probability that another turn follows; ``None``: unknown."""
    tool_durations_s: Sequence[float]
    """Earlier durations of this tool, ascending. If this tool is new, durations of all tools."""
    reload_s: float
    """Seconds to copy the prefix back from host memory; 0: no host tier, or its speed is unknown."""


class LoadAheadView(NamedTuple):
    """A prefix whose prefetch is due: how many of its blocks are loaded into spare blocks of the device?"""

    host_blocks: int
    """Number of leading blocks that the device lacks, that are in host memory and may be loaded now. The
    engine's budget for prefetches limits this number."""
    spare_blocks: int
    """Number of blocks that can be taken without evicting KV of a living program. The count may stop where
    further blocks would not change the decision."""
    reserve_blocks: int
    """Number of blocks that requests may take in one step."""
    pool_blocks: int
    """Size of the device's pool."""
    compute_s_per_block: float
    """Mean seconds to compute a block of the prefix; 0: unknown."""
    load_s_per_block: float | None
    """Seconds to copy a block from host memory to the device; ``None``: unknown."""
    queue_s: float
    """Seconds until the queued copies to the device are done."""
