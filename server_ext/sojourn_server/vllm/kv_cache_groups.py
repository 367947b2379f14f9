"""The KV cache groups of a model: sets of layers with block tables of their own.

Most models have one group. Models with sliding windows beside full attention have one for each, at least, and
hybrid models have groups for layers that keep a state (Mamba, linear attention) instead of keys and values.
The blocks of all groups have one size in bytes and come from one pool. A prefix cache hit needs blocks of
every group: with full attention all blocks of the prefix, with a window the last ones, with a state the block
that has the state at the prefix's end.

In this file, *window blocks* are the blocks of all groups without full attention: windows, chunks and states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import dropwhile
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from ..kv_offload.context_keys import ContextKeys, GroupLayout
from ..kv_offload.offload_jobs import BlockKey
from .compat import FullAttentionManager, KVCacheBlock, MambaManager, get_block_hash

if TYPE_CHECKING:
    from .compat import KVCacheConfig, KVCacheCoordinator, Request, Scheduler


MAX_READ_BLOCKS = 1024
"""Maximum number of block table entries that are read, from the end, to find the blocks that a request still
holds in groups that free blocks of running requests."""

GROUP_BYTES = 4
"""Length in bytes of the group's number, which vLLM appends to a content hash."""


class UnsupportedModel(RuntimeError):
    """Sojourn cannot manage the model's KV cache, or cannot schedule its requests."""


class CachedPrefix(NamedTuple):
    blocks: list[KVCacheBlock]
    """Distinct blocks of all groups. With one group they are in the order of the prefix."""
    hashes: int


