"""The table of requests in the engine, with the state of each and the number of running tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from sojourn.hints import AgenticContext
from sojourn.ids import ProgramId

from ..metrics.turn_ledger import TurnRecord
from ..policies.forecasting.remaining_tokens import RemainingTokens
from ..policies.policy_views import RunningRequestView, WaitingRequestView
from ..programs.program_state import ProgramState
from ..programs.program_table import ProgramTable
from .request_hints import clipped


@dataclass(slots=True)
class RequestState:
    """One request in the engine. Times are seconds on the engine's monotonic clock."""

    request_id: str
    rank: int
    """Arrival rank of the request's program, or of the request itself if it has no program."""
    arrival: int
    """Number of the request in order of arrival."""
    program: ProgramState | None
    record: TurnRecord | None
    arrived_s: float
    hinted_ttl_s: float | None = None
    final: bool = False
    node: str | None = None
    """Graph node that the request's hint names."""
    steps_left: float | None = None
    """Number of further turns that the hint announces."""
    hinted_tokens: int | None = None
    """Total output length in tokens that the hint announces."""
    tool: str | None = None
    """Key of the tool that ran before this request."""
    prompt_tokens: int = 0
    preempted: bool = False
    admitted: bool = False
    """Whether the request was admitted. It may have been preempted since."""
    admission_blocked_since_s: float | None = None
    """Time at which the admission policy first rejected the request, if it still waits."""
    attained_s: float = 0.0
    """Seconds that the program's requests had run when this request arrived."""
    since_s: float = 0.0
    """Time at which the request's present wait or run began."""
    running: bool = False
    ran_s: float = 0.0
    """Seconds that the request ran before ``since_s``."""
    waited_s: float = 0.0
    """Seconds that the request waited in the queue before ``since_s``."""
    preemptions: int = 0
    output_tokens_at_admission: int = 0
    """Number of tokens that the request had generated at its last admission."""
    remaining: RemainingTokens | None = None
    """Predicted remaining tokens, as of ``asked_at`` generated tokens."""
    asked_at: int = -1
    predicted_output_tokens: float | None = None
    """First prediction of the output length, made near the start of the output; ``None``: there was none."""
    guess: RemainingTokens | None = None
    """Remaining tokens as predicted by the network, as of ``model_predicted_at_tokens`` generated tokens."""
    model_predicted_at_tokens: int = 0
    guesses: list[tuple[int, float, float | None]] = field(default_factory=list)
    """Samples to check the network: (generated tokens, network's prediction, prediction without network)."""

    def run(self, now: float, promoted_s: float) -> None:
        """Record that the request begins to run. If ``promoted_s`` has passed, the seconds that the request
        ran and waited before that time no longer count."""
        if promoted_s <= now:
            self.waited_s, self.ran_s = now - promoted_s, 0.0
        else:
            self.waited_s += now - self.since_s
        self.running, self.since_s = True, now

    def stop(self, now: float) -> None:
        """Record that the request stops running or waiting, and begins to wait."""
        if self.running:
            self.ran_s += now - self.since_s
        else:
            self.waited_s += now - self.since_s
        self.running, self.since_s = False, now

    def ran_until(self, now: float) -> float:
        """Seconds that the request has run up to ``now``."""
        return self.ran_s + (now - self.since_s if self.running else 0.0)


