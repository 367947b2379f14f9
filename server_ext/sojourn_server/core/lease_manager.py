"""Grants and ends leases, adds the actions for the engine, and records why KV was released."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sojourn.ids import ProgramId

from ..metrics.turn_ledger import EvictedBlock, LossCause
from ..policies.lease_reclaim_policies import reclaim_for_overdue
from ..policies.policy_protocols import DecisionReason, EndedKvHandling, RetentionDecision
from ..policies.policy_views import FinishedTurnView, ReclaimRequest
from ..programs.program_state import ProgramState
from ..programs.program_status import OVER_STATUSES
from .events_and_actions import (
    CachedBlocksFound,
    EngineAction,
    EngineActionKind,
    LeaseGranted,
    RequestAdmitted,
    TurnFinished,
)
from .lease_table import SILENCE_INITIAL_S, Lease
from .scheduler_state import SchedulerState

_LOSS_CAUSE_OF_LEASE_END = {
    DecisionReason.TTL: LossCause.EXPIRED,
    DecisionReason.SILENT: LossCause.SILENT,
    DecisionReason.PRESSURE: LossCause.PRESSURE,
    DecisionReason.RESET: LossCause.DROPPED,
    DecisionReason.END: LossCause.DROPPED,
}


class LeaseManager:
    """Grants and ends leases, and adds the resulting actions for the engine to the scheduler's list."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._refused: tuple[ReclaimRequest, int] | None = None
        """The last ``need`` for which ``make_room`` ended no lease, and ``LeaseTable.changes`` at that
        time."""

    def may_reclaim(self, need: ReclaimRequest) -> bool:
        """Whether ``make_room`` could end a lease for ``need``. False if there is no lease. While requests
        run, a ``need`` that ended no lease is not tried again until leases change."""
        leases = self._state.leases
        if not len(leases):
            return False
        # A waiting request asks in every step. While the leases do not change, the answer stays the same.
        return not need.anything_running or (need, leases.changes) != self._refused

    def make_room(
        self,
        need: ReclaimRequest,
        now: float,
        freed: Mapping[ProgramId, int] | None,
        score: Callable[[ProgramId], tuple[float, ...]],
    ) -> None:
        """End leases for a request that needs blocks.

        The leases are chosen in up to three attempts. Each attempt is made only if the one before chose none:

        1. The lease reclaim policy chooses, except for an overdue request without a program.
        2. For an overdue request (``ReclaimRequest.overdue``), ``reclaim_for_overdue`` chooses.
        3. If the engine schedules by priority, a waiting request ends leases of less important programs.

        ``freed`` has the number of blocks that become free if a program's lease ends; ``None``: all blocks of
        the lease. ``score`` returns a program's eviction key.
        """
        if not self.may_reclaim(need):
            return
        state = self._state
        views = [lease.view() for lease in state.leases]
        if freed is not None:
            views = [view._replace(blocks=freed[view.program_id]) for view in views]
        if state.preset.eviction.by_program:
            views = [view._replace(score=score(view.program_id)) for view in views]
        chosen = None
        if not need.overdue or need.program_id is not None:
            chosen = state.preset.lease_reclaim.release(need, views, now)
        if not chosen and need.overdue:
            chosen = reclaim_for_overdue(need, views, now)
        if not chosen and need.priority is not None:
            # The policy goes by the arrival of programs, and the queue by priorities. A less important
            # program that has come back would wait behind this request, and its lease would not expire.
            less = [view for view in views if self._priority_of(view.program_id) > need.priority]
            chosen = reclaim_for_overdue(need, less, now)
        for program_id in chosen or ():
            self.end(program_id, DecisionReason.PRESSURE, now)
        if not chosen:
            self._refused = (need, state.leases.changes)

    def _priority_of(self, program_id: ProgramId) -> int:
        """Return the user's priority of a program: the priority of its most important request in the engine,
        or else of its last request; 0 for an unknown program."""
        program, states = self._state.programs.get(program_id), self._state.requests.states
        if program is None:
            return 0
        live = (states[request_id].priority for request_id in program.live_requests if request_id in states)
        return min(live, default=program.priority)

    def order_action(
        self, kind: EngineActionKind, program_id: ProgramId, reason: DecisionReason, now: float
    ) -> None:
        """Order the engine to do ``kind`` with the program's KV: add this action, and end the program's
        lease.

        A ``RELEASE`` is added only if the program has a lease. If the preset leaves the KV of ended programs
        in the cache, a ``DROP`` becomes a ``RELEASE``."""
        state = self._state
        if kind is EngineActionKind.DROP and state.preset.ended is EndedKvHandling.LEFT:
            kind = EngineActionKind.RELEASE
        lease = state.leases.end(program_id)
        if lease is not None:
            self.ended(lease, reason, now, kind)
        elif kind is not EngineActionKind.RELEASE:
            state.actions.append(EngineAction(kind, program_id, reason))
        if kind is EngineActionKind.DROP:
            # Only programs with KV are logged, so that a flood of invented ids does not fill the log.
            if lease is not None or state.contexts.get(program_id) is not None:
                state.decisions.add(now, "drop", program_id, reason.value)
                self.record_release(program_id, reason)
            state.contexts.drop(program_id)

    def grant(
        self,
        program: ProgramState,
        tool: str | None,
        blocks: int,
        event: TurnFinished | CachedBlocksFound,
        now: float,
        kind: str = "keep",
    ) -> Lease | None:
        """Ask the policy how long to keep ``blocks`` cached blocks; return the lease, if any. ``tool``: key
        of the tool that runs in the gap, if known. ``event`` has the numbers of held and used blocks.
        ``kind``: name of the decision in the log."""
        state = self._state
        tokens = program.context_tokens
        reload_s = chunked_reload_s = state.reload.seconds(tokens)
        # A context that is too long for one engine step is computed in several steps.
        pieces = -(-tokens // state.pool.step_tokens)
        if pieces > 1:
            chunked_reload_s = pieces * state.reload.seconds(-(-tokens // pieces))
        view = FinishedTurnView(
            program_id=program.id,
            tool=tool,
            context_tokens=program.context_tokens,
            kv_blocks=blocks,
            reload_s=reload_s,
            mean_evicted_wait_s=state.histories.evicted_waits.mean(),
            memoryfulness=state.histories.turns.memoryfulness(),
            history=state.histories.tools,
            hinted_ttl_s=program.hinted_ttl_s,
            chunked_reload_s=chunked_reload_s,
            host_reload_s=state.copy_back_s(tokens),
            running_tokens=state.requests.running_tokens,
            continuation_probability=program.continuation_probability,
            used_share=event.used_blocks / state.pool.blocks if event.used_blocks is not None else None,
        )
        keep = state.preset.retention.keep(view, now)
        if keep.ttl_s > 0 and not blocks:
            keep = RetentionDecision(0.0, DecisionReason.NOTHING_CACHED)
        # A block that several leases share counts once against the budget.
        more = blocks if event.unheld_blocks is None else event.unheld_blocks
        held = state.leases.blocks if event.held_blocks is None else event.held_blocks
        excess = held + more - state.leases.budget_blocks
        hinted = keep.reason is DecisionReason.HINTED
        if keep.ttl_s > 0 and (hinted or excess > 0):
            share = self._hinted_share_blocks(program.tenant)
            own = state.leases.hinted_blocks.get(program.tenant, 0) + more
            if excess > 0:
                # Ended leases may free less than ``excess``, because other leases can share their blocks. So
                # this lease is refused anyway; the next lease may find enough budget.
                self._end_excess_hinted(share, excess, now)
            if excess > 0 or (hinted and own > share):
                keep = RetentionDecision(0.0, DecisionReason.OVER_BUDGET)
        self.log_keep(program, keep, blocks, now, kind)
        if keep.ttl_s <= 0:
            return None
        silent_s = now + SILENCE_INITIAL_S if program.heartbeats else None
        lease = Lease(
            program.id, program.rank, now, keep.ttl_s, now + keep.ttl_s, silent_s, blocks, view.restore_s,
            keep.reason, tool, tenant=program.tenant, own_blocks=more,
        )  # fmt: skip
        lease.limit_s = now + max(keep.ttl_s, state.limits.max_held_s)
        state.leases.grant(lease)
        program.gap_leased = True
        return lease

    def cached_blocks_found(self, event: CachedBlocksFound, now: float) -> LeaseGranted | None:
        """Grant a lease on the blocks that the engine found for a ``PIN_CACHED`` action. No lease is granted
        if the program is over or has a request or a lease, or if the policy refuses."""
        state = self._state
        program = state.programs.get(event.program_id)
        if program is None or program.live_requests or program.id in state.leases or not event.blocks:
            return None
        if program.status in OVER_STATUSES:  # it ended before the engine carried out PIN_CACHED
            return None
        lease = self.grant(program, program.tool_now(), event.blocks, event, now, "late_keep")
        return LeaseGranted(lease) if lease is not None else None

    def _hinted_share_blocks(self, tenant: str | None) -> int:
        """Number of blocks that one tenant's hinted leases may hold. A lease is hinted if its client chose
        the TTL.

        The budget is divided equally among tenants with hinted leases or with requests in the engine.
        Requests without a program count as one more tenant.
        """
        state = self._state
        tenants = {tenant, *state.leases.hinted_blocks}
        untracked = False
        for request in state.requests.states.values():
            if request.program is None:
                untracked = True
            else:
                tenants.add(request.program.tenant)
        return state.leases.budget_blocks // (len(tenants) + untracked)

    def _end_excess_hinted(self, share_blocks: int, blocks: int, now: float) -> None:
        """End hinted leases until at least ``blocks`` blocks are released, or no tenant holds more than
        ``share_blocks``. Only tenants above that share lose leases. Leases without a waiting request end
        before leases with one. Within each group, the lease that expires soonest ends first."""
        held = self._state.leases.hinted_blocks
        if not any(own > share_blocks for own in held.values()):
            return
        hinted = [lease for lease in self._state.leases if lease.reason is DecisionReason.HINTED]
        for lease in sorted(hinted, key=lambda lease: (lease.waiting, lease.expires_s, lease.program_id)):
            if blocks <= 0:
                break
            before = held[lease.tenant]
            if before > share_blocks:
                self.end(lease.program_id, DecisionReason.PRESSURE, now)
                blocks -= before - held[lease.tenant]

    def log_keep(
        self, program: ProgramState, keep: RetentionDecision, blocks: int, now: float, kind: str = "keep"
    ) -> None:
        """Log a retention decision under the name ``kind``, and add a granted TTL to the metrics."""
        self._state.decisions.add(
            now, kind, program.id, keep.reason.value, ttl_s=keep.ttl_s, blocks=blocks, turn=program.turns
        )
        if keep.ttl_s > 0:
            tool = program.pending_tool or "none"
            self._state.recorder.observe("sojourn_lease_ttl_seconds", keep.ttl_s, tool=tool)

    def end(self, program_id: ProgramId, reason: DecisionReason, now: float) -> None:
        """End the program's lease, if it has one. The blocks stay cached until they are reused."""
        lease = self._state.leases.end(program_id)
        if lease is not None:
            self.ended(lease, reason, now)

    def end_all(self, reason: DecisionReason, now: float) -> list[ProgramId]:
        """End all leases. Returns their programs."""
        ended = list(self._state.leases.programs())
        for program_id in ended:
            self.end(program_id, reason, now)
        return ended

    def ended(
        self,
        lease: Lease,
        reason: DecisionReason,
        now: float,
        kind: EngineActionKind = EngineActionKind.RELEASE,
    ) -> None:
        """Record the end of a lease that was removed from the table, and add the engine's action ``kind``."""
        self._state.actions.append(EngineAction(kind, lease.program_id, reason))
        self.record_release(lease.program_id, reason)
        if reason is DecisionReason.PRESSURE:
            self._state.last_shortage_s = now
        self._state.recorder.count("sojourn_lease_ends_total", reason=reason.value)
        if reason is DecisionReason.SILENT:
            self._state.recorder.count("sojourn_client_silent_total")
        if reason is not DecisionReason.RETURN:
            self._state.decisions.add(
                now, "release", lease.program_id, reason.value,
                blocks=lease.blocks, held_s=round(now - lease.granted_s, 6),
            )  # fmt: skip

    def loss_cause(
        self, program: ProgramState, before: Sequence[Any] | None, event: RequestAdmitted
    ) -> tuple[LossCause, EvictedBlock | None]:
        """Return why a prompt's first uncached block was lost, and the record of this block's eviction
        (``None``: unknown).

        ``before``: block hashes of the program's last turn; ``None`` if they are no longer stored."""
        cause = self.release_cause(program.id)
        missing = event.cached_tokens // self._state.pool.block_size
        if before is None:  # the stored hashes were dropped
            return (cause if cause is LossCause.DROPPED else LossCause.UNKNOWN), None
        if missing >= len(before):
            return LossCause.UNKNOWN, None
        find = self._state.eviction_log.find
        evicted_block = find(before[missing])
        if evicted_block is None and self._state.pool.fixed_blocks:
            # A missing attention window or recurrent state later in the prefix prevents the whole hit.
            evicted_block = next(filter(None, map(find, reversed(before[missing:]))), None)
        if evicted_block is None:
            return cause or LossCause.UNKNOWN, None
        return (cause or evicted_block.cause), evicted_block

    def release_cause(self, program_id: ProgramId | None) -> LossCause | None:
        """Return why the program's KV was released, as a cause in the turn ledger.

        ``None`` if the KV was not released, or if the ledger has no cause for the reason of the release."""
        ended = self._state.release_reasons.get(program_id) if program_id is not None else None
        return _LOSS_CAUSE_OF_LEASE_END.get(ended) if ended is not None else None

    def record_release(self, program_id: ProgramId, reason: DecisionReason) -> None:
        """Record why the program's KV was released."""
        if program_id in self._state.programs:  # bounds the number of entries
            self._state.release_reasons[program_id] = reason
