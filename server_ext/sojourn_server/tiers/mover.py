"""Carries out the orders of each step beside the model: the other half of ``planner``.

Works on any device whose KV blocks ``Device`` can copy. Each direction is a lane
of its own, and none waits for another: host memory to device, layer by layer, so
that the forward pass begins with the first layer while the second comes; device
to host; host to disk; disk to host.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from .disk_store import BlockMissing, DiskStore, Outcome, StoreError
from .full_block import BlockCorrupt
from .jobs import Copy, Fate, FileCopy, Key, Probed, TierJobs, TierResults
from .lane import Lane
from .siblings import Siblings


class Device(Protocol):
    """KV blocks of one worker, and slots of host memory of the same content."""

    layers: Sequence[str]
    """Names of layers in the order of the forward pass."""
    block_bytes: int
    """Of one block: all layers."""

    def to_host(self, copies: Sequence[Copy]) -> None:
        """Copy blocks of all layers, in this order; both are still when it returns."""

    def to_device(self, copies: Sequence[Copy], layer: int) -> None:
        """Copy one layer; the forward pass may use it when it returns."""

    def slot(self, slot: int) -> memoryview:
        """The bytes of a slot, to be read and written."""


class _Store:
    """A copy to host memory beside the computing."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self.copies = copies
        self._begun = threading.Lock()  # taken once, by whoever carries it out
        self.over = threading.Event()
        self.fate = Fate.FAILED

    def begin(self) -> bool:
        """Whether nobody has begun it: who asks does it."""
        return self._begun.acquire(blocking=False)


