"""What is known of one program. Mutated only by ``ProgramTable`` and the steward; read by views."""

from __future__ import annotations

from dataclasses import dataclass, field

from sojourn.ids import CallId, EmitterId, ProgramId

from .status import ProgramStatus

SEQ_WINDOW = 1024
"""How far a sequence number may lag behind the newest before it counts as seen."""
_FULL = (1 << SEQ_WINDOW) - 1


@dataclass(slots=True)
class RunningTool:
    """A tool call that has begun and not yet ended."""

    key: str
    """History key, e.g. ``bash:pytest``."""
    started_s: float
    """On the engine's clock."""
    expected_s: float | None = None


@dataclass(slots=True)
class SeenEvents:
    """Which sequence numbers of one emitter were seen, in bounded memory."""

    newest: int = -1
    mask: int = 0
    """Bit i is set where ``newest - i`` was seen: a few hundred bytes, whatever a client numbers."""

    def admit(self, seq: int) -> bool:
        """True the first time ``seq`` is shown; False for repeats and for what is too old to tell."""
        ahead = seq - self.newest
        if ahead > 0:
            kept = (self.mask << ahead) & _FULL if ahead < SEQ_WINDOW else 0
            self.newest, self.mask = seq, kept | 1
            return True
        bit = 1 << -ahead if -ahead < SEQ_WINDOW else 0
        if not bit or self.mask & bit:
            return False
        self.mask |= bit
        return True


@dataclass(slots=True)
class Program:
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
    node: str | None = None
    turns: int = 0
    """Turns finished."""
    first_prompt_tokens: int = 0
    context_tokens: int = 0
    """Prompt plus output of the last finished turn."""
    live_requests: set[str] = field(default_factory=set)
    tools: dict[CallId, RunningTool] = field(default_factory=dict)
    pending_tool: str | None = None
    """Tool key parsed from the last output; its gap runs from ``turn_over_s``."""
    ranked: bool = False
    """Its rank is its first request's; an announcement alone gives no place in line."""
    gap_leased: bool = False
    """It has had a lease since its last turn: no second one in the same gap."""
    gap_reported: bool = False
    """The client reported this gap's durations, so the inferred one is not recorded."""
    turn_over_s: float | None = None
    gap_inferred_s: float | None = None
    """When a request last closed a gap that no event had reported: later news of that gap count no more."""
    hinted_ttl_s: float | None = None
    """What the client asked for its last turn, bounded."""
    turns_when_over: int | None = None
    """Turns at the last end that was learned from, so that one end is not learned twice."""
    last_contact_s: float = 0.0
    heartbeats: bool = False
    """The client promised heartbeats, so its silence means something."""
    seen: dict[EmitterId, SeenEvents] = field(default_factory=dict)

    def tool_now(self) -> str | None:
        """Key of the longest-running reported tool, else of the parsed one."""
        if self.tools:
            return min(self.tools.values(), key=lambda tool: tool.started_s).key
        return self.pending_tool
