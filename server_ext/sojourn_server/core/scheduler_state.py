"""What a steward is given and what it keeps: bounds, the pool's shape, histories, and a ticket a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..metrics.turn_ledger import TurnRecord
from ..policies.forecasting.remaining_tokens import RemainingTokens
from ..programs.execution_history import SlidingMean, ToolHistory, TurnHistory
from ..programs.output_lengths import HintErrors, OutputLengthHistory
from ..programs.program_state import ProgramState
from ..programs.workflow_history import WorkflowHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds, each with its unit."""

    max_programs: int = 20_000
    max_graphs: int = 256
    max_graph_bytes: int = 4 * 1024 * 1024
    """Of all graphs together, in bytes of JSON."""
    lease_budget_fraction: float = 0.95
    """Share of the pool that all leases together may hold."""
    max_ends_per_tick: int = 1000
    """Leases ended in one engine step at most; the rest follow in the next."""
    max_hinted_ttl_s: float = 300.0
    max_held_s: float = 310.0
    """No lease outlives its grant by more, whatever its client reports, unless its policy gave it more."""
    gate_timeout_s: float = 600.0
    """A request that placement has kept out for so long is refused with an error."""
    line_patience_s: float = 30.0
    """Strangers go past a program that is kept out for so long; then it holds the line, as in stock vLLM."""
    return_grace_s: float = 2.0
    """How long a lease outlives its tool's reported end: the time a request needs to arrive."""
    idle_program_s: float = 1800.0
    """A program not heard of for so long between turns is given up."""
    silent_program_s: float = 60.0
    """The same for a client that promised heartbeats."""


@dataclass(slots=True, kw_only=True)
class KVPoolConfig:
    """The engine's KV pool."""

    blocks: int
    block_size: int
    """Tokens a block holds."""
    block_bytes: int = 0
    max_context_tokens: int = 1 << 31
    dropped_hit_blocks: int = 0
    """Cached blocks at the end of a prefix that this engine computes anew on purpose (EAGLE: 1)."""
    step_tokens: int = 1 << 31
    """Most tokens that one engine step computes."""
    host_s_per_token: float | None = None
    """Seconds to copy a token's KV back from host memory; None where no host tier is known."""
    host_blocks: int = 0
    """Blocks that host memory below the device holds; 0: there is none that we know of."""
    disk_blocks: int = 0
    """The same of the disk."""


@dataclass(slots=True)
class Histories:
    """What is learned over time and may be saved."""

    tools: ToolHistory = field(default_factory=ToolHistory)
    turns: TurnHistory = field(default_factory=TurnHistory)
    evicted_waits: SlidingMean = field(default_factory=SlidingMean)
    growth_tokens: SlidingMean = field(default_factory=SlidingMean)
    """Tokens by which each turn after the first outgrew its program's longest context until then."""
    workflows: WorkflowHistory = field(default_factory=WorkflowHistory)
    output_lengths: OutputLengthHistory = field(default_factory=OutputLengthHistory)
    hints_off: HintErrors = field(default_factory=HintErrors)
    """Of hinted output lengths."""


@dataclass(slots=True)
class RequestState:
    """What the steward keeps of a request while it is in the engine."""

    request_id: str
    rank: int
    """The program's rank; the request's own where it has no program."""
    arrival: int
    program: ProgramState | None
    record: TurnRecord | None
    arrived_s: float
    hinted_ttl_s: float | None = None
    final: bool = False
    node: str | None = None
    """Graph node that its hint named."""
    steps_left: float | None = None
    """Turns that its hint expects to follow."""
    hinted_tokens: int | None = None
    """Tokens that its hint expects of the whole output."""
    tool: str | None = None
    """Key of the tool whose result its prompt ends with."""
    prompt_tokens: int = 0
    preempted: bool = False
    admitted: bool = False
    """It has run, though it may have been preempted since."""
    admission_blocked_since_s: float | None = None
    """Since when the entry policy keeps it out."""
    attained_s: float = 0.0
    """Seconds that its program's requests had run when it arrived."""
    since_s: float = 0.0
    """Since when it waits, or runs."""
    running: bool = False
    ran_s: float = 0.0
    """Seconds that it ran, up to ``since_s``."""
    waited_s: float = 0.0
    """Seconds that it waited in the queue, up to ``since_s``."""
    preemptions: int = 0
    output_tokens_at_admission: int = 0
    """Tokens it had written when it was last taken in."""
    remaining: RemainingTokens | None = None
    """What it was expected to write yet when it had written ``asked_at`` tokens."""
    asked_at: int = -1
    predicted_output_tokens: float | None = None
    """How long its output was expected to be when that was first asked; ``None``: it had not just begun."""
    guess: RemainingTokens | None = None
    """What a network made of its hidden states when it had written ``model_predicted_at_tokens`` tokens."""
    model_predicted_at_tokens: int = 0
    guesses: list[tuple[int, float, float | None]] = field(default_factory=list)
    """Of some of them: tokens written, what was guessed to be left, and what was expected without it."""

    def run(self, now: float, promoted_s: float) -> None:
        """It stops waiting and runs; what was before ``promoted_s``, if that has passed, is forgotten."""
        if promoted_s <= now:
            self.waited_s, self.ran_s = now - promoted_s, 0.0
        else:
            self.waited_s += now - self.since_s
        self.running, self.since_s = True, now

    def stop(self, now: float) -> None:
        """It stops running, or waiting where it never ran."""
        if self.running:
            self.ran_s += now - self.since_s
        else:
            self.waited_s += now - self.since_s
        self.running, self.since_s = False, now

    def ran_until(self, now: float) -> float:
        """Seconds that it has run by now."""
        return self.ran_s + (now - self.since_s if self.running else 0.0)
