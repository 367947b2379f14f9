"""Leases keep the KV of programs on the device between their turns: the table, its deadlines and its blocks.

Times are seconds on the engine's monotonic clock.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sojourn.ids import ProgramId

from ..metrics.turn_ledger import EvictedBlock, LossCause
from ..policies.lease_reclaim_policies import reclaim_for_overdue
from ..policies.policy_protocols import DecisionReason, EndedKvHandling, RetentionDecision
from ..policies.policy_views import FinishedTurnView, LeaseView, ReclaimRequest
from ..programs.program_state import ProgramState
from . import events_and_actions as ev
from .scheduler_state import SchedulerState

SILENCE_S = 20.0
"""The lease of a client that promised heartbeats ends this many seconds after its grant or the last contact
with the client, whichever is later. Heartbeats come every 3 s."""
_LOSS_CAUSE_OF_LEASE_END = {
    DecisionReason.TTL: LossCause.EXPIRED,
    DecisionReason.SILENT: LossCause.SILENT,
    DecisionReason.PRESSURE: LossCause.PRESSURE,
    DecisionReason.RESET: LossCause.DROPPED,
    DecisionReason.END: LossCause.DROPPED,
}


@dataclass(slots=True, kw_only=True)
class Lease:
    """The cached blocks of one program, held between its turns."""

    program: ProgramState
    granted_s: float
    ttl_s: float
    expires_s: float
    """Time at which the TTL ends. ``extend`` postpones it."""
    block_ids: Sequence[int]
    """The distinct blocks that the lease holds, in context order."""
    reload_s: float
    """Estimated seconds to restore the program's KV if it is evicted."""
    reason: DecisionReason
    freed_blocks: int = 0
    """Number of blocks that are held for this lease. A block of several leases is held for that of the
    earliest program, which usually ends last. So the numbers of all leases add up to the blocks held."""
    limit_s: float = math.inf
    """Latest ``expires_s``, however often the client's reports postpone it."""
    anchored: bool = False
    """Whether the TTL is counted from the reported start of a tool."""

    @property
    def blocks(self) -> int:
        return len(self.block_ids)

    @property
    def waiting(self) -> bool:
        """Whether a request of the program waits to be scheduled. Meanwhile the lease does not expire
        (Continuum §5.2). The admission of a request ends the lease."""
        return bool(self.program.live_requests)

    @property
    def silent_s(self) -> float:
        """Time at which the client's silence ends the lease; ``inf`` if it never promised heartbeats."""
        return self.program.last_contact_s + SILENCE_S if self.program.heartbeats else math.inf

    def deadline_s(self) -> float:
        return min(self.expires_s, self.silent_s)

    def extend(self, expires_s: float) -> None:
        """Postpone the lease's expiry to ``expires_s``, at most to ``limit_s``."""
        self.expires_s = max(self.expires_s, min(expires_s, self.limit_s))

    def view(self, score: tuple[float, ...]) -> LeaseView:
        """The lease as input of policies. ``score``: the program's eviction score."""
        return LeaseView(
            self.program.id, self.program.rank, self.expires_s, self.freed_blocks, self.reload_s,
            self.waiting, score, hinted=self.reason is DecisionReason.HINTED, ttl_s=self.ttl_s,
        )  # fmt: skip


