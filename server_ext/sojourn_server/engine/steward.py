"""The steward: folds facts into program state, asks the policies, and says what is to be done.

It knows no engine, no clock and no network. An adapter reports facts with
``now`` and carries out the actions; the lab does the same in virtual time, so
that a recorded run gives the same decisions again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sojourn.ids import ProgramId
from sojourn.wire import Outcome

from ..metrics.decisions import DecisionLog
from ..metrics.ledger import Ledger, Lost, Tombstone, TurnRecord, common_prefix, split_tokens
from ..metrics.recorder import Recorder
from ..policy.base import Keep, Reason
from ..policy.costs import PrefillCurve
from ..policy.labels import Label, label
from ..policy.placement import Move, MoveReason, When
from ..policy.placement_views import Tier
from ..policy.preset import Preset
from ..policy.reload import ReloadEstimate
from ..policy.views import LeftBehind, RoomNeed, VictimView, WaitingView
from ..program.graphs import GraphStore
from ..program.record import Program
from ..program.status import OVER, ProgramStatus, Signal
from ..program.table import ProgramTable
from .facts import Action, ActionKind, Admission, Arrival, TurnEnd, TurnOutcome
from .foreseer import Foreseer
from .gate import EntryGate
from .keeper import Keeper
from .leases import Lease
from .placer import Placer
from .state import Histories, Pool, StewardLimits, Ticket

MAX_NAME_CHARS = 256
"""Longest agent type, tenant or graph node kept of a hint, in characters."""


_EVICTED = frozenset({Lost.EVICTED, Lost.EXPIRED, Lost.SILENT, Lost.PRESSURE})
"""Losses of programs that had been evicted, in the sense of Continuum's T̄."""


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
        self.tickets: dict[str, Ticket] = {}
        self.refused: list[str] = []
        """Requests that the engine is to end with an error: they were parked for ``gate_timeout_s``."""
        self._arrivals = 0
        self._awaiting_first_token: dict[str, TurnRecord] = {}
        self.gate = EntryGate(
            preset.entry,
            pool,
            limits=self.limits,
            histories=self.histories,
            table=self.table,
            leases=self.leases,
        )
        self.foreseer = Foreseer(preset, pool, histories=self.histories, graphs=self.graphs, table=self.table)
        self.placer = Placer(preset.placement, pool, histories=self.histories, moved=self._moved)
        self._running_tokens = 0
        """Prompt tokens of all running requests."""
        self._idle_since_s: float | None = None
        self._now_s = 0.0
        """When it was last told that time passes."""

    # -- requests -----------------------------------------------------------

    def arrived(self, fact: Arrival, now: float) -> Ticket:
        """A request has reached the engine: it belongs to a program, and ends its tool calls."""
        self._now_s = now
        self._arrivals += 1
        program = self._open(fact, now)
        if program is not None and (not program.ranked or program.status is ProgramStatus.ENDED):
            # A place in line comes with the first request, not with an announcement; and an id used again
            # after its program's end is a new program.
            program.rank, program.ranked = self.table.next_rank(), True
            if program.status is ProgramStatus.ENDED:
                program.begin_again()
        ticket = Ticket(
            fact.request_id,
            program.rank if program else self.table.next_rank(),
            self._arrivals,
            program,
            None,
            now,
            prompt_tokens=fact.prompt_tokens,
            attained_s=program.attained_s if program else 0.0,
            since_s=now,
        )
        self.tickets[fact.request_id] = ticket
        outcome = fact.identity.outcome
        if program is not None and self._read_hint(fact, ticket, program):
            outcome = Outcome.CLIPPED
        if outcome is not None:
            self.recorder.count("sojourn_hints_total", outcome=outcome.value)
        if program is None:
            return ticket
        gap_s = self._close_gap(program, now)
        tool = program.pending_tool
        if gap_s is not None:
            self.foreseer.came_back(program, tool, gap_s, fact.prompt_tokens)
        self.foreseer.touched(program)
        program.pending_tool = None
        program.live_requests.add(fact.request_id)
        self.table.signal(program, Signal.REQUEST_ARRIVED)
        self.placer.arrived(ticket, now)
        if self.placer.parked(ticket):
            self.table.signal(program, Signal.GATE)
        leased = self.leases.set_waiting(program.id, True)
        context = fact.identity.context
        ticket.record = TurnRecord(
            program.id,
            program.turns + 1,
            fact.request_id,
            now,
            tool_before=tool,
            gap_s=gap_s,
            leased=leased,
            client_request_id=context.request_id[:MAX_NAME_CHARS] if context and context.request_id else None,
        )
        return ticket

    def stranger(self, request_id: str, now: float) -> None:
        """A request that could not be taken in: it belongs to nobody and stands in line by its arrival."""
        self._arrivals += 1
        rank = self.table.next_rank()
        self.tickets[request_id] = Ticket(request_id, rank, self._arrivals, None, None, now, since_s=now)

    def stranger_left(self, request_id: str) -> None:
        """A request of no program has left the engine."""
        ticket = self.tickets.pop(request_id, None)
        if ticket is not None:
            self.placer.finished(ticket, self._now_s)
            if ticket.running:
                self._running_tokens -= ticket.prompt_tokens

    def admitted(self, fact: Admission, now: float) -> None:
        """A request got its blocks: its program's lease has done its work."""
        ticket = self.tickets.get(fact.request_id)
        if ticket is None:
            return
        ticket.run(now, self.promoted_s(ticket))
        self._running_tokens += ticket.prompt_tokens
        self._idle_since_s = None
        ticket.preempted = False
        first = not ticket.admitted
        ticket.admitted = True
        self.placer.admitted(ticket, now)
        program, record = ticket.program, ticket.record
        if program is None or record is None:
            return
        self.gate.holds_kv(ticket)
        if not first:
            if fact.resumed:
                record.recomputed_after_preemption += max(0, fact.tokens - fact.cached_tokens)
            return
        record.admitted_s = now
        self._awaiting_first_token[fact.request_id] = record
        before = self.contexts.get(program.id)
        shared = common_prefix(before, fact.block_hashes) if before is not None else None
        self.foreseer.admitted(program, fact.block_hashes, len(before or ()), shared)
        cause, stone = self.keeper.cause(program, before, fact)
        if stone is not None:
            record.evictor, record.evicted_score = stone.evictor, stone.score
        split = split_tokens(
            prompt=fact.tokens,
            device=fact.cached_tokens,
            block_size=self.pool.block_size,
            before_tokens=program.context_tokens,
            before_full_blocks=len(before) if before is not None else 0,
            shared_blocks=shared,
            cause=cause,
            dropped_hit_blocks=self.pool.dropped_hit_blocks,
        )
        record.tokens = replace(split, device=split.device - fact.host_tokens, host=fact.host_tokens)
        wait_s = now - ticket.arrived_s
        if program.turns and any(cause in _EVICTED for cause in record.tokens.lost):
            self.histories.evicted_waits.observe(wait_s)
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
        record = self._awaiting_first_token.pop(request_id, None)
        if record is not None:
            record.first_token_s = now

    def preempted(self, request_id: str, now: float) -> None:
        """A running request lost its blocks and waits again."""
        self.recorder.count("sojourn_preemptions_total", mode="recompute")
        ticket = self.tickets.get(request_id)
        if ticket is None:
            return
        self._runs_no_more(ticket, now)
        self.placer.preempted(ticket, now)
        ticket.preempted = True
        self.gate.holds_none(request_id)
        if ticket.record is not None:
            ticket.record.preemptions += 1
        program = ticket.program
        self.decisions.add(now, "preempt", program.id if program else None, "shortage")

    def finished(self, fact: TurnEnd, now: float) -> Lease | None:
        """A request has left the engine. Returns the lease under which its blocks are to be held, if any."""
        ticket = self.tickets.pop(fact.request_id, None)
        self.gate.holds_none(fact.request_id)
        if ticket is None:
            return None
        self._runs_no_more(ticket, now)
        failed = fact.outcome in (TurnOutcome.ABORTED, TurnOutcome.ERROR)
        self.placer.finished(ticket, now, failed=failed)
        if ticket.program is None:
            return None
        program = ticket.program
        program.attained_s = max(program.attained_s, ticket.attained_s + ticket.ran_s)
        program.waited_s += ticket.waited_s
        self._close_record(ticket, fact, now)
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
        context_tokens = fact.prompt_tokens + fact.output_tokens
        if program.turns > 1:
            self.histories.growth_tokens.observe(max(0, context_tokens - program.peak_tokens))
        else:
            program.first_prompt_tokens = fact.prompt_tokens
        program.context_tokens = context_tokens
        program.peak_tokens = max(program.peak_tokens, context_tokens)
        program.turn_over_s = now
        program.gap_reported = False
        program.gap_leased = False
        program.pending_tool = self._slowest(fact)
        program.hinted_ttl_s = ticket.hinted_ttl_s
        self.contexts.put(program.id, fact.block_hashes[: fact.cached_blocks])
        self.placer.turn_over(program, fact.cached_blocks, now)
        self.foreseer.turn_over(program, ticket, fact.cached_blocks, now)
        if ticket.record is not None:
            record = ticket.record
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
        if lease is not None and ticket.record is not None:
            ticket.record.lease_ttl_s = round(lease.ttl_s, 3)
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
        self.recorder.count("sojourn_evictions_total", tier="device", cause=cause.value)
        self.recorder.count(
            "sojourn_evicted_bytes_total", self.pool.block_bytes, tier="device", cause=cause.value
        )

    # -- time, room, order ---------------------------------------------------

    def tick(self, now: float) -> None:
        """Let time pass: end what is due. Called once an engine step and before every answer."""
        self._now_s = now
        due = self.leases.next_deadline_s()
        if due is not None and due <= now:
            for lease, reason in self.leases.due(now, self.limits.max_ends_per_tick):
                self.keeper.ended(lease, reason, now)
        for _ in range(8):
            program = self.table.silent(
                now, idle_s=self.limits.idle_program_s, promised_s=self.limits.silent_program_s
            )
            if program is None:
                break
            self.program_over(program, Signal.SILENCE, "silent", now)
        self.foreseer.idle(now)
        while (program := self.foreseer.due(now)) is not None:
            self.keeper.actions.append(Action(ActionKind.PREFETCH, program.id, Reason.THIS_TOOL))
        self.placer.tick(now)
        for ticket in self.placer.parked_for(self.limits.gate_timeout_s, now):
            self.refused.append(ticket.request_id)
            self.recorder.count("sojourn_gate_timeouts_total")
            program_id = ticket.program.id if ticket.program is not None else None
            self.decisions.add(now, "refuse", program_id, Reason.PLACED.value)

    def step_took(self, tokens: int, seconds: float, requests: int) -> None:
        """An engine step of ``tokens`` tokens of ``requests`` requests took so long."""
        self.reload.observe_step(tokens, seconds, requests)

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
            need = replace(need, idle_s=self._idle_s(now, False))
        return self.keeper.make_room(need, now, freed_by, self._score)

    def may_enter(
        self, ticket: Ticket, need_blocks: int, free_blocks: int, now: float, *, anything_running: bool
    ) -> bool:
        """Whether a waiting request may be admitted, as far as the entry policy is concerned.

        Only programs that hold no KV are ever kept out (``behind_gate``).
        ``need_blocks`` is what its prompt takes, ``free_blocks`` what the pool has.
        """
        idle_s = self._idle_s(now, anything_running) if self.gate.concerns(ticket) else 0.0
        return self.gate.may_enter(
            ticket, need_blocks, free_blocks, now, anything_running=anything_running, idle_s=idle_s
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
        program = self.table.get(program_id) if program_id is not None else None
        if program is None or program.status in OVER:
            return Label.INACTIVE
        return label(self.placer.tier(program.id))

    def holds_the_line(self, ticket: Ticket, now: float) -> bool:
        """Whether a request that is kept out has waited so long that nobody later may go past it."""
        return self.gate.holds_the_line(ticket, now)

    def program_over(self, program: Program, signal: Signal, outcome: str, now: float) -> None:
        """A program has ended (``END``) or was given up (``SILENCE``): learn from it and let its KV go."""
        if not self.table.signal(program, signal):
            return
        if signal is Signal.END:  # silence is a guess: a tool may outlast it, and its end is still to be told
            program.tools.clear()
        self.placer.forget(program.id, now)
        if program.turns != program.turns_when_over:
            program.turns_when_over = program.turns
            self.histories.turns.observe(program.turns)
            # Whoever is not heard of any more has ended, as far as a cache can tell; who was cancelled was
            # broken off.
            self.foreseer.over(program, ended=outcome != "cancelled")
            self.recorder.count("sojourn_programs_finished_total", outcome=outcome)
            self.recorder.observe("sojourn_program_duration_seconds", now - program.arrived_s)
        self.foreseer.touched(program)
        if signal is Signal.END:
            self.keeper.order(ActionKind.DROP, program.id, Reason.END, now)
        else:
            self.keeper.order(ActionKind.RELEASE, program.id, Reason.SILENT, now)

    def victim(self, running: Sequence[VictimView], short_blocks: int, now: float) -> str | None:
        """Which running request to preempt; None leaves it to the engine."""
        return self.preset.victim.victim([self._served(view, now) for view in running], short_blocks, now)

    def waiting_view(self, ticket: Ticket) -> WaitingView:
        """What the queue order sees of a request."""
        program = ticket.program
        return WaitingView(
            preempted=ticket.preempted,
            leased=program is not None and program.id in self.leases,
            program_rank=ticket.rank,
            arrival=ticket.arrival,
            attained_s=ticket.attained_s,
            ran_s=ticket.ran_s,
            waited_s=ticket.waited_s + (program.waited_s if program is not None else 0.0),
            arrived_s=ticket.arrived_s,
            since_s=ticket.since_s,
            now_s=self._now_s,
        )

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
        program = self.table.get(program_id)
        if program is None:
            return None
        view = self.foreseer.owner_view(program, left)
        return self.preset.eviction.standing(view._replace(tier=self.placer.tier(program_id)))

    def owner_score(self, standing: tuple[float, ...] | None, branch_reuse: float = 1.0) -> tuple[float, ...]:
        """The place of a standing in the order in which cached blocks are reused, lowest first.

        It holds until ``foreseer.scale_changes`` grows or ``branch_reuse`` is another one: the share of what
        turns did without that was used again.
        """
        if standing is None:
            return (-math.inf,)
        return self.preset.eviction.score(standing, self.foreseer.scale(branch_reuse))

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
        lost = missing_blocks if lost_blocks is None else lost_blocks
        if coming_blocks:
            reason = Reason.FROM_DISK
        elif not missing_blocks:
            reason = Reason.IN_PLACE
        else:
            reason = Reason.NO_TIER if lost == missing_blocks else Reason.IN_HOST
        self.decisions.add(now, "prefetch", program_id, reason.value, blocks=missing_blocks)
        self.recorder.count("sojourn_prefetches_total", outcome=reason.value)

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
        for program in programs:
            self.placer.forget(program.id, now)
            self.keeper.order(ActionKind.DROP, program.id, Reason.SUPERSEDED, now)
            self.keeper.let_go.pop(program.id, None)

    def close_tape(self, reason: str) -> None:
        """The engine stops. A steward that writes a tape ends it here (``tape.TapingSteward``)."""

    def promoted_s(self, ticket: Ticket) -> float:
        """When waiting alone puts the request first in the queue; ``inf``: never, as things are."""
        return self.preset.order.promoted_s(self.waiting_view(ticket))

    # -- inside ---------------------------------------------------------------

    def _moved(self, program: Program, move: Move, now: float) -> None:
        """The placer has moved a program: log it, and have the engine do its part."""
        if move.reason is MoveReason.OVER:  # that it is over is logged as such
            self.keeper.actions.append(Action(ActionKind.PLACE, program.id, Reason.END, move.to))
            return
        kind = "to_" + move.to.value if move.when is When.NOW else "leaves_after_turn"
        self.decisions.add(now, kind, program.id, move.reason.value)
        self.recorder.count(
            "sojourn_placements_total", to=move.to.value, when=move.when.value, reason=move.reason.value
        )
        if move.when is When.AFTER_TURN:
            return
        self.foreseer.touched(program)
        parked = move.to is not Tier.DEVICE
        if parked:
            self.keeper.end(program.id, Reason.PLACED, now)
        if program.live_requests:
            self.table.signal(program, Signal.GATE if parked else Signal.UNGATE)
        self.keeper.actions.append(Action(ActionKind.PLACE, program.id, Reason.PLACED, move.to))

    def _score(self, program_id: ProgramId) -> tuple[float, ...]:
        return self.owner_score(Steward.owner_standing(self, program_id))

    def _idle_s(self, now: float, anything_running: bool) -> float:
        """Seconds for which nothing has run, counted from when somebody first asked."""
        if anything_running:
            self._idle_since_s = None
            return 0.0
        if self._idle_since_s is None:
            self._idle_since_s = now
        return now - self._idle_since_s

    def _served(self, view: VictimView, now: float) -> VictimView:
        ticket = self.tickets.get(view.request_id)
        if ticket is None:
            return view
        return view._replace(attained_s=ticket.attained_s, ran_s=ticket.ran_until(now))

    def _runs_no_more(self, ticket: Ticket, now: float) -> None:
        if ticket.running:
            self._running_tokens -= ticket.prompt_tokens
        ticket.stop(now)

    def _open(self, fact: Arrival, now: float) -> Program | None:
        identity = fact.identity
        if identity.program_id is None:
            return None
        program, forgotten = self.table.open(identity.program_id, now)
        self.forget(forgotten, now)
        self.leases.heard(program.id, now)
        return program

    def _read_hint(self, fact: Arrival, ticket: Ticket, program: Program) -> bool:
        """Take in what the request advises. True where a part of it was clipped."""
        context = fact.identity.context
        clipped = False
        if context is None:
            return clipped
        if context.parent_program_id:
            program.parent_id = ProgramId(context.parent_program_id)
        if context.root_program_id:
            program.root_id = ProgramId(context.root_program_id)
        ttl_s = context.kv_retention_ttl_seconds
        if ttl_s is not None:
            bounded = min(max(0.0, ttl_s), self.limits.max_hinted_ttl_s)
            clipped = bounded != ttl_s
            ticket.hinted_ttl_s = bounded
        ticket.final = context.expected_resume is False
        ours = context.sojourn
        if ours is not None:
            if ours.heartbeat:
                self.table.promise_heartbeats(program)
            # Kept for as long as the program is: a context may hold a name of 16 KiB.
            program.agent_type = (ours.agent_type or "")[:MAX_NAME_CHARS] or program.agent_type
            program.node = (ours.node or "")[:MAX_NAME_CHARS] or program.node
            program.tenant = (ours.tenant or "")[:MAX_NAME_CHARS] or program.tenant
            left = ours.expected_steps_left
            program.expected_steps_left = left if left is not None and 0 <= left < math.inf else None
            ticket.steps_left = program.expected_steps_left
            ticket.node = ours.node[:MAX_NAME_CHARS] if ours.node else None
            ticket.final = ticket.final or ours.final
        return clipped

    def _close_gap(self, program: Program, now: float) -> float | None:
        """The program is back: what its tools took is known now, unless the client told it already."""
        program.tools.clear()
        if program.turn_over_s is None or program.live_requests:
            return None
        gap_s = max(0.0, now - program.turn_over_s)
        if program.pending_tool is not None:
            source = "reported" if program.gap_reported else "inferred"
            self.recorder.count("sojourn_tool_gap_source_total", source=source)
            self.recorder.observe("sojourn_tool_gap_seconds", gap_s, tool=program.pending_tool)
            if not program.gap_reported:
                self.histories.tools.observe(program.pending_tool, gap_s)
                program.gap_inferred_s = now
        program.turn_over_s = None
        return gap_s

    def _slowest(self, fact: TurnEnd) -> str | None:
        """Several tool calls are one gap, the longest: the key whose median was highest so far."""
        keys = [call.key for call in fact.tool_calls]
        if len(keys) < 2:
            return keys[0] if keys else None
        return max(keys, key=self._median_s)

    def _median_s(self, key: str) -> float:
        durations = self.histories.tools.durations(key)
        return durations[len(durations) // 2] if durations else 0.0

    def _close_record(self, ticket: Ticket, fact: TurnEnd, now: float) -> None:
        self._awaiting_first_token.pop(fact.request_id, None)
        record = ticket.record
        if record is None:
            return
        record.finished_s = now
        record.output_tokens = fact.output_tokens
        record.outcome = fact.outcome.value
        self.ledger.close(record)
        self.recorder.count("sojourn_program_turns_total", outcome=fact.outcome.value)
        if record.recomputed_after_preemption:
            self.recorder.count(
                "sojourn_lost_tokens_total", record.recomputed_after_preemption, cause=Lost.PREEMPTED.value
            )
        split = record.tokens
        if split is not None:
            for result in ("device", "host", "new", "tail"):
                tokens = getattr(split, result)
                self.recorder.count("sojourn_prompt_tokens_total", tokens, result=result)
            for cause, tokens in split.lost.items():
                self.recorder.count("sojourn_prompt_tokens_total", tokens, result="lost")
                self.recorder.count("sojourn_lost_tokens_total", tokens, cause=cause.value)
                if cause is not Lost.CHANGED:
                    regretted = tokens // self.pool.block_size
                    self.recorder.count("sojourn_evictions_regretted_total", regretted, tier="device")
