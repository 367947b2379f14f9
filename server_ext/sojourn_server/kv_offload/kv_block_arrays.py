"""Copies an engine's KV blocks layer by layer, through staging memory. For transfers between engines.

With CUDA, time runs to the right. On a CPU each copy is complete when it is queued.

    compute stream  ── layer n ──● fence ── layer n+1 ──(hold)── layer n+2 ──
    gather                       └▶ device to staging memory ──● the caller copies on to other memory
    scatter                      └▶ staging memory to device ──● hold: layer n+2 waits; else the caller waits

A gather returns memory that nothing else writes to. When the call returns, the device has read the blocks, so
other requests may overwrite them. A scatter is complete when the call returns, unless ``hold`` is set. With
``hold`` the call returns earlier, and the device completes the scatter before any later work of the model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import numpy as np

from .offload_jobs import BlockCopy
from .offload_worker import Copy, DeviceBackend

STAGING_BYTES = 64 * 2**20
"""Bytes of staging memory for each direction. Larger transfers pass through it in parts."""


class KvBlockArrays:
    """Copies KV blocks layer by layer. A Full Block consists of ``per_full`` engine blocks.

    Only the thread that runs the model may call ``fence``, or ``scatter`` with ``hold``. Any thread may call
    ``gather``, ``gather_full``, and ``scatter`` without ``hold``.
    """

    def __init__(self, layers: Iterable[str], per_full: int, backend: DeviceBackend, rows: int) -> None:
        """``layers``: their names, in the order of the forward pass. ``backend``: copies layers of engine
        blocks. Its slots are the staging memory: ``rows`` to the host, then ``rows`` to the device."""
        self.index = {name: at for at, name in enumerate(layers)}
        self.per_full = per_full
        self.engine_bytes = backend.block_bytes
        self.layer_bytes = self.engine_bytes * per_full
        self.block_bytes = self.layer_bytes * len(self)
        self._backend = backend
        self._staging_rows = rows
        self._out_lock, self._in_lock = threading.Lock(), threading.Lock()
        """Each lock guards the staging memory of one direction."""
        self._last_in: Copy | None = None
        """The newest copy from staging memory to the device, if it may still be under way."""

    def __len__(self) -> int:
        return len(self.index)

    def fence(self) -> Any:
        """Return a fence after all work queued so far. A copy begins once its fence ``after`` is passed."""
        return self._backend.fence()

    def close(self) -> None:
        """Wait for all copies and release the staging memory."""
        self._backend.close()

    def gather(self, layer: int, block_ids: Sequence[int], after: Any = None) -> list[memoryview]:
        """Return copies of Layer Blocks (one layer of a Full Block each): of layer number ``layer`` of the
        engine blocks ``block_ids``. An incomplete last one is padded with zeros."""
        return self._read([layer], block_ids, after)

    def gather_full(self, block_ids: Sequence[int], after: Any = None) -> list[memoryview]:
        """Return a copy of the Full Block of the engine blocks ``block_ids``, one buffer per layer."""
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
        """Copy layer number ``layer`` of the Full Blocks ``blocks`` into ``block_ids``. Returns those filled.

        ``skip``: number of engine blocks at the beginning of ``blocks`` that are not copied. ``part``:
        position of the layer in each of ``blocks``; 0 if they hold only this layer. ``hold``: return without
        waiting for the copy; the device finishes it before any work that the calling thread queues later.
        Only the thread that runs the model may set ``hold``.
        """
        count = min(len(block_ids), max(0, len(blocks) * self.per_full - skip))
        start, size = part * self.layer_bytes, self.engine_bytes
        with self._in_lock:
            for low in range(0, count, self._staging_rows):
                copies = []
                self._await_staging()
                for row, at in enumerate(
                    range(low, min(count, low + self._staging_rows)), self._staging_rows
                ):
                    copies.append(BlockCopy(block_ids[at] * len(self) + layer, row))
                    full, engine = divmod(skip + at, self.per_full)
                    first = start + engine * size
                    self._backend.slot(row)[:] = blocks[full][first : first + size]
                self._last_in = self._backend.to_device(copies, after)
            if hold and self._last_in is not None:
                self._backend.hold_compute(self._last_in)
            else:
                self._await_staging()  # before the blocks' request is reported as loaded
        return list(block_ids[:count])

    def _read(self, layers: Sequence[int], block_ids: Sequence[int], after: Any) -> list[memoryview]:
        """Return the Layer Blocks of ``layers``, one layer after the other."""
        full = -(-len(block_ids) // self.per_full)
        made = np.zeros((len(layers), full * self.per_full, self.engine_bytes), np.uint8)
        rows = [row for of_layer in made for row in of_layer[: len(block_ids)]]
        places = [block * len(self) + layer for layer, block in product(layers, block_ids)]
        with self._out_lock:
            for low in range(0, len(places), self._staging_rows):
                some = places[low : low + self._staging_rows]
                # Before the copies are read on the host, the device must have made them.
                self._backend.to_host([BlockCopy(each, slot) for slot, each in enumerate(some)], after).wait()
                for slot, row in enumerate(rows[low : low + len(some)]):
                    row[:] = self._backend.slot(slot)
        layer_blocks: Any = made.reshape(len(layers) * full, self.layer_bytes)
        return [memoryview(each) for each in layer_blocks]

    def _await_staging(self) -> None:
        """Wait until the device has read the staging memory, before the host writes it again."""
        copy, self._last_in = self._last_in, None
        if copy is not None:
            copy.wait()
