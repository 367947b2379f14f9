"""The requests in the engine: a ticket for each, how many tokens of them run, and since when none does."""

from __future__ import annotations

from collections.abc import Sequence

from ..policy.views import RunningView, WaitingView
from ..program.record import Program
from ..program.table import ProgramTable
from .state import Ticket


class Requests:
    """Those of one engine, by id. Times are seconds on its monotonic clock."""

    def __init__(self, table: ProgramTable) -> None:
        self._table = table
        self.tickets: dict[str, Ticket] = {}
        self.running_tokens = 0
        """Prompt tokens of all running requests."""
        self._arrivals = 0
        self._idle_since_s: float | None = None

    # -- what happens -----------------------------------------------------------

    def enter(self, request_id: str, program: Program | None, now: float, prompt_tokens: int = 0) -> Ticket:
        """A request has reached the engine; with no program it stands in line by its own arrival."""
        self._arrivals += 1
        ticket = Ticket(
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
        self.tickets[request_id] = ticket
        return ticket

    def run(self, ticket: Ticket, now: float, promoted_s: float) -> bool:
        """A request got its blocks. Returns whether it did so for the first time."""
        ticket.run(now, promoted_s)
        self.running_tokens += ticket.prompt_tokens
        self._idle_since_s = None
        ticket.preempted = False
        first = not ticket.admitted
        ticket.admitted = True
        return first

    def stop(self, ticket: Ticket, now: float) -> None:
        """A request has lost its blocks, or left the engine whether or not it ran."""
        if ticket.running:
            self.running_tokens -= ticket.prompt_tokens
        ticket.stop(now)

    # -- what is asked ------------------------------------------------------------

    def idle_s(self, now: float, anything_running: bool) -> float:
        """Seconds for which nothing has run, counted from when somebody first asked."""
        if anything_running:
            self._idle_since_s = None
            return 0.0
        if self._idle_since_s is None:
            self._idle_since_s = now
        return now - self._idle_since_s

    def served(self, running: Sequence[RunningView], now: float) -> list[RunningView]:
        """The engine's views of running requests, with how long each has been served."""
        return [self._served(view, now) for view in running]

    def waiting(self, ticket: Ticket, now: float, *, leased: bool) -> WaitingView:
        """What the queue order sees of a request; ``leased``: a lease holds its program's KV."""
        program = ticket.program
        return WaitingView(
            preempted=ticket.preempted,
            leased=leased,
            program_rank=ticket.rank,
            arrival=ticket.arrival,
            attained_s=ticket.attained_s,
            ran_s=ticket.ran_s,
            waited_s=ticket.waited_s + (program.waited_s if program is not None else 0.0),
            arrived_s=ticket.arrived_s,
            since_s=ticket.since_s,
            now_s=now,
        )

    def _served(self, view: RunningView, now: float) -> RunningView:
        ticket = self.tickets.get(view.request_id)
        if ticket is None:
            return view
        return view._replace(attained_s=ticket.attained_s, ran_s=ticket.ran_until(now))
