"""Eviction order for the host memory of vLLM's own connector (``--tier-backend vllm``).

KV of ended programs is evicted first, all other KV in vLLM's LRU order.

vLLM loads the class by name, from ``eviction_policy`` and ``cache_policy_module_path`` of the connector's
configuration. The scheduler adapter then gives it the programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from sojourn.ids import ProgramId

from .compat import LRUCachePolicy

if TYPE_CHECKING:
    from ..core.program_scheduler import ProgramScheduler
    from .compat import ChunkStatus, ReqContext

OffloadKey = bytes
"""Hash of a block and number of its KV cache group."""
MAX_ENDED_PROGRAMS = 1000
"""Number of ended programs that are remembered because their last stores may still run."""


@dataclass(frozen=True, slots=True)
class RequestProgram:
    """Program of a request, kept in vLLM's context of the request: its stores may end after it."""

    program_id: ProgramId | None


class ProgramCachePolicy(LRUCachePolicy):
    """vLLM's LRU order, but first the chunks that only ended programs have used."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._program_scheduler: ProgramScheduler | None = None
        self._owner: dict[OffloadKey, ProgramId | None] = {}
        """Chunk → the only program that has used it; ``None``: also a second program, or a request of no
        program."""
        self._owned: dict[ProgramId, dict[OffloadKey, None]] = {}
        """Program → the chunks that it alone has used, in the order of its context."""
        self._ended: dict[OffloadKey, None] = {}
        """Chunks of ended programs, in the order in which they are evicted."""
        self._ended_programs: dict[ProgramId, None] = {}
        """Programs that have ended, oldest first."""

    def follow(self, program_scheduler: ProgramScheduler) -> None:
        """Learn from now on which program each request belongs to."""
        self._program_scheduler = program_scheduler

    def program_ended(self, program_id: ProgramId) -> None:
        """Evict the chunks that only this program has used before all others."""
        self._evict_first(program_id)
        self._ended_programs[program_id] = None
        if len(self._ended_programs) > MAX_ENDED_PROGRAMS:
            del self._ended_programs[next(iter(self._ended_programs))]

    # -- vLLM's hooks ---------------------------------------------------------------

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Remember the program of a request while the request is in the engine."""
        super().on_store_miss(keys, req_context)
        self._remember(req_context)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Record which program has used the chunks of a request."""
        super().on_request_finished(key_groups, insertion_only_keys, reused_keys, req_context)
        program_id = self._remember(req_context)
        for keys in key_groups:
            for key in keys:
                if self.get(key) is not None:
                    self._used(key, program_id)
        if program_id is not None and program_id in self._ended_programs:
            self._evict_first(program_id)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Evict ``n`` chunks that are not ``protected``; ``None``: there are fewer, and all stay."""
        free = (key for key in self._ended if key not in protected and self._chunk(key).ref_cnt == 0)
        first = list(islice(free, n))
        rest = super().evict(n - len(first), {*protected, *first})
        if rest is None:
            return None
        evicted = [(key, self._chunk(key)) for key in first]
        for key in first:
            self.remove(key)
        for key, chunk in rest:
            self._forget(key)
            evicted.append((key, chunk))
        return evicted

    def remove(self, key: OffloadKey) -> None:
        """Remove a chunk."""
        super().remove(key)
        self._forget(key)

    def clear(self) -> None:
        """Remove all chunks."""
        super().clear()
        self._owner.clear()
        self._owned.clear()
        self._ended.clear()

    def _chunk(self, key: OffloadKey) -> ChunkStatus:
        chunk = self.get(key)
        assert chunk is not None, "a chunk that was removed is still recorded"
        return chunk

    def _remember(self, req_context: ReqContext) -> ProgramId | None:
        known = req_context.get_state(RequestProgram)
        if known is None:
            programs = self._program_scheduler
            sender = programs.request(req_context.req_id) if programs is not None else None
            known = RequestProgram(sender.program_id if sender is not None else None)
            req_context.set_state(known)
            if known.program_id is not None:
                self._ended_programs.pop(known.program_id, None)  # it goes on
        program_id: ProgramId | None = known.program_id
        return program_id

    def _evict_first(self, program_id: ProgramId) -> None:
        self._ended.update(dict.fromkeys(reversed(self._owned.pop(program_id, {}))))

    def _used(self, key: OffloadKey, program_id: ProgramId | None) -> None:
        self._ended.pop(key, None)
        owner = self._owner.setdefault(key, program_id)
        if owner is None:
            return
        if owner == program_id:
            self._owned.setdefault(owner, {})[key] = None
        else:
            self._disown(key, owner)
            self._owner[key] = None

    def _forget(self, key: OffloadKey) -> None:
        self._ended.pop(key, None)
        owner = self._owner.pop(key, None)
        if owner is not None:
            self._disown(key, owner)

    def _disown(self, key: OffloadKey, owner: ProgramId) -> None:
        owned = self._owned.get(owner)
        if owned is not None:
            owned.pop(key, None)
            if not owned:
                del self._owned[owner]


def find_cache_policy(connector: Any) -> ProgramCachePolicy | None:
    """Return the policy of vLLM's connector; ``None`` for another connector or another policy."""
    manager = getattr(getattr(connector, "connector_scheduler", None), "manager", None)
    policy = getattr(manager, "_policy", None)
    return policy if isinstance(policy, ProgramCachePolicy) else None
