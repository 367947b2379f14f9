"""What is known of one program. Mutated only by ``ProgramTable`` and the steward; read by views."""

from __future__ import annotations

from dataclasses import dataclass, field

from sojourn.ids import CallId, EmitterId, ProgramId

from .status import ProgramStatus

SEQ_WINDOW = 1024
"""How far a sequence number may lag behind the newest before it counts as seen."""


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
    recent: set[int] = field(default_factory=set)

    def admit(self, seq: int) -> bool:
        """True the first time ``seq`` is shown; False for repeats and for what is too old to tell."""
        if seq in self.recent or seq <= self.newest - SEQ_WINDOW:
            return False
        self.recent.add(seq)
        if seq > self.newest:
            self.newest = seq
            if len(self.recent) > 2 * SEQ_WINDOW:
                floor = seq - SEQ_WINDOW
                self.recent = {s for s in self.recent if s > floor}
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
    context_tokens: int = 0
    """Prompt plus output of the last finished turn."""
    live_requests: set[str] = field(default_factory=set)
    tools: dict[CallId, RunningTool] = field(default_factory=dict)
    pending_tool: str | None = None
    """Tool key parsed from the last output; its gap runs from ``turn_over_s``."""
    gap_reported: bool = False
    """The client reported this gap's durations, so the inferred one is not recorded."""
    turn_over_s: float | None = None
    last_contact_s: float = 0.0
    heartbeats: bool = False
    """The client promised heartbeats, so its silence means something."""
    evicted_since_turn: bool = False
    """Blocks of its context were reused by others since its last turn."""
    seen: dict[EmitterId, SeenEvents] = field(default_factory=dict)

    def tool_now(self) -> str | None:
        """Key of the longest-running reported tool, else of the parsed one."""
        if self.tools:
            return min(self.tools.values(), key=lambda tool: tool.started_s).key
        return self.pending_tool
