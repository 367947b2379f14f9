"""Loads KV from host memory into the device's prefix cache before a request needs it: loads ahead of need.

Sources: SAGA §4.3 (mechanism S5) and Tetris §2.3 (mechanism T4).

vLLM's connector interface loads only into blocks of a waiting request. ``KVPrefetcher`` allocates blocks from
the pool itself, as a request would, holds them while the connector copies, then sets their content hashes and
frees them. From then on they are ordinary cached blocks, which any prompt with this prefix finds.

A load takes only spare blocks: uncached ones, and those that only ended programs have used. Loaded blocks
that no request has used are evicted as early as blocks of ended programs. So a false hint costs only spare
memory and idle time of the link. If an allocation fails while loads hold blocks, they are cancelled first.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

from sojourn.ids import ProgramId

from ..kv_offload.offload_jobs import BlockKey
from .compat import KVCacheBlock
from .free_block_queue import ProgramFreeBlockQueue
from .kv_cache_groups import KVCacheGroups
from .kv_offload_connector import SojournConnector

if TYPE_CHECKING:
    from .compat import BlockPool

MAX_DEVICE_SHARE = 0.125
"""Maximum share of the device's blocks for running loads and for loaded blocks that no request has used
yet."""


class _Load(NamedTuple):
    program_id: ProgramId
    keys: Sequence[BlockKey]
    """Block hashes of the prefix up to the last block loaded; empty if these must not be cached."""
    blocks: list[KVCacheBlock]
    """The blocks being filled, for the last ``len(blocks)`` keys."""
    expires_s: float
    """Time on the engine's clock at which the blocks are uncached if no request has used them."""


class KVPrefetcher:
    """Runs one engine's loads ahead of need, and uncaches loaded blocks that no request uses in time. It
    loads nothing without a ``connector``, with several KV cache groups, or with vLLM's KV cache events."""

    def __init__(
        self,
        pool: BlockPool,
        queue: ProgramFreeBlockQueue,
        groups: KVCacheGroups,
        connector: SojournConnector | None,
    ) -> None:
        self._pool = pool
        self._queue = queue
        self._groups = groups
        # vLLM's KV cache event for a cached block contains the block's tokens, which are unknown here.
        has_events = bool(getattr(pool, "enable_kv_cache_events", False))
        self._connector = connector if groups.is_single and not has_events else None
        if connector is not None:
            connector.load_ahead_ended = self._ended
        self._budget = int(MAX_DEVICE_SHARE * (pool.num_gpu_blocks - 1))
        self._loads: dict[str, _Load] = {}
        self._filled: dict[ProgramId, tuple[float, list[int]]] = {}
        """Program → (expiry, ids of the blocks filled for it), last filled last."""

    def budget(self, program_id: ProgramId) -> int:
        """Return how many blocks one ``load`` for the program may load now, if the device has as many spare
        ones. It is 0 while another load for the program runs."""
        connector = self._connector
        loads = self._loads.values()
        if connector is None or connector.off or any(load.program_id == program_id for load in loads):
            return 0
        held = sum(len(load.blocks) for load in loads)
        return max(0, self._budget - held - len(self._queue.owners.ahead))

    def load(self, program_id: ProgramId, keys: Sequence[BlockKey], count: int, expires_s: float) -> None:
        """Begin to load the blocks of the last ``count`` of ``keys`` from host memory, or those before the
        first that it has lost. ``keys`` are the block hashes of a context from its start, of whose earlier
        blocks the device has all. ``count``: at least 1, and at most what ``budget`` and ``spare_blocks``
        return. ``expires_s``: as in ``_Load``."""
        assert self._connector is not None
        blocks = self._pool.get_new_blocks(count)
        try:
            first = len(keys) - count
            # The pool has saved the blocks' old content. Host memory may have evicted some keys to make room.
            count = self._connector.planner.loadable(keys[first:])
            if count:
                wanted, ids = keys[first : first + count], [block.block_id for block in blocks[:count]]
                name = self._connector.planner.load_ahead(wanted, ids)
                self._loads[name] = _Load(program_id, keys[: first + count], blocks[:count], expires_s)
                blocks = blocks[count:]
        finally:
            self._pool.free_blocks(blocks)

    def expire(self, now: float) -> None:
        """Uncache filled blocks that have expired unused. If the connector is off, cancel all loads."""
        if self._connector is not None and self._connector.off:
            self.cancel_all()
        while self._filled and next(iter(self._filled.values()))[0] <= now:
            self.uncache_unused(next(iter(self._filled)))

    def uncache_unused(self, program_id: ProgramId) -> None:
        """Forget the blocks filled for a program whose request is admitted. Uncache unused ones."""
        if program_id not in self._filled:
            return
        ahead = self._queue.owners.ahead
        unused = {
            block_id for block_id in self._filled.pop(program_id)[1] if ahead.get(block_id) == program_id
        }
        # The next step may overwrite uncached blocks. A copy to host memory that still runs must end before.
        if self._connector is not None:
            for block in map(self._pool.blocks.__getitem__, unused):
                if block.block_hash is not None:
                    self._connector.planner.await_store(self._groups.key_of(block))
        self._pool.evict_blocks(unused)
        self._queue.uncache(unused)

    def program_ended(self, program_id: ProgramId) -> None:
        """Uncache the unused blocks filled for a program. Those of a running load are not cached."""
        self.uncache_unused(program_id)
        for name, load in self._loads.items():
            if load.program_id == program_id:
                self._loads[name] = load._replace(keys=())

    def cancel_all(self) -> bool:
        """Cancel all loads and free their blocks. Return whether there were any."""
        loads, self._loads = self._loads, {}
        for name, load in loads.items():
            assert self._connector is not None
            self._connector.planner.cancel_load(name)
            self._pool.free_blocks(load.blocks)
        return bool(loads)

    def reset(self) -> None:
        """Forget all filled blocks after a reset of the cache, which all loads were cancelled for."""
        self._filled.clear()

    def _ended(self, name: str, arrived: int) -> None:
        load = self._loads.pop(name)
        try:
            self._cache(load, arrived)
        finally:
            self._pool.free_blocks(reversed(load.blocks))

    def _cache(self, load: _Load, arrived: int) -> None:
        """Cache the first ``arrived`` blocks of a load, up to the first that the prefix cache already has;
        none without keys, or if the device has lost the blocks before."""
        blocks, keys = load.blocks, load.keys
        first = len(keys) - len(blocks)
        find = self._pool.get_cached_block
        count = 0
        if keys and (first == 0 or find(keys[first - 1], [0]) is not None):
            # A request may have computed some of the blocks meanwhile.
            while count < arrived and find(keys[first + count], [0]) is None:
                count += 1
        if count:
            self._pool.cache_full_blocks(
                SimpleNamespace(block_hashes=keys),  # of the request, the pool reads only these
                [*blocks[:1] * first, *blocks],  # the pool reads no block before index ``first``
                first,
                first + count,
                self._groups.hash_tokens,
                0,
            )
            ids = [block.block_id for block in blocks[:count]]
            self._queue.owners.ahead.update(dict.fromkeys(ids, load.program_id))
            before = self._filled.pop(load.program_id, (0.0, []))[1]
            self._filled[load.program_id] = load.expires_s, before + ids
