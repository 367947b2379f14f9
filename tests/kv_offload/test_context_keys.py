"""Host memory covers as much of a context as vLLM's own look-up finds among the same blocks."""

from __future__ import annotations

import random
from typing import Any

import pytest
from sojourn_server.kv_offload.context_keys import ContextKeys, GroupLayout

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

HASH_TOKENS = 4
BLOCKS = 12
"""Of ``HASH_TOKENS`` tokens each: length of the context."""
SHAPES: dict[str, tuple[tuple[int, int | None], ...]] = {
    "a window": ((4, None), (4, 10)),
    "two windows": ((4, 5), (4, None), (4, 16)),
    "windows alike": ((4, None), (4, 9), (4, 9)),
    "larger blocks": ((8, None), (4, 10), (4, 3)),
    "larger blocks in the window": ((4, None), (8, 12)),
    "a window of two tokens": ((4, None), (4, 2)),
    "two groups with full attention": ((4, None), (8, None), (4, 7)),
}
"""Tokens per block and window of each group; ``None``: full attention."""


def layouts(shape: tuple[tuple[int, int | None], ...]) -> list[GroupLayout]:
    return [
        GroupLayout(
            suffix=number.to_bytes(4, "big"),
            block_tokens=size,
            hashes_per_block=size // HASH_TOKENS,
            first_needed=lambda tokens, size=size, window=window: (
                max(0, tokens - window + 1) // size if window is not None else 0
            ),
            keeps_all=window is None,
        )
        for number, (size, window) in enumerate(shape)
    ]


def coordinator(shape: tuple[tuple[int, int | None], ...], step_tokens: int) -> Any:
    import torch
    from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )

    shared = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    specs = [
        FullAttentionSpec(block_size=size, **shared)
        if window is None
        else SlidingWindowSpec(block_size=size, sliding_window=window, **shared)
        for size, window in shape
    ]
    groups = [KVCacheGroupSpec([f"layer{number}"], spec) for number, spec in enumerate(specs)]
    return get_kv_cache_coordinator(
        KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=HASH_TOKENS * BLOCKS,
        max_in_flight_tokens=HASH_TOKENS * BLOCKS,
        use_eagle=False,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=step_tokens,
        hash_block_size=HASH_TOKENS,
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_finds_what_vllm_would_find(shape: tuple[tuple[int, int | None], ...]) -> None:
    draw = random.Random(len(shape))
    step_tokens = max(size for size, _ in shape)
    hashes = [number.to_bytes(8, "big") for number in range(1, BLOCKS + 1)]
    found = set()
    for _ in range(150):
        vllm = coordinator(shape, step_tokens)
        pool, share = vllm.block_pool, draw.choice([0.5, 0.8, 0.95])
        limit = draw.randint(0, HASH_TOKENS * BLOCKS)
        keys = set()
        for number, (size, _) in enumerate(shape):
            for index in range(HASH_TOKENS * BLOCKS // size):
                if draw.random() < share:
                    key = hashes[(index + 1) * size // HASH_TOKENS - 1] + number.to_bytes(4, "big")
                    keys.add(key)
                    (block,) = pool.get_new_blocks(1)
                    pool.cached_block_hash_to_block.insert(key, block)
        context = ContextKeys(
            layouts(shape), hashes, step_tokens=step_tokens, start_tokens=0, end_tokens=limit
        )
        blocks, tokens, _ = vllm.find_longest_cache_hit(hashes, limit)
        assert context.covered(keys.__contains__) == tokens
        missed = context.missed_windows(tokens, keys.__contains__)
        longest = context.covered_without_windows(keys.__contains__)
        assert context.covered({*keys, *missed}.__contains__) == longest
        assert bool(missed) == (longest > tokens)
        needed = list(context.needed(tokens))
        assert keys.issuperset(block.key for block in needed)
        used = [
            (group, index)
            for group, each in enumerate(blocks)
            for index, block in enumerate(each)
            if not block.is_null
        ]
        assert set(used) <= {(block.group, block.place) for block in needed}
        skipped = [each.get_num_skipped_tokens(tokens) for each in vllm.single_type_managers]
        assert {(block.group, block.place) for block in needed} == {
            (group, index)
            for group, (size, _) in enumerate(shape)
            for index in range(skipped[group] // size, tokens // size)
        }
        found.add(tokens)
    assert len(found) > 4
    assert max(found) > 0


def test_blocks_that_the_device_has_are_not_asked_for() -> None:
    groups = layouts(((4, None), (4, 10)))
    hashes = [number.to_bytes(8, "big") for number in range(1, BLOCKS + 1)]
    context = ContextKeys(groups, hashes, step_tokens=4, start_tokens=16, end_tokens=23)
    asked = []

    def has(key: bytes) -> bool:
        asked.append(key)
        return True

    assert context.covered(has) == 20
    assert {(block.group, block.place) for block in context.needed(20)} == {(0, 4), (1, 4)}
    assert len(asked) == 2
    assert context.covered(lambda key: False) == 16
    assert not list(context.needed(16))
