"""Answers the calls of an engine's API server, inside the engine core."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..core.client_event_decoder import EventHandler
from ..core.engine_answers import MissingTiers
from ..core.engine_service import EngineService
from ..core.event_time_budget import EventTimeBudget
from ..core.events_and_actions import Tick
from ..core.program_scheduler import ProgramScheduler
from ..core.request_hints import RequestIdentity
from .action_executor import ActionExecutor
from .block_pool import PinnedBlocks
from .compat import PauseState
from .engine_description import offload_description, pair_status_reporter, profile_description
from .history_file import HistoryFile
from .kv_cache_groups import KVCacheGroups
from .length_predictor import LengthPredictor
from .offload_manager import OffloadManager

if TYPE_CHECKING:
    from .compat import Scheduler

_TICK = Tick()


class EngineCallHandler:
    """Answers calls of the API server with an ``EngineService``. Calls may change the learned histories, so
    this class also saves them."""

    def __init__(
        self,
        scheduler: Scheduler,
        program_scheduler: ProgramScheduler,
        groups: KVCacheGroups,
        executor: ActionExecutor,
        *,
        clock: Callable[[], float],
        handle: EventHandler,
        pinned: PinnedBlocks,
        offload: OffloadManager | None,
        length_predictor: LengthPredictor | None,
        history: HistoryFile,
        missing: MissingTiers | None,
    ) -> None:
        """``missing``: mechanisms of the policy that are off for lack of tiers; ``None`` if all are on."""
        self._scheduler = scheduler
        self._program_scheduler = program_scheduler
        self._executor = executor
        self._clock = clock
        self._handle = handle
        self._offload = offload
        self._length_predictor = length_predictor
        self._history = history
        pool = scheduler.kv_cache_manager.block_pool
        self.service = EngineService(
            program_scheduler,
            engine=profile_description(scheduler, groups.tokens_per_block),
            pool_state=pinned.count_by_state,
            handle=handle,
            tier_state=lambda: offload.state() if offload is not None else {},
            below_device=lambda: offload_description(scheduler),
            missing=missing,
            network_state=lambda: length_predictor.state() if length_predictor is not None else None,
            persist=self._persist,
            paths=pair_status_reporter(scheduler),
            owned_blocks=lambda program_id: len(pool.free_block_queue.owners.blocks.get(program_id, ())),
            cpu_clock=time.thread_time,
            below_blocks=lambda program_id: (
                offload.held_blocks(program_id) if offload is not None else (0, 0)
            ),
        )
        self._event_budget = EventTimeBudget(clock())

    def apply_attached_events(self, identity: RequestIdentity, now: float) -> None:
        """Handle the client events that a new request carries."""
        self.service.client_event_decoder.apply_attached_events(identity, now)
        ended_s = self._clock()
        self._event_budget.spend(ended_s - now, ended_s)  # delays posted events, not attached ones

    def call(self, operation: str, payload: str) -> str:
        """Answer one operation of the HTTP API, between two steps. ``payload`` and the answer are JSON."""
        now = self._clock()
        # No tick while the engine is paused, because this time does not count as waiting. The API server
        # still asks for metrics.
        if self._scheduler.pause_state is not PauseState.PAUSED_ALL:
            self._handle(_TICK, now)
        self._executor.execute(now)
        started_s = self._clock()
        answer = self.service.call(operation, payload, now)
        ended_s = self._clock()
        self._executor.execute(now)
        if operation in ("events", "event_batches"):
            seconds = self._clock() - now
            self._program_scheduler.recorder.observe("sojourn_policy_seconds", seconds, hook="event")
        self._history.save_if_due(self._program_scheduler.histories, now)
        if operation == "event_batches":
            wait_s = self._event_budget.spend(ended_s - started_s, ended_s)
            return f'{{"wait_s": {wait_s:.6f}, "batches": {answer}}}'
        return answer

    def shutdown(self) -> None:
        """Save the learned histories, end the recording, and stop the length predictor, which saves its
        network. Called when the engine stops."""
        try:
            self._history.save(self._program_scheduler.histories)
        finally:
            self._program_scheduler.close_recording("the engine stopped")
            if self._length_predictor is not None:
                self._length_predictor.stop()

    def _persist(self, hashes: Sequence[Any]) -> dict[str, Any]:
        if self._offload is None:
            return {"reason": "this engine has no sojourn connector: no host memory or disk to write to"}
        return self._offload.persist(hashes)
