"""The gate before the engine's queue: who holds KV, who wants to enter, and who has waited too long."""

from __future__ import annotations

from collections.abc import Iterator

from sojourn.ids import ProgramId

from ..policy.base import EntryPolicy
from ..policy.views import EntryView, GrowthView, RunningView
from ..program.status import Signal
from ..program.table import ProgramTable
from .leases import LeaseBook
from .prospects import Prospects
from .requests import Requests
from .state import Histories, Pool, StewardLimits, Ticket


class EntryGate:
    """Asks the entry policy about requests of programs that hold no KV; all others go past it."""

    def __init__(
        self,
        policy: EntryPolicy,
        pool: Pool,
        *,
        limits: StewardLimits,
        histories: Histories,
        table: ProgramTable,
        leases: LeaseBook,
        requests: Requests,
        prospects: Prospects,
    ) -> None:
        self._policy = policy
        self._pool = pool
        self._limits = limits
        self._histories = histories
        self._table = table
        self._leases = leases
        self._requests = requests
        self._prospects = prospects
        self._holding: dict[str, Ticket] = {}
        """Requests of programs that hold KV: admitted, or let in a moment ago."""

    def admitted(self, ticket: Ticket) -> None:
        """The request has blocks: until now it was kept out, if not by the policy then by the engine."""
        self._holding[ticket.request_id] = ticket
        ticket.gated_since_s = None

    def holds_none(self, request_id: str) -> None:
        """The request has left the engine, or lost its blocks."""
        self._holding.pop(request_id, None)

    def concerns(self, ticket: Ticket) -> bool:
        """Whether the policy has a say: not for strangers, nor, unless it forecasts, for preempted requests
        or programs that hold KV under a lease or with another request."""
        program = ticket.program
        if program is None or not self._policy.gates:
            return False
        if self._policy.forecasts:
            return True
        if ticket.preempted or program.id in self._leases:
            return False
        return not any(
            other != ticket.request_id and other in self._holding for other in program.live_requests
        )

    def may_enter(
        self,
        ticket: Ticket,
        need_blocks: int,
        free_blocks: int,
        now: float,
        *,
        anything_running: bool,
        output_tokens: int = 0,
        most_tokens: int = 0,
    ) -> bool:
        """Whether the request may be admitted. ``need_blocks`` is what its context takes, ``free_blocks``
        what the pool has; it has written ``output_tokens``, and ``most_tokens`` may follow."""
        program = ticket.program
        if program is None or not self.concerns(ticket):
            return True
        own = self._own(ticket, need_blocks, output_tokens, most_tokens, now)
        demand = self._prospects.demand if own is not None else None
        later = sum(lease.blocks for lease in self._leases if lease.rank > ticket.rank)
        growth, turns = self._histories.growth_tokens, self._histories.turns
        entry = EntryView(
            need_blocks=need_blocks,
            free_blocks=free_blocks + later,
            pool_blocks=self._pool.blocks,
            block_size=self._pool.block_size,
            max_context_tokens=self._pool.max_context_tokens,
            anything_running=anything_running,
            # What all that run will need says more, where it is told.
            earlier=() if demand is not None else tuple(self._holding_before(ticket.rank)),
            turns_seen=growth.count(),
            mean_growth_tokens=growth.mean(),
            programs_seen=turns.count(),
            mean_turns=turns.mean_turns(),
            idle_s=self._requests.idle_s(now, anything_running),
            own=own,
            needed_blocks=tuple(demand.needed_blocks) if demand is not None else (),
            room_blocks=demand.room_blocks if demand is not None else 0,
        )
        enters = self._policy.may_enter(entry, now)
        self._table.signal(program, Signal.UNGATE if enters else Signal.GATE)
        if enters:
            # Several may pass in one step, before the engine reports any of them as admitted.
            self._holding[ticket.request_id] = ticket
        else:
            self.holds_none(ticket.request_id)
            if ticket.gated_since_s is None:
                ticket.gated_since_s = now
        if enters and own is not None:
            self._prospects.came(own)
        return enters

    def holds_the_line(self, ticket: Ticket, now: float) -> bool:
        """Whether a request that is kept out has waited so long that nobody later may go past it."""
        since = ticket.gated_since_s
        return since is not None and now - since > self._limits.line_patience_s

    def _own(
        self, ticket: Ticket, need_blocks: int, output_tokens: int, most_tokens: int, now: float
    ) -> RunningView | None:
        """The request as it would run, for a policy that forecasts; ``None``: it does not."""
        if not self._policy.forecasts:
            return None
        self._prospects.not_in(ticket.request_id)
        tokens = need_blocks * self._pool.block_size
        return self._prospects.would_run(
            ticket, tokens=tokens, output_tokens=output_tokens, most_tokens=most_tokens, now=now
        )

    def _holding_before(self, rank: int) -> Iterator[GrowthView]:
        """Programs that arrived before ``rank`` and hold KV, each once."""
        seen: set[ProgramId] = set()
        for ticket in self._holding.values():
            program = ticket.program
            if program is not None and ticket.rank < rank and program.id not in seen:
                seen.add(program.id)
                first_tokens = program.first_prompt_tokens or ticket.prompt_tokens
                yield GrowthView(program.turns, first_tokens, ticket.prompt_tokens, program.peak_tokens)
        for lease in self._leases:
            program = self._table.get(lease.program_id)
            if lease.rank < rank and program is not None and program.id not in seen:
                yield GrowthView(
                    program.turns, program.first_prompt_tokens, program.context_tokens, program.peak_tokens
                )
