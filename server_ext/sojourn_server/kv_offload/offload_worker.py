"""Carries out the jobs of ``offload_scheduler`` in each step, in the process that runs the model.

A ``DeviceBackend`` copies the KV blocks of one kind of device. Each direction has a thread of its own: host
memory to device, device to host, host to disk, disk to host. vLLM schedules a request only after its load has
ended, and other requests compute meanwhile. So a step waits for loads only if one was cancelled.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from .offload_jobs import BlockCopy, BlockKey, CopyResult, FileCopy, OffloadJobs, OffloadResults
from .shared_store import BlockCorrupt, PutOutcome, SharedStore
from .transfer_thread import TransferThread

SEARCH_S = 0.5
"""Seconds after which a search of the disk ends with what it has found. Requests wait longer by default
(``TierLimits.max_stage_wait_s``), so they can use the result."""


class Copy(Protocol):
    """Copies that have begun."""

    def wait(self) -> float:
        """Wait until the copies are complete. Returns the seconds from their beginning."""


class DeviceBackend(Protocol):
    """Copies KV blocks between one worker's device and slots of host memory; one implementation per kind of
    device. Only the thread that runs the model may call ``fence`` and ``hold_compute``."""

    block_bytes: int
    """Bytes of one block over all layers."""

    def fence(self) -> Any:
        """Return a fence, which marks the end of all work that has been queued on the device so far."""

    def to_host(self, copies: Sequence[BlockCopy], after: Any) -> Copy:
        """Queue copies to host memory. They begin once the device has passed fence ``after``. If several
        copies have the same slot, the slot gets the content of the last."""

    def to_device(self, copies: Sequence[BlockCopy], after: Any) -> Copy:
        """Queue copies to the device. Each begins after fence ``after`` and earlier copies into its slot."""

    def hold_compute(self, copy: Any) -> None:
        """Make the device finish ``copy`` before any work that the calling thread queues later."""

    def slot(self, slot: int) -> memoryview:
        """Return the bytes of a slot, writable. Waits for the last copy into the slot."""

    def close(self) -> None:
        """Wait for all copies and release host memory."""


class OffloadWorker:
    """Carries out one worker's offload jobs. The thread that runs the model calls all methods.

    After an error in a copy to host memory, the content of host memory is unknown. Then the worker
    ``is_broken``: all jobs that use host memory fail from then on.
    """

    def __init__(
        self,
        device: DeviceBackend,
        disk: SharedStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device = device
        self._disk = disk
        self._clock = clock
        self._to_host = TransferThread("to_host")
        self._to_device = TransferThread("to_device")
        self._to_disk = TransferThread("to_disk")
        self._from_disk = TransferThread("from_disk")
        self._probe = TransferThread("probe")
        """Thread for searches of the disk, which thus need not wait for disk reads."""
        self._stores: dict[int, Future[Copy]] = {}
        """Number of a store job → its copies, once the device-to-host thread has begun them. Cancelled if a
        step needs them before: the model's thread then makes them."""
        self._loaded: dict[str, set[int]] = {}
        """Request whose load has ended → ids of its device blocks that were not filled."""
        self.is_broken = False
        self._lock = threading.Lock()
        self._results = OffloadResults()

    # -- a step --------------------------------------------------------------------

    def begin_step(self, jobs: OffloadJobs) -> None:
        """Begin a step's jobs, before its forward pass. The device completes saves and awaited stores before
        any work that is queued later. All other jobs run in parallel with that work.

        If this raises, the worker is broken, and ``take_results`` and ``take_loaded`` report what has not
        begun as failed. Otherwise the jobs' slots would stay in use, and requests would wait for ever."""
        fence = None
        try:
            self._save_before_step(jobs)
            # After the saves, because a load may fill a block that this step saves.
            fence = self._device.fence() if jobs.loads or jobs.stores else None
        except Exception:
            self.is_broken = True
            raise
        finally:
            stores = {} if self.is_broken else jobs.stores
            with self._lock:
                self._loaded.update((request_id, set(ids)) for request_id, ids in jobs.rejected.items())
                self._results.stored.update(dict.fromkeys(jobs.stores.keys() - stores, CopyResult.FAILED))
            for request_id, load in jobs.loads.items():
                self._to_device.submit(partial(self._load, request_id, load, fence))
            for job, copies in stores.items():
                self._stores[job] = begun = Future[Copy]()
                self._to_host.submit(partial(self._store, job, copies, begun, fence))
            if jobs.spills:
                self._to_disk.submit(partial(self._copy_files, jobs.spills, "to_disk", self._put))
            if jobs.stages:
                self._from_disk.submit(partial(self._copy_files, jobs.stages, "from_disk", self._get))
            for job, keys in jobs.probes.items():
                self._probe.submit(partial(self._look_for, job, keys))

    def _save_before_step(self, jobs: OffloadJobs) -> None:
        began = time.perf_counter()
        if jobs.settles:
            self.wait_for_loads()
        awaited = [self._unfinished(job, copies) for job, copies in jobs.awaited.items()]
        saves = [*(copy for copies in awaited for copy in copies), *jobs.saves]
        if saves and not self.is_broken:
            copy = self._device.to_host(saves, self._device.fence())
            self._device.hold_compute(copy)
            self._to_host.submit(lambda: self._moved("to_host", len(saves), copy.wait()))
        if jobs.settles or jobs.awaited or jobs.saves:
            with self._lock:
                self._results.waited_s += time.perf_counter() - began

    def take_loaded(self) -> tuple[set[str], set[int]]:
        """Return the ids of the requests whose loads have ended since the last call, and the ids of their
        device blocks that were not filled."""
        with self._lock:
            loaded, self._loaded = self._loaded, {}
        return set(loaded), set().union(*loaded.values())

    def wait_for_loads(self) -> None:
        """Wait until all loads that have begun have ended. A step needs this after a cancelled load."""
        self._to_device.end_of_work().wait()

    def take_results(self) -> OffloadResults:
        """Return the results of the jobs that have ended since the last call."""
        with self._lock:
            results, self._results = self._results, OffloadResults()
        for job in results.stored:
            self._stores.pop(job, None)
        return results

    def close(self) -> None:
        """Wait for queued work, at most 5 s per thread. Then close the device backend."""
        for lane in (self._to_host, self._to_device, self._probe, self._from_disk, self._to_disk):
            lane.close()
        self._device.close()

    # -- inside --------------------------------------------------------------------------

    def _unfinished(self, job: int, copies: Sequence[BlockCopy]) -> Sequence[BlockCopy]:
        """Return the copies of store job ``job`` that the caller must make before the step. If the copies
        have begun without an error, return none, and make the device end them before the step. Otherwise
        return all."""
        begun = self._stores.get(job)
        if begun is None:
            return copies  # already reported, possibly as failed; copying again is harmless
        if begun.cancel():  # do not wait for the work queued before it
            with self._lock:
                self._results.stored[job] = CopyResult.MOVED
            return copies
        try:
            self._device.hold_compute(begun.result())
        except Exception:
            return copies
        return ()

    def _moved(self, direction: str, blocks: int, seconds: float) -> None:
        with self._lock:
            self._results.seconds[direction] += seconds
            self._results.moved_bytes[direction] += blocks * self._device.block_bytes

    def _load(self, request_id: str, copies: Sequence[BlockCopy], fence: Any) -> None:
        not_filled = {copy.block_id for copy in copies}
        try:
            if not self.is_broken:
                self._moved("to_device", len(copies), self._device.to_device(copies, fence).wait())
                not_filled = set()
        finally:
            with self._lock:
                self._loaded[request_id] = not_filled

    def _store(self, job: int, copies: Sequence[BlockCopy], begun: Future[Copy], fence: Any) -> None:
        if not begun.set_running_or_notify_cancel():
            return
        copy_result = CopyResult.FAILED
        try:
            copy = self._device.to_host(copies, fence)
            begun.set_result(copy)
            self._moved("to_host", len(copies), copy.wait())
            copy_result = CopyResult.MOVED
        except Exception as error:
            self.is_broken = True
            if not begun.done():
                begun.set_exception(error)
            raise
        finally:
            with self._lock:
                self._results.stored[job] = copy_result

    def _copy_files(
        self, files: Sequence[FileCopy], direction: str, move: Callable[[SharedStore, FileCopy], CopyResult]
    ) -> None:
        """Copy blocks between host memory and disk. Each is answered, whatever is raised."""
        assert self._disk is not None
        for file in files:
            began, copy_result = time.perf_counter(), CopyResult.FAILED
            if not self.is_broken:
                with contextlib.suppress(Exception):
                    copy_result = move(self._disk, file)
            self._moved(direction, copy_result is CopyResult.MOVED, time.perf_counter() - began)
            with self._lock:
                reports = self._results.spilled if direction == "to_disk" else self._results.staged
                reports[file.key] = copy_result
        if direction == "from_disk":
            self._disk.touch([file.key for file in files])  # the end of the context as the oldest

    def _put(self, disk: SharedStore, file: FileCopy) -> CopyResult:
        outcome = disk.put(file.key, [self._device.slot(file.slot)])
        return CopyResult.FULL if outcome is PutOutcome.FULL else CopyResult.MOVED

    def _get(self, disk: SharedStore, file: FileCopy) -> CopyResult:
        try:
            disk.get_into(file.key, [self._device.slot(file.slot)])
        except FileNotFoundError:
            return CopyResult.MISSING
        except BlockCorrupt:
            return CopyResult.CORRUPT
        return CopyResult.MOVED

    def _look_for(self, job: int, keys: Sequence[BlockKey]) -> None:
        assert self._disk is not None
        found, is_missing, ends_s = 0, False, self._clock() + SEARCH_S
        try:
            while found < len(keys) and self._clock() <= ends_s and not is_missing:
                is_missing = not self._disk.has(keys[found])
                found += not is_missing
        finally:
            with self._lock:
                self._results.probed[job] = found, is_missing
        self._disk.touch(keys[:found])
