"""The state of one program, and its parts. ``ProgramTable``, ``WorkflowHistory`` and ``core`` change it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, fields
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec
from sojourn.ids import CallId, EmitterId, ProgramId

from .program_status import ProgramOutcome, ProgramStatus
from .windowed_history import Amount

MAX_GAP_CALLS = 256
"""Maximum number of calls in ``ProgramState.gap_calls``, the last reported ones."""
SEQ_WINDOW = 1024
"""Number of sequence numbers that are tracked per emitter (the sender of events in one client process).
A number that is further behind the newest number counts as seen."""
_FULL_MASK = (1 << SEQ_WINDOW) - 1
HALF_LIFE = 20.0
"""Number of turns after which the weight of an older turn is halved in ``HintReliability``."""
MIN_OUTCOMES = 5.0
"""Minimum total weight of observed turns in ``HintReliability``. With less, hints count as reliable."""
MAX_ERROR_RATIO = 1.25
"""Hints count as unreliable if their error exceeds this multiple of the baseline's error (see
``HintReliability``)."""
ERROR_SLACK = 0.05
"""Amount by which the hints' sum of squared errors may exceed ``MAX_ERROR_RATIO`` times the baseline's sum.
The amount matters only if both sums are small."""
CHANCE_ERROR = 0.25
"""Mean squared error of the constant prediction 0.5."""

_DECAY = 0.5 ** (1.0 / HALF_LIFE)


@dataclass(slots=True)
class RunningTool:
    """A tool call in progress. A field is ``None`` if the client did not give it."""

    key: str
    """History key, e.g. ``bash:pytest``."""
    started_s: float
    """Time at which the call began, in seconds on the engine's clock."""
    expected_s: float | None = None
    """The client's estimate of the duration."""
    expected_p95_s: float | None = None
    """The client's estimate of the duration's 95th percentile."""


@dataclass(slots=True)
class SequenceWindow:
    """Sequence numbers seen from one emitter, in bounded memory."""

    newest: int = -1
    mask: int = 0
    """Bit i is set if ``newest - i`` was seen."""

    def admit(self, seq: int) -> bool:
        """Record ``seq``. Returns whether it is new: neither seen before nor behind the window."""
        if seq > self.newest:
            self.mask = (self.mask << min(seq - self.newest, SEQ_WINDOW)) & _FULL_MASK
            self.newest = seq
        behind = self.newest - seq
        bit = 1 << behind if behind < SEQ_WINDOW else 0
        is_new = bool(bit & ~self.mask)
        self.mask |= bit
        return is_new


class HintReliability(msgspec.Struct, array_like=True):
    """Measures how well hints predicted whether a turn is followed by another turn (the turn's outcome).

    Keeps squared errors of the hinted probabilities and of a baseline. Older errors lose weight. The baseline
    always predicts the share of earlier turns that were followed by another turn.
    """

    weight: Amount = 0.0
    came_back: Amount = 0.0
    declared: Amount = 0.0
    error: Amount = 0.0
    base_error: Amount = 0.0

    def observe(self, declared: float | None, came_back: bool) -> None:
        """Record the outcome of a turn. ``came_back``: whether another turn followed. ``declared``: hinted
        probability of another turn; ``None``: no hint."""
        outcome = float(came_back)
        if declared is not None:
            share = (self.came_back + 0.5) / (self.weight + 1.0)
            self.error = self.error * _DECAY + (declared - outcome) ** 2
            self.base_error = self.base_error * _DECAY + (share - outcome) ** 2
            self.declared = self.declared * _DECAY + 1.0
        self.weight = self.weight * _DECAY + 1.0
        self.came_back = self.came_back * _DECAY + outcome

    @property
    def hints_reliable(self) -> bool:
        """Whether the hints of many programs are about as good as the baseline, or better. True while fewer
        than ``MIN_OUTCOMES`` turns are known."""
        return self.weight < MIN_OUTCOMES or self.error <= self.base_error * MAX_ERROR_RATIO + ERROR_SLACK

    @property
    def no_worse_than_chance(self) -> bool:
        """Whether one program's hints are at least as good as the constant prediction 0.5. True while fewer
        than ``MIN_OUTCOMES`` hints are known.

        The baseline of ``hints_reliable`` would be too strict for one program. Within a program, another turn
        follows every turn except the last one. So the baseline is almost always right.
        """
        return self.declared < MIN_OUTCOMES or self.error <= self.declared * CHANCE_ERROR


class StepsLeft(NamedTuple):
    """A statement about the turns that a program has left: a program's first one of this source and size."""

    source: str
    turns: float
    """Turns to the program's end, the next one included."""
    after: int
    """Turns that the program had finished."""


