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
from itertools import product
from typing import Any

import numpy as np

from .cpu_device_backend import KvBlockArrays
from .cuda_device_backend import CudaCopy, CudaDeviceBackend, CudaEvent, TorchCuda
from .kv_pages import KvPages
from .offload_jobs import BlockCopy

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
        cuda: TorchCuda,
        *,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """``layers``: places of each layer's blocks on the device, in the order of the forward pass. Raises
        ``ValueError`` for layers of different sizes, and ``RuntimeError`` if host memory cannot be pinned."""
        sizes = {sum(each.page_bytes for each in pages) for pages in layers.values()}
        self._set_sizes(layers, sizes, per_full)
        self._rows_each_way = max(1, staging_bytes // self.engine_bytes)
        self._backend = CudaDeviceBackend([*layers.values()], 2 * self._rows_each_way, cuda)
        """Its slots are the staging memory: first those to the host, then those to the device."""
        self._out_lock, self._in_lock = threading.Lock(), threading.Lock()
        """Each lock guards the staging memory of one direction."""
        self._last_in: CudaCopy | None = None
        """The newest copy from staging memory to the device, if it may still be under way."""

    def fence(self) -> CudaEvent:
        return self._backend.fence()

    def close(self) -> None:
        """Wait for all copies and unpin host memory."""
        self._backend.close()

    # -- inside --------------------------------------------------------------------------

    def _read_into(
        self,
        made: np.ndarray[Any, Any],
        layers: Sequence[int],
        block_ids: Sequence[int],
        after: CudaEvent,
    ) -> None:
        places = list(product(layers, block_ids))
        rows = [row for of_layer in made for row in of_layer]
        with self._out_lock:
            for low in range(0, len(places), self._rows_each_way):
                some = places[low : low + self._rows_each_way]
                copies = [BlockCopy(self._id(*place), slot) for slot, place in enumerate(some)]
                # Before the copies are read on the host, the device must have made them.
                self._backend.to_host(copies, after).wait()
                for slot, row in enumerate(rows[low : low + len(some)]):
                    row[:] = self._backend.slot(slot)

    def _write(
        self,
        layer: int,
        block_ids: list[int],
        rows: Sequence[np.ndarray[Any, Any]],
        after: CudaEvent,
        hold: bool,
    ) -> None:
        with self._in_lock:
            for low in range(0, len(block_ids), self._rows_each_way):
                ids = block_ids[low : low + self._rows_each_way]
                slots = range(self._rows_each_way, 2 * self._rows_each_way)
                copies = [
                    BlockCopy(self._id(layer, block), slot) for slot, block in zip(slots, ids, strict=False)
                ]
                self._await_staging()
                for copy, content in zip(copies, rows[low:], strict=False):
                    self._backend.slot(copy.slot)[:] = content.data
                self._last_in = self._backend.to_device(copies, after)
            assert self._last_in is not None
            if hold:
                self._backend.hold_compute(self._last_in)
            else:
                self._await_staging()  # before the blocks' request is reported as loaded

    def _id(self, layer: int, block: int) -> int:
        """Return the number by which ``_backend`` knows a layer of a block."""
        return block * len(self) + layer

    def _await_staging(self) -> None:
        """Wait until the device has read the staging memory, before the host writes it again."""
        copy, self._last_in = self._last_in, None
        if copy is not None:
            copy.wait()
