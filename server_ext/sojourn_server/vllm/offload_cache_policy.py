"""Eviction order for the host memory of vLLM's own connector (``--tier-backend vllm``), whose unit is the
chunk.

KV of ended programs is evicted first, then all other KV in vLLM's LRU order. vLLM loads the class by name,
from ``eviction_policy`` and ``cache_policy_module_path`` of the connector's configuration. The scheduler
adapter reports requests and programs to it. After an error of sojourn's own, vLLM's order remains.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sojourn.ids import ProgramId

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


class ProgramCachePolicy(LRUCachePolicy):
    """Evicts first the chunks that only one program has used, which has ended."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.strict = False
        self.groups = 1
        """Number of the model's KV cache groups, which have chunks of their own."""
        self._off = False
        self._programs: OrderedDict[str, ProgramId] = OrderedDict()
        """Request id → its program, from its arrival until ``on_request_finished``."""
        self._owner: dict[OffloadKey, ProgramId | None] = {}
        """Chunk → the only program that has used it; ``None``: several have, or a request without one."""
        self._owned: dict[ProgramId, dict[OffloadKey, None]] = {}
        """Program → the chunks that it alone has used, in context order."""
        self._ended: OrderedDict[ProgramId, None] = OrderedDict()
        """Ended programs. Eviction starts with the first one, and in each context with the last chunk."""

    # -- the scheduler adapter's reports ------------------------------------------------

    def arrived(self, request_id: str, program_id: ProgramId) -> None:
        """Handle the arrival of a program's request. A program that had ended is alive again."""
        self._programs[request_id] = program_id
        if len(self._programs) > MAX_REQUESTS:
            self._programs.popitem(last=False)
        self._ended.pop(program_id, None)

    def request_admitted(self, program_id: ProgramId | None, block_hashes: Iterable[bytes]) -> None:
        """Record that an admitted request uses the chunks of these blocks."""
        groups = [make_offload_key(b"", number) for number in range(self.groups)]
        keys = (block_hash + group for block_hash in block_hashes for group in groups)
        self._attempt(self._used_all, [[key for key in keys if key in self._owner]], program_id)

    def program_ended(self, program_id: ProgramId) -> None:
        """Handle the end of a program: from now on, the chunks that it alone has used are evicted first."""
        self._ended.setdefault(program_id)
        if len(self._ended) > MAX_ENDED_PROGRAMS:
            oldest, _ = self._ended.popitem(last=False)
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

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Evict and return ``n`` chunks that are not ``protected``; none, and ``None``, if there are
        fewer."""
        first = dict(self._attempt(self._of_ended, n, protected) or ())
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
            logger.exception("sojourn: the eviction order of host memory failed; it is vLLM's from now on")
            return None

    def _forget_all(self) -> None:
        self._owner.clear()
        self._owned.clear()
        self._ended.clear()

    def _used_all(self, key_groups: Sequence[Sequence[OffloadKey]], program_id: ProgramId | None) -> None:
        for key in (key for keys in key_groups for key in keys):
            if self.get(key) is None:
                continue
            owner = self._owner.setdefault(key, program_id)
            if owner is not None and owner == program_id:
                self._owned.setdefault(owner, {})[key] = None
            elif owner is not None:
                self._disown(key, owner)
                self._owner[key] = None

    def _of_ended(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]]:
        """Return at most ``n`` evictable chunks of ended programs, in eviction order."""
        found: list[tuple[OffloadKey, ChunkStatus]] = []
        for program_id in self._ended:
            for key in reversed(self._owned.get(program_id, {})):
                if len(found) == n:
                    return found
                chunk = self.get(key)
                if chunk is not None and chunk.ref_cnt == 0 and key not in protected:
                    found.append((key, chunk))
        return found

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
