"""The gate before the engine's queue: who holds KV, who wants to enter, and who has waited too long."""

from __future__ import annotations

from collections.abc import Iterator

from sojourn.ids import ProgramId

from ..policies.policy_protocols import AdmissionPolicy
from ..policies.policy_views import AdmissionView, ProgramGrowthView, RunningRequestView
from ..programs.program_status import ProgramSignal
from ..programs.program_table import ProgramTable
from .demand_forecaster import DemandForecaster
from .lease_table import LeaseTable
from .request_table import RequestTable
from .scheduler_state import Histories, KVPoolConfig, RequestState, SchedulerLimits


class AdmissionController:
    """Asks the entry policy about requests of programs that hold no KV; all others go past it."""

    def __init__(
        self,
        policy: AdmissionPolicy,
        pool: KVPoolConfig,
        *,
        limits: SchedulerLimits,
        histories: Histories,
        table: ProgramTable,
        leases: LeaseTable,
        requests: RequestTable,
        demand_forecaster: DemandForecaster,
    ) -> None:
        self._policy = policy
        self._pool = pool
        self._limits = limits
        self._histories = histories
        self._table = table
        self._leases = leases
        self._requests = requests
        self._demand_forecaster = demand_forecaster
        self._holding: dict[str, RequestState] = {}
        """Requests of programs that hold KV: admitted, or let in a moment ago."""

    def admitted(self, request_state: RequestState) -> None:
        """The request has blocks: until now it was kept out, if not by the policy then by the engine."""
        self._holding[request_state.request_id] = request_state
        request_state.admission_blocked_since_s = None

    def drop_holder(self, request_id: str) -> None:
        """The request has left the engine, or lost its blocks."""
        self._holding.pop(request_id, None)

    def applies_to(self, request_state: RequestState, preempted: bool | None = None) -> bool:
        """Whether the policy has a say: not for strangers, nor, unless it forecasts, for preempted requests
        or programs that hold KV under a lease or with another request."""
        program = request_state.program
        if program is None or not self._policy.gates:
            return False
        if self._policy.forecasts:
            return True
        if preempted is None:
            preempted = request_state.preempted
        if preempted or program.id in self._leases:
            return False
        return not any(
            other != request_state.request_id and other in self._holding for other in program.live_requests
        )

    def may_admit(
        self,
        request_state: RequestState,
        need_blocks: int,
        free_blocks: int,
        now: float,
        *,
        anything_running: bool,
        output_tokens: int = 0,
        most_tokens: int = 0,
        preempted: bool | None = None,
    ) -> bool:
        """Whether the request may be admitted. ``need_blocks`` is what its context takes, ``free_blocks``
        what the pool has; it has written ``output_tokens``, and ``most_tokens`` may follow."""
        program = request_state.program
        if program is None or not self.applies_to(request_state, preempted):
            return True
        own = self._own(request_state, need_blocks, output_tokens, most_tokens, now)
        demand = self._demand_forecaster.demand if own is not None else None
        later = sum(lease.blocks for lease in self._leases if lease.rank > request_state.rank)
        growth, turns = self._histories.growth_tokens, self._histories.turns
        entry = AdmissionView(
            need_blocks=need_blocks,
            free_blocks=free_blocks + later,
            pool_blocks=self._pool.blocks,
            block_size=self._pool.block_size,
            max_context_tokens=self._pool.max_context_tokens,
            anything_running=anything_running,
            # What all that run will need says more, where it is told.
            earlier=() if demand is not None else tuple(self._holding_before(request_state.rank)),
            observed_turns=growth.count(),
            mean_growth_tokens=growth.mean(),
            observed_programs=turns.count(),
            mean_turns=turns.mean_turns(),
            idle_s=self._requests.idle_s(now, anything_running),
            own=own,
            needed_blocks=tuple(demand.needed_blocks) if demand is not None else (),
            available_blocks=demand.available_blocks if demand is not None else 0,
        )
        enters = self._policy.may_admit(entry, now)
        self._table.signal(program, ProgramSignal.UNGATE if enters else ProgramSignal.GATE)
        if enters:
            # Several may pass in one step, before the engine reports any of them as admitted.
            self._holding[request_state.request_id] = request_state
        else:
            self.drop_holder(request_state.request_id)
            if request_state.admission_blocked_since_s is None:
                request_state.admission_blocked_since_s = now
        if enters and own is not None:
            self._demand_forecaster.came(own)
        return enters

    def blocks_later_requests(self, request_state: RequestState, now: float) -> bool:
        """Whether a request that is kept out has waited so long that nobody later may go past it."""
        since = request_state.admission_blocked_since_s
        return since is not None and now - since > self._limits.line_patience_s

    def _own(
        self, request_state: RequestState, need_blocks: int, output_tokens: int, most_tokens: int, now: float
    ) -> RunningRequestView | None:
        """The request as it would run, for a policy that forecasts; ``None``: it does not."""
        if not self._policy.forecasts:
            return None
        self._demand_forecaster.remove_demand(request_state.request_id)
        tokens = need_blocks * self._pool.block_size
        return self._demand_forecaster.as_running_view(
            request_state, tokens=tokens, output_tokens=output_tokens, most_tokens=most_tokens, now=now
        )

    def _holding_before(self, rank: int) -> Iterator[ProgramGrowthView]:
        """Programs that arrived before ``rank`` and hold KV, each once."""
        seen: set[ProgramId] = set()
        for request_state in self._holding.values():
            program = request_state.program
            if program is not None and request_state.rank < rank and program.id not in seen:
                seen.add(program.id)
                first_tokens = program.first_prompt_tokens or request_state.prompt_tokens
                yield ProgramGrowthView(
                    program.turns, first_tokens, request_state.prompt_tokens, program.peak_tokens
                )
        for lease in self._leases:
            program = self._table.get(lease.program_id)
            if lease.rank < rank and program is not None and program.id not in seen:
                yield ProgramGrowthView(
                    program.turns, program.first_prompt_tokens, program.context_tokens, program.peak_tokens
                )
