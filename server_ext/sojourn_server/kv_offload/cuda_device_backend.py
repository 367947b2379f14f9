"""Copies between the KV memory of a CUDA device and pinned host memory, ordered by streams and events.

    compute stream  ── step N ──● fence ─────────────────(hold)── step N+1 ──
    store stream                └▶ copies to host ──● done ─┘
    load stream                 └▶ copies to the device, once earlier copies have filled their slots ──● done

The thread that runs the model never waits for these copies on the host. To save a block that the next step
overwrites, it calls ``to_host`` with a fence, then ``hold_compute``, so that the device itself waits. Only
the threads of ``OffloadWorker`` wait, before they report a copy's end or read a slot that a copy fills.

Only ``TorchCuda`` imports torch, so that the order of copies can be tested without a device.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .kv_pages import KvPages
from .offload_jobs import BlockCopy

Int64Array = np.ndarray[Any, np.dtype[np.int64]]
Addresses = tuple[Int64Array, Int64Array, Int64Array]
"""For each copy, the address of its source, that of its destination, and its size."""

PIN_CHUNK_BYTES = 16 * 2**30
"""Host memory is pinned in chunks of at most this many bytes, because drivers refuse very large ones."""

MEMORY_PAGE_BYTES = 4096


CudaEvent = Any
"""A point in a stream's work: ``torch.cuda.Event``."""
CudaStream = Any
"""A queue of work that the device does in order: ``torch.cuda.Stream``."""


@dataclass(slots=True, eq=False)
class CudaCopy:
    """Copies that have begun. It keeps the arrays of addresses that the device may still read."""

    begun: CudaEvent
    event: CudaEvent
    """Completes when all bytes have arrived."""
    arrays: tuple[Int64Array, ...]

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> float:
        """Block the calling thread until all bytes have arrived. Return the seconds that the copies took.
        Raises ``RuntimeError`` from CUDA."""
        self.event.synchronize()
        self.arrays = ()
        return float(self.begun.elapsed_time(self.event)) / 1e3


