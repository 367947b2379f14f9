"""The steward: folds facts into program state, asks the policies, and says what is to be done.

It knows no engine, no clock and no network. An adapter reports facts with
``now`` and carries out the actions; the lab does the same in virtual time, so
that a recorded run gives the same decisions again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sojourn.ids import ProgramId
from sojourn.wire import Outcome

from ..metrics.decisions import DecisionLog
from ..metrics.ledger import Graveyard, Ledger, Lost, TurnRecord, common_prefix, split_tokens
from ..metrics.recorder import Recorder
from ..policy.base import Keep, Reason
from ..policy.costs import PrefillCurve
from ..policy.preset import Preset
from ..policy.reload import ReloadEstimate
from ..policy.views import RoomNeed, TurnView, VictimView, WaitingView
from ..program.history import SlidingMean, ToolHistory, TurnHistory
from ..program.record import Program
from ..program.status import OVER, Signal
from ..program.table import ProgramTable
from .contexts import ContextStore
from .facts import Action, ActionKind, Admission, Arrival, TurnEnd, TurnOutcome
from .leases import SILENCE_INITIAL_S, Lease, LeaseBook

MAX_NAME_CHARS = 256
"""Longest agent type or graph node kept of a hint, in characters."""

_CAUSE_OF_LEASE_END = {
    Reason.TTL: Lost.EXPIRED,
    Reason.SILENT: Lost.SILENT,
    Reason.PRESSURE: Lost.PRESSURE,
    Reason.RESET: Lost.DROPPED,
    Reason.END: Lost.DROPPED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StewardLimits:
    """Bounds, each with its unit."""

    max_programs: int = 20_000
    lease_budget_fraction: float = 0.95
    """Share of the pool that all leases together may hold."""
    max_ends_per_tick: int = 1000
    """Leases ended in one engine step at most; the rest follow in the next."""
    max_hinted_ttl_s: float = 300.0
    return_grace_s: float = 2.0
    """How long a lease outlives its tool's reported end: the time a request needs to arrive."""
    idle_program_s: float = 1800.0
    """A program not heard of for so long between turns is given up."""
    silent_program_s: float = 60.0
    """The same for a client that promised heartbeats."""


@dataclass(slots=True)
class Ticket:
    """What the steward keeps of a request while it is in the engine."""

    request_id: str
    rank: int
    """The program's rank; the request's own where it has no program."""
    arrival: int
    program: Program | None
    record: TurnRecord | None
    arrived_s: float
    hinted_ttl_s: float | None = None
    final: bool = False
    preempted: bool = False
    admitted: bool = False


@dataclass(slots=True, kw_only=True)
class Pool:
    """The engine's KV pool."""

    blocks: int
    block_size: int
    """Tokens a block holds."""
    block_bytes: int = 0


