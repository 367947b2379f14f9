"""The keeper of leases: grants them, ends them, and orders what the engine is to do about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sojourn.ids import ProgramId

from ..metrics.decision_log import DecisionLog
from ..metrics.metrics_recorder import MetricsRecorder
from ..metrics.turn_ledger import EvictedBlock, EvictionLog, LossCause
from ..policies.costs.reload_estimate import ReloadEstimate
from ..policies.policy_protocols import DecisionReason, EndedKvHandling, RetentionDecision
from ..policies.policy_views import FinishedTurnView, ReclaimRequest
from ..policies.preset import Preset
from ..programs.program_state import ProgramState
from ..programs.program_table import ProgramTable
from .context_hashes import ContextHashStore
from .events_and_actions import EngineAction, EngineActionKind, RequestAdmitted
from .lease_table import SILENCE_INITIAL_S, Lease, LeaseTable
from .scheduler_state import Histories, KVPoolConfig, SchedulerLimits

_LOSS_CAUSE_OF_LEASE_END = {
    DecisionReason.TTL: LossCause.EXPIRED,
    DecisionReason.SILENT: LossCause.SILENT,
    DecisionReason.PRESSURE: LossCause.PRESSURE,
    DecisionReason.RESET: LossCause.DROPPED,
    DecisionReason.END: LossCause.DROPPED,
}


class LeaseManager:
    """Leases of one engine, the orders that follow from them, and why KV was let go."""

    def __init__(
        self,
        preset: Preset,
        pool: KVPoolConfig,
        *,
        limits: SchedulerLimits,
        histories: Histories,
        reload: ReloadEstimate,
        table: ProgramTable,
        decisions: DecisionLog,
        recorder: MetricsRecorder,
    ) -> None:
        self._preset = preset
        self._pool = pool
        self._limits = limits
        self._histories = histories
        self._reload = reload
        self._table = table
        self._decisions = decisions
        self._recorder = recorder
        self.leases = LeaseTable(int(pool.blocks * limits.lease_budget_fraction))
        self.contexts = ContextHashStore()
        self.eviction_log = EvictionLog(2 * pool.blocks)
        self.actions: list[Any] = []
        """Actions of the event being handled, oldest first; ``ProgramScheduler.handle`` empties it."""
        self.let_go: dict[ProgramId, DecisionReason] = {}
        """Why KV of a known program was let go since it was last admitted."""
        self._refused: tuple[ReclaimRequest, int] | None = None
        """The last need for which no lease was given up, and the state of the book then."""

    def may_reclaim(self, need: ReclaimRequest) -> bool:
        """Whether ``make_room`` could end a lease."""
        if not len(self.leases):
            return False
        # A waiting request asks again in every step; where nothing has changed, neither does the answer.
        return not need.anything_running or (need, self.leases.changes) != self._refused

    def make_room(
        self,
        need: ReclaimRequest,
        now: float,
        freed_by: Callable[[ProgramId], int] | None,
        score: Callable[[ProgramId], tuple[float, ...]],
    ) -> int:
        """Give up leases for somebody who needs space; returns how many. Orders are in ``actions``.

        ``freed_by`` says how many blocks the end of a program's lease would
        free; without it, as many as the lease holds. ``score`` is a program's
        place in the eviction order.
        """
        if not self.may_reclaim(need):
            return 0
        views = [lease.view() for lease in self.leases]
        if freed_by is not None:
            views = [view._replace(blocks=freed_by(view.program_id)) for view in views]
        if self._preset.eviction.by_program:
            views = [view._replace(score=score(view.program_id)) for view in views]
        chosen = self._preset.room.release(need, views, now)
        for program_id in chosen or ():
            self.end(program_id, DecisionReason.PRESSURE, now)
        if not chosen:
            self._refused = (need, self.leases.changes)
        return len(chosen or ())

    def order(
        self, kind: EngineActionKind, program_id: ProgramId, reason: DecisionReason, now: float
    ) -> None:
        """Put an order for the engine on the list, ending the program's lease with it."""
        if kind is EngineActionKind.DROP and self._preset.ended is EndedKvHandling.LEFT:
            kind = EngineActionKind.RELEASE
        lease = self.leases.end(program_id)
        if lease is not None:
            self.ended(lease, reason, now, kind)
        elif kind is not EngineActionKind.RELEASE:
            self.actions.append(EngineAction(kind, program_id, reason))
        if kind is EngineActionKind.DROP:
            # A program that left nothing behind is no decision: a flood of invented ids would fill the log.
            if lease is not None or self.contexts.get(program_id) is not None:
                self._decisions.add(now, "drop", program_id, reason.value)
                self.record_release(program_id, reason)
            self.contexts.drop(program_id)

    def grant(
        self,
        program: ProgramState,
        tool: str | None,
        blocks: int,
        hinted_ttl_s: float | None,
        now: float,
        kind: str = "keep",
        *,
        held_blocks: int | None = None,
        unheld_blocks: int | None = None,
        running_tokens: int = 0,
        used_blocks: int | None = None,
    ) -> Lease | None:
        """Ask how long to keep ``blocks`` cached blocks of the program; book and return the lease, if any."""
        reload_s = self._reload.seconds(program.context_tokens)
        host_s = self._pool.host_s_per_token
        keep = self._preset.retention.keep(
            FinishedTurnView(
                program_id=program.id,
                tool=tool,
                context_tokens=program.context_tokens,
                kv_blocks=blocks,
                reload_s=reload_s,
                mean_evicted_wait_s=self._histories.evicted_waits.mean(),
                memoryfulness=self._histories.turns.memoryfulness(),
                history=self._histories.tools,
                hinted_ttl_s=hinted_ttl_s,
                chunked_reload_s=self._chunked_reload_s(program.context_tokens, reload_s),
                host_reload_s=host_s * program.context_tokens if host_s is not None else None,
                running_tokens=running_tokens,
                goes_on=program.goes_on,
                used_share=used_blocks / self._pool.blocks if used_blocks is not None else None,
            ),
            now,
        )
        if keep.ttl_s > 0 and not blocks:
            keep = RetentionDecision(0.0, DecisionReason.NOTHING_CACHED)
        # What several leases share is held once, and counts once against the budget.
        more = blocks if unheld_blocks is None else unheld_blocks
        held = self.leases.blocks if held_blocks is None else held_blocks
        if keep.ttl_s > 0 and held + more > self.leases.budget_blocks:
            keep = RetentionDecision(0.0, DecisionReason.OVER_BUDGET)
        self.log_keep(program, keep, blocks, now, kind)
        if keep.ttl_s <= 0:
            return None
        silent_s = now + SILENCE_INITIAL_S if program.heartbeats else None
        lease = Lease(
            program.id, program.rank, now, keep.ttl_s, now + keep.ttl_s, silent_s, blocks, reload_s,
            keep.reason, tool,
        )  # fmt: skip
        lease.limit_s = now + max(keep.ttl_s, self._limits.max_held_s)
        self.leases.grant(lease)
        program.gap_leased = True
        return lease

    def _chunked_reload_s(self, tokens: int, reload_s: float) -> float:
        pieces = -(-tokens // self._pool.step_tokens)
        return reload_s if pieces <= 1 else pieces * self._reload.seconds(-(-tokens // pieces))

    def log_keep(
        self, program: ProgramState, keep: RetentionDecision, blocks: int, now: float, kind: str = "keep"
    ) -> None:
        """Log a retention decision."""
        self._decisions.add(
            now, kind, program.id, keep.reason.value, ttl_s=keep.ttl_s, blocks=blocks, turn=program.turns
        )
        if keep.ttl_s > 0:
            tool = program.pending_tool or "none"
            self._recorder.observe("sojourn_lease_ttl_seconds", keep.ttl_s, tool=tool)

    def end(self, program_id: ProgramId, reason: DecisionReason, now: float) -> None:
        """End the program's lease, if it has one; its blocks stay cached until reused."""
        lease = self.leases.end(program_id)
        if lease is not None:
            self.ended(lease, reason, now)

    def ended(
        self,
        lease: Lease,
        reason: DecisionReason,
        now: float,
        kind: EngineActionKind = EngineActionKind.RELEASE,
    ) -> None:
        """A lease has been struck out: order it carried out, and say so."""
        self.actions.append(EngineAction(kind, lease.program_id, reason))
        self.record_release(lease.program_id, reason)
        self._recorder.count("sojourn_lease_ends_total", reason=reason.value)
        if reason is DecisionReason.SILENT:
            self._recorder.count("sojourn_client_silent_total")
        if reason is not DecisionReason.RETURN:
            self._decisions.add(
                now, "release", lease.program_id, reason.value,
                blocks=lease.blocks, held_s=round(now - lease.granted_s, 6),
            )  # fmt: skip

    def cause(
        self, program: ProgramState, before: Sequence[Any] | None, fact: RequestAdmitted
    ) -> tuple[LossCause, EvictedBlock | None]:
        """Why the first block that is missing is missing, and what is known of its eviction."""
        cause = self.release_cause(program.id)
        missing = fact.cached_tokens // self._pool.block_size
        if before is None:  # what was dropped is dropped; of what was merely forgotten nothing is known
            return (cause if cause is LossCause.DROPPED else LossCause.UNKNOWN), None
        if missing >= len(before):
            return LossCause.UNKNOWN, None
        evicted_block = self.eviction_log.find(before[missing])
        if evicted_block is None:
            return cause or LossCause.UNKNOWN, None
        return (cause or evicted_block.cause), evicted_block

    def release_cause(self, program_id: ProgramId | None) -> LossCause | None:
        """Why the program's KV is no longer held, in the ledger's words; None where it never was."""
        ended = self.let_go.get(program_id) if program_id is not None else None
        return _LOSS_CAUSE_OF_LEASE_END.get(ended) if ended is not None else None

    def record_release(self, program_id: ProgramId, reason: DecisionReason) -> None:
        """Remember why the program's KV is no longer held."""
        if program_id in self._table:  # so that the notes are bounded by the table
            self.let_go[program_id] = reason