class LeaseTable(dict[ProgramId, Lease]):
    """The leases of one engine, at most one per program. It grants and ends them by the engine's policies,
    adds the actions for the engine, and records why KV was released."""

    def __init__(self, state: SchedulerState) -> None:
        super().__init__()
        self._state, state.leases = state, self
        self.budget_blocks = int(state.pool.blocks * state.limits.lease_budget_fraction)
        self._holders: dict[int, list[tuple[int, ProgramId]]] = {}
        """Block id → (rank, id) of the programs whose leases hold the block, in ascending order."""
        self._refused: ReclaimRequest | None = None
        """The last ``need`` for which ``make_room`` ended no lease, if leases have not changed since."""

    @property
    def held_blocks(self) -> int:
        """Number of distinct blocks that leases hold."""
        return len(self._holders)

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
        state, tokens = self._state, program.context_tokens
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
            running_tokens=sum(one.prompt_tokens for one in state.requests.states.values() if one.running),
            continuation_probability=program.continuation_probability,
        )
        keep = state.preset.retention.keep(view, now)
        if keep.ttl_s > 0 and not block_ids:
            keep = RetentionDecision(0.0, DecisionReason.NOTHING_CACHED)
        # A block that several leases share counts once against the budget.
        more = sum(block_id not in self._holders for block_id in block_ids)
        if keep.ttl_s > 0 and not self._has_budget(program.tenant, more, keep.reason, now):
            keep = RetentionDecision(0.0, DecisionReason.OVER_BUDGET)
        self.log_keep(program, keep, len(block_ids), now, kind)
        if keep.ttl_s <= 0:
            return None
        lease = self[program.id] = Lease(
            program=program,
            granted_s=now,
            ttl_s=keep.ttl_s,
            expires_s=now + keep.ttl_s,
            limit_s=now + max(keep.ttl_s, state.limits.max_held_s),
            block_ids=block_ids,
            reload_s=view.restore_s,
            reason=keep.reason,
        )
        holder = (program.rank, program.id)
        for block_id in block_ids:
            holders = self._holders.setdefault(block_id, [])
            insort(holders, holder)
            if holders[0] == holder:
                lease.freed_blocks += 1
                if len(holders) > 1:
                    self[holders[1][1]].freed_blocks -= 1
        self._refused = None
        program.gap_leased = True
        state.actions.append(ev.LeaseGranted(program.id, block_ids))
        return lease

    def _has_budget(self, tenant: str | None, blocks: int, reason: DecisionReason, now: float) -> bool:
        """Return whether a lease may hold ``blocks`` further blocks.

        All leases together have a budget. Of it, hinted leases (their client chose the TTL) of one tenant may
        take an equal share among the tenants with hinted leases or with requests in the engine. Requests
        without a program count as one more tenant. If the budget is exceeded, hinted leases of tenants above
        that share end: those without a waiting request first, then those that expire soonest."""
        excess = self.held_blocks + blocks - self.budget_blocks
        if excess <= 0 and reason is not DecisionReason.HINTED:
            return True
        of_hints = [lease for lease in self.values() if lease.reason is DecisionReason.HINTED]
        hinted: Counter[str | None] = Counter()
        for lease in of_hints:
            hinted[lease.program.tenant] += lease.freed_blocks
        requests = self._state.requests.states.values()
        tenants = {tenant, *hinted, *(each.program.tenant for each in requests if each.program is not None)}
        untracked = any(each.program is None for each in requests)
        share = self.budget_blocks // (len(tenants) + untracked)
        if excess <= 0:
            return hinted[tenant] + blocks <= share
        # Ended leases may free less than ``excess``, because other leases can share their blocks. So this
        # lease is refused anyway; the next lease may find enough budget.
        for lease in sorted(of_hints, key=lambda lease: (lease.waiting, lease.expires_s, lease.program.id)):
            if excess > 0 and hinted[lease.program.tenant] > share:
                hinted[lease.program.tenant] -= lease.freed_blocks
                excess -= lease.freed_blocks
                self.end(lease.program.id, DecisionReason.PRESSURE, now)
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
        return len(self) > 0 and (not need.anything_running or need != self._refused)

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
            less = [view for view in views if self[view.program_id].program.priority > need.priority]
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
        changed, lease = state.owners.end(program_id), self._remove(program_id, reason, now)
        state.actions.append(ev.EngineAction(ev.EngineActionKind.DROP, program_id, reason, block_ids=changed))
        # Only programs with KV are logged, so that a flood of invented ids does not fill the log.
        if lease is not None or state.contexts.get(program_id) is not None:
            state.decisions.add(now, "drop", program_id, reason.value)
            state.release_reasons[program_id] = _LOSS_CAUSE_OF_LEASE_END.get(reason)
        state.contexts.pop(program_id, None)

    def end(self, program_id: ProgramId, reason: DecisionReason, now: float) -> None:
        """End the program's lease, if it has one. The blocks stay cached until they are reused."""
        if self._remove(program_id, reason, now) is not None:
            self._state.actions.append(ev.EngineAction(ev.EngineActionKind.RELEASE, program_id, reason))

    def end_all(self, reason: DecisionReason, now: float) -> list[ProgramId]:
        """End all leases. Returns their programs."""
        ended = list(self)
        for program_id in ended:
            self.end(program_id, reason, now)
        return ended

    def end_expired(self, now: float) -> None:
        """End the leases whose time is over, earliest first, unless a request of their program waits."""
        due = [lease for lease in self.values() if lease.expires_s <= now or lease.silent_s <= now]
        for lease in sorted(due, key=Lease.deadline_s):
            if not lease.waiting:
                silent = lease.silent_s < lease.expires_s
                self.end(lease.program.id, DecisionReason.SILENT if silent else DecisionReason.TTL, now)

    def _remove(self, program_id: ProgramId, reason: DecisionReason, now: float) -> Lease | None:
        """Remove and return the program's lease, and record its end. ``None``: there is none."""
        lease = self.pop(program_id, None)
        if lease is None:
            return None
        holder = (lease.program.rank, program_id)
        for block_id in lease.block_ids:
            holders = self._holders[block_id]
            place = bisect_left(holders, holder)
            del holders[place]
            if not holders:
                del self._holders[block_id]
            elif not place:
                self[holders[0][1]].freed_blocks += 1
        state, self._refused = self._state, None
        state.release_reasons[program_id] = _LOSS_CAUSE_OF_LEASE_END.get(reason)
        if reason is DecisionReason.PRESSURE:
            state.last_shortage_s = now
        state.recorder.count("sojourn_lease_ends_total", reason=reason.value)
        if reason is DecisionReason.SILENT:
            state.recorder.count("sojourn_client_silent_total")
        if reason is not DecisionReason.RETURN:
            state.decisions.add(
                now, "release", program_id, reason.value,
                blocks=lease.blocks, held_s=round(now - lease.granted_s, 6),
            )  # fmt: skip
        return lease

    def loss_cause(
        self, program: ProgramState, before: Sequence[Any] | None, event: ev.RequestAdmitted
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