class RequestHint(NamedTuple):
    """The hint of a request."""

    ttl_s: float | None = None
    """TTL, clipped to the allowed range."""
    final: bool = False
    """Whether no further turn follows."""
    resumes: bool = False
    """Whether another turn follows."""
    node: str | None = None
    """Graph node."""
    steps_left: float | None = None
    """Number of further turns."""
    output_tokens: int | None = None
    """Total output length."""


NO_HINT = RequestHint()


@dataclass(slots=True)
class ProgramState:
    """One agent run, from its first to its last LLM request. Times are seconds on the engine's monotonic
    clock. ``None`` means unknown or absent, unless the field says otherwise."""

    id: ProgramId
    rank: int
    """Order of the program's first request; the same in later turns (Continuum §4.3)."""
    arrived_s: float
    status: ProgramStatus = ProgramStatus.ACTING
    parent_id: ProgramId | None = None
    importance: int = 0
    """Priority in the hint of the last request; a larger number is more important."""
    due_s: float = math.inf
    """The client's deadline."""
    name: str | None = None
    agent_type: str | None = None
    tenant: str | None = None
    """The tenant that the client declared; not authenticated."""
    node: str | None = None
    graph_hash: str | None = None
    """Hash of the program's execution graph. ``GraphStore`` may have removed the graph."""
    prompt_type: str | None = None
    """Agent type that the program's first prompt implies; used if the client names none."""
    steps: list[str] = field(default_factory=list)
    """Workflow steps of the program's turns, newest last, without the turn whose tool still runs."""
    steps_begin: bool = True
    """Whether ``steps`` begins with the program's first step; false after older steps were dropped."""
    reused_share: float = 1.0
    """Moving average of the share of the context that the next prompt reuses."""
    kept_share: float = 1.0
    """Share of the context that the next prompt is expected to reuse: of the predicted successors, or else
    ``reused_share``."""
    cached_blocks: int = 0
    """Full blocks that the last turn left in the prefix cache, shared ones included."""
    last_turn_s: float | None = None
    """Time at which the last turn ended."""
    turn_hint: RequestHint = NO_HINT
    """Hint of the last turn's request."""
    went_on_after_final: bool = False
    """Whether a turn followed one that was declared the final one."""
    continuation_probability: float | None = None
    """Probability that another turn follows."""
    p_reuse: float | None = None
    """``continuation_probability`` times the share of the next prompt that the cached context covers."""
    prediction_source: str | None = None
    """Source of ``continuation_probability``, a ``PredictionSource``: hints, inferred or cold."""
    pending_declaration: tuple[str, float] | None = None
    """Agent type and hinted probability of another turn, kept until it is known whether one follows."""
    credit: HintReliability | None = None
    """Reliability of this program's hints."""
    successor: str | None = None
    """Predicted next workflow step."""
    prefetch_tries: int = 0
    """Number of prefetches begun in this gap."""
    expected_steps_left: float | None = None
    """Number of further turns that the client expects."""
    statements: dict[str, StepsLeft] = field(default_factory=dict)
    """The program's first statement of each source and size about the turns that it has left."""
    steps_left: StepsLeft | None = None
    """The statement among them whose source and size were stated last."""
    turns: int = 0
    """Number of finished turns."""
    client_request_id: str | None = None
    """The client's own id of the request that was counted last in ``turns``. A repetition does not count."""
    first_prompt_tokens: int = 0
    context_tokens: int = 0
    """Prompt plus output tokens of the last finished turn."""
    prompt_tokens: int = 0
    """Prompt tokens of the last finished turn."""
    peak_tokens: int = 0
    """Maximum of ``context_tokens``."""
    priority: int = 0
    """The user's priority of the program's request that arrived last."""
    live_requests: set[str] = field(default_factory=set)
    branch: tuple[int, Any] | None = None
    """The prompt of the newest side request since the last turn: its number of blocks, and their last hash,
    which covers the others."""
    tools: dict[CallId, RunningTool] = field(default_factory=dict)
    """The tool calls that run, by id."""
    tools_ended_s: float = 0.0
    """Arrival of the last request, which ended the tool calls that ran."""
    pending_tool: str | None = None
    """History key of the tool that runs in this gap, from the last output or the client's report."""
    ranked: bool = False
    """Whether a request of the program has set its ``rank``."""
    gap_leased: bool = False
    """Whether the program has had a lease in this gap between turns; it gets no second one."""
    gap_reported: bool = False
    """Whether the client reported a tool's duration in this gap. If not, the gap's length is learned."""
    gap_calls: deque[tuple[float, float, str]] = field(default_factory=lambda: deque(maxlen=MAX_GAP_CALLS))
    """Start, end and history key of the reported tool calls that have ended in this gap."""
    gap_started_s: float | None = None
    gap_inferred_s: float | None = None
    """Time at which the last gap without a reported tool duration ended. Its length was learned as the tool's
    duration, so later events about tool calls of that gap do not count."""
    attained_s: float = 0.0
    """Seconds that the program's finished requests ran. Of parallel requests only the longest chain counts
    (Autellix, Algorithm 1)."""
    waited_s: float = 0.0
    """Seconds that the program's finished requests waited in the engine's queue."""
    reused_tokens: int = 0
    """Prompt tokens of all turns whose KV was on the device or in host memory."""
    lost_tokens: int = 0
    """Prompt tokens of all turns that were computed again because their KV was lost."""
    ttft_s: float | None = None
    """Time to first token, in seconds, of the newest request that has one."""
    saved_s: float = 0.0
    """Estimated seconds that computing ``reused_tokens`` would have taken."""
    turns_at_last_end: int | None = None
    """Value of ``turns`` when the histories last learned the program's end. No end is learned twice."""
    aborted_wait: tuple[float, float] | None = None
    """The program's waiting request that was aborted last: the start of its wait, and the time of the abort.
    ``None`` after a request of the program arrived."""
    last_contact_s: float = 0.0
    heartbeats: bool = False
    """Whether the client promised heartbeats."""
    disconnected: bool = False
    """Whether the last request was aborted, and the client has sent nothing since."""
    outcome: ProgramOutcome | None = None
    """How the program ended."""
    seen: dict[EmitterId, SequenceWindow] = field(default_factory=dict)

    def reset_for_reuse(self, now: float) -> None:
        """Reset the state of an ended program whose id is used again, by a request that arrives at ``now``.

        Data that the client has declared since the old program ended stays, because it is about the new
        program. ``context_tokens`` stays too, because the ledger compares it with the new prompt.
        """
        fresh = ProgramState(self.id, self.rank, now)
        for each in fields(self):
            if each.name not in _KEPT_ON_REUSE:
                setattr(self, each.name, getattr(fresh, each.name))

    @property
    def last_active_s(self) -> float:
        """End of the program's last turn, or else its arrival."""
        return self.last_turn_s if self.last_turn_s is not None else self.arrived_s

    def silent_outcome(self) -> ProgramOutcome:
        """The outcome of a program whose client has fallen silent."""
        if self.turn_hint.final:
            return ProgramOutcome.FINAL
        if self.disconnected:
            return ProgramOutcome.DISCONNECTED
        return ProgramOutcome.LOST if self.heartbeats else ProgramOutcome.IDLE

    def tool_ended(self, tool: RunningTool, duration_s: float, now: float) -> None:
        """Add a call that has ended to ``gap_calls``. A call that ended before the gap does not count."""
        if self.gap_started_s is not None and tool.started_s + duration_s >= self.gap_started_s:
            self.gap_calls.append((tool.started_s, min(tool.started_s + duration_s, now), tool.key))

    def gap_tool_s(self) -> float | None:
        """Return the seconds of this gap in which at least one reported call ran; ``None``: none ended, or
        one still runs. Reports may come in any order."""
        if self.gap_started_s is None or self.tools or not self.gap_calls:
            return None
        total_s, counted_until_s = 0.0, self.gap_started_s
        for start_s, end_s, _ in sorted(self.gap_calls):
            total_s += max(0.0, end_s - max(start_s, counted_until_s))
            counted_until_s = max(counted_until_s, end_s)
        return total_s

    def running_tool(self) -> RunningTool | None:
        """The reported tool call that has run longest; ``None`` without a reported call."""
        return min(self.tools.values(), key=lambda tool: tool.started_s, default=None)

    def tool_now(self) -> str | None:
        """History key of ``running_tool``, or else ``pending_tool``; ``None`` without either."""
        tool = self.running_tool()
        return tool.key if tool is not None else self.pending_tool

    def tool_of_gap(self) -> str | None:
        """History key of the tool of this gap: of the reported call that began last, whether it still runs or
        has ended, or else ``pending_tool``. A start that came during the turn counts too, although it changed
        no ``pending_tool``."""
        calls = [(tool.started_s, tool.key) for tool in self.tools.values()]
        calls += [(started_s, key) for started_s, _, key in self.gap_calls]
        return max(calls, key=itemgetter(0))[1] if calls else self.pending_tool


_KEPT_ON_REUSE = frozenset({
    "id", "rank", "ranked", "status", "outcome", "last_contact_s", "heartbeats", "disconnected", "seen",
    "parent_id", "name", "agent_type", "tenant", "graph_hash", "priority",
    "tools", "tools_ended_s", "context_tokens", "prompt_tokens",
})  # fmt: skip
"""Fields that ``ProgramState.reset_for_reuse`` does not reset."""
