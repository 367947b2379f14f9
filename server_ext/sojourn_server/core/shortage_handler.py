"""Handles shortages of blocks: ends leases, chooses requests to preempt, and logs causes of evictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sojourn.ids import ProgramId

from ..metrics.turn_ledger import EvictedBlock, LossCause
from ..policies.policy_views import RunningRequestView
from ..policies.preemption.preemption_recovery import RecoveryMethod
from ..programs.program_status import OVER_STATUSES
from .decision_recorder import DecisionRecorder
from .demand_forecaster import DemandForecaster
from .events_and_actions import BlocksEvicted, BlocksNeeded, DemandSampled, RequestChosen, VictimNeeded
from .lease_manager import LeaseManager
from .scheduler_state import SchedulerState


class ShortageHandler:
    """Handles the events of an engine whose blocks run short, or may soon."""

    def __init__(
        self,
        state: SchedulerState,
        *,
        lease_manager: LeaseManager,
        forecaster: DemandForecaster,
        decision_recorder: DecisionRecorder,
        score: Callable[[ProgramId], tuple[float, ...]],
    ) -> None:
        self._state = state
        self._lease_manager = lease_manager
        self._forecaster = forecaster
        self._decision_recorder = decision_recorder
        self._score = score
        """Returns a program's eviction key."""

    def blocks_needed(self, event: BlocksNeeded, now: float) -> None:
        """End leases for a request that needs blocks."""
        need, freed = event.need, event.freed_blocks
        if not need.anything_running:
            need = replace(need, idle_s=self._state.requests.idle_s(now, False))
        freed_by = freed.__getitem__ if freed is not None else None
        self._lease_manager.make_room(need, now, freed_by, self._score)

    def evicted(self, event: BlocksEvicted, now: float) -> None:
        """Log why cached blocks were evicted, and for which program."""
        state, taker_request_id = self._state, event.taker_request_id
        taker = state.requests.states.get(taker_request_id) if taker_request_id is not None else None
        evictor = taker.program_id if taker is not None else None
        entries: dict[ProgramId | None, tuple[EvictedBlock, list[Any]]] = {}
        for block_hash, owner in event.blocks:
            if owner not in entries:
                program = state.programs.get(owner) if owner is not None else None
                if program is not None and program.status not in OVER_STATUSES:
                    state.last_shortage_s = now
                cause = self._lease_manager.release_cause(owner) or LossCause.EVICTED
                entries[owner] = EvictedBlock(cause, owner, evictor, now, event.score), []
            entries[owner][1].append(block_hash)
        for entry, hashes in entries.values():
            state.eviction_log.add(hashes, entry)
            self._decision_recorder.evicted(entry.cause, len(hashes))

    def victim_needed(self, event: VictimNeeded, now: float) -> RequestChosen | None:
        """Choose the running request to preempt. ``None``: the engine chooses."""
        views = self._with_predictions(event.running, now)
        chosen = self._victim(views, event.short_blocks, event.used_blocks, now)
        return RequestChosen(chosen) if chosen is not None else None

    def demand_sampled(self, event: DemandSampled, now: float) -> RequestChosen | None:
        """Choose a running request to offload before a forecast shortage comes. ``None``: no request is
        offloaded."""
        state, forecaster = self._state, self._forecaster
        state.host_link.observe_stores(event.offload_s_per_token, event.queued_s)
        state.host_link.observe_loads(event.load_back_s_per_token)
        if forecaster.sample_demand(event.running, event.used_blocks, now) is None:
            return None
        views = self._with_predictions(event.running, now)
        chosen = self._victim(views, 0, event.used_blocks, now)
        view = next((view for view in views if view.request_id == chosen), None)
        if view is None or forecaster.recovery(view.context_tokens, now) is not RecoveryMethod.OFFLOAD:
            return None
        return RequestChosen(view.request_id)

    def _with_predictions(
        self, running: Sequence[RunningRequestView], now: float
    ) -> list[RunningRequestView]:
        with_service, with_predictions = self._state.requests.with_service, self._forecaster.with_predictions
        return [with_predictions(with_service(view, now), now) for view in running]

    def _victim(
        self, views: Sequence[RunningRequestView], short_blocks: int, used_blocks: int, now: float
    ) -> str | None:
        need = self._forecaster.block_shortage(views, short_blocks, used_blocks)
        return self._state.preset.victim.victim(views, need, now)
