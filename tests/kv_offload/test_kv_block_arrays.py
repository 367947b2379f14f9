"""Layers of blocks to and from a CUDA device in whatever order it works; without one of the waits, a byte is
wrong."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda
from sojourn_server.kv_offload.cpu_device_backend import CpuDeviceBackend
from sojourn_server.kv_offload.cuda_device_backend import CudaDeviceBackend
from sojourn_server.kv_offload.kv_block_arrays import KvBlockArrays
from sojourn_server.kv_offload.kv_pages import KvPages

LAYERS, BLOCKS, PER_FULL = 3, 24, 2
PAGES = (8, 4)
"""Bytes of a block's two pages in a layer."""
ROW = sum(PAGES)
STAGING_ROWS = 3
NAMES = [f"layer{at}" for at in range(LAYERS)]
STEPS = 40
WAITS = ("gather's fence", "scatter's fence", "staging")


class Device:
    """A device's memory, what computes on it, and what is expected in it."""

    def __init__(self, seed: int, missing: str = "") -> None:
        self.cuda = FakeCuda(seed)
        # With a gap between the pages of a block, as where layers share a block.
        self.pages = [[np.zeros((BLOCKS, size + 4), np.uint8) for size in PAGES] for _ in range(LAYERS)]
        pages = [
            [
                KvPages(each.ctypes.data, each.strides[0], size)
                for each, size in zip(layer, PAGES, strict=True)
            ]
            for layer in self.pages
        ]
        backend = CudaDeviceBackend(pages, 2 * STAGING_ROWS, self.cuda)
        self.kv = KvBlockArrays(NAMES, PER_FULL, backend, STAGING_ROWS)
        self.expected = np.zeros((LAYERS, BLOCKS, ROW), np.uint8)
        self.draw = random.Random(seed)
        self.wrong = 0
        self._leave_out(missing)

    def _leave_out(self, missing: str) -> None:
        def nothing(*arguments: Any) -> None: ...

        if missing == "gather's fence":
            self.kv._backend._store_stream.wait_event = nothing  # type: ignore[method-assign]
        elif missing == "scatter's fence":
            self.kv._backend._load_stream.wait_event = nothing  # type: ignore[method-assign]
        elif missing == "staging":
            self.kv._await_staging = nothing  # type: ignore[method-assign]

    def row(self, layer: int, block: int) -> bytes:
        return b"".join(
            each[block, :size].tobytes() for each, size in zip(self.pages[layer], PAGES, strict=True)
        )

    def compute(self, layer: int, block: int) -> None:
        """Queue a kernel that writes a layer of a block."""
        content = self.draw.randbytes(ROW)
        self.expected[layer, block] = np.frombuffer(content, np.uint8)

        def kernel() -> None:
            start = 0
            for each, size in zip(self.pages[layer], PAGES, strict=True):
                each[block, :size] = np.frombuffer(content[start : start + size], np.uint8)
                start += size

        self.cuda.kernel(kernel)

    def attend(self, layer: int, block: int) -> None:
        """Queue a kernel that reads a layer of a block."""
        content = self.expected[layer, block].tobytes()

        def kernel() -> None:
            self.wrong += self.row(layer, block) != content

        self.cuda.kernel(kernel)

    def some(self) -> list[int]:
        return self.draw.sample(range(BLOCKS), self.draw.randint(1, 7))

    def gather(self) -> None:
        layer, ids = self.draw.randrange(LAYERS), self.some()
        found = b"".join(self.kv.gather(layer, ids, self.kv.fence()))
        whole = self.expected[layer, ids].tobytes()
        self.wrong += found != whole.ljust(-(-len(ids) // PER_FULL) * PER_FULL * ROW, b"\0")

    def gather_full(self) -> None:
        ids = self.draw.sample(range(BLOCKS), PER_FULL)
        found = self.kv.gather_full(ids, self.kv.fence())
        self.wrong += found != [self.expected[layer, ids].tobytes() for layer in range(LAYERS)]

    def scatter(self, hold: bool) -> None:
        """Fill a layer from Full Blocks whose memory is used for something else right after."""
        layer, ids, skip = self.draw.randrange(LAYERS), self.some(), self.draw.randrange(2 * PER_FULL)
        full = -(-(skip + len(ids)) // PER_FULL) - self.draw.randrange(2)
        content = np.frombuffer(self.draw.randbytes(full * PER_FULL * ROW), np.uint8).copy()
        blocks = [memoryview(block) for block in content.reshape(full, -1)] if full else []
        rows = content.reshape(-1, ROW)[skip:][: len(ids)].copy()
        filled = self.kv.scatter(layer, blocks, skip, ids, after=self.kv.fence(), hold=hold)
        assert filled == ids[: len(rows)]
        content[:] = 0xEE
        self.expected[layer, filled] = rows
        for block in filled:
            if hold:
                self.attend(layer, block)
            else:  # its request is told of at once: another process may read it, and steps begin with it
                self.wrong += self.row(layer, block) != self.expected[layer, block].tobytes()

    def step(self) -> None:
        for block in self.some():
            self.compute(self.draw.randrange(LAYERS), block)
        self.draw.choice(
            [self.gather, self.gather_full, lambda: self.scatter(True), lambda: self.scatter(False)]
        )()
        self.cuda.run_some(12)

    def end(self) -> int:
        self.cuda.run_all()
        for layer in range(LAYERS):
            for block in range(BLOCKS):
                self.wrong += self.row(layer, block) != self.expected[layer, block].tobytes()
        self.kv.close()
        assert not self.cuda.pinned
        return self.wrong


def wrong_copies(seed: int, missing: str = "") -> int:
    device = Device(seed, missing)
    for _ in range(STEPS):
        device.step()
    return device.end()


@pytest.mark.parametrize("seed", range(40))
def test_no_byte_is_wrong_in_whatever_order_the_device_works(seed: int) -> None:
    assert wrong_copies(seed) == 0


@pytest.mark.parametrize("missing", WAITS)
def test_without_this_wait_a_byte_is_wrong(missing: str) -> None:
    noticed = sum(wrong_copies(seed, missing) > 0 for seed in range(40))
    assert noticed > 20, f"only {noticed} of 40 lives notice that the wait {missing!r} is missing"


def test_a_fill_that_holds_makes_the_thread_of_the_model_wait_for_nothing() -> None:
    device = Device(0)
    device.cuda.run_one = lambda: False  # type: ignore[method-assign]
    device.compute(0, 1)
    block = memoryview(bytes(PER_FULL * ROW))
    assert device.kv.scatter(0, [block], 0, [5, 6], after=device.kv.fence(), hold=True) == [5, 6]


def test_it_has_the_sizes_and_the_order_of_bytes_of_a_cpu() -> None:
    """What one gathers, the other fills in."""
    device = Device(1)
    rows = [np.zeros((BLOCKS, ROW), np.uint8) for _ in NAMES]
    cpu = KvBlockArrays(NAMES, PER_FULL, CpuDeviceBackend(rows, 20, by_layer=True), 10)
    for name in ("index", "per_full", "engine_bytes", "layer_bytes", "block_bytes"):
        assert getattr(device.kv, name) == getattr(cpu, name)
    for block in range(5):
        device.compute(2, block)
    found = device.kv.gather(2, range(5), device.kv.fence())
    assert cpu.scatter(2, found, 0, list(range(5))) == list(range(5))
    assert (rows[2][:5] == device.expected[2, :5]).all()
    assert cpu.gather(2, range(5)) == found
