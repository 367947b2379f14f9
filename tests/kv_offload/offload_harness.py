"""The real planner, worker, host memory and disk, with a device whose content is derived from block keys.

Import it after ``pytest.importorskip("torch")``.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from block_contexts import as_context
from fake_cuda import FakeCuda
from kv_blocks import identity
from sojourn_server.kv_offload.cpu_device_backend import CpuDeviceBackend
from sojourn_server.kv_offload.cuda_device_backend import CudaDeviceBackend
from sojourn_server.kv_offload.disk_tier import TierLimits
from sojourn_server.kv_offload.host_block_pool import RetentionRank
from sojourn_server.kv_offload.kv_pages import KvPages, page_views
from sojourn_server.kv_offload.offload_jobs import OffloadJobs, OffloadResults
from sojourn_server.kv_offload.offload_scheduler import OffloadScheduler
from sojourn_server.kv_offload.offload_worker import DeviceBackend, OffloadWorker
from sojourn_server.kv_offload.shared_store import HEADER_BYTES, FileSystem, SharedStore

LAYERS = 3
PATIENCE_S = 20.0
"""Seconds after which a test counts as hung, even on a busy machine."""


class WatchedDevice:
    """Calls ``before`` before each copy. The copy waits for this call, and raises what it raises."""

    def __init__(self, memory: DeviceBackend) -> None:
        self.memory = memory
        self.before: Callable[[str], None] = lambda name: None
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        made = getattr(self.memory, name)
        if name not in ("to_host", "to_device", "slot"):
            return made

        def watched(*arguments: Any) -> Any:
            self.calls.append(name)
            self.before(name)
            return made(*arguments)

        return watched


class Engine:
    """One engine's tiers, without the engine."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        files: FileSystem | None = None,
        dtype: torch.dtype = torch.float32,
        blocks: int = 8,
        slots: int = 6,
        disk_blocks: int = 8,
        cuda: FakeCuda | None = None,
        **limits: Any,
    ) -> None:
        """With ``cuda``, a stand-in for CUDA is the device, and its queued work runs in any allowed order."""
        self.cuda = cuda
        self.now = 100.0
        # The layers have different sizes, so that a wrong offset shows.
        self.caches = {
            f"layer{index}": torch.zeros(blocks, 2, 1 + index, 4, dtype=dtype) for index in range(LAYERS)
        }
        self._bytes = [cache.view(blocks, -1).view(torch.uint8).numpy() for cache in self.caches.values()]
        rows = [page_views(name, cache, blocks)[0].numpy() for name, cache in self.caches.items()]
        backend: DeviceBackend = CpuDeviceBackend(rows, slots)
        if cuda is not None:
            pages = [KvPages(row.ctypes.data, row.strides[0], row.shape[1]) for row in rows]
            backend = CudaDeviceBackend(pages, slots, cuda)
        self.device = WatchedDevice(backend)
        self.disk = None
        if folder is not None:
            size = self.device.block_bytes
            budget = disk_blocks * (HEADER_BYTES + size)
            model = identity(block_bytes=size, layers=LAYERS, kv_dtype=str(dtype))
            self.disk = SharedStore(folder, model, budget_bytes=budget, files=files)
        limits = {"min_probe_blocks": 1, **limits}
        self.planner = OffloadScheduler(
            TierLimits(host_slots=slots, disk_blocks=disk_blocks if folder is not None else 0, **limits)
        )
        self.mover = OffloadWorker(self.device, self.disk)
        self.results: list[OffloadResults] = []
        """The worker's reports, of each step one."""

    # -- the device's blocks

    def write(self, block_id: int, key: bytes, weights: int = 0) -> None:
        def compute() -> None:
            for layer, content in enumerate(self._bytes):
                content[block_id] = memoryview(_content(key, layer, weights, content.shape[1]))

        self._run(compute)

    def _run(self, compute: Callable[[], None]) -> None:
        """Give the device work. A CPU does it at once."""
        if self.cuda is None:
            compute()
        else:
            self.cuda.kernel(compute)

    def holds(self, block_id: int, key: bytes, weights: int = 0) -> bool:
        return all(
            content[block_id].tobytes() == _content(key, layer, weights, content.shape[1])
            for layer, content in enumerate(self._bytes)
        )

    # -- steps

    def begin(self) -> OffloadJobs:
        jobs = self.planner.take_jobs()
        self.mover.begin_step(jobs)
        return jobs

    def end(self) -> set[int]:
        """End a step: wait for all loads and take the results. Returns the blocks that were not filled."""
        self.mover.wait_for_loads()
        loaded, invalid = self.mover.take_loaded()
        self.planner.end_loads(loaded, invalid)
        if self.cuda is not None:
            self.cuda.run_some(30)
        self.results.append(self.mover.take_results())
        self.planner.take_results(self.results[-1])
        return invalid

    def step(self) -> set[int]:
        self.begin()
        return self.end()

    def steps_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "it never came to that"
            time.sleep(0.001)
            self.step()

    def rest(self) -> None:
        """Run steps until no operation is pending, including writes to the disk."""
        planner = self.planner
        self.step()
        self.steps_until(lambda: not planner.under_way and not planner.has_jobs)
        self.lane_is_through("_to_disk")

    def lane_is_through(self, lane: str) -> None:
        assert getattr(self.mover, lane).end_of_work().wait(PATIENCE_S)

    # -- what a scheduler does

    def save(self, contents: Mapping[bytes, int] | Sequence[bytes]) -> None:
        """Compute blocks with these keys, and let the next step overwrite them."""
        if not isinstance(contents, Mapping):
            contents = {key: index for index, key in enumerate(contents)}
        for key, block_id in contents.items():
            self.write(block_id, key)
            assert self.planner.plan_save(key, block_id)

    def ask(self, keys: Sequence[bytes], request_id: str = "r") -> int | None:
        return self.planner.lookup(request_id, as_context(keys), self.now)

    def wait_for(self, keys: Sequence[bytes], request_id: str = "r") -> int:
        """Look up keys as a scheduler does, by asking again in each step until there is an answer."""
        found: int | None = None

        def answered() -> bool:
            nonlocal found
            found = self.ask(keys, request_id)
            return found is not None

        self.steps_until(answered)
        assert found is not None
        return found

    def load(self, keys: Sequence[bytes], request_id: str = "r") -> None:
        """Load keys into the first blocks, which are cleared before. Fails if any content differs from the
        saved one."""
        found = self.wait_for(keys, request_id)
        assert found == len(keys), f"{found} of {len(keys)} found"

        def clear() -> None:
            for content in self._bytes:
                content[: len(keys)] = 0

        self._run(clear)
        self.planner.load(request_id, keys, range(len(keys)))
        assert self.step() == set()
        for block_id, key in enumerate(keys):
            assert self.holds(block_id, key), "a wrong token would follow"

    def close(self) -> None:
        self.mover.close()


