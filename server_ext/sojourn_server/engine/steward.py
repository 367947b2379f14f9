"""The steward: folds facts into program state, asks the policies, and says what is to be done.

It knows no engine, no clock and no network. An adapter reports facts with
``now`` and carries out the actions; the lab does the same in virtual time, so
that a recorded run gives the same decisions again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sojourn.ids import ProgramId
from sojourn.wire import Outcome

from ..metrics.decisions import DecisionLog
from ..metrics.ledger import Ledger, Lost, Tombstone, common_prefix
from ..metrics.recorder import Recorder
from ..policy.base import Keep, Reason
from ..policy.costs import PrefillCurve
from ..policy.labels import Label
from ..policy.preset import Preset
from ..policy.recovery import Recovery
from ..policy.reload import ReloadEstimate
from ..policy.views import LeftBehind, RoomNeed, RunningView, WaitingView
from ..program.graphs import GraphStore
from ..program.output_lengths import MOST_TOKENS
from ..program.record import Program
from ..program.status import OVER, Signal
from ..program.table import ProgramTable
from .facts import Action, ActionKind, Admission, Arrival, TurnEnd, TurnOutcome
from .foreseer import Foreseer
from .gaps import Gaps
from .gate import EntryGate
from .hint import take_in
from .journal import Journal
from .keeper import Keeper
from .leases import Lease
from .lifetimes import Lifetimes
from .moves import Moves
from .owners import Owners
from .placer import Placer
from .prospects import Prospects
from .requests import Requests
from .state import Histories, Pool, StewardLimits, Ticket
from .turn_records import TurnRecords
from .victims import Victims


class Steward:
    """Program state, leases and policies of one engine."""

    def __init__(
        self,
        preset: Preset,
        pool: Pool,
        *,
        limits: StewardLimits | None = None,
        curve: PrefillCurve | None = None,
        histories: Histories | None = None,
        decisions: DecisionLog | None = None,
    ) -> None:
        self.preset = preset
        self.pool = pool
        self.limits = limits or StewardLimits()
        self.histories = histories or Histories()
        self.reload = ReloadEstimate(curve)
        self.table = ProgramTable(self.limits.max_programs)
        self.graphs = GraphStore(self.limits.max_graphs, self.limits.max_graph_bytes)
        self.ledger = Ledger()
        self.decisions = decisions if decisions is not None else DecisionLog()
        self.recorder = Recorder()
        self.keeper = Keeper(
            preset,
            pool,
            limits=self.limits,
            histories=self.histories,
            reload=self.reload,
            table=self.table,
            decisions=self.decisions,
            recorder=self.recorder,
        )
        self.leases = self.keeper.leases
        self.contexts = self.keeper.contexts
        self.requests = Requests(self.table)
        self.tickets = self.requests.tickets
        self.gaps = Gaps(self.histories, self.recorder)
        self.journal = Journal(self.decisions, self.recorder, pool)
        self.records = TurnRecords(
            pool, ledger=self.ledger, histories=self.histories, keeper=self.keeper, recorder=self.recorder
        )
        self._awaiting_first_token = self.records.unstarted
        """Records of requests whose first token is still to come, by their ids."""
        self.refused: list[str] = []
        """Requests that the engine is to end with an error: they were parked for ``gate_timeout_s``."""
        self.foreseer = Foreseer(preset, pool, histories=self.histories, graphs=self.graphs, table=self.table)
        moves = Moves(self.table, self.keeper, self.foreseer, self.journal)
        self.prospects = Prospects(
            preset,
            pool,
            histories=self.histories,
            reload=self.reload,
            tickets=self.tickets,
            recorder=self.recorder,
        )
        self._victims = Victims(preset.victim, self.prospects, self.requests)
        self.gate = EntryGate(
            preset.entry,
            pool,
            limits=self.limits,
            histories=self.histories,
            table=self.table,
            leases=self.leases,
            requests=self.requests,
            prospects=self.prospects,
        )
        self.placer = Placer(preset.placement, pool, histories=self.histories, moved=moves.made)
        self.owners = Owners(preset.eviction, table=self.table, foreseer=self.foreseer, placer=self.placer)
        self.lifetimes = Lifetimes(
            limits=self.limits,
            histories=self.histories,
            table=self.table,
            keeper=self.keeper,
            foreseer=self.foreseer,
            placer=self.placer,
            journal=self.journal,
        )
        self._steps = 0
        """Engine steps so far."""
        self._now_s = 0.0
        """When it was last told that time passes."""

    # -- requests -----------------------------------------------------------

    def arrived(self, fact: Arrival, now: float) -> Ticket:
        """A request has reached the engine: it belongs to a program, and ends its tool calls."""
        self._now_s = now
        program_id = fact.identity.program_id
        program = self.lifetimes.open(program_id, now) if program_id is not None else None
        ticket = self.requests.enter(fact.request_id, program, now, fact.prompt_tokens)
        outcome = fact.identity.outcome
        if take_in(fact.identity.context, ticket, table=self.table, limits=self.limits):
            outcome = Outcome.CLIPPED
        if outcome is not None:
            self.journal.hint(outcome)
        if program is None:
            return ticket
        gap_s = self.gaps.close(program, now)
        tool = program.pending_tool
        if gap_s is not None:
            self.foreseer.came_back(program, tool, gap_s, fact.prompt_tokens)
        self.foreseer.touched(program)
        ticket.tool, program.pending_tool = tool, None
        program.live_requests.add(fact.request_id)
        self.table.signal(program, Signal.REQUEST_ARRIVED)
        self.placer.arrived(ticket, now)
        if self.placer.parked(ticket):
            self.table.signal(program, Signal.GATE)
        leased = self.leases.set_waiting(program.id, True)
        ticket.record = self.records.open(fact, program, tool=tool, gap_s=gap_s, leased=leased, now=now)
        return ticket

    def stranger(self, request_id: str, now: float) -> None:
        """A request that could not be taken in: it belongs to nobody and stands in line by its arrival."""
        self.requests.enter(request_id, None, now)

    def stranger_left(self, request_id: str) -> None:
        """A request of no program has left the engine."""
        ticket = self.tickets.pop(request_id, None)
        self.prospects.gone(request_id)
        if ticket is not None:
            self.placer.finished(ticket, self._now_s)
            self.requests.stop(ticket, self._now_s)

    def admitted(self, fact: Admission, now: float) -> None:
        """A request got its blocks: its program's lease has done its work."""
        ticket = self.tickets.get(fact.request_id)
        if ticket is None:
            return
        first = self.requests.run(ticket, now, self.promoted_s(ticket))
        ticket.output_when_in = max(0, fact.tokens - ticket.prompt_tokens)
        self.placer.admitted(ticket, now)
        self.prospects.admitted(ticket, fact.tokens, fact.most_tokens, now)
        program, record = ticket.program, ticket.record
        if program is None or record is None:
            return
        self.gate.admitted(ticket)
        if not first:
            if fact.resumed:
                record.recomputed_after_preemption += max(0, fact.tokens - fact.cached_tokens)
            return
        before = self.contexts.get(program.id)
        shared = common_prefix(before, fact.block_hashes) if before is not None else None
        self.foreseer.admitted(program, fact.block_hashes, len(before or ()), shared)
        self.records.admitted(record, program, fact, before, shared, now)
        self.keeper.end(program.id, Reason.RETURN, now)
        self.keeper.let_go.pop(program.id, None)

    def has_unstarted(self) -> bool:
        """Whether any admitted request of a program still waits for its first token."""
        return bool(self._awaiting_first_token)

    def unstarted(self) -> Sequence[str]:
        """Ids of those requests."""
        return tuple(self._awaiting_first_token)

    def first_token(self, request_id: str, now: float) -> None:
        """A request's first output token exists."""
        self.records.first_token(request_id, now)

    def preempted(
        self,
        request_id: str,
        now: float,
        *,
        tokens: int = 0,
        copied_tokens: int = 0,
        out_s_per_token: float | None = None,
        back_s_per_token: float | None = None,
        queued_s: float = 0.0,
    ) -> Recovery:
        """A running request lost its blocks and waits again. Returns how it is to get the KV of its
        ``tokens`` tokens back, of which ``copied_tokens`` tokens' are in host memory already. What copies
        take is told as to ``look_ahead``."""
        ticket = self.tickets.get(request_id)
        self.prospects.copied(out_s_per_token, back_s_per_token, queued_s)
        recovery = self.prospects.recovery(tokens, now, copied_tokens=copied_tokens)
        self.prospects.gone(request_id)
        if ticket is not None:
            self.requests.stop(ticket, now)
            self.placer.preempted(ticket, now)
            ticket.preempted = True
            ticket.preemptions += 1
            self.gate.holds_none(request_id)
            if ticket.record is not None:
                ticket.record.preemptions += 1
        self.journal.preempted(ticket, now, recovery, tokens, self._steps)
        return recovery

    def finished(self, fact: TurnEnd, now: float) -> Lease | None:
        """A request has left the engine. Returns the lease under which its blocks are to be held, if any."""
        ticket = self.tickets.pop(fact.request_id, None)
        self.gate.holds_none(fact.request_id)
        self.prospects.gone(fact.request_id)
        if ticket is None:
            return None
        self.requests.stop(ticket, now)
        failed = fact.outcome in (TurnOutcome.ABORTED, TurnOutcome.ERROR)
        if not failed:
            self.prospects.ended(ticket, fact.output_tokens, cut=fact.outcome is TurnOutcome.LENGTH)
        elif fact.outcome is TurnOutcome.ABORTED:
            self.prospects.broken_off(ticket, fact.output_tokens)
        self.placer.finished(ticket, now, failed=failed)
        if ticket.program is None:
            return None
        program = ticket.program
        program.attained_s = max(program.attained_s, ticket.attained_s + ticket.ran_s)
        program.waited_s += ticket.waited_s
        record = ticket.record
        if record is not None:
            self.records.close(record, fact, now)
        program.live_requests.discard(fact.request_id)
        program.last_contact_s = now
        self.foreseer.touched(program)
        program.turns += not failed
        if program.live_requests:
            return None
        self.table.signal(program, Signal.TURN_OVER)
        self.leases.set_waiting(program.id, False)
        if program.status in OVER:  # the client ended it while this request still ran
            self.keeper.order(ActionKind.DROP, program.id, Reason.END, now)
            return None
        if failed:
            return None
        self.gaps.open(program, fact, now)
        program.hinted_ttl_s = ticket.hinted_ttl_s
        self.contexts.put(program.id, fact.block_hashes[: fact.cached_blocks])
        self.placer.turn_over(program, fact.cached_blocks, now)
        self.foreseer.turn_over(program, ticket, fact.cached_blocks, now)
        if record is not None:
            record.goes_on, record.tier, record.p_reuse = program.goes_on, program.tier, program.p_reuse
        if ticket.final:
            self.placer.forget(program.id, now)
            self.keeper.log_keep(program, Keep(0.0, Reason.FINAL_TURN), fact.cached_blocks, now)
            return None
        if program.id in self.leases:  # a parallel branch of the same program still holds one
            self.keeper.end(program.id, Reason.SUPERSEDED, now)
        lease = self.keeper.grant(
            program,
            program.pending_tool,
            fact.cached_blocks,
            ticket.hinted_ttl_s,
            now,
            held_blocks=fact.held_blocks,
            unheld_blocks=fact.unheld_blocks,
            running_tokens=self._running_tokens,
            used_blocks=fact.used_blocks,
        )
        if lease is not None and record is not None:
            record.lease_ttl_s = round(lease.ttl_s, 3)
        return lease

    def evicted(
        self,
        block_hash: Any,
        owner: ProgramId | None,
        taker_request_id: str | None,
        now: float,
        score: tuple[float, ...] | None = None,
    ) -> None:
        """A cached block of a program (None: of several) was reused, for that request where it is known.

        ``score``: the owner's place in the eviction order by which it was chosen; None: by no such order.
        """
        taker = self.tickets.get(taker_request_id) if taker_request_id is not None else None
        evictor = taker.program.id if taker is not None and taker.program is not None else None
        cause = self.keeper.let_go_cause(owner) or Lost.EVICTED
        self.keeper.graveyard.bury(block_hash, Tombstone(cause, owner, evictor, now, score))
        self.journal.evicted(cause)

    # -- time, room, order ---------------------------------------------------

    def tick(self, now: float) -> None:
        """Let time pass: end what is due. Called once an engine step and before every answer."""
        self._now_s = now
        due = self.leases.next_deadline_s()
        if due is not None and due <= now:
            for lease, reason in self.leases.due(now, self.limits.max_ends_per_tick):
                self.keeper.ended(lease, reason, now)
        self.lifetimes.give_up_silent(now)
        self.foreseer.idle(now)
        while (program := self.foreseer.due(now)) is not None:
            self.keeper.actions.append(Action(ActionKind.PREFETCH, program.id, Reason.THIS_TOOL))
        self.placer.tick(now)
        for ticket in self.placer.parked_for(self.limits.gate_timeout_s, now):
            self.refused.append(ticket.request_id)
            self.journal.refused(ticket, now)

    def step_took(self, tokens: int, seconds: float, requests: int) -> None:
        """An engine step of ``tokens`` tokens of ``requests`` requests took so long."""
        self._steps += 1
        self.reload.observe_step(tokens, seconds, requests)
        self.prospects.step_took(seconds)
        self.journal.step(self._steps)

    @property
    def actions(self) -> Sequence[Action]:
        """Orders not yet carried out, oldest first."""
        return self.keeper.actions

    def take_actions(self) -> list[Action]:
        """The orders not yet carried out; they are the caller's now."""
        return self.keeper.take_actions()

    def make_room(
        self, need: RoomNeed, now: float, freed_by: Callable[[ProgramId], int] | None = None
    ) -> int:
        """Give up leases for somebody who needs space; returns how many. Orders are in ``actions``."""
        if not need.anything_running:
            need = replace(need, idle_s=self.requests.idle_s(now, False))
        return self.keeper.make_room(need, now, freed_by, self.owners.score_now)

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
        """Whether a waiting request may be admitted, as far as the entry policy is concerned.

        It is asked about those ``behind_gate`` only. ``need_blocks`` is what its context takes,
        ``free_blocks`` what the pool has; it has written ``output_tokens``, and ``most_tokens`` may follow.
        """
        return self.gate.may_enter(
            ticket,
            need_blocks,
            free_blocks,
            now,
            anything_running=anything_running,
            output_tokens=output_tokens,
            most_tokens=most_tokens,
        )

    def behind_gate(self, ticket: Ticket) -> bool:
        """Whether the entry policy has a say in a waiting request."""
        return self.gate.concerns(ticket)

    def parked(self, ticket: Ticket) -> bool:
        """Whether a waiting request has to wait on, whatever is free: its program is not on the device."""
        return self.placer.parked(ticket)

    def take_refused(self) -> list[str]:
        """The requests to be ended with an error; they are the caller's now."""
        refused, self.refused = self.refused, []
        return refused

    def label(self, program_id: ProgramId | None) -> Label:
        """What the program's queue says of its blocks; ``None``: of those of programs that are over."""
        return self.owners.label(program_id)

    def holds_the_line(self, ticket: Ticket, now: float) -> bool:
        """Whether a request that is kept out has waited so long that nobody later may go past it."""
        return self.gate.holds_the_line(ticket, now)

    def program_over(self, program: Program, signal: Signal, outcome: str, now: float) -> None:
        """A program has ended (``END``) or was given up (``SILENCE``): learn from it and let its KV go."""
        self.lifetimes.over(program, signal, outcome, now)

    def victim(
        self, running: Sequence[RunningView], short_blocks: int, now: float, *, used_blocks: int = 0
    ) -> str | None:
        """Which running request to preempt; None: the engine's choice. ``used_blocks`` are in use or held."""
        return self._victims.choose(running, short_blocks, used_blocks, now)

    def look_ahead(
        self,
        running: Sequence[RunningView],
        used_blocks: int,
        now: float,
        *,
        out_s_per_token: float | None = None,
        back_s_per_token: float | None = None,
        queued_s: float = 0.0,
    ) -> str | None:
        """Look at what all that run will yet need; which of them to copy to host memory now, since it will
        probably be preempted soon. Asked every few steps, where the preset ``predicts``.

        Copies take ``out_s_per_token`` and ``back_s_per_token`` so far, ``None`` before the first; those
        queued will take ``queued_s`` more.
        """
        self.prospects.copied(out_s_per_token, back_s_per_token, queued_s)
        return self._victims.coming(running, used_blocks, now)

    def guessed(
        self,
        request_id: str,
        at_tokens: int,
        remaining: tuple[float, ...],
        now: float,
        *,
        most_tokens: int = MOST_TOKENS,
    ) -> None:
        """What a network reads in the request's hidden states: having written ``at_tokens`` tokens, when it
        was allowed ``most_tokens`` more, it will write ``remaining`` more, which are equally likely and
        ascend."""
        self.prospects.guessed(request_id, at_tokens, remaining, now, most_tokens=most_tokens)

    def waiting_view(self, ticket: Ticket) -> WaitingView:
        """What the queue order sees of a request."""
        leased = ticket.program is not None and ticket.program.id in self.leases
        return self.requests.waiting(ticket, self._now_s, leased=leased)

    def queue_key(self, ticket: Ticket, *, preempted: bool) -> tuple[Any, ...]:
        """The request's place in the queue, lowest first; ``preempted`` is what the engine calls it now."""
        ticket.preempted = preempted
        return self.preset.order.key(self.waiting_view(ticket))

    def owner_standing(
        self, program_id: ProgramId, left: LeftBehind | None = None
    ) -> tuple[float, ...] | None:
        """What the eviction order goes by, of a program or of what its newest turn left behind.

        It holds until something happens to the program. ``None``: such a program is not known.
        """
        return self.owners.standing(program_id, left)

    def owner_score(self, standing: tuple[float, ...] | None, branch_reuse: float = 1.0) -> tuple[float, ...]:
        """The place of a standing in the order in which cached blocks are reused, lowest first.

        It holds until ``foreseer.scale_changes`` grows or ``branch_reuse`` is another one: the share of what
        turns did without that was used again.
        """
        return self.owners.score(standing, branch_reuse)

    def prefetched(
        self,
        program_id: ProgramId,
        missing_blocks: int,
        now: float,
        *,
        coming_blocks: int = 0,
        lost_blocks: int | None = None,
    ) -> None:
        """The engine was told to bring a program's prefix back: so many of its blocks were not on the device,
        of which ``coming_blocks`` are read from disk and ``lost_blocks`` are in no tier (``None``: all)."""
        self.journal.prefetched(
            program_id,
            now,
            missing_blocks=missing_blocks,
            coming_blocks=coming_blocks,
            lost_blocks=missing_blocks if lost_blocks is None else lost_blocks,
        )

    def pinned(
        self,
        program_id: ProgramId,
        blocks: int,
        now: float,
        *,
        held_blocks: int | None = None,
        unheld_blocks: int | None = None,
        used_blocks: int | None = None,
    ) -> Lease | None:
        """The engine can hold ``blocks`` still-cached blocks after ``PIN_CACHED``: book them.

        ``held_blocks`` are held by leases now, ``unheld_blocks`` of the program's by none; ``used_blocks``
        are held or in use.
        """
        program = self.table.get(program_id)
        if program is None or program.live_requests or program.id in self.leases or not blocks:
            return None
        if program.status in OVER:  # it ended between the order and its execution
            return None
        return self.keeper.grant(
            program,
            program.tool_now(),
            blocks,
            program.hinted_ttl_s,
            now,
            "late_keep",
            held_blocks=held_blocks,
            unheld_blocks=unheld_blocks,
            running_tokens=self._running_tokens,
            used_blocks=used_blocks,
        )

    def cache_reset(self, now: float) -> None:
        """The engine's prefix cache is about to be cleared."""
        for lease in list(self.leases):
            self.keeper.end(lease.program_id, Reason.RESET, now)
        for program_id in self.contexts.clear():
            self.keeper.note_let_go(program_id, Reason.RESET)
        self.placer.cache_reset(now)

    def forget(self, programs: Sequence[Program], now: float) -> None:
        """Programs that had to leave the table for others: nothing of them stays, least of all KV."""
        self.lifetimes.forget(programs, now)

    def close_tape(self, reason: str) -> None:
        """The engine stops. A steward that writes a tape ends it here (``tape.TapingSteward``)."""

    def promoted_s(self, ticket: Ticket) -> float:
        """When waiting alone puts the request first in the queue; ``inf``: never, as things are."""
        return self.preset.order.promoted_s(self.waiting_view(ticket))

    # -- inside ---------------------------------------------------------------

    @property
    def _running_tokens(self) -> int:
        """Prompt tokens of all running requests."""
        return self.requests.running_tokens