class CudaDeviceBackend:
    """Copies blocks between a CUDA device's KV memory and ``slots`` slots of pinned host memory, as
    ``CpuDeviceBackend`` does."""

    def __init__(
        self, pages: Sequence[KvPages] | Sequence[Sequence[KvPages]], slots: int, cuda: TorchCuda
    ) -> None:
        """``pages``: places of the blocks on the device, in the order of the forward pass. Or a list of the
        places for each of ``n`` layers: then block id ``b * n + layer`` is that layer of block ``b``. Raises
        ``RuntimeError`` if host memory cannot be pinned; nothing stays pinned then."""
        self._cuda = cuda
        table = np.array(list(pages), np.int64)
        self._pages = table if table.ndim == 3 else table[None]
        """[layer, page, field of ``KvPages``]"""
        self.block_bytes = int(self._pages[0, :, 2].sum())
        # It begins with a page of memory. The operating system allocates a page when it is first pinned.
        raw = np.empty(slots * self.block_bytes + MEMORY_PAGE_BYTES, np.uint8)
        start = -raw.ctypes.data % MEMORY_PAGE_BYTES
        self._host = raw[start : start + slots * self.block_bytes].reshape(slots, self.block_bytes)
        self._pinned: list[int] = []
        """Addresses of the pinned chunks."""
        self._pin_host_memory()
        self._lock = threading.Lock()
        """Held while a stream's wait and the copies after it are queued: nothing may come between them."""
        self._store_stream = cuda.new_stream()
        self._load_stream = cuda.new_stream()
        self._filling: dict[int, CudaCopy] = {}
        """Slot → the last copy into it."""

    def fence(self) -> CudaEvent:
        return self._event(self._cuda.compute_stream())

    def to_host(self, copies: Sequence[BlockCopy], after: CudaEvent) -> CudaCopy:
        # Of several copies into a slot only the last is made: copies of one call have no order.
        last = {copy.slot: copy.block_id for copy in copies}
        pages, places, sizes = self._addresses(list(last.values()), list(last))
        with self._lock:
            self._store_stream.wait_event(after)
            copy = self._queue((pages, places, sizes), self._store_stream, stable_sources=False)
            self._filling.update(dict.fromkeys(last, copy))
        return copy

    def to_device(self, copies: Sequence[BlockCopy], after: CudaEvent) -> CudaCopy:
        slots = [copy.slot for copy in copies]
        pages, places, sizes = self._addresses([copy.block_id for copy in copies], slots)
        with self._lock:
            self._load_stream.wait_event(after)
            stable = self._follow_stores(slots)
            return self._queue((places, pages, sizes), self._load_stream, stable_sources=stable)

    def hold_compute(self, copy: CudaCopy) -> None:
        self._cuda.compute_stream().wait_event(copy.event)

    def slot(self, slot: int) -> memoryview:
        with self._lock:
            copy = self._filling.get(slot)
        if copy is not None:
            copy.wait()
        return memoryview(self._host[slot])

    def close(self) -> None:
        for stream in (self._store_stream, self._load_stream):
            self._event(stream).synchronize()
        self._unpin()

    # -- inside --------------------------------------------------------------------------

    def _follow_stores(self, slots: Sequence[int]) -> bool:
        """Make the load stream wait for unfinished copies into ``slots``. Return true if there are none. Only
        then are the slots stable sources (see ``TorchCuda.copy``)."""
        filling = {copy for slot in slots if (copy := self._filling.get(slot)) is not None}
        pending = [copy for copy in filling if not copy.done()]
        for copy in pending:
            self._load_stream.wait_event(copy.event)
        return not pending

    def _addresses(self, block_ids: Sequence[int], slots: Sequence[int]) -> Addresses:
        """Return, for each page of the blocks, its address on the device, that in the slot, and its size."""
        at = np.array(slots, np.int64)
        if at.size and not 0 <= at.min() <= at.max() < len(self._host):
            # A copy by address would reach other memory of the process.
            raise IndexError(f"slots {at.min()} to {at.max()}; expected 0 to {len(self._host) - 1}")
        ids, layers = np.divmod(np.array(block_ids, np.int64), len(self._pages))
        address, stride, size = np.moveaxis(self._pages[layers], 2, 0)
        places = self._host.ctypes.data + at[:, None] * self.block_bytes + np.cumsum(size, axis=1) - size
        return (address + ids[:, None] * stride).ravel(), places.ravel(), size.ravel()

    def _queue(self, arrays: Addresses, stream: CudaStream, *, stable_sources: bool) -> CudaCopy:
        begun = self._event(stream)
        self._cuda.copy(*arrays, stream, stable_sources=stable_sources)
        return CudaCopy(begun, self._event(stream), arrays)

    def _event(self, stream: CudaStream) -> CudaEvent:
        """Return an event that completes when the device has done all work queued on ``stream`` so far."""
        event = self._cuda.new_event()
        event.record(stream)
        return event

    def _pin_host_memory(self) -> None:
        """Each chunk except the last ends where both a slot and a memory page end. So no copy of a slot
        crosses chunks, and no page is pinned twice."""
        slots, slot_bytes = self._host.shape
        unit = MEMORY_PAGE_BYTES // math.gcd(slot_bytes, MEMORY_PAGE_BYTES)
        chunk_slots = max(unit, PIN_CHUNK_BYTES // slot_bytes // unit * unit)
        for first in range(0, slots, chunk_slots):
            address = self._host.ctypes.data + first * slot_bytes
            try:
                self._cuda.pin(address, min(chunk_slots, slots - first) * slot_bytes)
            except RuntimeError:
                self._unpin()
                raise
            self._pinned.append(address)

    def _unpin(self) -> None:
        while self._pinned:
            self._cuda.unpin(self._pinned.pop())


class TorchCuda:
    """The part of CUDA that copies need, by torch. Any thread may use it. Tests have a stand-in."""

    def __init__(self, device: Any, batch_copy: Callable[..., None]) -> None:
        """``batch_copy``: a function like vLLM's ``swap_blocks_batch``. It takes ``Addresses`` as
        int64 tensors, and whether sources are stable. It uses the current stream."""
        import torch

        self._torch = torch
        self._device = torch.device(device)
        self._batch_copy = batch_copy

    def compute_stream(self) -> CudaStream:
        """Return the stream on which the calling thread runs the model."""
        return self._torch.cuda.current_stream(self._device)

    def new_stream(self) -> CudaStream:
        # 0 is the lowest priority. If copies need the device's processors, the model goes first.
        return self._torch.cuda.Stream(self._device, priority=0)

    def new_event(self) -> CudaEvent:
        # A waiting thread sleeps, so that it takes no core from the thread that runs the model.
        return self._torch.cuda.Event(enable_timing=True, blocking=True)

    def pin(self, address: int, size_bytes: int) -> None:
        """Pin host memory. Raises ``RuntimeError``."""
        cuda = self._torch.cuda
        cuda.check_error(cuda.cudart().cudaHostRegister(address, size_bytes, 0))

    def unpin(self, address: int) -> None:
        self._torch.cuda.cudart().cudaHostUnregister(address)

    def copy(
        self, sources: Any, destinations: Any, sizes: Any, stream: CudaStream, *, stable_sources: bool
    ) -> None:
        """Queue copies (``Addresses``). ``stable_sources``: nothing writes to the sources any more, so the
        device may read them before the stream reaches the copy. Raises ``RuntimeError``."""
        torch = self._torch
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            self._batch_copy(*map(torch.from_numpy, (sources, destinations, sizes)), stable_sources)
