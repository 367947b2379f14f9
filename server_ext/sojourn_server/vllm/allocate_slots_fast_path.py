"""Allocates KV slots without vLLM's manager if a request's own blocks have room.

vLLM calls ``KVCacheManager.allocate_slots`` for each running request in each step. For most decode steps the
call changes nothing, because the request's last block has room and no block becomes full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .compat import FullAttentionManager

if TYPE_CHECKING:
    from .compat import KVCacheBlocks, KVCacheManager, Request

AllocateSlots = Callable[..., "KVCacheBlocks | None"]


def allocate_slots_with_fast_path(manager: KVCacheManager) -> AllocateSlots:
    """Return ``manager.allocate_slots``, with a fast path for running requests that need no new block.

    The fast path has the same result as vLLM's method: no blocks, and no change to any table. It is for
    models with one full-attention group, since other groups free blocks in this call. It is used only with a
    prefix cache and without speculative tokens.
    """
    original: AllocateSlots = manager.allocate_slots
    groups = manager.coordinator.single_type_managers
    if len(groups) != 1 or type(groups[0]) is not FullAttentionManager or not manager.enable_caching:
        return original
    group = groups[0]
    size = group.block_size
    if size != group.block_pool.hash_block_size:
        return original  # vLLM may also cache incomplete blocks
    blocks_of, cached_of = group.req_to_blocks, group.num_cached_block
    nothing, no_lookahead = manager.empty_kv_cache_blocks, {"num_lookahead_tokens": 0}

    def allocate_slots(
        request: Request, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> KVCacheBlocks | None:
        if not args and kwargs in ({}, no_lookahead):  # only calls for running requests have these arguments
            request_id = request.request_id
            cached = cached_of.get(request_id)
            if (
                cached is not None
                and request.num_computed_tokens + num_new_tokens < (cached + 1) * size
                and len(blocks_of[request_id]) > cached
                and num_new_tokens > 0
            ):
                return nothing
        return original(request, num_new_tokens, *args, **kwargs)

    return allocate_slots
