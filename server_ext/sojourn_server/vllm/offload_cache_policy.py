"""Eviction order for the host memory of vLLM's own connector (``--tier-backend vllm``).

KV of ended programs is evicted first, then all other KV in vLLM's LRU order. The connector's unit of storage
is the chunk.

vLLM loads the class by name, from ``eviction_policy`` and ``cache_policy_module_path`` of the connector's
configuration. The scheduler adapter reports requests and programs to it. vLLM's connector calls the methods
below the comment ``vLLM's hooks``. After an error of sojourn's own, vLLM's LRU order remains.
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
"""Maximum number of requests whose program is remembered, in case vLLM does not report the end of some. The
oldest are forgotten."""
MAX_ENDED_PROGRAMS = 1000
"""Maximum number of ended programs whose chunks are evicted first. If there are more, the chunks of the
program that ended first return to vLLM's LRU order."""


class ProgramCachePolicy(LRUCachePolicy):
    """Evicts first the chunks that only one program has used, if this program has ended. All other chunks
    follow in vLLM's LRU order."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.strict = False
        """Whether sojourn's own errors are raised instead of logged. For tests."""
        self.groups = 1
        """Number of the model's KV cache groups. Each has chunks of its own."""
        self._off = False
        self._programs: OrderedDict[str, ProgramId] = OrderedDict()
        """Request id → its program, from the request's arrival until ``on_request_finished``."""
        self._owner: dict[OffloadKey, ProgramId | None] = {}
        """Chunk → the only program that has used it; ``None``: several programs, or a request without a
        program, have used it."""
        self._owned: dict[ProgramId, dict[OffloadKey, None]] = {}
        """Program → the chunks that it alone has used, in the order of its context."""
        self._ended: OrderedDict[ProgramId, dict[OffloadKey, None]] = OrderedDict()
        """Ended program → the chunks that it alone has used, in the order of its context. Eviction starts
        with the first program, and in each context with the last chunk."""

    # -- the scheduler adapter's reports ------------------------------------------------

    def arrived(self, request_id: str, program_id: ProgramId) -> None:
        """Handle the arrival of a program's request. If the program had ended, it is alive again, and its
        chunks are no longer evicted first."""
        self._programs[request_id] = program_id
        if len(self._programs) > MAX_REQUESTS:
            self._programs.popitem(last=False)
        keys = self._ended.pop(program_id, None)
        if keys:
            self._owned[program_id] = keys

    def request_admitted(self, program_id: ProgramId | None, block_hashes: Iterable[bytes]) -> None:
        """Record that an admitted request uses the chunks of the blocks ``block_hashes``. ``program_id`` is
        ``None`` for a request without a program."""
        groups = [make_offload_key(b"", number) for number in range(self.groups)]
        keys = (block_hash + group for block_hash in block_hashes for group in groups)
        self._attempt(self._used_all, [[key for key in keys if key in self._owner]], program_id)

    def program_ended(self, program_id: ProgramId) -> None:
        """Handle the end of a program. From now on, the chunks that only this program has used are evicted
        before those of live programs."""
        self._ended.setdefault(program_id, {}).update(self._owned.pop(program_id, {}))
        if len(self._ended) > MAX_ENDED_PROGRAMS:
            _, keys = self._ended.popitem(last=False)
            self._owner.update(dict.fromkeys(keys))

    # -- vLLM's hooks ---------------------------------------------------------------

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Record which program has used the chunks of a request. vLLM calls this when the request's last
        store has ended."""
        super().on_request_finished(key_groups, insertion_only_keys, reused_keys, req_context)
        self._attempt(self._used_all, key_groups, self._programs.pop(req_context.req_id, None))

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Evict ``n`` chunks that are not ``protected``, and return them. If there are fewer such chunks,
        evict none and return ``None``."""
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
        """Remove a chunk."""
        super().remove(key)
        self._attempt(self._forget, [key])

    def clear(self) -> None:
        """Remove all chunks."""
        super().clear()
        self._forget_all()

    # -- inside -----------------------------------------------------------------

    def _attempt(self, call: Callable[..., Any], *arguments: object) -> Any:
        """Make a call and return its value. After an error, keep vLLM's order from now on, and return
        ``None``."""
        if self._off:
            return None
        try:
            return call(*arguments)
        except Exception:
            if self.strict:
                raise
            self._off = True
            self._forget_all()
            logger.exception(
                "sojourn: the eviction order of host memory failed; it is vLLM's own from now on"
            )
            return None

    def _forget_all(self) -> None:
        self._owner.clear()
        self._owned.clear()
        self._ended.clear()

    def _used_all(self, key_groups: Sequence[Sequence[OffloadKey]], program_id: ProgramId | None) -> None:
        for keys in key_groups:
            for key in keys:
                if self.get(key) is not None:
                    self._used(key, program_id)

    def _of_ended(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]]:
        """Return at most ``n`` chunks of ended programs, in eviction order, without ``protected`` chunks and
        chunks that are being read or written."""
        found: list[tuple[OffloadKey, ChunkStatus]] = []
        for keys in self._ended.values():
            for key in reversed(keys):
                if len(found) == n:
                    return found
                chunk = self.get(key)
                if chunk is not None and chunk.ref_cnt == 0 and key not in protected:
                    found.append((key, chunk))
        return found

    def _used(self, key: OffloadKey, program_id: ProgramId | None) -> None:
        owner = self._owner.setdefault(key, program_id)
        if owner is None:
            return
        if owner == program_id:
            ended = self._ended.get(owner)
            (ended if ended is not None else self._owned.setdefault(owner, {}))[key] = None
        else:
            self._disown(key, owner)
            self._owner[key] = None

    def _forget(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            owner = self._owner.pop(key, None)
            if owner is not None:
                self._disown(key, owner)

    def _disown(self, key: OffloadKey, owner: ProgramId) -> None:
        ended = self._ended.get(owner)
        if ended is not None:
            ended.pop(key, None)
            return
        owned = self._owned.get(owner, {})
        owned.pop(key, None)
        if not owned:
            self._owned.pop(owner, None)


def find_cache_policy(connector: Any) -> ProgramCachePolicy | None:
    """Return the ``ProgramCachePolicy`` that vLLM's connector uses; ``None`` for another connector or
    policy."""
    manager = getattr(getattr(connector, "connector_scheduler", None), "manager", None)
    policy = getattr(manager, "_policy", None)
    return policy if isinstance(policy, ProgramCachePolicy) else None
