"""The protocols of an engine's policies: each computes one decision from a frozen view and ``now``.

``now`` is engine time: seconds on the engine's monotonic clock. A policy reads no clock, does no I/O and
knows no engine, so the same object runs in vLLM and in the simulator. A policy that cannot decide returns the
value that its protocol names for this case, such as ``None``. Policies do not raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from sojourn.ids import ProgramId

from .policy_views import (
    AdmissionView,
    BlockShortage,
    EvictionCandidateView,
    EvictionScoreScale,
    FinishedTurnView,
    LeaseView,
    LoadAheadView,
    PrefetchView,
    ReclaimRequest,
    RunningRequestView,
    WaitingRequestView,
    WorkflowStepView,
)


class DecisionReason(str, Enum):
    """Why a decision was made. The decision log records the reason."""

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
    # results of a prefetch
    IN_PLACE = "in_place"
    NO_TIER = "no_tier"
    IN_HOST = "in_host"
    FROM_DISK = "from_disk"
    TO_DEVICE = "to_device"
    # ends of a lease
    TTL = "ttl"
    RETURN = "return"
    END = "end"
    SILENT = "silent"
    PRESSURE = "pressure"
    RESET = "reset"
    SUPERSEDED = "superseded"
    SWITCHED_OFF = "switched_off"
    """The operator switched the policy off."""
    PLACED = "placed"
    """The placement policy has decided that the program's KV belongs in another tier."""


class EndedKvHandling(str, Enum):
    """What happens to the KV of a program that has ended."""

    REUSED_FIRST = "reused-first"
    """Blocks that only this program used are evicted first, since no other request is expected to need
    them."""
    LEFT = "left"
    """The blocks stay cached in the ordinary eviction order, as in an engine without end-of-program hints."""


class RetentionDecision(NamedTuple):
    """How long to keep a turn's KV. ``ttl_s`` 0 grants no lease."""

    ttl_s: float
    reason: DecisionReason


class PredictionSource(str, Enum):
    """The source of a prediction."""

    HINTS = "hints"
    """Declared by the client: a graph and the present node, the number of steps left, or a tool call."""
    INFERRED = "inferred"
    """Inferred from earlier programs of this agent type."""
    COLD = "cold"
    """Nothing is known about the program's workflow."""


class NextStepPrediction(NamedTuple):
    """A prediction of what follows a turn, and its source."""

    source: PredictionSource
    continuation_probability: float | None
    """Probability that another turn follows; ``None``: unknown."""
    successor: str | None = None
    """The most likely next workflow step; ``None``: unknown, or not likely enough to act on."""
    successors: tuple[tuple[str, float], ...] = ()
    """Possible next steps with their probabilities, as declared or inferred; empty: unknown."""


class PrefetchTiming(NamedTuple):
    """Planned times of a prefetch, in engine time: the copy starts at ``at_s`` and should end by ``by_s``."""

    at_s: float
    by_s: float


class LoadAhead(NamedTuple):
    """Number of blocks to load into spare blocks of the device. A loaded block is given up if no request uses
    it within ``keep_s`` seconds."""

    blocks: int
    keep_s: float


NO_LOAD_AHEAD = LoadAhead(0, 0.0)


class RetentionPolicy(Protocol):
    """Decides how long to keep the KV of a turn that has just ended.

    A policy that grants the TTL of a client's hint has the class attribute ``reads_hinted_ttl = True``. Under
    other policies such hints are answered ``unsupported``. A policy with a method ``pressed(leases,
    used_blocks, pool_blocks, now)`` is asked before each step while there are leases: it returns the programs
    whose leases end, each with the reason."""

    def keep(self, turn: FinishedTurnView, now: float) -> RetentionDecision: ...


class AdmissionPolicy(Protocol):
    """Decides whether a program that holds no KV is admitted now.

    ``is_used``: whether the policy is asked. If not, every program is admitted. ``reserves_prompt_blocks``:
    whether blocks that running requests still need for their prompts are subtracted from the free blocks.
    ``forecasts``: whether the scheduler adds the demand forecast to the view. If so, the scheduler asks the
    policy about every request of a program, even if the request was preempted or the program has a lease.
    """

    is_used: bool
    reserves_prompt_blocks: bool
    forecasts: bool

    def may_admit(self, view: AdmissionView, now: float) -> bool: ...


class QueueOrderPolicy(Protocol):
    """The order of the waiting queue: requests are admitted in ascending order of ``key``."""

    def key(self, request: WaitingRequestView) -> tuple[float, ...]: ...

    def promoted_s(self, request: WaitingRequestView) -> float:
        """Return the engine time at which the request is promoted because it has waited long enough; ``inf``:
        never.

        A promoted request has a new key. Its waiting and running times before the promotion no longer count.
        """
        ...


class LeaseReclaimPolicy(Protocol):
    """Chooses the programs whose leases end early, so that blocks become free. ``None``: no lease ends."""

    def release(
        self, need: ReclaimRequest, leases: Sequence[LeaseView], now: float
    ) -> tuple[ProgramId, ...] | None: ...


class VictimPolicy(Protocol):
    """Chooses the running request to preempt, by its id. ``None`` leaves the choice to the engine."""

    def victim(
        self, running: Sequence[RunningRequestView], need: BlockShortage, now: float
    ) -> str | None: ...


class EvictionPolicy(Protocol):
    """Orders the eviction of programs' cached blocks: ascending ``score``.

    ``by_program``: whether blocks are evicted in this order. If not, the engine's least-recently-used order
    applies. ``score_inputs`` returns the data from which a program's score is computed. The scheduler stores
    these data at each event of the program. ``score`` computes the score from them and the present scale.
    When the scale changes, all scores are computed again.
    """

    by_program: bool

    def score_inputs(self, owner: EvictionCandidateView) -> tuple[float, ...]: ...

    def score(self, inputs: tuple[float, ...], scale: EvictionScoreScale) -> tuple[float, ...]: ...


class WorkflowPredictionPolicy(Protocol):
    """Predicts the next step of a program after a turn. ``is_used``: whether workflows are recorded and
    predicted."""

    is_used: bool

    def expect(self, step: WorkflowStepView, now: float) -> NextStepPrediction: ...


class PrefetchPolicy(Protocol):
    """Decides when to load a program's prefix back before its next request, and how many blocks.

    ``plan`` returns the times of the prefetch, or ``None`` for no prefetch. When the prefetch starts, blocks
    on disk are read into host memory. Then ``load_ahead`` returns how many of the leading missing blocks to
    load from host memory into spare blocks of the device, and for how many seconds to keep loaded blocks that
    are unused. The policy is asked only about programs whose next step is predicted.

    ``is_used``: whether the policy is asked.
    """

    is_used: bool

    def plan(self, view: PrefetchView, now: float) -> PrefetchTiming | None: ...

    def load_ahead(self, view: LoadAheadView, now: float) -> LoadAhead: ...
