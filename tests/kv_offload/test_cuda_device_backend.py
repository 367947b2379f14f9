"""Whatever order a CUDA device works in, no copied byte is wrong; without one of the waits, some byte is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda
from sojourn_server.kv_offload.cuda_device_backend import CudaDeviceBackend
from sojourn_server.kv_offload.kv_pages import KvPages
from sojourn_server.kv_offload.offload_jobs import BlockCopy

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"))

from copy_order import WAITS, Life

LAYERS, BLOCKS, SLOTS = 3, 10, 6
STEPS = 60


def device_memory() -> tuple[list[np.ndarray[Any, Any]], list[KvPages]]:
    """Layers of different page sizes."""
    layers = [np.zeros((BLOCKS, 8 * (1 + index)), np.uint8) for index in range(LAYERS)]
    return layers, [KvPages(each.ctypes.data, each.strides[0], each.shape[1]) for each in layers]


class FakeModel:
    """Computes on the stand-in's compute stream."""

    def __init__(self, cuda: FakeCuda, layers: list[np.ndarray[Any, Any]]) -> None:
        self.cuda = cuda
        self.layers = layers
        self.wrong = 0

    def compute(self, block_id: int, content: int) -> None:
        def kernel() -> None:
            for layer in self.layers:
                layer[block_id] = content

        self.cuda.kernel(kernel)

    def check(self, block_id: int, content: int) -> None:
        self.wrong += any((layer[block_id] != content).any() for layer in self.layers)

    def idle(self) -> None:
        self.cuda.run_some(12)


def wrong_copies(seed: int, missing: str | None = None) -> int:
    """Lead one life. Return how many copies arrived with other bytes than were computed."""
    cuda = FakeCuda(seed)
    layers, pages = device_memory()
    backend = CudaDeviceBackend(pages, SLOTS, cuda)
    model = FakeModel(cuda, layers)
    life = Life(
        seed, backend, model, blocks=BLOCKS, slots=SLOTS, passed_event=cuda.new_event, missing=missing
    )
    for _ in range(STEPS):
        life.step()
    cuda.run_all()
    while life.loading:
        life.look()
    backend.close()
    return life.wrong + model.wrong


@pytest.mark.parametrize("seed", range(40))
def test_no_byte_is_wrong_in_whatever_order_the_device_works(seed: int) -> None:
    assert wrong_copies(seed) == 0


@pytest.mark.parametrize("missing", WAITS)
def test_without_this_wait_a_byte_is_wrong(missing: str) -> None:
    noticed = sum(wrong_copies(seed, missing) > 0 for seed in range(40))
    assert noticed > 20, f"only {noticed} of 40 lives notice that {missing} wait is missing"


def test_the_thread_of_the_model_never_waits() -> None:
    """Nothing runs while it queues: a wait of the host would never end."""
    cuda = FakeCuda(0)
    cuda.run_one = lambda: False  # type: ignore[method-assign]
    layers, pages = device_memory()
    backend = CudaDeviceBackend(pages, SLOTS, cuda)
    FakeModel(cuda, layers).compute(0, 1)
    save = backend.to_host([BlockCopy(0, 0)], backend.fence())
    backend.hold_compute(save)
    load = backend.to_device([BlockCopy(5, 0)], backend.fence())
    assert not save.done()
    assert not load.done()


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_a_slot_that_does_not_exist_is_refused(slot: int) -> None:
    """A copy by address would reach other memory of the process."""
    cuda = FakeCuda(0)
    backend = CudaDeviceBackend(device_memory()[1], SLOTS, cuda)
    with pytest.raises(IndexError, match=f"slots 0 to {slot}" if slot > 0 else f"slots {slot} to 0"):
        backend.to_host([BlockCopy(0, 0), BlockCopy(1, slot)], backend.fence())
    with pytest.raises(IndexError, match="expected 0 to 5"):
        backend.to_device([BlockCopy(0, slot)], backend.fence())


def test_host_memory_is_pinned_in_chunks_and_unpinned_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sojourn_server.kv_offload.cuda_device_backend.PIN_CHUNK_BYTES", 3 * 4096)
    cuda = FakeCuda(0)
    backend = CudaDeviceBackend([KvPages(1 << 20, 48, 48)], 1000, cuda)
    assert sum(cuda.pinned.values()) == 1000 * 48
    assert len(cuda.pinned) == 4  # of 256 slots: 12,288 bytes are both whole slots and whole pages
    backend.close()
    assert not cuda.pinned


def test_no_host_memory_stays_pinned_if_a_part_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sojourn_server.kv_offload.cuda_device_backend.PIN_CHUNK_BYTES", 4096)

    class Small(FakeCuda):
        def pin(self, address: int, size_bytes: int) -> None:
            if len(self.pinned) == 2:
                raise RuntimeError("no more")
            super().pin(address, size_bytes)

    cuda = Small(0)
    with pytest.raises(RuntimeError, match="no more"):
        CudaDeviceBackend([KvPages(1 << 20, 4096, 4096)], 5, cuda)
    assert not cuda.pinned
