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
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from .cpu_device_backend import KvBlockArrays
from .cuda_device_backend import (
    CudaCopy,
    CudaEvent,
    CudaRuntime,
    CudaStream,
    Int64Array,
    PinnedMemory,
    queue_copy,
    record_event,
)
from .kv_pages import KvPages

STAGING_BYTES = 64 * 2**20
"""Bytes of pinned host memory for each direction. Larger transfers pass through it in parts."""


class CudaBlockArrays(KvBlockArrays):
    """Copies KV blocks of a CUDA device layer by layer.

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
        self._pages = [np.array(list(pages), np.int64).reshape(-1, 3) for pages in layers.values()]
        self._set_sizes(layers, {int(pages[:, 2].sum()) for pages in self._pages}, per_full)
        self._cuda = cuda
        staging_rows = max(1, staging_bytes // self.engine_bytes)
        self._pinned = PinnedMemory(cuda, 2 * staging_rows, self.engine_bytes)
        self._out, self._in = self._pinned.rows[:staging_rows], self._pinned.rows[staging_rows:]
        self._out_stream, self._in_stream = cuda.new_stream(), cuda.new_stream()
        self._out_lock, self._in_lock = threading.Lock(), threading.Lock()
        """Each lock guards the staging memory of one direction, and the order of work on its stream."""
        self._last_in: CudaCopy | None = None
        """The newest copy from the staging memory ``_in`` to the device, if it may still be under way."""

    def fence(self) -> CudaEvent:
        return record_event(self._cuda, self._cuda.compute_stream())

    def close(self) -> None:
        """Wait for all copies and unpin host memory."""
        with self._in_lock:
            self._await_staging()
        self._pinned.unpin()

    # -- inside --------------------------------------------------------------------------

    def _read_into(
        self,
        made: np.ndarray[Any, Any],
        layers: Sequence[int],
        block_ids: Sequence[int],
        after: CudaEvent,
    ) -> None:
        places = [(layer, block) for layer in layers for block in block_ids]
        rows = [row for of_layer in made for row in of_layer]
        with self._out_lock:
            self._out_stream.wait_event(after)
            for low in range(0, len(places), len(self._out)):
                some = places[low : low + len(self._out)]
                pages, parts, sizes = self._addresses(some, 0)
                # Before the copies are read on the host, the device must have made them.
                self._copy(pages, parts, sizes, self._out_stream).wait()
                for row, content in zip(rows[low:], self._out[: len(some)], strict=False):
                    row[:] = content

    def _write(
        self,
        layer: int,
        block_ids: list[int],
        rows: Sequence[np.ndarray[Any, Any]],
        after: CudaEvent,
        hold: bool,
    ) -> None:
        with self._in_lock:
            self._in_stream.wait_event(after)
            for low in range(0, len(block_ids), len(self._in)):
                ids = block_ids[low : low + len(self._in)]
                self._await_staging()
                for place, content in zip(self._in, rows[low:], strict=False):
                    place[:] = content
                pages, parts, sizes = self._addresses([(layer, block) for block in ids], len(self._out))
                self._last_in = self._copy(parts, pages, sizes, self._in_stream)
            assert self._last_in is not None
            if hold:
                self._cuda.compute_stream().wait_event(self._last_in.event)
            else:
                self._await_staging()  # before the blocks' request is reported as loaded

    def _addresses(self, places: Sequence[tuple[int, int]], row: int) -> list[Int64Array]:
        """Return ``PinnedMemory.addresses`` of the blocks ``places`` (layer, block id) and the rows from
        ``row`` on."""
        found = []
        for layer, group in groupby(places, key=itemgetter(0)):
            ids = [block for _, block in group]
            found.append(self._pinned.addresses(self._pages[layer], ids, range(row, row + len(ids))))
            row += len(ids)
        return [np.concatenate(each) for each in zip(*found, strict=True)]

    def _copy(self, sources: Any, destinations: Any, sizes: Any, stream: CudaStream) -> CudaCopy:
        return queue_copy(self._cuda, sources, destinations, sizes, stream, stable_sources=False)

    def _await_staging(self) -> None:
        """Wait until the device has read the staging memory, before the host writes it again."""
        copy, self._last_in = self._last_in, None
        if copy is not None:
            copy.wait()