@dataclass(slots=True)
class Histories:
    """What is learned over time and may be saved."""

    tools: ToolHistory = field(default_factory=ToolHistory)
    turns: TurnHistory = field(default_factory=TurnHistory)
    evicted_waits: SlidingMean = field(default_factory=SlidingMean)


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
    ) -> None:
        self.preset = preset
        self.pool = pool
        self.limits = limits or StewardLimits()
        self.histories = histories or Histories()
        self.reload = ReloadEstimate(curve)
        self.table = ProgramTable(self.limits.max_programs)
        self.leases = LeaseBook(int(pool.blocks * self.limits.lease_budget_fraction))
        self.contexts = ContextStore()
        self.ledger = Ledger()
        self.graveyard = Graveyard(2 * pool.blocks)
        self.decisions = DecisionLog()
        self.recorder = Recorder()
        self.tickets: dict[str, Ticket] = {}
        self.actions: list[Action] = []
        """Orders not yet carried out, oldest first; the adapter takes them with ``take_actions``."""
        self._arrivals = 0
        self._awaiting_first_token: dict[str, TurnRecord] = {}
        self._let_go: dict[ProgramId, Reason] = {}
        """Why KV of a known program was let go since it was last admitted."""

    # -- requests -----------------------------------------------------------

    def arrived(self, fact: Arrival, now: float) -> Ticket:
        """A request has reached the engine: it belongs to a program, and ends its tool calls."""
        self._arrivals += 1
        program = self._open(fact, now)
        ticket = Ticket(
            fact.request_id,
            program.rank if program else self.table.next_rank(),
            self._arrivals,
            program,
            None,
            now,
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
        program.pending_tool = None
        program.live_requests.add(fact.request_id)
        self.table.signal(program, Signal.REQUEST_ARRIVED)
        leased = self.leases.set_waiting(program.id, True)
        ticket.record = TurnRecord(
            program.id, program.turns + 1, fact.request_id, now, tool_before=tool, gap_s=gap_s, leased=leased
        )
        return ticket

    def admitted(self, fact: Admission, now: float) -> None:
        """A request got its blocks: its program's lease has done its work."""
        ticket = self.tickets.get(fact.request_id)
        if ticket is None:
            return
        ticket.preempted = False
        first = not ticket.admitted
        ticket.admitted = True
        program, record = ticket.program, ticket.record
        if program is None or record is None:
            return
        if not first:
            record.recomputed_after_preemption += max(0, fact.tokens - fact.cached_tokens)
            return
        record.admitted_s = now
        self._awaiting_first_token[fact.request_id] = record
        before = self.contexts.get(program.id)
        shared = common_prefix(before, fact.block_hashes) if before is not None else None
        cause, record.evictor = self._cause(program, before, fact)
        record.tokens = split_tokens(
            prompt=fact.tokens,
            device=fact.cached_tokens,
            block_size=self.pool.block_size,
            before_tokens=program.context_tokens,
            before_full_blocks=len(before) if before is not None else 0,
            shared_blocks=shared,
            cause=cause,
        )
        wait_s = now - ticket.arrived_s
        if program.turns and any(cause is not Lost.CHANGED for cause in record.tokens.lost):
            self.histories.evicted_waits.observe(wait_s)
        self._end_lease(program.id, Reason.RETURN, now)
        self._let_go.pop(program.id, None)

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
        ticket.preempted = True
        if ticket.record is not None:
            ticket.record.preemptions += 1
        program = ticket.program
        self.decisions.add(now, "preempt", program.id if program else None, "shortage")

    def finished(self, fact: TurnEnd, now: float) -> Lease | None:
        """A request has left the engine. Returns the lease under which its blocks are to be held, if any."""
        ticket = self.tickets.pop(fact.request_id, None)
        if ticket is None or ticket.program is None:
            return None
        program = ticket.program
        self._close_record(ticket, fact, now)
        program.live_requests.discard(fact.request_id)
        program.last_contact_s = now
        failed = fact.outcome in (TurnOutcome.ABORTED, TurnOutcome.ERROR)
        program.turns += not failed
        if program.live_requests:
            return None
        self.table.signal(program, Signal.TURN_OVER)
        self.leases.set_waiting(program.id, False)
        if program.status in OVER:  # the client ended it while this request still ran
            self.order(ActionKind.DROP, program.id, Reason.END, now)
            return None
        if failed:
            return None
        program.context_tokens = fact.prompt_tokens + fact.output_tokens
        program.turn_over_s = now
        program.gap_reported = False
        program.pending_tool = self._slowest(fact)
        program.hinted_ttl_s = ticket.hinted_ttl_s
        self.contexts.put(program.id, fact.block_hashes[: fact.cached_blocks])
        if ticket.final:
            self._log_keep(program, Keep(0.0, Reason.FINAL_TURN), fact.cached_blocks, now)
            return None
        if program.id in self.leases:  # a parallel branch of the same program still holds one
            self._end_lease(program.id, Reason.SUPERSEDED, now)
        return self._grant(program, program.pending_tool, fact.cached_blocks, ticket.hinted_ttl_s, now)

    # -- time, room, order ---------------------------------------------------

    def tick(self, now: float) -> None:
        """Let time pass: end what is due. Called once an engine step and before every answer."""
        due = self.leases.next_deadline_s()
        if due is not None and due <= now:
            for lease, reason in self.leases.due(now, self.limits.max_ends_per_tick):
                self._after_lease(lease, reason, now)
        for _ in range(8):
            program = self.table.silent(
                now, idle_s=self.limits.idle_program_s, promised_s=self.limits.silent_program_s
            )
            if program is None:
                break
            self.program_over(program, Signal.SILENCE, "silent", now)

    def make_room(self, need: RoomNeed, now: float) -> int:
        """Give up leases for somebody who needs space; returns how many. Orders are in ``actions``."""
        if not len(self.leases):
            return 0
        chosen = self.preset.room.release(need, [lease.view() for lease in self.leases], now)
        for program_id in chosen or ():
            self._end_lease(program_id, Reason.PRESSURE, now)
        return len(chosen or ())

    def program_over(self, program: Program, signal: Signal, outcome: str, now: float) -> None:
        """A program has ended (``END``) or was given up (``SILENCE``): learn from it and let its KV go."""
        if not self.table.signal(program, signal):
            return
        program.tools.clear()
        if program.turns != program.turns_when_over:
            program.turns_when_over = program.turns
            self.histories.turns.observe(program.turns)
            self.recorder.count("sojourn_programs_finished_total", outcome=outcome)
            self.recorder.observe("sojourn_program_duration_seconds", now - program.arrived_s)
        if signal is Signal.END:
            self.order(ActionKind.DROP, program.id, Reason.END, now)
        else:
            self.order(ActionKind.RELEASE, program.id, Reason.SILENT, now)

    def victim(self, running: Sequence[VictimView], short_blocks: int, now: float) -> str | None:
        """Which running request to preempt; None leaves it to the engine."""
        return self.preset.victim.victim(running, short_blocks, now)

    def waiting_view(self, ticket: Ticket) -> WaitingView:
        """What the queue order sees of a request."""
        program = ticket.program
        leased = program is not None and program.id in self.leases
        return WaitingView(ticket.preempted, leased, ticket.rank, ticket.arrival)

    def take_actions(self) -> list[Action]:
        """The orders not yet carried out; they are the caller's now."""
        actions, self.actions = self.actions, []
        return actions

    def pinned(self, program_id: ProgramId, blocks: int, now: float) -> Lease | None:
        """The engine holds ``blocks`` still-cached blocks after ``PIN_CACHED``: book them."""
        program = self.table.get(program_id)
        if program is None or program.live_requests or program.id in self.leases or not blocks:
            return None
        if program.status in OVER:  # it ended between the order and its execution
            return None
        return self._grant(program, program.tool_now(), blocks, program.hinted_ttl_s, now, "late_keep")

    def cache_reset(self, now: float) -> None:
        """The engine's prefix cache is about to be cleared."""
        for lease in list(self.leases):
            self._end_lease(lease.program_id, Reason.RESET, now)
        for program_id in self.contexts.clear():
            self._note_let_go(program_id, Reason.RESET)

    def forget(self, programs: Sequence[Program], now: float) -> None:
        """Programs that had to leave the table for others: nothing of them stays, least of all KV."""
        for program in programs:
            self.order(ActionKind.DROP, program.id, Reason.SUPERSEDED, now)
            self._let_go.pop(program.id, None)

    def order(self, kind: ActionKind, program_id: ProgramId, reason: Reason, now: float) -> None:
        """Put an order for the engine on the list, ending the program's lease with it."""
        lease = self.leases.end(program_id)
        if lease is not None:
            self._after_lease(lease, reason, now, kind)
        elif kind is not ActionKind.RELEASE:
            self.actions.append(Action(kind, program_id, reason))
        if kind is ActionKind.DROP:
            # A program that left nothing behind is no decision: a flood of invented ids would fill the log.
            if lease is not None or self.contexts.get(program_id) is not None:
                self.decisions.add(now, "drop", program_id, reason.value)
                self._note_let_go(program_id, reason)
            self.contexts.drop(program_id)

    # -- inside ---------------------------------------------------------------

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

    def _grant(
        self,
        program: Program,
        tool: str | None,
        blocks: int,
        hinted_ttl_s: float | None,
        now: float,
        kind: str = "keep",
    ) -> Lease | None:
        reload_s = self.reload.seconds(program.context_tokens)
        keep = self.preset.retention.keep(
            TurnView(
                program_id=program.id,
                tool=tool,
                context_tokens=program.context_tokens,
                kv_blocks=blocks,
                reload_s=reload_s,
                mean_evicted_wait_s=self.histories.evicted_waits.mean(),
                memoryfulness=self.histories.turns.memoryfulness(),
                history=self.histories.tools,
                hinted_ttl_s=hinted_ttl_s,
            ),
            now,
        )
        if keep.ttl_s > 0 and not blocks:
            keep = Keep(0.0, Reason.NOTHING_CACHED)
        if keep.ttl_s > 0 and not self.leases.fits(blocks):
            keep = Keep(0.0, Reason.OVER_BUDGET)
        self._log_keep(program, keep, blocks, now, kind)
        if keep.ttl_s <= 0:
            return None
        silent_s = now + SILENCE_INITIAL_S if program.heartbeats else None
        lease = Lease(
            program.id, program.rank, now, keep.ttl_s, now + keep.ttl_s, silent_s, blocks, reload_s,
            keep.reason, tool,
        )  # fmt: skip
        self.leases.grant(lease)
        return lease

    def _log_keep(self, program: Program, keep: Keep, blocks: int, now: float, kind: str = "keep") -> None:
        self.decisions.add(
            now, kind, program.id, keep.reason.value, ttl_s=keep.ttl_s, blocks=blocks, turn=program.turns
        )
        if keep.ttl_s > 0:
            tool = program.pending_tool or "none"
            self.recorder.observe("sojourn_lease_ttl_seconds", keep.ttl_s, tool=tool)

    def _end_lease(self, program_id: ProgramId, reason: Reason, now: float) -> None:
        lease = self.leases.end(program_id)
        if lease is not None:
            self._after_lease(lease, reason, now)

    def _after_lease(
        self, lease: Lease, reason: Reason, now: float, kind: ActionKind = ActionKind.RELEASE
    ) -> None:
        self.actions.append(Action(kind, lease.program_id, reason))
        self._note_let_go(lease.program_id, reason)
        self.recorder.count("sojourn_lease_ends_total", reason=reason.value)
        if reason is Reason.SILENT:
            self.recorder.count("sojourn_client_silent_total")
        if reason is not Reason.RETURN:
            self.decisions.add(
                now, "release", lease.program_id, reason.value,
                blocks=lease.blocks, held_s=round(now - lease.granted_s, 6),
            )  # fmt: skip

    def _cause(
        self, program: Program, before: Sequence[Any] | None, fact: Admission
    ) -> tuple[Lost, str | None]:
        """Why the first block that is missing is missing, and who took its place."""
        ended = self._let_go.get(program.id)
        cause = _CAUSE_OF_LEASE_END.get(ended) if ended is not None else None
        missing = fact.cached_tokens // self.pool.block_size
        if before is None:  # what was dropped is dropped; of what was merely forgotten nothing is known
            return (cause if cause is Lost.DROPPED else Lost.UNKNOWN), None
        if missing >= len(before):
            return Lost.UNKNOWN, None
        stone = self.graveyard.find(before[missing])
        if stone is None:
            return cause or Lost.UNKNOWN, None
        return (cause or stone.cause), stone.evictor

    def _note_let_go(self, program_id: ProgramId, reason: Reason) -> None:
        if program_id in self.table:  # so that the notes are bounded by the table
            self._let_go[program_id] = reason

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
            for result, tokens in (("device", split.device), ("new", split.new), ("tail", split.tail)):
                self.recorder.count("sojourn_prompt_tokens_total", tokens, result=result)
            for cause, tokens in split.lost.items():
                self.recorder.count("sojourn_prompt_tokens_total", tokens, result="lost")
                self.recorder.count("sojourn_lost_tokens_total", tokens, cause=cause.value)
