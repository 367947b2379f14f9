"""What is known of one program. Mutated only by ``ProgramTable`` and the steward; read by views."""

from __future__ import annotations

from dataclasses import dataclass, field

from sojourn.ids import CallId, EmitterId, ProgramId

from .hint_reliability import HintReliability
from .program_status import ProgramStatus

SEQ_WINDOW = 1024
"""How far a sequence number may lag behind the newest before it counts as seen."""
_FULL_MASK = (1 << SEQ_WINDOW) - 1


@dataclass(slots=True)
class RunningTool:
    """A tool call that has begun and not yet ended."""

    key: str
    """History key, e.g. ``bash:pytest``."""
    started_s: float
    """On the engine's clock."""
    expected_s: float | None = None
    name: str = ""
    """As the framework knows it, e.g. ``bash``."""
    tool_class: str | None = None
    """The finer class the client told, e.g. ``pytest``."""


@dataclass(slots=True)
class SequenceWindow:
    """Which sequence numbers of one emitter were seen, in bounded memory."""

    newest: int = -1
    mask: int = 0
    """Bit i is set where ``newest - i`` was seen: a few hundred bytes, whatever a client numbers."""

    def admit(self, seq: int) -> bool:
        """True the first time ``seq`` is shown; False for repeats and for what is too old to tell."""
        ahead = seq - self.newest
        if ahead > 0:
            kept = (self.mask << ahead) & _FULL_MASK if ahead < SEQ_WINDOW else 0
            self.newest, self.mask = seq, kept | 1
            return True
        bit = 1 << -ahead if -ahead < SEQ_WINDOW else 0
        if not bit or self.mask & bit:
            return False
        self.mask |= bit
        return True


@dataclass(slots=True)
class ProgramState:
    """One agent run, first to last LLM request. Times are seconds on the engine's monotonic clock."""

    id: ProgramId
    rank: int
    """Order of first arrival; smaller is earlier. Kept for ever (Continuum §4.3)."""
    arrived_s: float
    status: ProgramStatus = ProgramStatus.ACTING
    parent_id: ProgramId | None = None
    root_id: ProgramId | None = None
    name: str | None = None
    agent_type: str | None = None
    tenant: str | None = None
    """On whose behalf it runs, as the client declares; not authenticated."""
    node: str | None = None
    graph_hash: str | None = None
    """The graph it follows, which ``GraphStore`` may have forgotten."""
    prompt_type: str | None = None
    """How its first prompt began, as a name: stands for the agent's type where the client names none."""
    steps: list[str] = field(default_factory=list)
    """What its turns called, newest last (``workflows``); without the last one while its tool runs."""
    steps_begin: bool = True
    """``steps`` begin where the program began."""
    reused_share: float = 1.0
    """Of a turn's cached context the share that the next prompt began with, as a moving average."""
    cached_blocks: int = 0
    """Full blocks that its last turn left in the prefix cache, those it shares among them."""
    last_turn_s: float | None = None
    """When its last turn ended, whatever came since."""
    turn_node: str | None = None
    """Graph node that the request of its last turn named."""
    turn_steps_left: float | None = None
    """Turns that this request expected to follow."""
    turn_final: bool = False
    """It said that none follows."""
    goes_on: float | None = None
    """Probability that another turn follows its last; ``None`` where nothing is known."""
    p_reuse: float | None = None
    """``goes_on`` times the share of its next prompt that its context is; ``None`` where nothing is known."""
    tier: str | None = None
    """What ``goes_on`` was taken from (``policy.foresight``)."""
    pending_declaration: tuple[str, float] | None = None
    """Its agent type then, and what its hints alone gave to another turn, until that is known."""
    credit: HintReliability | None = None
    """What its own hints have been worth so far."""
    prefetch_at_s: float | None = None
    """When to begin to bring its prefix back; ``None`` where nothing is planned."""
    expected_steps_left: float | None = None
    """Turns the client expected to follow its last one."""
    turns: int = 0
    """Turns finished."""
    first_prompt_tokens: int = 0
    context_tokens: int = 0
    """Prompt plus output of the last finished turn."""
    peak_tokens: int = 0
    """The most that this was after any turn."""
    live_requests: set[str] = field(default_factory=set)
    tools: dict[CallId, RunningTool] = field(default_factory=dict)
    pending_tool: str | None = None
    """Tool key parsed from the last output; its gap runs from ``gap_started_s``."""
    ranked: bool = False
    """Its rank is its first request's; an announcement alone gives no place in line."""
    gap_leased: bool = False
    """It has had a lease since its last turn: no second one in the same gap."""
    gap_reported: bool = False
    """The client reported this gap's durations, so the inferred one is not recorded."""
    gap_started_s: float | None = None
    gap_inferred_s: float | None = None
    """When a request last closed a gap that no event had reported: later news of that gap count no more."""
    hinted_ttl_s: float | None = None
    """What the client asked for its last turn, bounded."""
    attained_s: float = 0.0
    """Seconds that its finished requests ran; of parallel ones the longest chain (Autellix, Algorithm 1)."""
    waited_s: float = 0.0
    """Seconds that its finished requests waited in the engine's queue."""
    turns_at_last_end: int | None = None
    """Turns at the last end that was learned from, so that one end is not learned twice."""
    last_contact_s: float = 0.0
    heartbeats: bool = False
    """The client promised heartbeats, so its silence means something."""
    seen: dict[EmitterId, SequenceWindow] = field(default_factory=dict)

    def reset_for_reuse(self) -> None:
        """Its id is used again after its end: nothing of its last life holds for the new one.

        What was declared since its end stays, since it was declared for what begins now; so does the length
        of its old context, which the ledger holds the new prompt against.
        """
        self.turns = self.first_prompt_tokens = self.peak_tokens = self.cached_blocks = 0
        self.turns_at_last_end = self.gap_started_s = self.last_turn_s = self.pending_tool = None
        self.gap_leased = self.gap_reported = self.turn_final = False
        self.gap_inferred_s = self.hinted_ttl_s = self.node = self.expected_steps_left = None
        self.prompt_type = self.turn_node = self.turn_steps_left = None
        self.steps, self.steps_begin, self.reused_share = [], True, 1.0
        self.goes_on = self.p_reuse = self.tier = self.pending_declaration = self.credit = (
            self.prefetch_at_s
        ) = None
        self.attained_s = self.waited_s = 0.0

    def tool_now(self) -> str | None:
        """Key of the longest-running reported tool, else of the parsed one."""
        if self.tools:
            return min(self.tools.values(), key=lambda tool: tool.started_s).key
        return self.pending_tool