class KVCacheGroups:
    """The KV cache groups of one scheduler. Raises ``UnsupportedModel`` for none or several block pools."""

    def __init__(self, scheduler: Scheduler) -> None:
        manager = scheduler.kv_cache_manager
        self._manager = manager
        self._pool = manager.block_pool
        self._coordinator: KVCacheCoordinator = manager.coordinator
        self._managers = self._coordinator.single_type_managers
        if not self._managers:
            raise UnsupportedModel(
                "this model has no KV cache; expected one with attention. Serve it with --policy stock."
            )
        if any(each.block_pool is not self._pool for each in self._managers):
            raise UnsupportedModel(
                "the KV cache groups of this model have several block pools; expected one. Serve it with "
                "--policy stock."
            )
        self.is_single = len(self._managers) == 1 and isinstance(self._managers[0], FullAttentionManager)
        """Whether the model has one group, with full attention. A request then holds its context in order."""
        self.hash_tokens = int(scheduler.hash_block_size)
        config = scheduler.vllm_config
        self._sizes: list[tuple[int, int]] = []
        """For each group, (tokens per block, maximum blocks of one request)."""
        growing, fixed = [], 0
        for each in self._managers:
            spec = each.kv_cache_spec
            most = math.ceil(spec.max_memory_usage_bytes(config) / spec.page_size_bytes)
            self._sizes.append((each.block_size, most))
            if isinstance(each, FullAttentionManager) and spec.prefix_cacheable:
                growing.append(each.block_size)
            else:  # between two steps a window has fewer blocks than while a prompt is computed
                window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
                fixed += min(most, window // each.block_size + 1) if window else most
        self.fixed_blocks = 0 if self.is_single else fixed
        """Number of blocks that a request needs for windows and states, however long its context is."""
        self._keeps_all = [self.is_single or type(each) is FullAttentionManager for each in self._managers]
        """For each group, whether a request holds the blocks of its whole context."""
        self.tokens_per_block: float = (
            scheduler.block_size
            if self.is_single or not growing
            else 1 / sum(1 / tokens for tokens in growing)
        )
        """Average tokens by which a long context grows per additional block: fewer than a block's with
        several full-attention groups, because each needs a block."""
        self._drops_last_block = bool(scheduler.use_eagle_block_drop)
        self._hit_tokens = int(scheduler.block_size)
        """Every prefix cache hit is a multiple of this number of tokens."""
        self._layouts = [
            GroupLayout(
                suffix=b"" if self.is_single else number.to_bytes(GROUP_BYTES, "big"),
                block_tokens=each.block_size,
                hashes_per_block=max(1, each.block_size // self.hash_tokens),
                first_needed=lambda tokens, group=each: (  # type: ignore[misc]
                    group.get_num_skipped_tokens(tokens) // group.block_size
                ),
                keeps_all=keeps_all,
            )
            for number, (each, keeps_all) in enumerate(zip(self._managers, self._keeps_all, strict=True))
        ]
        self.key_of: Callable[[KVCacheBlock], BlockKey] = attrgetter("block_hash")
        """A cached block's key below the device: its content hash, and with several groups the group's
        number."""
        if self.is_single:
            self.key_of = lambda block: get_block_hash(block.block_hash)
        self._windows = frozenset(each.suffix for each in self._layouts if not each.keeps_all)

    def __len__(self) -> int:
        return len(self._managers)

    def blocks_of(self, tokens: int) -> int:
        return sum(min(-(-tokens // size), most) for size, most in self._sizes)

    def blocks_of_new(self, tokens: int) -> int:
        """Return the maximum number of blocks that ``tokens`` new tokens add to a running request."""
        return sum(min(-(-tokens // size) + 1, most) for size, most in self._sizes)

    def used_by(self, request: Request) -> Iterator[Sequence[KVCacheBlock]]:
        """Yield, for each group, the blocks that the request holds, without placeholders of freed blocks."""
        groups = self._manager.get_blocks(request.request_id).blocks
        for blocks, keeps_all in zip(groups, self._keeps_all, strict=True):
            if keeps_all:
                yield blocks
            else:  # nearly all placeholders are first: a long list need not be read from its beginning
                yield [block for block in blocks[-MAX_READ_BLOCKS:] if not block.is_null]

    def cached_blocks(self, request: Request) -> list[KVCacheBlock]:
        """Return the request's blocks that have a hash, one group after the other."""
        groups = self._manager.get_blocks(request.request_id).blocks
        return [
            block for group in groups for block in group if block.block_hash is not None and not block.is_null
        ]

    def uncomputed(self, request: Request) -> set[int]:
        """Return the ids of the request's blocks whose hash covers tokens that are not computed yet."""
        groups, computed = self._manager.get_blocks(request.request_id).blocks, request.num_computed_tokens
        return {
            block.block_id
            for blocks, (size, _) in zip(groups, self._sizes, strict=True)
            for block in blocks[computed // size :]
            if block.block_hash is not None and (block.block_hash_num_tokens or math.inf) > computed
        }

    def blocks_behind(self, requests: Iterable[Request], block_ids: set[int]) -> set[int]:
        """Return ``block_ids`` and the ids of all blocks of ``requests`` behind one of them. vLLM supports
        connectors that report such blocks with one group only."""
        dependent = set(block_ids)
        for request in requests:
            for group in self._manager.get_block_ids(request.request_id):
                dependent.update(dropwhile(lambda block_id: block_id not in block_ids, group))
        return dependent

    def cached_prefix(self, hashes: Sequence[Any]) -> CachedPrefix:
        if self.is_single:
            found: list[KVCacheBlock] = []
            for block_hash in hashes:
                blocks = self._pool.get_cached_block(block_hash, [0])
                if blocks is None:
                    break
                found.append(blocks[0])
            return CachedPrefix(found, len(found))
        groups, tokens, _ = self._coordinator.find_longest_cache_hit(hashes, len(hashes) * self.hash_tokens)
        found = [block for blocks in groups for block in blocks if not block.is_null]
        count = tokens // self.hash_tokens
        if self._drops_last_block and tokens:
            # With EAGLE a hit ends one block before the last block that was found. To get the same hit again,
            # this last block is needed too.
            for group, (size, _) in enumerate(self._sizes):
                last = (tokens // size + 1) * size // self.hash_tokens
                if last <= len(hashes):
                    more = self._pool.get_cached_block(hashes[last - 1], [group])
                    if more is not None:
                        found += more
                        count = max(count, last)
        return CachedPrefix(found, count)

    # -- blocks below the device ---------------------------------------------------

    def is_of_window(self, key: BlockKey) -> bool:
        return key[-GROUP_BYTES:] in self._windows

    def context_keys(self, hashes: Sequence[Any], start_tokens: int, end_tokens: int) -> ContextKeys:
        """Return the keys of the blocks that a context with these block ``hashes`` needs for its tokens from
        ``start_tokens`` to ``end_tokens``. The device has the tokens before."""
        return ContextKeys(
            self._layouts,
            hashes,
            step_tokens=self._hit_tokens,
            start_tokens=start_tokens,
            end_tokens=min(end_tokens, len(hashes) * self.hash_tokens),
        )

    def is_cached(self, key: BlockKey) -> bool:
        """Return whether the device has a block with this key. Only for models with several groups."""
        group = int.from_bytes(key[-GROUP_BYTES:], "big")
        return self._pool.get_cached_block(key[:-GROUP_BYTES], [group]) is not None

    def prompt_end_keys(self, hashes: Sequence[Any], prompt_tokens: int) -> list[BlockKey]:
        """Return the keys of the window blocks that the next prompt needs to hit this prompt of
        ``prompt_tokens`` tokens at its end, or a step (``_hit_tokens``) before, if the next prompt differs in
        the last few tokens."""
        context = self.context_keys(hashes, 0, prompt_tokens)
        ends = (context.end_tokens - self._hit_tokens, context.end_tokens)
        return list(dict.fromkeys(key for end in ends if end > 0 for key in context.window_keys(end)))

    def needed_keys(
        self, hashes: Sequence[Any], start: int = 0, stop: int | None = None
    ) -> Sequence[BlockKey]:
        """Return the keys of the blocks that a request needs to continue a context with these block hashes:
        with one full-attention group ``hashes[start:stop]``. Otherwise the keys of window blocks come first,
        if ``stop`` reaches the end of the context, then those of full-attention blocks that begin within
        ``hashes[start:stop]``."""
        if self.is_single:
            return hashes[start:stop] if start or stop is not None else hashes
        first, end = start * self.hash_tokens, (len(hashes) if stop is None else stop) * self.hash_tokens
        whole = self.context_keys(hashes, 0, len(hashes) * self.hash_tokens)
        at_end = end >= len(hashes) * self.hash_tokens
        return [
            each.key
            for each in whole.needed(whole.end_tokens)
            if (
                first <= each.place * self._sizes[each.group][0] < end
                if self._keeps_all[each.group]
                else at_end
            )
        ]

    def sample_keys(self, hashes: Sequence[Any], most: int) -> tuple[int, Sequence[BlockKey]]:
        """Return (number of blocks that a context with these hashes needs, keys of at most ``most`` of these
        blocks, evenly spaced). They are of one group that has the whole context, if there is one."""
        group = next((each for each in self._layouts if each.keeps_all), self._layouts[0])
        step = group.hashes_per_block
        count = len(hashes) // step
        every = step * max(1, -(-count // most))
        keys = [hashes[index] + group.suffix for index in range(step - 1, count * step, every)]
        return self.blocks_of(len(hashes) * self.hash_tokens), keys

    def all_keys(self, hashes: Sequence[Any]) -> Iterator[BlockKey]:
        """Return the keys that blocks with these hashes may have, in all groups."""
        return (each + layout.suffix for each in hashes for layout in self._layouts)

    def needed_blocks(self, hashes: Sequence[Any]) -> list[KVCacheBlock]:
        """Return those blocks of ``needed_keys(hashes)`` that the device has; with one group, those before
        the first missing one. With several they may be too few for a cache hit."""
        if self.is_single:
            return self.cached_prefix(hashes).blocks
        context = self.context_keys(hashes, 0, len(hashes) * self.hash_tokens)
        found: list[KVCacheBlock] = []
        for each in context.needed(context.end_tokens):
            found += self._pool.get_cached_block(each.key[:-GROUP_BYTES], [each.group]) or ()
        return found

    def count_in_use(self, hits: Sequence[Sequence[KVCacheBlock]]) -> int:
        return sum(1 for blocks in hits for block in blocks if block.ref_cnt > 0 and not block.is_null)

    def waits_for_state(self, hits: Sequence[Sequence[KVCacheBlock]]) -> bool:
        """Return whether a prefix cache hit ends with a state that another request computes in this same
        step. vLLM then allocates no blocks for it in this step, even if blocks are free."""
        return any(
            blocks
            and isinstance(each, MambaManager)
            and blocks[-1].block_hash in each.cached_blocks_this_step
            for blocks, each in zip(hits, self._managers, strict=False)
        )


def stored_block_bytes(kv_cache_config: KVCacheConfig) -> int:
    """Return the size in bytes of one block of KV on one worker; 0 if the config has no tensors."""
    sizes = [tensor.size for tensor in kv_cache_config.kv_cache_tensors or ()]
    # All tensors lie in one allocation, because groups share its blocks, and each has its size.
    return int(max(sizes, default=0) // max(1, kv_cache_config.num_blocks))