def nothing_is_pinned(planner: OffloadScheduler) -> bool:
    """Whether no reader is left, and no slot is lost. Only at rest: an entry may be gone before its slot."""
    host = planner.host
    return len(host) + len(host.free) == host.slots and not any(entry.pins for entry in host)


def check_accounts(planner: OffloadScheduler) -> None:
    """Check that no slot is used twice, and that pins, idle and dirty entries are what they should be. Those
    that wait for their write to disk are evicted as idle programs' blocks are."""
    host, disk = planner.host, planner.disk
    slots = [*(entry.slot for entry in host), *host.free]
    assert len(set(slots)) == len(slots) <= host.slots
    idle = {id(entry) for members in host._idle.values() for entry in members.values()}
    assert idle == {id(e) for e in host if not e.pins and e.job is None}
    assert host.unspilled == sum(not e.pins and e.job is None and e.dirty and e.rank > 0 for e in host)
    assert not any(e.dirty and e.key in disk.blocks for e in host)
    cold, idle_rank = RetentionRank.COLD, RetentionRank.IDLE
    assert all(entry.rank == cold and entry.dirty for entry in host.unwritten.values())
    assert not any(entry.dirty for entry in host._idle[cold].values())
    assert host.unwritten.keys() <= host._idle[idle_rank].keys()
    pinned = [
        *(lookup.found for lookup in planner._looked_up.values()),
        *(load.entries for load in planner.loads.values()),
        *(wait.entries for wait in disk._waits.values()),
        disk.spilling.values(),
    ]
    expected = Counter(entry.slot for entries in pinned for entry in entries)
    assert all(entry.pins == expected[entry.slot] for entry in host)


def _content(key: bytes, layer: int, weights: int, size: int) -> bytes:
    return hashlib.shake_128(key + bytes([layer, weights])).digest(size)
