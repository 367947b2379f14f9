"""Copies between the KV memory of a CPU engine and host memory.

``CpuDeviceBackend`` is the counterpart of ``cuda_device_backend.CudaDeviceBackend``. ``KvBlockArrays`` serves
transfers between engines. Torch is used only to view tensors as arrays of bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .kv_pages import UnsupportedKvCaches, page_views
from .offload_jobs import BlockCopy

ByteArray = np.ndarray[Any, Any]
"""An array of ``uint8``."""

CHUNK_BLOCKS = 32
"""Number of blocks copied at once. A chunk of this size stays in the processor's cache."""


def block_rows(name: str, cache: Any, blocks: int) -> ByteArray:
    """Return one layer's KV tensor as an array with one row of bytes for each of ``blocks`` blocks. The array
    shares the tensor's memory.

    Raises ``UnsupportedKvCaches`` if the tensor is not on the CPU, or if a block's bytes are not contiguous.
    """
    if cache.device.type != "cpu":
        raise UnsupportedKvCaches(f"layer {name}: KV on {cache.device}; expected a CPU engine")
    views = page_views(name, cache, blocks)
    if len(views) != 1:
        raise UnsupportedKvCaches(f"layer {name}: each block lies in {len(views)} places; expected one")
    rows: ByteArray = views[0].numpy()
    return rows


class CpuCopy(NamedTuple):
    """The result of copies on a CPU, which are already complete."""

    seconds: float

    def wait(self) -> float:
        """Return the seconds that the copies took."""
        return self.seconds


class CpuDeviceBackend:
    """Copies blocks between a CPU engine's KV memory and ``slots`` slots of host memory. A slot holds one
    block, with its layers one after the other, as in a block's file.

    Each call returns after its copies are complete. So fences (``DeviceBackend.fence``) have no effect.
    """

    def __init__(self, rows: Sequence[ByteArray], slots: int) -> None:
        """``rows``: for each layer, in forward order, an array with one row of bytes per block."""
        self._layers = list(rows)
        sizes = [layer.shape[1] for layer in self._layers]
        self._offsets = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
        self.block_bytes = self._offsets[-1]
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
            for layer, first, end in zip(self._layers, self._offsets, self._offsets[1:], strict=False):
                if to_host:
                    self._host[slots, first:end] = layer[blocks]
                else:
                    layer[blocks] = self._host[slots, first:end]
        return CpuCopy(time.perf_counter() - began)

    def hold_compute(self, copy: CpuCopy) -> None:
        """Do nothing, because ``copy`` is already complete."""

    def slot(self, slot: int) -> memoryview:
        return memoryview(self._host[slot])

    def close(self) -> None:
        """Do nothing, because host memory is released with this object."""


class KvBlockArrays:
    """Copies a CPU engine's KV blocks layer by layer. A Full Block consists of ``per_full`` engine blocks.

    ``cuda_block_arrays.CudaBlockArrays`` does so on a CUDA device. A *fence* marks a point in the device's
    queue of model work. It completes when the device has done all work queued before that point. A copy
    begins once its fence ``after`` has completed, and a call returns when its copy is complete.
    """

    def __init__(self, layers: Mapping[str, ByteArray], per_full: int) -> None:
        """``layers``: the ``block_rows`` of each layer, in the order of the forward pass. Raises
        ``ValueError`` for layers of different sizes."""
        self._rows = list(layers.values())
        self._set_sizes(layers, {int(rows.shape[1]) for rows in self._rows}, per_full)

    def _set_sizes(self, layers: Iterable[str], sizes: set[int], per_full: int) -> None:
        self.index = {name: at for at, name in enumerate(layers)}
        self.per_full = per_full
        if len(sizes) != 1:
            raise ValueError(f"layers have blocks of {sorted(sizes)} bytes; expected one size")
        (self.engine_bytes,) = sizes
        self.layer_bytes = self.engine_bytes * per_full
        self.block_bytes = self.layer_bytes * len(self)

    def __len__(self) -> int:
        return len(self.index)

    def fence(self) -> Any:
        """Return a fence after all work that the calling thread has queued so far. On a CPU that is ``None``,
        because all earlier work is already complete."""
        return None

    def close(self) -> None:
        """Do nothing, because nothing is pinned."""

    def gather(self, layer: int, block_ids: Sequence[int], after: Any = None) -> list[memoryview]:
        """Copy layer number ``layer`` of the engine blocks ``block_ids`` into Layer Blocks (one layer of a
        Full Block each), and return them. An incomplete last Layer Block is padded with zeros."""
        return self._read([layer], block_ids, after)

    def gather_full(self, block_ids: Sequence[int], after: Any = None) -> list[memoryview]:
        """Return a copy of the Full Block that consists of the engine blocks ``block_ids``, one buffer per
        layer."""
        return self._read(range(len(self)), block_ids, after)

    def scatter(
        self,
        layer: int,
        blocks: Sequence[memoryview],
        skip: int,
        block_ids: Sequence[int],
        part: int = 0,
        *,
        after: Any = None,
        hold: bool = False,
    ) -> list[int]:
        """Copy layer number ``layer`` of the Full Blocks ``blocks`` into the engine blocks ``block_ids``.
        Returns the ids that are filled.

        ``skip``: number of engine blocks at the beginning of ``blocks`` that are not copied. ``part``:
        position of the layer in each of ``blocks``; 0 if they hold only this layer. ``hold``: return without
        waiting for the copy; the device finishes it before any work that the calling thread queues later.
        Only the thread that runs the model may set ``hold``.
        """
        count = min(len(block_ids), max(0, len(blocks) * self.per_full - skip))
        start, size = part * self.layer_bytes, self.engine_bytes
        rows = [
            np.frombuffer(blocks[at // self.per_full], np.uint8, size, start + at % self.per_full * size)
            for at in range(skip, skip + count)
        ]
        filled = list(block_ids[:count])
        if filled:
            self._write(layer, filled, rows, after, hold)
        return filled

    def _read(self, layers: Sequence[int], block_ids: Sequence[int], after: Any) -> list[memoryview]:
        """Return the Layer Blocks of ``layers``, one layer after the other."""
        full = -(-len(block_ids) // self.per_full)
        made = np.zeros((len(layers), full * self.per_full, self.engine_bytes), np.uint8)
        self._read_into(made[:, : len(block_ids)], layers, block_ids, after)
        rows: Any = made.reshape(len(layers) * full, self.layer_bytes)
        return [memoryview(row) for row in rows]

    def _read_into(
        self, made: ByteArray, layers: Sequence[int], block_ids: Sequence[int], after: Any
    ) -> None:
        ids = np.asarray(block_ids, np.intp)
        for rows, layer in zip(made, layers, strict=True):
            np.take(self._rows[layer], ids, axis=0, out=rows, mode="clip")  # releases the GIL

    def _write(
        self, layer: int, block_ids: list[int], rows: Sequence[ByteArray], after: Any, hold: bool
    ) -> None:
        self._rows[layer][block_ids] = rows
