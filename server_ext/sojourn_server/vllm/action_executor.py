"""Carries out actions of the ``ProgramScheduler`` on one engine's KV: drops, pins, prefetches, moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sojourn.ids import ProgramId

from ..core.client_event_decoder import EventHandler
from ..core.events_and_actions import (
    CachedBlocksFound,
    EngineAction,
    EngineActionKind,
    PrefetchStarted,
    chosen_load,
    granted_lease,
)
from ..core.program_scheduler import ProgramScheduler
from .block_pool import PinnedBlocks
from .free_block_queue import ProgramFreeBlockQueue
from .kv_cache_groups import KVCacheGroups
from .kv_prefetcher import KVPrefetcher
from .offload_cache_policy import ProgramCachePolicy
from .offload_manager import OffloadManager


class ActionExecutor:
    """Carries out actions of the ``ProgramScheduler`` on one engine's KV. The caller adds new actions to
    ``pending``; ``execute`` carries them out."""

    def __init__(
        self,
        program_scheduler: ProgramScheduler,
        groups: KVCacheGroups,
        queue: ProgramFreeBlockQueue,
        *,
        handle: EventHandler,
        guarded: Callable[..., Any],
        requeue: Callable[[str], None],
        pinned: PinnedBlocks,
        prefetcher: KVPrefetcher,
        offload: OffloadManager | None,
        cache_policy: ProgramCachePolicy | None,
        before_load: Callable[[], None],
    ) -> None:
        """``guarded`` runs a call and returns ``None`` if it fails. ``requeue`` takes the id of a request
        whose queue key may have changed. ``before_load`` is called before a prefetch evicts blocks."""
        self.pending: list[EngineAction] = []
        """Actions that are not carried out yet, oldest first."""
        self._program_scheduler = program_scheduler
        self._groups = groups
        self._queue = queue
        self._handle = handle
        self._guarded = guarded
        self._requeue = requeue
        self._pinned = pinned
        self._prefetcher = prefetcher
        self._offload = offload
        self._cache_policy = cache_policy
        self._before_load = before_load

    def execute(self, now: float) -> None:
        """Carry out the pending actions, and the actions that follow from them. ``now``: seconds on the
        engine's clock."""
        while self.pending:
            actions, self.pending = self.pending, []
            for action in actions:
                # Guarded separately: if one action fails, the others must still be carried out, because their
                # leases have ended already.
                self._guarded(self._execute_one, action, now)

    def _execute_one(self, action: EngineAction, now: float) -> None:
        program_id = action.program_id
        if action.kind is EngineActionKind.DROP:
            if self._offload is not None:
                self._offload.program_ended(program_id, self._queue.owners)
            self._prefetcher.program_ended(program_id)
            self._pinned.drop(program_id)
            if self._cache_policy is not None:
                self._cache_policy.program_ended(program_id)
        elif action.kind is EngineActionKind.RELEASE:
            self._pinned.release(program_id)
        elif action.kind is EngineActionKind.PIN_CACHED:
            blocks = self._groups.cached_prefix(self._program_scheduler.context(program_id) or ()).blocks
            found = CachedBlocksFound(
                program_id,
                len(blocks),
                held_blocks=self._pinned.blocks(),
                unheld_blocks=self._pinned.count_unpinned(blocks),
                used_blocks=self._pinned.used_blocks(),
            )
            lease = granted_lease(self._handle(found, now))
            if lease is not None:
                self._pinned.hold(program_id, blocks, lease.rank)
        elif action.kind is EngineActionKind.PREFETCH:
            self._prefetch(program_id, now)
            return
        elif action.kind is EngineActionKind.PLACE and self._offload is not None and action.tier is not None:
            self._offload.place(program_id, action.tier)
        for request_id in self._program_scheduler.live_requests(program_id):
            self._requeue(request_id)

    def _prefetch(self, program_id: ProgramId, now: float) -> None:
        """Prefetch a program's expected prefix. Blocks on disk are read into host memory. Blocks in host
        memory are loaded into spare blocks of the device, as many as the policy chooses."""
        hashes = self._program_scheduler.prefetch_keys(program_id)
        prefix = self._groups.cached_prefix(hashes)
        missing = len(hashes) - prefix.hashes
        being_read, lost, loadable = 0, missing, 0
        if self._offload is not None:
            being_read, lost, loadable = self._offload.fetch(hashes, prefix.hashes)
            loadable = min(loadable, self._prefetcher.budget(program_id))
        most = loadable + self._program_scheduler.prefetch_reserve_blocks if loadable else 0
        spare = self._prefetcher.spare(prefix.blocks, most)
        event = PrefetchStarted(program_id, missing, being_read, lost, loadable, spare)
        chosen = chosen_load(self._handle(event, now))
        if chosen is not None:
            self._before_load()
            end = prefix.hashes + chosen.blocks
            self._prefetcher.load(program_id, hashes[:end], chosen.blocks, now + chosen.keep_s)
