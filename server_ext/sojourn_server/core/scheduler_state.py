"""All tables of a scheduler, its histories, its limits and the size of the KV pool."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from sojourn.ids import ProgramId

from ..metrics.decision_log import DecisionLog
from ..metrics.metrics_recorder import MetricsRecorder
from ..metrics.turn_ledger import EvictionLog, LossCause, TurnLedger
from ..policies.costs.engine_profile import PrefillCurve
from ..policies.costs.reload_estimate import HostLink, StepTimeEstimator
from ..policies.policy_views import GrowthStatistics
from ..policies.preset import Preset
from ..programs.declared_graphs import GraphStore
from ..programs.program_table import ProgramTable
from ..programs.statements import RatioHistory, StepsLeftHistory
from ..programs.windowed_history import (
    KeyedHistory,
    OutputLengthHistory,
    SlidingWindow,
    ToolHistory,
    TurnHistory,
)
from ..programs.workflow_history import WorkflowHistory
from .block_owners import BlockOwners
from .context_hashes import HashLists
from .events_and_actions import Action
from .request_table import RequestTable

LOGGED_TURNS_AND_DECISIONS = 20_000
"""Maximum number of turns that the turn ledger keeps, and of entries that the decision log keeps."""
MIN_LOGGED_EVICTED_BLOCKS = 16_384
"""Minimum capacity of the eviction log, in blocks (about 6 MB). Else the capacity is twice the pool's blocks,
but a pool of a few hundred blocks can evict more than that during one tool call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Limits of a scheduler. Six of them can be changed by plugin settings of the same names."""

    max_programs: int = 2_000
    lease_budget_fraction: float = 0.95
    """Share of the pool that all leases together may hold."""
    max_hinted_ttl_s: float = 300.0
    max_held_s: float = 310.0
    """Seconds beyond which a client's reports cannot extend a lease. A longer TTL from the policy is not
    shortened, and a lease does not expire while a request of its program waits."""
    hold_timeout_s: float = 240.0
    """Seconds for which a request may be parked (kept waiting by placement) before it is released.
    The default leaves time for the answer in the 600 s after which OpenAI's clients give up."""
    queue_patience_s: float = 30.0
    """Seconds after which a waiting request gets privileges.

    - A request without a program is then overdue: it may end any lease. While it waits, all requests that
      have waited for as long are served first, by arrival, and may end any lease too.
    - A request that the admission policy has rejected for this time is no longer overtaken by later requests.
      If a request without a program waits too, the rejected request is admitted as soon as it fits."""
    return_grace_s: float = 2.0
    """Seconds that a lease lasts after the reported end of its tool, so that the next request can arrive."""
    idle_program_s: float = 1800.0
    """Seconds of silence between turns after which a program expires."""
    silent_program_s: float = 60.0
    """Seconds of silence after which a program expires if its client promised heartbeats."""


@dataclass(slots=True, kw_only=True)
class KVPoolConfig:
    """Sizes of the engine's KV pool and of the tiers below it."""

    blocks: int
    block_size: int
    """Number of tokens per block hash. The length of a prefix cache hit is a multiple of this number."""
    tokens_per_block: float = 0.0
    """Number of tokens of context per block; 0: ``block_size``. A model with several KV cache groups needs
    several blocks for the same tokens."""
    fixed_blocks: int = 0
    """Number of blocks that each request needs in addition, whatever its length, for attention windows and
    recurrent states."""
    block_bytes: int = 0
    hidden_size: int = 0
    """Dimension of the model; 0: unknown, or a request's attention does not grow with its context."""
    max_context_tokens: int = 1 << 31
    dropped_hit_blocks: int = 0
    """Number of cached blocks at the end of a prefix that the engine computes again anyway (EAGLE: 1)."""
    step_tokens: int = 1 << 31
    """Maximum number of tokens in one engine step."""
    host_s_per_token: float | None = None
    """Seconds to copy a token's KV back from host memory, by the engine profile; ``None``: unknown, or no
    host tier."""
    host_blocks: int = 0
    """Number of blocks that fit in host memory; 0: no host tier."""
    disk_blocks: int = 0
    """Number of blocks that fit on the disk; 0: no disk."""

    def __post_init__(self) -> None:
        self.tokens_per_block = self.tokens_per_block or self.block_size

    def blocks_of(self, tokens: float) -> int:
        """Return the number of blocks of a request with ``tokens`` tokens; 0 for 0 tokens."""
        return math.ceil(tokens / self.tokens_per_block) + self.fixed_blocks if tokens else 0


ASSUMED_LINK_BYTES_PER_S = 4e9
"""Assumed speed of copies between device and host memory until a speed is measured: about an eighth of a PCIe
4.0 link with 16 lanes."""


