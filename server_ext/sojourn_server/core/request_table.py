"""The requests in the engine: a ticket for each, how many tokens of them run, and since when none does."""

from __future__ import annotations

from collections.abc import Sequence

from ..policies.policy_views import RunningRequestView, WaitingRequestView
from ..programs.program_state import ProgramState
from ..programs.program_table import ProgramTable
from .scheduler_state import RequestState


class RequestTable:
    """Those of one engine, by id. Times are seconds on its monotonic clock."""

    def __init__(self, table: ProgramTable) -> None:
        self._table = table
        self.request_states: dict[str, RequestState] = {}
        self.running_tokens = 0
        """Prompt tokens of all running requests."""
        self._arrivals = 0
        self._idle_since_s: float | None = None

    # -- what happens -----------------------------------------------------------

    def enter(
        self, request_id: str, program: ProgramState | None, now: float, prompt_tokens: int = 0
    ) -> RequestState:
        """A request has reached the engine; with no program it stands in line by its own arrival."""
        self._arrivals += 1
        request_state = RequestState(
            request_id,
            program.rank if program is not None else self._table.next_rank(),
            self._arrivals,
            program,
            None,
            now,
            prompt_tokens=prompt_tokens,
            attained_s=program.attained_s if program is not None else 0.0,
            since_s=now,
        )
        self.request_states[request_id] = request_state
        return request_state

    def run(self, request_state: RequestState, now: float, promoted_s: float) -> bool:
        """A request got its blocks. Returns whether it did so for the first time."""
        if not request_state.running:
            self.running_tokens += request_state.prompt_tokens
        request_state.run(now, promoted_s)
        self._idle_since_s = None
        request_state.preempted = False
        first = not request_state.admitted
        request_state.admitted = True
        return first

    def stop(self, request_state: RequestState, now: float) -> None:
        """A request has lost its blocks, or left the engine whether or not it ran."""
        if request_state.running:
            self.running_tokens -= request_state.prompt_tokens
        request_state.stop(now)

    # -- what is asked ------------------------------------------------------------

    def idle_s(self, now: float, anything_running: bool) -> float:
        """Seconds for which nothing has run, counted from when somebody first asked."""
        if anything_running:
            self._idle_since_s = None
            return 0.0
        if self._idle_since_s is None:
            self._idle_since_s = now
        return now - self._idle_since_s

    def served(self, running: Sequence[RunningRequestView], now: float) -> list[RunningRequestView]:
        """The engine's views of running requests, with how long each has been served."""
        return [self._served(view, now) for view in running]

    def waiting(self, request_state: RequestState, now: float, *, leased: bool) -> WaitingRequestView:
        """What the queue order sees of a request; ``leased``: a lease holds its program's KV."""
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

    def _served(self, view: RunningRequestView, now: float) -> RunningRequestView:
        request_state = self.request_states.get(view.request_id)
        if request_state is None:
            return view
        return view._replace(attained_s=request_state.attained_s, ran_s=request_state.ran_until(now))
