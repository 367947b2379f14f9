"""Eviction order for the host memory of vLLM's own connector (``--tier-backend vllm``), whose unit is the
chunk.

KV of ended programs is evicted first, then that of programs by rank (``RetentionRank``), within a rank and
without a program in vLLM's LRU order. No chunk is evicted for one of a lower rank. vLLM loads the class by
name, from ``eviction_policy`` and ``cache_policy_module_path`` of the connector's configuration. The
scheduler adapter reports requests and programs to it. After an error of sojourn's own, vLLM's order remains.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any

from sojourn.ids import ProgramId

from ..kv_offload.host_block_pool import RetentionRank
from .compat import LRUCachePolicy, make_offload_key

if TYPE_CHECKING:
    from .compat import ChunkStatus, ReqContext

logger = logging.getLogger("vllm.sojourn")

OffloadKey = bytes
"""Key of a chunk: the hash of its block, followed by the number of its KV cache group."""
MAX_REQUESTS = 10_000
"""Maximum number of requests whose program is remembered, in case vLLM does not report the end of some."""
MAX_ENDED_PROGRAMS = 1000
"""Maximum number of ended programs whose chunks are evicted first. Those of the oldest beyond return to LRU
order."""
MAX_WANTED_S = 60.0
"""Maximum time for which the chunks of a program that waits for its admission have the rank ``WANTED``."""
MAX_WANTED_SHARE = 0.25
"""Maximum share of host memory for chunks of that rank. Programs that have waited longer go first."""

_PLAIN, _WANTED = RetentionRank.PLAIN, RetentionRank.WANTED


class ProgramCachePolicy(LRUCachePolicy):
    """Orders the chunks that only one program has used by that program.

    Chunks of programs above ``PLAIN`` are not evictable for vLLM's class, which would otherwise visit all of
    them at each eviction."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.strict = False
        self.groups = 1
        """Number of the model's KV cache groups, which have chunks of their own."""
        self.rank: Callable[[ProgramId], RetentionRank] = lambda _: _PLAIN
        self.clock: Callable[[], float] = time.monotonic
        self._newcomer = _WANTED
        """Rank of the chunks for which others are evicted next."""
        self._wanted_since_s: OrderedDict[ProgramId, float] = OrderedDict()
        """Program with a request that waits for admission → since when."""
        self._off = False
        self._programs: OrderedDict[str, ProgramId] = OrderedDict()
        """Request id → its program, from its arrival until ``on_request_finished``."""
        self._owner: dict[OffloadKey, ProgramId | None] = {}
        """Chunk → the only program that has used it; ``None``: several have, or a request without one."""
        self._owned: dict[ProgramId, dict[OffloadKey, None]] = {}
        """Program → the chunks that it alone has used, in context order. Least recently used first."""
        self._kept: set[ProgramId] = set()
        """Programs with chunks whose rank is above ``PLAIN``."""
        self._ended: OrderedDict[ProgramId, None] = OrderedDict()
        """Ended programs. Eviction starts with the first one, and in each context with the last chunk."""

    # -- the scheduler adapter's reports ------------------------------------------------

    def arrived(self, request_id: str, program_id: ProgramId) -> None:
        """Handle the arrival of a program's request. A program that had ended is alive again."""
        self.waits(program_id)
        self._programs[request_id] = program_id
        if len(self._programs) > MAX_REQUESTS:
            self._programs.popitem(last=False)
        self._ended.pop(program_id, None)

    def request_admitted(self, program_id: ProgramId | None, block_hashes: Iterable[bytes]) -> None:
        """Record that an admitted request uses the chunks of these blocks."""
        self._wanted_since_s.pop(program_id, None)  # type: ignore[arg-type]
        groups = [make_offload_key(b"", number) for number in range(self.groups)]
        keys = (block_hash + group for block_hash in block_hashes for group in groups)
        self._attempt(self._used_all, [[key for key in keys if key in self._owner]], program_id)

    def waits(self, program_id: ProgramId) -> None:
        """Record that a request of the program will soon load its chunks: it arrived, or was preempted."""
        self._wanted_since_s.pop(program_id, None)
        self._wanted_since_s[program_id] = self.clock()

    def held_chunks(self, program_id: ProgramId) -> int:
        """Return the number of chunks that only this program has used."""
        return len(self._owned.get(program_id, ()))

    def stores_for(self, request_id: str) -> None:
        """Give the next chunks the rank of a request's program. Without a program it is ``PLAIN``."""
        program_id = self._programs.get(request_id)
        self._newcomer = self._attempt(self.rank, program_id) if program_id is not None else _PLAIN
        self._newcomer = _PLAIN if self._newcomer is None else self._newcomer

    def program_ended(self, program_id: ProgramId) -> None:
        """Handle the end of a program: from now on, the chunks that it alone has used are evicted first."""
        self._wanted_since_s.pop(program_id, None)
        self._ended.setdefault(program_id)
        self._attempt(self._keep, self._kept - {program_id})
        if len(self._ended) > MAX_ENDED_PROGRAMS:
            oldest, _ = self._ended.popitem(last=False)
            self._attempt(self._keep, self._kept - {oldest})
            self._owner.update(dict.fromkeys(self._owned.pop(oldest, {})))

    # -- vLLM's hooks ---------------------------------------------------------------

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Record which program has used a request's chunks. Called when its last store has ended."""
        super().on_request_finished(key_groups, insertion_only_keys, reused_keys, req_context)
        self._attempt(self._used_all, key_groups, self._programs.pop(req_context.req_id, None))

    def mark_evictable(self, key: OffloadKey) -> None:
        if self._owner.get(key) not in self._kept:
            super().mark_evictable(key)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        if self._owner.get(key) not in self._kept:
            super().mark_non_evictable(key)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Evict and return ``n`` chunks that are not ``protected`` nor worth more than those to be stored;
        none, and ``None``, if there are fewer."""
        ranks: dict[ProgramId, RetentionRank] = self._attempt(self._ranks_of_programs) or {}
        above = {name: rank for name, rank in ranks.items() if rank > _PLAIN}
        self._attempt(self._keep, above.keys())
        newcomer = self._newcomer
        in_order = sorted((name for name in ranks if ranks[name] <= newcomer), key=ranks.__getitem__)
        low = [name for name in in_order if name not in above]
        first = dict(self._attempt(self._of_programs, n, protected, [*self._ended, *low]) or ())
        rest: list[tuple[OffloadKey, ChunkStatus]] | None = [] if len(first) == n else None
        if rest is None and newcomer >= _PLAIN:
            rest = super().evict(n - len(first), {*protected, *first})
        for name in in_order[len(low) :]:
            if rest is None:
                self._attempt(self._keep, self._kept - {name})
                rest = super().evict(n - len(first), {*protected, *first})
        if rest is None:
            return None
        for key in first:
            super().remove(key)
        evicted = [*first.items(), *rest]
        self._attempt(self._forget, [key for key, _ in evicted])
        return evicted

    def remove(self, key: OffloadKey) -> None:
        super().remove(key)
        self._attempt(self._forget, [key])

    def clear(self) -> None:
        super().clear()
        self._forget_all()

    # -- inside -----------------------------------------------------------------

    def _attempt(self, call: Callable[..., Any], *arguments: object) -> Any:
        """Make a call. After an error, keep vLLM's order from now on, and return ``None``."""
        if self._off:
            return None
        try:
            return call(*arguments)
        except Exception:
            if self.strict:
                raise
            self._off = True
            self._forget_all()
            for key, chunk in self.chunks.items():
                if chunk.ref_cnt == 0:
                    super().mark_evictable(key)
            logger.exception("sojourn: the eviction order of host memory failed; it is vLLM's from now on")
            return None

    def _forget_all(self) -> None:
        self._owner.clear()
        self._owned.clear()
        self._ended.clear()
        self._wanted_since_s.clear()
        self._kept.clear()

    def _keep(self, program_ids: Set[ProgramId]) -> None:
        """Make evictable the chunks of all programs but these."""
        for names, mark in (
            (self._kept - program_ids, super().mark_evictable),
            (program_ids - self._kept, super().mark_non_evictable),
        ):
            for key in (key for name in names for key in self._owned.get(name, ())):
                if self.chunks[key].ref_cnt == 0:
                    mark(key)
        self._kept = set(program_ids)

    def _used_all(self, key_groups: Sequence[Sequence[OffloadKey]], program_id: ProgramId | None) -> None:
        keys = [key for keys in key_groups for key in keys if self.get(key) is not None]
        self._keep(self._kept - {program_id, *(self._owner.get(key) for key in keys)})
        if keys and program_id in self._owned:
            self._owned[program_id] = self._owned.pop(program_id)
        for key in keys:
            owner = self._owner.setdefault(key, program_id)
            if owner is not None and owner == program_id:
                self._owned.setdefault(owner, {})[key] = None
            elif owner is not None:
                self._disown(key, owner)
                self._owner[key] = None

    def _ranks_of_programs(self) -> dict[ProgramId, RetentionRank]:
        """Return the programs with chunks of their own whose rank is not ``PLAIN``."""
        alive = (name for name in self._owned if name not in self._ended)
        ranks = {name: rank for name in alive if (rank := self.rank(name)) is not _PLAIN}
        room, now = MAX_WANTED_SHARE * self.cache_capacity, self.clock()
        for name, since_s in list(self._wanted_since_s.items()):
            if now - since_s > MAX_WANTED_S:
                del self._wanted_since_s[name]
            elif (room := room - self.held_chunks(name)) >= 0:
                ranks[name] = _WANTED
        return ranks

    def _of_programs(
        self, n: int, protected: set[OffloadKey], program_ids: Iterable[ProgramId]
    ) -> list[tuple[OffloadKey, ChunkStatus]]:
        """Return at most ``n`` evictable chunks of these programs, in eviction order."""
        found: dict[OffloadKey, ChunkStatus] = {}
        for program_id in program_ids:
            for key in reversed(self._owned.get(program_id, {})):
                if len(found) == n:
                    return list(found.items())
                chunk = self.get(key)
                if chunk is not None and chunk.ref_cnt == 0 and key not in protected:
                    found[key] = chunk
        return list(found.items())

    def _forget(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            owner = self._owner.pop(key, None)
            if owner is not None:
                self._disown(key, owner)

    def _disown(self, key: OffloadKey, owner: ProgramId) -> None:
        owned = self._owned.get(owner, {})
        owned.pop(key, None)
        if not owned:
            self._owned.pop(owner, None)


def find_cache_policy(connector: Any) -> ProgramCachePolicy | None:
    manager = getattr(getattr(connector, "connector_scheduler", None), "manager", None)
    policy = getattr(manager, "_policy", None)
    return policy if isinstance(policy, ProgramCachePolicy) else None
