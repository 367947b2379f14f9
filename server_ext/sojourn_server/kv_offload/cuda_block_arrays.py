"""Copies a CUDA engine's KV blocks layer by layer, through pinned host memory. For transfers between engines.

``CudaBlockArrays`` is the counterpart of ``cpu_device_backend.KvBlockArrays``. Time runs to the right:

    compute stream  ── layer n ──● fence ── layer n+1 ──(hold)── layer n+2 ──
    gather                       └▶ device to pinned memory ──● the caller copies on to unpinned memory
    scatter                      └▶ pinned memory to device ──● hold: layer n+2 waits; else the caller waits

A gather returns ordinary (unpinned) memory that nothing else writes to. When the call returns, the device has
read the blocks, so other requests may overwrite them. A scatter is complete when the call returns, unless
``hold`` is set. With ``hold`` the call returns earlier, and the device completes the scatter before any later
work of the model.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .cpu_device_backend import KvBlockArrays
from .cuda_device_backend import (
    CudaCopy,
    CudaEvent,
    CudaRuntime,
    CudaStream,
    page_aligned,
    pin_memory,
    queue_copy,
    record_event,
)
from .kv_pages import KvPages

STAGING_BYTES = 64 * 2**20
"""Bytes of pinned host memory for each direction. Larger transfers pass through it in parts."""


class CudaBlockArrays:
    """Copies KV blocks of a CUDA device layer by layer. A Full Block consists of ``per_full`` engine blocks.

    Only the thread that runs the model may call ``fence``, or ``scatter`` with ``hold``. Any thread may call
    ``gather``, ``gather_full``, and ``scatter`` without ``hold``.
    """

    def __init__(
        self,
        layers: Mapping[str, Sequence[KvPages]],
        per_full: int,
        cuda: CudaRuntime,
        *,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """``layers``: places of each layer's blocks on the device, in the order of the forward pass. Raises
        ``ValueError`` for layers of different sizes, and ``RuntimeError`` if host memory cannot be pinned."""
        self.index = {name: at for at, name in enumerate(layers)}
        self._pages = [np.array(list(pages), np.int64).reshape(-1, 3) for pages in layers.values()]
        self.per_full = per_full
        sizes = {int(pages[:, 2].sum()) for pages in self._pages}
        if len(sizes) != 1:
            raise ValueError(f"layers have blocks of {sorted(sizes)} bytes; expected one size")
        self.engine_bytes = sizes.pop()
        self.layer_bytes = self.engine_bytes * per_full
        self.block_bytes = self.layer_bytes * len(self._pages)
        self._cuda = cuda
        rows = max(1, staging_bytes // self.engine_bytes)
        self._out, self._in = (page_aligned(rows, self.engine_bytes) for _ in range(2))
        self._pinned = pin_memory(cuda, self._out)
        try:
            self._pinned += pin_memory(cuda, self._in)
        except RuntimeError:
            self.close()
            raise
        self._out_stream, self._in_stream = cuda.new_stream(), cuda.new_stream()
        self._out_lock, self._in_lock = threading.Lock(), threading.Lock()
        """Each lock guards the staging memory of one direction, and the order of work on its stream."""
        self._last_in: CudaCopy | None = None
        """The newest copy from the staging memory ``_in`` to the device, if it may still be under way."""

    def __len__(self) -> int:
        return len(self._pages)

    def fence(self) -> CudaEvent:
        """Return an event that completes when the device has done all work that the calling thread has queued
        so far."""
        return record_event(self._cuda, self._cuda.compute_stream())

    def gather(self, layer: int, block_ids: Sequence[int], after: CudaEvent) -> list[memoryview]:
        """Once ``after`` is complete, copy layer number ``layer`` of the engine blocks ``block_ids`` into
        Layer Blocks (one layer of a Full Block each), and return them. An incomplete last Layer Block is
        padded with zeros."""
        full = -(-len(block_ids) // self.per_full)
        made = np.zeros((full * self.per_full, self.engine_bytes), np.uint8)
        self._read([(layer, block) for block in block_ids], made, after)
        return [memoryview(row) for row in made.reshape(full, self.layer_bytes)]  # type: ignore[arg-type]

    def gather_full(self, block_ids: Sequence[int], after: CudaEvent) -> list[memoryview]:
        """Return a copy of the Full Block that consists of the engine blocks ``block_ids``, one buffer per
        layer. The device reads the engine blocks once ``after`` is complete."""
        made = np.empty((len(self) * self.per_full, self.engine_bytes), np.uint8)
        self._read([(layer, block) for layer in range(len(self)) for block in block_ids], made, after)
        return [memoryview(row) for row in made.reshape(len(self), self.layer_bytes)]  # type: ignore[arg-type]

    def scatter(
        self,
        layer: int,
        blocks: Sequence[memoryview],
        skip: int,
        block_ids: Sequence[int],
        part: int = 0,
        *,
        after: CudaEvent,
        hold: bool = False,
    ) -> list[int]:
        """Once ``after`` is complete, copy layer number ``layer`` of the Full Blocks ``blocks`` into the
        engine blocks ``block_ids``. Returns the ids that are filled.

        ``skip``: number of engine blocks at the beginning of ``blocks`` that are not copied. ``part``:
        position of the layer in each of ``blocks``; 0 if they hold only this layer. ``hold``: return without
        waiting for the copy; the device finishes it before any work that the calling thread queues later.
        Only the thread that runs the model may set ``hold``.
        """
        count = min(len(block_ids), max(0, len(blocks) * self.per_full - skip))
        start, size = part * self.layer_bytes, self.engine_bytes
        with self._in_lock:
            self._in_stream.wait_event(after)
            for low in range(0, count, len(self._in)):
                ids = block_ids[low : min(count, low + len(self._in))]
                self._await_staging()
                for row, at in enumerate(range(skip + low, skip + low + len(ids))):
                    offset = start + at % self.per_full * size
                    content = np.frombuffer(blocks[at // self.per_full], np.uint8, size, offset)
                    self._in[row] = content
                pages, parts, sizes = self._addresses([(layer, block) for block in ids], self._in)
                self._last_in = self._copy(parts, pages, sizes, self._in_stream)
            if count and hold:
                assert self._last_in is not None
                self._hold(self._last_in)
            elif count:
                self._await_filled()
        return list(block_ids[:count])

    def close(self) -> None:
        """Wait for all copies and unpin host memory."""
        if hasattr(self, "_in_lock"):
            with self._in_lock:
                self._await_staging()
        while self._pinned:
            self._cuda.unpin(self._pinned.pop())

    # -- inside --------------------------------------------------------------------------

    def _read(self, places: Sequence[tuple[int, int]], into: np.ndarray[Any, Any], after: CudaEvent) -> None:
        """Copy blocks into the rows of ``into``. ``places``: (layer, block id) of each block."""
        with self._out_lock:
            self._out_stream.wait_event(after)
            for low in range(0, len(places), len(self._out)):
                some = places[low : low + len(self._out)]
                pages, parts, sizes = self._addresses(some, self._out)
                self._await_gathered(self._copy(pages, parts, sizes, self._out_stream))
                into[low : low + len(some)] = self._out[: len(some)]

    def _addresses(
        self, places: Sequence[tuple[int, int]], staging: np.ndarray[Any, Any]
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return three arrays with an item per page of the blocks ``places`` (layer, block id): address on
        the device, address in ``staging``, and size in bytes. Each block uses one row of ``staging``."""
        found: tuple[list[Any], list[Any], list[Any]] = [], [], []
        for row, (layer, block) in enumerate(places):
            address, stride, size = self._pages[layer].T
            found[0].append(address + block * stride)
            found[1].append(staging.ctypes.data + row * self.engine_bytes + np.cumsum(size) - size)
            found[2].append(size)
        pages, parts, sizes = (np.ascontiguousarray(np.concatenate(each), np.int64) for each in found)
        return pages, parts, sizes

    def _copy(self, sources: Any, destinations: Any, sizes: Any, stream: CudaStream) -> CudaCopy:
        return queue_copy(self._cuda, sources, destinations, sizes, stream, stable_sources=False)

    def _hold(self, copy: CudaCopy) -> None:
        self._cuda.compute_stream().wait_event(copy.event)

    @staticmethod
    def _await_gathered(copy: CudaCopy) -> None:
        """Wait until the device has read the blocks, before their copies are read on the host."""
        copy.wait()

    def _await_filled(self) -> None:
        """Wait until blocks are filled, before their request is reported as loaded."""
        self._await_staging()

    def _await_staging(self) -> None:
        """Wait until the device has read the staging memory, before the host writes it again."""
        copy, self._last_in = self._last_in, None
        if copy is not None:
            copy.wait()


KvBlocks = KvBlockArrays | CudaBlockArrays
"""Copies an engine's KV blocks layer by layer."""
