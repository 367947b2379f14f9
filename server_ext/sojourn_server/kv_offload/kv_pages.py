"""Finds the bytes of KV blocks in a worker's memory.

A page is a run of consecutive bytes that belong to one block. A row of pages has one page for each block, at
equal distances. A layer's KV tensor consists of one or more such rows. The attention backend chooses the
order of the tensor's dimensions: if heads come before blocks, the layer has one row per head. Pages of
several layers may be next to each other. A block may consist of several blocks of the attention kernel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple


class UnsupportedKvCaches(RuntimeError):
    """Raised if the engine's KV tensors have an unexpected device, shape or layout."""


class KvPages(NamedTuple):
    """A row of pages, one page per block. The page of block ``b`` is ``page_bytes`` long and begins at
    address ``address + b * stride_bytes``."""

    address: int
    stride_bytes: int
    page_bytes: int


def page_views(name: str, cache: Any, blocks: int) -> list[Any]:
    """Return the rows of pages of one layer, each as a tensor of bytes with the shape ``(blocks, page
    bytes)``. The tensors share the memory of ``cache``.

    ``cache``: the layer's KV tensor. Its first dimension counts blocks, or kernel blocks that divide a block
    equally. ``blocks``: number of blocks. ``name``: the layer's name, for errors. Usually there is one row.
    If heads lie outside the blocks, there is one per head. Raises ``UnsupportedKvCaches`` for gaps.
    """
    import torch

    shape, strides, item_bytes = tuple(cache.shape), cache.stride(), cache.element_size()
    if not shape or shape[0] == 0 or shape[0] % blocks:
        raise UnsupportedKvCaches(
            f"layer {name}: KV of shape {shape} and strides {strides}; expected {blocks} blocks"
        )
    grouped = cache.unflatten(0, (blocks, -1))
    block_stride = grouped.stride(0)
    inner = [
        (stride, length)
        for stride, length in zip(grouped.stride()[1:], grouped.shape[1:], strict=True)
        if length > 1
    ]
    outside = [(stride, length) for stride, length in inner if stride >= block_stride and blocks > 1]
    page_items, has_gaps = 1, False
    for stride, length in sorted(each for each in inner if each not in outside):
        has_gaps = has_gaps or stride != page_items
        page_items *= length
    if has_gaps or (blocks > 1 and page_items > block_stride):
        raise UnsupportedKvCaches(
            f"layer {name}: KV of shape {shape} and strides {strides}; "
            "expected blocks without gaps or overlaps"
        )
    starts = [sum(at) for at in product(*([stride * n for n in range(length)] for stride, length in outside))]
    size = (blocks, page_items * item_bytes)
    return [
        torch.empty(0, dtype=torch.uint8, device=cache.device).set_(
            cache.untyped_storage(),
            (cache.storage_offset() + start) * item_bytes,
            size,
            (max(block_stride, page_items) * item_bytes, 1),
        )
        for start in sorted(starts)
    ]


def merge_neighbours(pages: Sequence[KvPages]) -> list[KvPages]:
    """Merge rows whose pages are adjacent in memory. Returns rows that cover the same bytes.

    Only rows that follow each other in ``pages`` are merged. If the layers of a block are adjacent in memory,
    they become one row, so that one copy moves a block of all these layers.
    """
    merged: list[KvPages] = []
    for each in pages:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.stride_bytes == each.stride_bytes
            and last.address + last.page_bytes == each.address
            and last.page_bytes + each.page_bytes <= last.stride_bytes
        ):
            merged[-1] = last._replace(page_bytes=last.page_bytes + each.page_bytes)
        else:
            merged.append(each)
    return merged


def device_layout(kv_caches: Mapping[str, Any], blocks: int) -> str:
    """Return a hash of the order of bytes within a block, which a GPU's attention backend chooses. It does
    not depend on where the blocks lie or how many there are. Empty on a CPU, where ``KvIdentity.kv_dtype``
    already names the order."""
    if next(iter(kv_caches.values())).device.type == "cpu":
        return ""
    kinds = []
    for cache in kv_caches.values():
        inner = cache.unflatten(0, (blocks, -1))
        axes = [(inner.stride(axis), axis) for axis in range(1, inner.dim()) if inner.shape[axis] > 1]
        order = [axis for _, axis in sorted(axes, reverse=True)]
        kinds.append((tuple(inner.shape[1:]), order))
    return hashlib.blake2b(repr(kinds).encode(), digest_size=6).hexdigest()
