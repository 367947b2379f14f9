"""KV blocks of a CPU engine, and host memory beside them. Imports torch's tensors only as arrays of bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .jobs import Copy

CHUNK_BLOCKS = 32
"""Copied at once: what is gathered on the way stays in the processor's cache."""


class UnsupportedCaches(RuntimeError):
    """The engine's KV tensors are not as this room knows them; the text says what they are."""


class HostMemory:
    """Slots of ``slots`` blocks of all layers, each in one piece, as a file of it is."""

    def __init__(self, caches: Mapping[str, Any], blocks: int, slots: int) -> None:
        """``caches``: of each layer its tensor on the CPU, whose first dimension is the block.

        Raises ``UnsupportedCaches`` for tensors on another device or of another shape.
        """
        self.layers: Sequence[str] = list(caches)
        self._layers = [_bytes_of(name, cache, blocks) for name, cache in caches.items()]
        sizes = [layer.shape[1] for layer in self._layers]
        self._offsets = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
        self.block_bytes = self._offsets[-1]
        # Pages are the system's to give when they are first written, so an unused tier costs nothing.
        self._host = np.empty((slots, self.block_bytes), np.uint8)

    def to_host(self, copies: Sequence[Copy]) -> None:
        """Copy blocks of all layers, in this order: of several into one slot the last one stays."""
        for start in range(0, len(copies), CHUNK_BLOCKS):
            blocks, slots = _indices(copies[start : start + CHUNK_BLOCKS])
            for index, layer in enumerate(self._layers):
                self._host[slots, self._offsets[index] : self._offsets[index + 1]] = layer[blocks]

    def to_device(self, copies: Sequence[Copy], layer: int) -> None:
        """Copy one layer of blocks."""
        part = slice(self._offsets[layer], self._offsets[layer + 1])
        for start in range(0, len(copies), CHUNK_BLOCKS):
            blocks, slots = _indices(copies[start : start + CHUNK_BLOCKS])
            self._layers[layer][blocks] = self._host[slots, part]

    def slot(self, slot: int) -> memoryview:
        """The bytes of a slot, to be read and written."""
        return memoryview(self._host[slot])


def _indices(copies: Sequence[Copy]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    pairs = np.array(copies, np.intp)
    return pairs[:, 0], pairs[:, 1]


def _bytes_of(name: str, cache: Any, blocks: int) -> np.ndarray[Any, Any]:
    import torch

    if cache.device.type != "cpu":
        raise UnsupportedCaches(f"layer {name}: KV on {cache.device}; this mover copies CPU engines' blocks")
    if cache.shape[0] != blocks or not cache.is_contiguous():
        shape, strides = tuple(cache.shape), cache.stride()
        raise UnsupportedCaches(
            f"layer {name}: KV of shape {shape} and strides {strides}; expected {blocks} blocks, contiguous"
        )
    flat: np.ndarray[Any, Any] = cache.view(blocks, -1).view(torch.uint8).numpy()
    return flat
