"""CUDA's streams and events without a device. The test decides when queued work runs, in any allowed order.

Copies move real bytes between numpy arrays by address. A stable source is read when the copy is queued, which
is the earliest moment that CUDA allows. An unstable source is read when the stream runs the copy.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class FakeEvent:
    """A CUDA event. ``passed`` is True before the first ``record``, as in CUDA, and again when the stream has
    reached the event."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.passed = True

    def record(self, stream: FakeStream) -> None:
        with self.cuda.lock:
            self.passed = False
            stream.work.append(self)

    def query(self) -> bool:
        with self.cuda.lock:
            return self.passed

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self.passed
        assert end_event.passed
        return 1.0

    def synchronize(self) -> None:
        with self.cuda.lock:
            while not self.passed:
                assert self.cuda.run_one(), "the event can never pass"


class FakeStream:
    """A CUDA stream. ``work`` holds its queued work in order: events to mark as passed, pairs
    ``("wait", event)``, and functions to call."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.work: deque[FakeEvent | tuple[str, FakeEvent] | Callable[[], None]] = deque()

    def wait_event(self, event: FakeEvent) -> None:
        with self.cuda.lock:
            self.work.append(("wait", event))

    @property
    def runnable(self) -> bool:
        if not self.work:
            return False
        head = self.work[0]
        return not (isinstance(head, tuple) and not head[1].passed)


class FakeCuda:
    """One device: a ``TorchCuda`` for the code under test, and methods with which the test runs the queued
    work. ``compute`` is the stream of the model's kernels. ``seed`` determines the order of the work."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.lock = threading.RLock()
        self.compute = FakeStream(self)
        self.streams = [self.compute]
        self.pinned: dict[int, int] = {}
        self.fails_next = False
        self.copies = 0

    # -- TorchCuda

    def compute_stream(self) -> FakeStream:
        return self.compute

    def new_stream(self) -> FakeStream:
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    def new_event(self) -> FakeEvent:
        return FakeEvent(self)

    def pin(self, address: int, size_bytes: int) -> None:
        for start, size in self.pinned.items():
            pages = range(start // 4096, -(-(start + size) // 4096))
            assert address // 4096 not in pages, "a page is pinned twice"
        self.pinned[address] = size_bytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def copy(self, sources: Any, destinations: Any, sizes: Any, stream: Any, *, stable_sources: bool) -> None:
        with self.lock:
            if self.fails_next:
                self.fails_next = False
                raise RuntimeError("the driver refuses")
            self.copies += 1
            parts = list(zip(sources.tolist(), destinations.tolist(), sizes.tolist(), strict=True))
            self.draw.shuffle(parts)
            for source, destination, size in parts:
                if stable_sources:
                    content = ctypes.string_at(source, size)
                    stream.work.append(lambda d=destination, c=content: ctypes.memmove(d, c, len(c)))
                else:
                    stream.work.append(lambda s=source, d=destination, n=size: ctypes.memmove(d, s, n))

    # -- the test's side

    def kernel(self, run: Callable[[], None]) -> None:
        """Queue ``run`` on the stream ``compute``, as a kernel of the model."""
        with self.lock:
            self.compute.work.append(run)

    def run_one(self) -> bool:
        """Run the next work of a random stream that does not wait for an event. Returns False if there is no
        such stream."""
        with self.lock:
            ready = [stream for stream in self.streams if stream.runnable]
            if not ready:
                return False
            head = self.draw.choice(ready).work.popleft()
            if isinstance(head, FakeEvent):
                head.passed = True
            elif callable(head):
                head()
            return True

    def run_some(self, most: int) -> None:
        """Run a random number of pieces of work, from 0 to ``most``."""
        for _ in range(self.draw.randrange(most + 1)):
            if not self.run_one():
                return

    def run_all(self) -> None:
        """Run all queued work. Fails if a stream waits for an event that never passes."""
        while self.run_one():
            pass
        assert not any(stream.work for stream in self.streams), "work waits for an event that never passes"
