"""Copies between the KV memory of a CPU engine and host memory.

``CpuDeviceBackend`` is the counterpart of ``CudaDeviceBackend``. Torch only views tensors as arrays of bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .offload_jobs import BlockCopy

ByteArray = np.ndarray[Any, Any]
"""An array of ``uint8``."""

CHUNK_BLOCKS = 32
"""Number of blocks copied at once. A chunk of this size stays in the processor's cache."""


class CpuCopy(NamedTuple):
    """Copies on a CPU, which are already complete."""

    seconds: float

    def wait(self) -> float:
        return self.seconds


class CpuDeviceBackend:
    """Copies blocks between a CPU engine's KV memory and ``slots`` slots of host memory. A slot holds one
    block, with its layers one after the other, as in a block's file.

    Each call returns after its copies are complete. So fences (``DeviceBackend.fence``) have no effect.
    """

    def __init__(self, rows: Sequence[ByteArray], slots: int, *, by_layer: bool = False) -> None:
        """``rows``: for each layer, in forward order, an array with one row of bytes per block. With
        ``by_layer``, a slot holds one of the ``n`` layers, which have one size: block id ``b * n + layer`` is
        that layer of block ``b``."""
        self._layers = list(rows)
        self._by_layer = by_layer
        sizes = [layer.shape[1] for layer in self._layers]
        self._starts = [0 if by_layer else sum(sizes[:index]) for index in range(len(sizes))]
        self.block_bytes = sizes[0] if by_layer else sum(sizes)
        # The system provides pages at their first write, so unused slots cost nothing.
        self._host = np.empty((slots, self.block_bytes), np.uint8)

    def fence(self) -> None:
        """Return ``None``, because on a CPU all earlier work is already complete."""

    def to_host(self, copies: Sequence[BlockCopy], after: None = None) -> CpuCopy:
        return self._copy(copies, to_host=True)

    def to_device(self, copies: Sequence[BlockCopy], after: None = None) -> CpuCopy:
        return self._copy(copies, to_host=False)

    def _copy(self, copies: Sequence[BlockCopy], *, to_host: bool) -> CpuCopy:
        began = time.perf_counter()
        for start in range(0, len(copies), CHUNK_BLOCKS):
            blocks, slots = np.array(copies[start : start + CHUNK_BLOCKS], np.intp).T
            for number, (layer, first) in enumerate(zip(self._layers, self._starts, strict=True)):
                ids, places, part = blocks, slots, slice(first, first + layer.shape[1])
                if self._by_layer:
                    here = blocks % len(self._layers) == number
                    ids, places = blocks[here] // len(self._layers), slots[here]
                if to_host:
                    self._host[places, part] = layer[ids]
                else:
                    layer[ids] = self._host[places, part]
        return CpuCopy(time.perf_counter() - began)

    def hold_compute(self, copy: CpuCopy) -> None:
        """Do nothing, because ``copy`` is already complete."""

    def slot(self, slot: int) -> memoryview:
        return memoryview(self._host[slot])

    def close(self) -> None:
        """Do nothing, because host memory is released with this object."""
