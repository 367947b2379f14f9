"""Admission: decides which requests may be admitted, and records which programs hold KV."""

from __future__ import annotations

from collections.abc import Iterator

from sojourn.ids import ProgramId

from ..policies.policy_views import AdmissionView, ProgramGrowthView, RunningRequestView
from ..programs.program_status import ProgramSignal
from .demand_forecaster import DemandForecaster
from .events_and_actions import AdmissionRequested
from .request_table import RequestState
from .scheduler_state import SchedulerState


class AdmissionController:
    """Decides whether a request may be admitted. If ``applies_to`` is true for the request, the admission
    policy decides. All other requests are admitted."""

    def __init__(self, state: SchedulerState, demand_forecaster: DemandForecaster) -> None:
        self._policy = state.preset.admission
        self._state = state
        self._leases = state.leases
        self._demand_forecaster = demand_forecaster
        self._holding: dict[str, RequestState] = {}
        """Request id → request that counts as a holder of KV: the engine admitted the request, or the
        admission policy has accepted it."""

    def admitted(self, request_state: RequestState) -> None:
        """Record that the engine admitted the request and allocated its blocks. The engine also admits
        requests that the policy has rejected for long (``ProgramScheduler.blocks_later_requests``)."""
        self._holding[request_state.request_id] = request_state
        if request_state.admission_blocked_since_s is not None and request_state.program is not None:
            self._state.programs.signal(request_state.program, ProgramSignal.UNGATE)
        request_state.admission_blocked_since_s = None

    def drop_holder(self, request_id: str) -> None:
        """Record that a request no longer holds KV, because it left the engine or lost its blocks."""
        self._holding.pop(request_id, None)

    def applies_to(self, request_state: RequestState, preempted: bool | None = None) -> bool:
        """Whether the admission policy decides on this request.

        False for a request without a program, and if the policy's ``is_used`` is false. A policy that
        forecasts KV demand decides on all other requests. A policy that does not forecast decides only on
        requests that are not preempted and whose program holds no KV. A program holds KV if it has a lease,
        or another request with KV. ``preempted``: whether the engine preempted the request; ``None``: the
        last reported state applies.
        """
        program = request_state.program
        if program is None or not self._policy.is_used:
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

    def try_admit(self, event: AdmissionRequested, request_state: RequestState, now: float) -> bool:
        """Return whether the request may be admitted. If so, record it as a holder of KV."""
        program = request_state.program
        if program is None or not self.applies_to(request_state, event.preempted):
            return True
        own = self._uncount_and_view(event, request_state, now) if self._policy.forecasts else None
        demand = self._demand_forecaster.demand if own is not None else None
        later = sum(lease.blocks for lease in self._leases if lease.rank > request_state.rank)
        pool, histories = self._state.pool, self._state.histories
        growth, turns = histories.growth_tokens, histories.turns
        view = AdmissionView(
            need_blocks=event.need_blocks,
            free_blocks=event.free_blocks + later,
            pool_blocks=pool.blocks,
            block_size=pool.tokens_per_block,
            max_context_tokens=pool.max_context_tokens,
            anything_running=event.anything_running,
            # If the policy forecasts, all running requests' demand replaces the earlier programs' growth.
            earlier=() if demand is not None else tuple(self._holding_before(request_state.rank)),
            observed_turns=growth.count(),
            mean_growth_tokens=growth.mean(),
            observed_programs=turns.count(),
            mean_turns=turns.mean(),
            idle_s=self._state.requests.idle_s(now, event.anything_running),
            own=own,
            needed_blocks=tuple(demand.needed_blocks) if demand is not None else (),
            available_blocks=demand.available_blocks if demand is not None else 0,
            since_shortage_s=max(0.0, now - self._state.last_shortage_s),
        )
        is_admitted = self._policy.may_admit(view, now)
        self._state.programs.signal(program, ProgramSignal.UNGATE if is_admitted else ProgramSignal.GATE)
        if is_admitted:
            # Recorded now, since several requests may be accepted before the engine reports an admission.
            self._holding[request_state.request_id] = request_state
        else:
            self.drop_holder(request_state.request_id)
            if request_state.admission_blocked_since_s is None:
                request_state.admission_blocked_since_s = now
        if is_admitted and own is not None:
            self._demand_forecaster.add_demand(own)
        return is_admitted

    def _uncount_and_view(
        self, event: AdmissionRequested, request_state: RequestState, now: float
    ) -> RunningRequestView:
        """Return a waiting request as a ``RunningRequestView``, the form in which policies read the demand of
        running requests. If the demand forecaster already counts the request's demand, subtract that demand
        first."""
        self._demand_forecaster.remove_demand(request_state.request_id)
        pool = self._state.pool
        tokens = int(max(0, event.need_blocks - pool.fixed_blocks) * pool.tokens_per_block)
        return self._demand_forecaster.as_running_view(
            request_state,
            tokens=tokens,
            output_tokens=event.output_tokens,
            most_tokens=event.most_tokens,
            now=now,
        )

    def _holding_before(self, rank: int) -> Iterator[ProgramGrowthView]:
        """Yield the view of each program that arrived before ``rank`` (has a lower rank) and holds KV."""
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
            program = self._state.programs.get(lease.program_id)
            if lease.rank < rank and program is not None and program.id not in seen:
                yield ProgramGrowthView(
                    program.turns, program.first_prompt_tokens, program.context_tokens, program.peak_tokens
                )
