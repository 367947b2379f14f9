"""The tokens of stock on a real engine whose copies run late, on stand-ins for the streams of CUDA.

The model computes on the CPU at once, so its compute stream is the calling thread; the copies run in
any order that their waits allow, and as late as possible.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from engine_tools import LOUD_BLOCK_BYTES, with_tiers
from fake_cuda import FakeCuda, FakeEvent, FakeStream
from multi_turn_programs import generate
from sojourn_server.kv_offload.cuda_device_backend import CudaDeviceBackend
from sojourn_server.kv_offload.kv_pages import KvPages, merge_neighbours, page_views

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

HOST_BYTES = 60 * LOUD_BLOCK_BYTES
DISK_BYTES = 1 << 30
LATEST_S = 0.2
"""Longest delay of a copy for which the model does not wait. The last step has no step behind it."""


class ComputedAtOnce(FakeStream):
    """The stream of a model that computes when it is told to: to wait for a copy is to wait now."""

    def wait_event(self, event: FakeEvent) -> None:
        event.synchronize()


class LateCopies(FakeCuda):
    """Copies run when the model must wait for them; a transfer thread lets the model take a step first."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.compute = ComputedAtOnce(self)
        self.streams[0] = self.compute
        self.steps = 0
        self.stepped = threading.Condition()

    def new_event(self) -> FakeEvent:
        return _Fence(self)


class _Fence(FakeEvent):
    cuda: LateCopies

    def record(self, stream: FakeStream) -> None:
        self.recorded_at = self.cuda.steps
        if isinstance(stream, ComputedAtOnce):  # all that it was given is computed
            with self.cuda.stepped:
                self.cuda.steps += 1
                self.cuda.stepped.notify_all()
        else:
            super().record(stream)

    def synchronize(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            with self.cuda.stepped:
                self.cuda.stepped.wait_for(lambda: self.cuda.steps > self.recorded_at, LATEST_S)
        super().synchronize()


@pytest.fixture
def late_copies(monkeypatch: pytest.MonkeyPatch) -> list[LateCopies]:
    """Engines started from now on have the CUDA backend. Returns their stand-ins."""
    made: list[LateCopies] = []

    def open_backend(kv_caches: dict[str, Any], blocks: int, slots: int) -> CudaDeviceBackend:
        made.append(LateCopies(len(made)))
        views = [view for name, cache in kv_caches.items() for view in page_views(name, cache, blocks)]
        pages = [KvPages(view.data_ptr(), view.stride(0), view.shape[1]) for view in views]
        return CudaDeviceBackend(merge_neighbours(pages), slots, made[-1])

    monkeypatch.setattr("sojourn_server.vllm.kv_offload_connector.open_device_backend", open_backend)
    return made


def test_late_copies_give_the_tokens_of_stock(loud_model, late_copies, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    below = with_tiers(host_bytes=HOST_BYTES, disk=str(tmp_path), disk_bytes=DISK_BYTES)
    stock, _ = generate(loud_model, None, hints=False)
    tokens, report = generate(loud_model, {"policy": "mori"}, hints=True, **below)
    assert tokens == stock
    assert report["stats"]["host_tokens"] > 500
    assert report["stats"]["tiers"]["moves"]["spilled"] > 0
    (cuda,) = late_copies
    assert cuda.copies > 20
    assert not cuda.pinned, "host memory was unpinned at the end"


@pytest.mark.nightly
def test_without_waiting_for_saves_the_tokens_are_wrong(loud_model, late_copies, monkeypatch):
    """Or the copies were not late enough to tell."""
    monkeypatch.setattr(CudaDeviceBackend, "hold_compute", lambda backend, copy: None)
    stock, _ = generate(loud_model, None, hints=False)
    tokens, report = generate(
        loud_model, {"policy": "mori"}, hints=True, **with_tiers(host_bytes=350 * LOUD_BLOCK_BYTES)
    )
    assert report["stats"]["host_tokens"] > 500
    assert tokens != stock
