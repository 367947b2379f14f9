"""State of one program. ``ProgramTable`` and ``core`` change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sojourn.ids import CallId, EmitterId, ProgramId

from .program_status import ProgramStatus

SEQ_WINDOW = 1024
"""Sequence numbers that lag further behind the newest count as seen."""
_FULL_MASK = (1 << SEQ_WINDOW) - 1
HALF_LIFE = 20.0
"""Number of outcomes after which the weight of an older one is halved."""
MIN_OUTCOMES = 5.0
"""Minimum number of outcomes; with fewer, hints count as reliable."""
MAX_ERROR_RATIO = 1.25
"""Maximum ratio of the hints' error to that of a constant prediction."""
ERROR_SLACK = 0.05
"""Absolute slack of that comparison, for small sums."""
CHANCE_ERROR = 0.25
"""Mean squared error of a coin toss."""

_DECAY = 0.5 ** (1.0 / HALF_LIFE)


@dataclass(slots=True)
class RunningTool:
    """A tool call in progress."""

    key: str
    """History key, e.g. ``bash:pytest``."""
    started_s: float
    """Start, on the engine's clock."""
    expected_s: float | None = None
    name: str = ""
    """The framework's name, e.g. ``bash``."""
    tool_class: str | None = None
    """The client's finer class, e.g. ``pytest``."""


@dataclass(slots=True)
class SequenceWindow:
    """Seen sequence numbers of one emitter, in bounded memory."""

    newest: int = -1
    mask: int = 0
    """Bit i is set if ``newest - i`` was seen."""

    def admit(self, seq: int) -> bool:
        """True the first time for each ``seq``; False for repeats and for numbers behind the window."""
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


class HintReliability:
    """Whether programs continued after their turns as their hints said.

    Decayed squared errors of declared probabilities, and of the plain share of turns with a successor.
    """

    __slots__ = ("base_error", "came_back", "declared", "error", "weight")

    def __init__(self) -> None:
        self.weight = self.came_back = self.declared = self.error = self.base_error = 0.0

    def observe(self, declared: float | None, came_back: bool) -> None:
        """A program returned after its turn, or ended. ``declared``: its hinted probability of return."""
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
        """Whether the hints of many programs are no worse than a constant prediction."""
        return self.weight < MIN_OUTCOMES or self.error <= self.base_error * MAX_ERROR_RATIO + ERROR_SLACK

    @property
    def no_worse_than_chance(self) -> bool:
        """Whether the hints of one program are no worse than chance. A constant prediction would be too
        strict: only its last turn has no successor."""
        return self.declared < MIN_OUTCOMES or self.error <= self.declared * CHANCE_ERROR

    def numbers(self) -> list[float]:
        """Return all of it, for ``restored``."""
        return [self.weight, self.came_back, self.declared, self.error, self.base_error]

    @classmethod
    def restored(cls, numbers: Sequence[float]) -> HintReliability:
        """Restore ``numbers``. Raises ``ValueError`` for anything else."""
        if len(numbers) != 5 or not all(isinstance(n, (int, float)) and 0 <= n < 1e9 for n in numbers):
            raise ValueError(f"credit: {list(numbers)[:6]!r}; expected five numbers ≥ 0")
        credit = cls()
        credit.weight, credit.came_back, credit.declared, credit.error, credit.base_error = map(
            float, numbers
        )
        return credit


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
    """The client's declared tenant; not authenticated."""
    node: str | None = None
    graph_hash: str | None = None
    """Its execution graph; ``GraphStore`` may have forgotten it."""
    prompt_type: str | None = None
    """Name of the first tokens of its first prompt: its type if the client names none."""
    steps: list[str] = field(default_factory=list)
    """Steps of its turns, newest last (``WorkflowHistory``), without the turn whose tool still runs."""
    steps_begin: bool = True
    """``steps`` contains its first step."""
    reused_share: float = 1.0
    """Share of its cached context that the next prompt reuses; a moving average."""
    cached_blocks: int = 0
    """Full blocks that its last turn left in the prefix cache, shared ones included."""
    last_turn_s: float | None = None
    """Time at which its last turn ended."""
    turn_node: str | None = None
    """Graph node that the request of its last turn named."""
    turn_steps_left: float | None = None
    """Turns that this request expected to follow."""
    turn_final: bool = False
    """That request was declared the last."""
    goes_on: float | None = None
    """Probability that another turn follows; ``None``: unknown."""
    p_reuse: float | None = None
    """``goes_on`` times the share of its next prompt that its context covers; ``None``: unknown."""
    tier: str | None = None
    """Source of ``goes_on`` (``policies.workflow``)."""
    pending_declaration: tuple[str, float] | None = None
    """Agent type and hinted probability of another turn, until the outcome is known."""
    credit: HintReliability | None = None
    """Reliability of its own hints."""
    prefetch_at_s: float | None = None
    """Start of its planned prefetch; ``None``: none is planned."""
    expected_steps_left: float | None = None
    """Turns that the client expects after its last one."""
    turns: int = 0
    """Turns finished."""
    first_prompt_tokens: int = 0
    context_tokens: int = 0
    """Prompt plus output of the last finished turn."""
    peak_tokens: int = 0
    """Maximum of ``context_tokens``."""
    live_requests: set[str] = field(default_factory=set)
    tools: dict[CallId, RunningTool] = field(default_factory=dict)
    pending_tool: str | None = None
    """Tool key parsed from the last output; its gap runs from ``gap_started_s``."""
    ranked: bool = False
    """Its first request has given it its rank; an announcement does not."""
    gap_leased: bool = False
    """Whether it has had a lease in this gap: no second one follows."""
    gap_reported: bool = False
    """The client reported this gap's duration, so the inferred one is not recorded."""
    gap_started_s: float | None = None
    gap_inferred_s: float | None = None
    """Time at which a request last ended an unreported gap: later events of that gap are ignored."""
    hinted_ttl_s: float | None = None
    """The client's time-to-live for its last turn, bounded."""
    attained_s: float = 0.0
    """Seconds that its finished requests ran; of parallel ones the longest chain (Autellix, Algorithm 1)."""
    waited_s: float = 0.0
    """Seconds that its finished requests waited in the engine's queue."""
    turns_at_last_end: int | None = None
    """Turns at the last end that was learned, so that no end is learned twice."""
    last_contact_s: float = 0.0
    heartbeats: bool = False
    """The client promised heartbeats."""
    seen: dict[EmitterId, SequenceWindow] = field(default_factory=dict)

    def reset_for_reuse(self) -> None:
        """Reset the state of an ended program whose id is used again.

        Declarations since its end stay, since they are about the new program. So does the length of its old
        context, which the ledger compares with the new prompt.
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