class Mover:
    """Of one worker. Every method but ``wait_for_layer`` is called by the thread that runs the model."""

    def __init__(
        self, device: Device, disk: DiskStore | None = None, siblings: Siblings | None = None
    ) -> None:
        self._device = device
        self._disk = disk
        self._siblings = siblings
        self._to_host = Lane("to_host")
        self._to_device = Lane("to_device")
        self._to_disk = Lane("to_disk")
        self._from_disk = Lane("from_disk")
        self._probe = Lane("probe") if siblings is not None else None
        """Of its own: whoever waits to hear whether there is anything does not wait for others' reads."""
        self._layer_index = {name: index for index, name in enumerate(device.layers)}
        self._stores: dict[int, _Store] = {}
        self._loaded: list[threading.Event] = []
        """Of this step's loads, each layer."""
        self._invalid: set[int] = set()
        self._lost: set[int] = set()
        """Slots that could not be filled and not since: the next step was planned before that was known."""
        self._lock = threading.Lock()
        self._results = TierResults(on_disk=disk.keys() if disk is not None else [])
        self._waited_s = 0.0

    # -- a step --------------------------------------------------------------------

    def begin_step(self, jobs: TierJobs) -> None:
        """Before the forward pass: what must be over is over when it returns, the rest is on its way."""
        began = time.perf_counter()
        awaited = [self._unfinished(job, copies) for job, copies in jobs.awaited.items()]
        self._save([copy for copies in awaited for copy in copies])
        self._save(jobs.saves)
        if jobs.awaited or jobs.saves:
            self._waited_s += time.perf_counter() - began
        self._load([copy for copies in jobs.loads.values() for copy in copies])
        for job, copies in jobs.stores.items():
            self._store(job, copies)
        # Drops come first: spills need their room, and may be of the same keys with other content.
        for key in jobs.drops:
            self._to_disk.give(partial(self._drop, key))
        for job, files in jobs.spills.items():
            lost = frozenset(file.slot for file in files if file.slot in self._lost)
            self._to_disk.give(partial(self._spill, job, files, lost))
        for job, files in jobs.stages.items():
            self._lost.difference_update(file.slot for file in files)
            self._from_disk.give(partial(self._stage, job, files))
        for job, keys in jobs.probes.items():
            if self._probe is not None:
                self._probe.give(partial(self._look_for, job, keys))

    def wait_for_layer(self, name: str) -> None:
        """The forward pass has come to a layer: returns once what this step loads of it is there."""
        loaded = self._loaded
        if not loaded:
            return
        # Of a layer that has no KV of its own it is not known which it reads.
        event = loaded[self._layer_index.get(name, -1)]
        if not event.is_set():
            began = time.perf_counter()
            event.wait()
            self._waited_s += time.perf_counter() - began

    def end_step(self) -> set[int]:
        """After the forward pass: nothing is being loaded any more. Returns blocks that were not filled."""
        if self._loaded:
            began = time.perf_counter()
            self._loaded[-1].wait()
            self._waited_s += time.perf_counter() - began
            self._loaded = []
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_results(self) -> TierResults:
        """What has come to its end since it was last asked."""
        with self._lock:
            results, self._results = self._results, TierResults()
        for job, store in list(self._stores.items()):
            if store.over.is_set():
                results.stored[job] = store.fate
                del self._stores[job]
        for lane in (self._to_host, self._to_device, self._to_disk, self._from_disk):
            seconds, moved = lane.take_moved()
            if seconds:
                results.seconds[lane.name], results.moved_bytes[lane.name] = seconds, moved
        results.waited_s, self._waited_s = self._waited_s, 0.0
        return results

    @property
    def on_disk(self) -> int:
        """Blocks on disk now."""
        return len(self._disk) if self._disk is not None else 0

    @property
    def busy(self) -> bool:
        """Whether a store is still to be reported."""
        return bool(self._stores)

    def close(self) -> None:
        """What was begun is done; the disk's store is another process's to open."""
        lanes = (self._to_host, self._to_device, self._probe, self._from_disk, self._to_disk)
        for lane in filter(None, lanes):
            lane.close()
        if self._disk is not None:
            self._disk.close()

    # -- inside --------------------------------------------------------------------------

    def _unfinished(self, job: int, copies: Sequence[Copy]) -> Sequence[Copy]:
        """What is left to do of a store that must be over now."""
        store = self._stores.get(job)
        if store is None:
            return copies  # reported already, perhaps as failed: to do it again does no harm
        if store.begin():  # rather than wait for all that is in front of it
            store.fate = Fate.MOVED
            store.over.set()
            return copies
        store.over.wait()
        return () if store.fate is Fate.MOVED else copies

    def _save(self, copies: Sequence[Copy]) -> None:
        if not copies:
            return
        slots = {copy.slot for copy in copies}
        began = time.perf_counter()
        try:
            self._device.to_host(copies)
        except Exception:
            self._lost |= slots
            with self._lock:
                self._results.lost_slots += sorted(slots)
        else:
            self._lost -= slots
            self._to_host.note_moved(time.perf_counter() - began, len(copies) * self._device.block_bytes)

    def _load(self, copies: Sequence[Copy]) -> None:
        self._invalid = {copy.block_id for copy in copies if copy.slot in self._lost}
        copies = [copy for copy in copies if copy.slot not in self._lost]
        if not copies:
            return
        events = self._loaded = [threading.Event() for _ in self._device.layers]

        def load() -> int:
            for layer, event in enumerate(events):
                try:
                    self._device.to_device(copies, layer)
                except Exception:
                    self._invalid.update(copy.block_id for copy in copies)
                finally:
                    event.set()
            return len(copies) * self._device.block_bytes

        self._to_device.give(load)

    def _store(self, job: int, copies: Sequence[Copy]) -> None:
        store = self._stores[job] = _Store(copies)
        self._lost.difference_update(copy.slot for copy in copies)

        def copy() -> int:
            if not store.begin():
                return 0
            try:
                self._device.to_host(copies)
                store.fate = Fate.MOVED
            finally:
                store.over.set()
            return len(copies) * self._device.block_bytes

        self._to_host.give(copy)

    def _spill(self, job: int, files: Sequence[FileCopy], lost: frozenset[int]) -> int:
        fates: dict[Key, Fate] = {}
        try:
            for file in files:
                fates[file.key] = Fate.MISSING if file.slot in lost else self._put(file)
        finally:  # whatever happens the job is answered; what is not in the answer has failed
            with self._lock:
                self._results.spilled[job] = fates
        return sum(fate is Fate.MOVED for fate in fates.values()) * self._device.block_bytes

    def _put(self, file: FileCopy) -> Fate:
        assert self._disk is not None
        try:
            outcome = self._disk.put(file.key, [self._device.slot(file.slot)])
        except StoreError:
            return Fate.FAILED
        return Fate.FULL if outcome in (Outcome.FULL, Outcome.DISK_FULL) else Fate.MOVED

    def _drop(self, key: Key) -> int:
        assert self._disk is not None
        with contextlib.suppress(StoreError):  # what is asked for is that it is found no more, and it is not
            self._disk.drop(key)
        return 0

    def _stage(self, job: int, files: Sequence[FileCopy]) -> int:
        fates: dict[Key, Fate] = {}
        try:
            for file in files:
                fates[file.key] = self._get(file)
        finally:
            with self._lock:
                self._results.staged[job] = fates
        return sum(fate is Fate.MOVED for fate in fates.values()) * self._device.block_bytes

    def _look_for(self, job: int, keys: Sequence[Key]) -> int:
        assert self._siblings is not None
        probed = Probed(0, 0)
        try:
            probed = self._siblings.leading(keys)
        finally:
            with self._lock:
                self._results.probed[job] = probed
        return 0

    def _get(self, file: FileCopy) -> Fate:
        store = self._siblings if file.shared else self._disk
        assert store is not None
        try:
            store.get_into(file.key, [self._device.slot(file.slot)])
        except BlockMissing:
            return Fate.MISSING
        except BlockCorrupt:
            return Fate.CORRUPT
        except StoreError:
            return Fate.FAILED
        return Fate.MOVED