@dataclass(slots=True)
class Histories:
    """Histories of earlier turns and programs from which a scheduler learns. They may be saved."""

    tools: ToolHistory = field(default_factory=ToolHistory)
    turns: TurnHistory = field(default_factory=TurnHistory)
    evicted_waits: SlidingWindow = field(default_factory=SlidingWindow)
    """Queueing delays, in seconds, of requests whose program's KV had been evicted; their mean is T̄."""
    growth_tokens: SlidingWindow = field(default_factory=SlidingWindow)
    """Growth of contexts, in tokens per turn: a turn's context minus the longest earlier context of its
    program. First turns do not count."""
    workflows: WorkflowHistory = field(default_factory=WorkflowHistory)
    output_lengths: OutputLengthHistory = field(default_factory=OutputLengthHistory)
    service: KeyedHistory[str] = field(default_factory=KeyedHistory)
    """Seconds that the requests of ended programs ran, by agent type; ``""``: of programs without one."""
    steps_left: StepsLeftHistory = field(default_factory=StepsLeftHistory)
    """Turns that programs had left, ÷ those that clients stated."""
    tool_estimates: RatioHistory = field(default_factory=RatioHistory)
    """Durations of tool calls ÷ the clients' estimates, and of gaps ÷ hinted TTLs, by tool."""
    hints_off: KeyedHistory[str] = field(default_factory=lambda: KeyedHistory(64, max_all=1))
    """Errors |ln(actual ÷ hinted)| of hinted output lengths, by agent type."""

    @property
    def growth(self) -> GrowthStatistics:
        tokens, turns = self.growth_tokens, self.turns
        return GrowthStatistics(tokens.count(), tokens.mean(), turns.count(), turns.mean())

    def snapshot(self) -> dict[str, Any]:
        """Return the content of all histories as JSON values, by name."""
        return {each.name: getattr(self, each.name).snapshot() for each in fields(self)}

    @classmethod
    def restore(cls, document: dict[str, Any]) -> Histories:
        """Return the histories of which ``document`` is the ``snapshot``. Raises ``KeyError`` for a missing
        one, and ``ValueError`` for invalid content."""
        histories = cls()
        for each in fields(cls):
            getattr(histories, each.name).restore(document[each.name])
        return histories


class SchedulerState:
    """Configuration and tables of one engine's scheduler. Only ``core`` and ``recording`` read this state;
    other packages ask ``ProgramScheduler``. Only ``ProgramScheduler.handle`` changes the tables."""

    def __init__(
        self,
        preset: Preset,
        pool: KVPoolConfig,
        *,
        limits: SchedulerLimits | None = None,
        curve: PrefillCurve | None = None,
        histories: Histories | None = None,
    ) -> None:
        self.preset = preset
        self.pool = pool
        self.limits = limits or SchedulerLimits()
        self.histories = histories or Histories()
        self.reload = StepTimeEstimator(curve, pool.hidden_size)
        self.host_link = HostLink(self._assumed_s_per_token)
        self.programs = ProgramTable(
            self.limits.max_programs,
            idle_s=self.limits.idle_program_s,
            promised_s=self.limits.silent_program_s,
        )
        self.requests = RequestTable()
        self.leases: dict[ProgramId, Any] = {}
        """Program → its ``Lease``. The ``LeaseTable`` puts itself here."""
        self.owners = BlockOwners()
        self.used_blocks: int | None = None
        """Number of blocks that requests use or leases hold, as last reported."""
        self.contexts: HashLists[ProgramId] = HashLists()
        """Each program's *context*: the block hashes of its last turn. They show whether a prompt changed or
        its KV was evicted. Without them, the ledger records the cause ``unknown`` for lost KV."""
        self.release_reasons: dict[ProgramId, LossCause | None] = {}
        """Program → why its KV was released, as a cause in the turn ledger; ``None``: a reason for which the
        ledger has no cause. The entry is removed when a turn of the program begins."""
        self.eviction_log = EvictionLog(max(MIN_LOGGED_EVICTED_BLOCKS, 2 * pool.blocks))
        self.graphs = GraphStore()
        self.ledger = TurnLedger(LOGGED_TURNS_AND_DECISIONS)
        self.decisions = DecisionLog(LOGGED_TURNS_AND_DECISIONS)
        self.recorder = MetricsRecorder()
        self.last_shortage_s = -math.inf
        """Time at which a living program last lost KV because memory was short, by eviction of a block,
        reclaim of a lease or preemption of a request. ``-inf``: never."""
        self.actions: list[Action] = []
        """Actions of the event being handled, oldest first. ``ProgramScheduler.handle`` empties this list."""

    def _assumed_s_per_token(self) -> float | None:
        """Assumed seconds to copy a token's KV from host memory, until a copy is measured: from the engine
        profile, or else by ``ASSUMED_LINK_BYTES_PER_S``. ``None`` without host memory."""
        pool = self.pool
        if pool.host_s_per_token is not None or not (pool.host_blocks and pool.block_bytes):
            return pool.host_s_per_token
        return pool.block_bytes / pool.tokens_per_block / ASSUMED_LINK_BYTES_PER_S