class RequestTable:
    """The requests of one engine, by id. Times are seconds on its monotonic clock."""

    def __init__(self, programs: ProgramTable) -> None:
        self._programs = programs
        self.states: dict[str, RequestState] = {}
        self.running_tokens = 0
        """Prompt tokens of all running requests."""
        self._arrivals = 0
        self._idle_since_s: float | None = None

    def enter(
        self, request_id: str, program: ProgramState | None, now: float, prompt_tokens: int = 0
    ) -> RequestState:
        """Add a request that has reached the engine. Without a program, its own arrival is its rank."""
        self._arrivals += 1
        request_state = RequestState(
            request_id,
            program.rank if program is not None else self._programs.next_rank(),
            self._arrivals,
            program,
            None,
            now,
            prompt_tokens=prompt_tokens,
            attained_s=program.attained_s if program is not None else 0.0,
            since_s=now,
        )
        self.states[request_id] = request_state
        return request_state

    def apply_hint(
        self, request_state: RequestState, context: AgenticContext | None, max_hinted_ttl_s: float
    ) -> bool:
        """Store a hint in the state of a request and of its program; no effect without a program.

        Returns whether the hinted TTL was outside its bounds and was changed.
        """
        program = request_state.program
        if context is None or program is None:
            return False
        if context.parent_program_id:
            program.parent_id = ProgramId(context.parent_program_id)
        if context.root_program_id:
            program.root_id = ProgramId(context.root_program_id)
        was_clipped = False
        ttl_s = context.kv_retention_ttl_seconds
        if ttl_s is not None:
            request_state.hinted_ttl_s = min(max(0.0, ttl_s), max_hinted_ttl_s)
            was_clipped = request_state.hinted_ttl_s != ttl_s
        request_state.final = context.expected_resume is False
        if context.expected_output_length is not None and context.expected_output_length > 0:
            request_state.hinted_tokens = context.expected_output_length
        ours = context.sojourn
        if ours is not None:
            if ours.heartbeat:
                self._programs.promise_heartbeats(program)
            # Names are clipped, because the program keeps them and a context may hold a name of 16 KiB.
            program.agent_type = clipped(ours.agent_type) or program.agent_type
            program.node = clipped(ours.node) or program.node
            program.tenant = clipped(ours.tenant) or program.tenant
            left = ours.expected_steps_left
            program.expected_steps_left = left if left is not None and 0 <= left < math.inf else None
            request_state.steps_left = program.expected_steps_left
            request_state.node = clipped(ours.node)
            request_state.final = request_state.final or ours.final
        return was_clipped

    def run(self, request_state: RequestState, now: float, promoted_s: float) -> bool:
        """Record that a request got its blocks. Returns whether this is its first admission."""
        if not request_state.running:
            self.running_tokens += request_state.prompt_tokens
        request_state.run(now, promoted_s)
        self._idle_since_s = None
        request_state.preempted = False
        first = not request_state.admitted
        request_state.admitted = True
        return first

    def stop(self, request_state: RequestState, now: float) -> None:
        """Record that a request has lost its blocks, or has left the engine."""
        if request_state.running:
            self.running_tokens -= request_state.prompt_tokens
        request_state.stop(now)

    def idle_s(self, now: float, anything_running: bool) -> float:
        """Seconds for which nothing has run, since the first call with ``anything_running`` false."""
        if anything_running:
            self._idle_since_s = None
            return 0.0
        if self._idle_since_s is None:
            self._idle_since_s = now
        return now - self._idle_since_s

    def waiting(self, request_state: RequestState, now: float, *, leased: bool) -> WaitingRequestView:
        """Return a request as input of the queue order policy. ``leased``: its program has a lease."""
        program = request_state.program
        return WaitingRequestView(
            preempted=request_state.preempted,
            leased=leased,
            program_rank=request_state.rank,
            arrival=request_state.arrival,
            attained_s=request_state.attained_s,
            ran_s=request_state.ran_s,
            waited_s=request_state.waited_s + (program.waited_s if program is not None else 0.0),
            arrived_s=request_state.arrived_s,
            since_s=request_state.since_s,
            now_s=now,
        )

    def with_service(self, running: Sequence[RunningRequestView], now: float) -> list[RunningRequestView]:
        """Return the engine's views of running requests, completed with the seconds that each has run."""
        return [self._with_service(view, now) for view in running]

    def _with_service(self, view: RunningRequestView, now: float) -> RunningRequestView:
        request_state = self.states.get(view.request_id)
        if request_state is None:
            return view
        return view._replace(attained_s=request_state.attained_s, ran_s=request_state.ran_until(now))
