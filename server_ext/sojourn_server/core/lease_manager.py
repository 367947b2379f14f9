"""Grants and ends leases, adds the actions for the engine, and records why KV was released."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sojourn.ids import ProgramId

from ..metrics.turn_ledger import EvictedBlock, LossCause
from ..policies.lease_reclaim_policies import reclaim_for_overdue
from ..policies.policy_protocols import DecisionReason, EndedKvHandling, RetentionDecision
from ..policies.policy_views import FinishedTurnView, LeaseView, ReclaimRequest
from ..programs.program_state import ProgramState
from .events_and_actions import EngineAction, EngineActionKind, LeaseGranted, RequestAdmitted
from .leases import SILENCE_S, Lease
from .scheduler_state import SchedulerState

_LOSS_CAUSE_OF_LEASE_END = {
    DecisionReason.TTL: LossCause.EXPIRED,
    DecisionReason.SILENT: LossCause.SILENT,
    DecisionReason.PRESSURE: LossCause.PRESSURE,
    DecisionReason.RESET: LossCause.DROPPED,
    DecisionReason.END: LossCause.DROPPED,
}


class LeaseManager:
    """Grants and ends the leases of one engine, by its policies."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._leases = state.leases
        self._refused: ReclaimRequest | None = None
        """The last ``need`` for which ``make_room`` ended no lease, if leases have not changed since."""

    def grant(
        self,
        program: ProgramState,
        tool: str | None,
        block_ids: Sequence[int],
        now: float,
        kind: str = "keep",
    ) -> Lease | None:
        """Ask the policy how long to keep these cached blocks; return the lease, if any. ``tool``: key of the
        tool that runs in the gap, if known. ``kind``: name of the decision in the log."""
        state, leases = self._state, self._leases
        tokens = program.context_tokens
        # A context that is too long for one engine step is computed in several steps.
        pieces = max(1, -(-tokens // state.pool.step_tokens))
        view = FinishedTurnView(
            program_id=program.id,
            tool=tool,
            context_tokens=tokens,
            reload_s=state.reload.seconds(tokens),
            mean_evicted_wait_s=state.histories.evicted_waits.mean(),
            memoryfulness=state.histories.turns.memoryfulness(),
            history=state.histories.tools,
            hinted_ttl_s=program.turn_hint.ttl_s,
            chunked_reload_s=pieces * state.reload.seconds(-(-tokens // pieces)),
            host_reload_s=state.host_link.load_s(tokens),
            running_tokens=state.requests.running_tokens,
            continuation_probability=program.continuation_probability,
        )
        keep = state.preset.retention.keep(view, now)
        if keep.ttl_s > 0 and not block_ids:
            keep = RetentionDecision(0.0, DecisionReason.NOTHING_CACHED)
        # A block that several leases share counts once against the budget.
        more = leases.count_unheld(block_ids)
        if keep.ttl_s > 0 and not self._has_budget(program.tenant, more, keep.reason, now):
            keep = RetentionDecision(0.0, DecisionReason.OVER_BUDGET)
        self.log_keep(program, keep, len(block_ids), now, kind)
        if keep.ttl_s <= 0:
            return None
        lease = Lease(
            program_id=program.id,
            rank=program.rank,
            granted_s=now,
            ttl_s=keep.ttl_s,
            expires_s=now + keep.ttl_s,
            silent_s=now + SILENCE_S if program.heartbeats else math.inf,
            block_ids=block_ids,
            reload_s=view.restore_s,
            reason=keep.reason,
            tenant=program.tenant,
            limit_s=now + max(keep.ttl_s, state.limits.max_held_s),
        )
        leases.grant(lease)
        self._refused = None
        program.gap_leased = True
        state.actions.append(LeaseGranted(program.id, block_ids))
        return lease

    def _has_budget(self, tenant: str | None, blocks: int, reason: DecisionReason, now: float) -> bool:
        """Return whether a lease may hold ``blocks`` further blocks.

        All leases together have a budget. Of it, hinted leases (their client chose the TTL) of one tenant may
        take an equal share among the tenants with hinted leases or with requests in the engine. Requests
        without a program count as one more tenant. If the budget is exceeded, hinted leases of tenants above
        that share end: those without a waiting request first, then those that expire soonest."""
        leases = self._leases
        excess = leases.held_blocks + blocks - leases.budget_blocks
        if excess <= 0 and reason is not DecisionReason.HINTED:
            return True
        of_hints = [lease for lease in leases.values() if lease.reason is DecisionReason.HINTED]
        hinted: Counter[str | None] = Counter()
        for lease in of_hints:
            hinted[lease.tenant] += lease.freed_blocks
        requests = self._state.requests.states.values()
        tenants = {tenant, *hinted, *(each.program.tenant for each in requests if each.program is not None)}
        untracked = any(each.program is None for each in requests)
        share = leases.budget_blocks // (len(tenants) + untracked)
        if excess <= 0:
            return hinted[tenant] + blocks <= share
        # Ended leases may free less than ``excess``, because other leases can share their blocks. So this
        # lease is refused anyway; the next lease may find enough budget.
        for lease in sorted(of_hints, key=lambda lease: (lease.waiting, lease.expires_s, lease.program_id)):
            if excess > 0 and hinted[lease.tenant] > share:
                hinted[lease.tenant] -= lease.freed_blocks
                excess -= lease.freed_blocks
                self.end(lease.program_id, DecisionReason.PRESSURE, now)
        return False

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

    def may_reclaim(self, need: ReclaimRequest) -> bool:
        """Whether ``make_room`` could end a lease for ``need``. While requests run, a ``need`` that ended no
        lease is not tried again until leases change, since a waiting request asks in every step."""
        return len(self._leases) > 0 and (not need.anything_running or need != self._refused)

    def make_room(self, need: ReclaimRequest, views: Sequence[LeaseView], now: float) -> None:
        """End leases for a request that needs blocks. ``views``: all leases.

        The leases are chosen in up to three attempts. Each attempt is made only if the one before chose none:

        1. The lease reclaim policy chooses, except for an overdue request without a program.
        2. For an overdue request (``ReclaimRequest.overdue``), ``reclaim_for_overdue`` chooses.
        3. If the engine schedules by priority, a waiting request ends leases of less important programs.
        """
        chosen = None
        if not need.overdue or need.program_id is not None:
            chosen = self._state.preset.lease_reclaim.release(need, views, now)
        if not chosen and need.overdue:
            chosen = reclaim_for_overdue(need, views, now)
        if not chosen and need.priority is not None:
            # The policy goes by the arrival of programs, and the queue by priorities. A less important
            # program that has come back would wait behind this request, and its lease would not expire.
            programs = {program.id: program.priority for program in self._state.programs}
            less = [view for view in views if programs[view.program_id] > need.priority]
            chosen = reclaim_for_overdue(need, less, now)
        for program_id in chosen or ():
            self.end(program_id, DecisionReason.PRESSURE, now)
        if not chosen:
            self._refused = need

    def drop(self, program_id: ProgramId, reason: DecisionReason, now: float) -> None:
        """End the lease of a program that is over, and give up its KV. If the preset leaves the KV of ended
        programs in the cache, the program keeps its blocks and its context."""
        state = self._state
        if state.preset.ended is EndedKvHandling.LEFT:
            self.end(program_id, reason, now)
            return
        lease = self._leases.end(program_id)
        changed = state.owners.end(program_id)
        if lease is not None:
            self._ended(lease, reason, now)
        state.actions.append(EngineAction(EngineActionKind.DROP, program_id, reason, block_ids=changed))
        # Only programs with KV are logged, so that a flood of invented ids does not fill the log.
        if lease is not None or state.contexts.get(program_id) is not None:
            state.decisions.add(now, "drop", program_id, reason.value)
            state.release_reasons[program_id] = _LOSS_CAUSE_OF_LEASE_END.get(reason)
        state.contexts.drop(program_id)

    def end(self, program_id: ProgramId, reason: DecisionReason, now: float) -> None:
        """End the program's lease, if it has one. The blocks stay cached until they are reused."""
        lease = self._leases.end(program_id)
        if lease is not None:
            self._state.actions.append(EngineAction(EngineActionKind.RELEASE, program_id, reason))
            self._ended(lease, reason, now)

    def end_all(self, reason: DecisionReason, now: float) -> list[ProgramId]:
        """End all leases. Returns their programs."""
        ended = list(self._leases)
        for program_id in ended:
            self.end(program_id, reason, now)
        return ended

    def _ended(self, lease: Lease, reason: DecisionReason, now: float) -> None:
        """Record the end of a lease that was removed from the table."""
        state, self._refused = self._state, None
        state.release_reasons[lease.program_id] = _LOSS_CAUSE_OF_LEASE_END.get(reason)
        if reason is DecisionReason.PRESSURE:
            state.last_shortage_s = now
        state.recorder.count("sojourn_lease_ends_total", reason=reason.value)
        if reason is DecisionReason.SILENT:
            state.recorder.count("sojourn_client_silent_total")
        if reason is not DecisionReason.RETURN:
            state.decisions.add(
                now, "release", lease.program_id, reason.value,
                blocks=lease.blocks, held_s=round(now - lease.granted_s, 6),
            )  # fmt: skip

    def loss_cause(
        self, program: ProgramState, before: Sequence[Any] | None, event: RequestAdmitted
    ) -> tuple[LossCause, EvictedBlock | None]:
        """Return why a prompt's first uncached block was lost, and the record of this block's eviction
        (``None``: unknown).

        ``before``: block hashes of the program's last turn; ``None`` if they are no longer stored."""
        cause = self._state.release_reasons.get(program.id)
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
