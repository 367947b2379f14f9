"""Random test of KV copies: saves, stores and loads blocks while a model computes, and looks for wrong bytes.

``Life`` drives ``CudaDeviceBackend`` beside a model that writes blocks. The model is GPU kernels in
``kit.py``, and a fake of CUDA in the tests. ``Life`` checks every load and some saves. ``missing`` removes
one of the waits that keep copies in order. If no byte is wrong then, ``Life`` cannot detect that kind of
error.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

from sojourn_server.kv_offload.cuda_device_backend import CudaCopy, CudaDeviceBackend
from sojourn_server.kv_offload.offload_jobs import BlockCopy

WAITS = (
    "the save's for the model",
    "the model's for the save",
    "the load's for the model",
    "the load's for the save of its slot",
    "the load's to read its slot",
    "the disk's for the save of its slot",
)


class Model(Protocol):
    """A model that writes blocks on the device's compute stream."""

    def compute(self, block_id: int, content: int) -> None:
        """Queue work that fills the block with ``content``, from 1 to 255."""

    def check(self, block_id: int, content: int) -> None:
        """Check that the block has ``content`` now, or queue such a check."""

    def idle(self) -> None:
        """Let the device work, if the caller controls it. Called after each step."""


class Life:
    """Random steps of a model that saves each block before overwriting it, and loads saved blocks."""

    def __init__(
        self,
        seed: int,
        backend: CudaDeviceBackend,
        model: Model,
        *,
        blocks: int,
        slots: int,
        passed_event: Callable[[], Any],
        missing: str | None = None,
    ) -> None:
        """``passed_event`` returns a CUDA event that has already happened. ``missing`` is the wait of
        ``WAITS`` to leave out."""
        self.draw = random.Random(seed)
        self.backend = backend
        self.model = model
        self.blocks, self.slots = blocks, slots
        self.missing = missing
        self.passed_event = passed_event
        self.wrong = 0
        """Number of slots whose bytes differed from what was saved. The model counts wrong blocks itself."""
        if missing == "the load's for the save of its slot":
            backend._follow_stores = lambda slots: False  # type: ignore[method-assign]
        elif missing == "the load's to read its slot":
            follow = backend._follow_stores
            backend._follow_stores = lambda slots: follow(slots) or True  # type: ignore[method-assign]
        self.on_device: dict[int, int] = {}
        """Block → its content after the work queued so far."""
        self.in_slot: dict[int, int] = {}
        """Slot → its content after the copies begun so far."""
        self.storing: dict[int, CudaCopy] = {}
        """Block → a copy from it to host memory. The model waits for the copy only before it overwrites the
        block."""
        self.loading: list[tuple[CudaCopy, list[BlockCopy], list[int]]] = []
        self.contents = 0

    def step(self) -> None:
        """Save and overwrite blocks, store one, load some, and check what has arrived."""
        loading = {copy.block_id for _, copies, _ in self.loading for copy in copies}
        read = {copy.slot for _, copies, _ in self.loading for copy in copies}
        free = [block for block in range(self.blocks) if block not in loading]
        overwritten = self.draw.sample(free, min(3, len(free)))
        slots = [slot for slot in range(self.slots) if slot not in read]
        saved = [block for block in overwritten if block in self.on_device][: len(slots)]
        copies = [BlockCopy(*pair) for pair in zip(saved, self.draw.sample(slots, len(saved)), strict=True)]
        if copies:
            copy = self.backend.to_host(copies, self._fence("the save's for the model"))
            if self.missing != "the model's for the save":
                self.backend.hold_compute(copy)
            for each in copies:
                self.in_slot[each.slot] = self.on_device[each.block_id]
        for block_id in overwritten:
            store = self.storing.pop(block_id, None)
            if store is not None:
                self.backend.hold_compute(store)
            self._compute(block_id)
        self._store([slot for slot in slots if slot not in {copy.slot for copy in copies}])
        self._load()
        self.model.idle()
        self.look()

    def look(self) -> None:
        """Check the finished loads. Sometimes also check a slot, by reading it as a write to disk does."""
        for each in list(self.loading):
            copy, copies, contents = each
            if copy.done():
                self.loading.remove(each)
                for (block_id, _), content in zip(copies, contents, strict=True):
                    self.on_device[block_id] = content
                    self.model.check(block_id, content)
        if self.in_slot and self.draw.random() < 0.3:
            slot = self.draw.choice(sorted(self.in_slot))
            content = self.in_slot[slot]
            if self.missing == "the disk's for the save of its slot":
                self.backend._filling.pop(slot, None)
            expected = bytes([content]) * self.backend.block_bytes
            self.wrong += bytes(self.backend.slot(slot)) != expected

    def _fence(self, wait: str) -> Any:
        """Return a fence, or an event that has already happened if ``wait`` is left out."""
        return self.passed_event() if self.missing == wait else self.backend.fence()

    def _compute(self, block_id: int) -> None:
        self.contents += 1
        content = self.contents % 255 + 1
        self.model.compute(block_id, content)
        self.on_device[block_id] = content

    def _store(self, slots: list[int]) -> None:
        """Copy one block to host memory. The model waits for the copy only when it overwrites the block."""
        blocks = [block for block in self.on_device if block not in self.storing]
        if blocks and slots:
            copies = [BlockCopy(self.draw.choice(blocks), self.draw.choice(slots))]
            copy = self.backend.to_host(copies, self._fence("the save's for the model"))
            self.storing[copies[0].block_id] = copy
            self.in_slot[copies[0].slot] = self.on_device[copies[0].block_id]

    def _load(self) -> None:
        """Load slots into blocks that earlier steps of the model wrote, like blocks that a running request
        has freed."""
        loading = {copy.block_id for _, copies, _ in self.loading for copy in copies}
        free = [block for block in range(self.blocks) if block not in loading and block not in self.storing]
        slots = self.draw.sample(sorted(self.in_slot), min(2, len(self.in_slot), len(free)))
        blocks = self.draw.sample(free, len(slots))
        copies = [BlockCopy(*pair) for pair in zip(blocks, slots, strict=True)]
        if copies:
            copy = self.backend.to_device(copies, self._fence("the load's for the model"))
            self.loading.append((copy, copies, [self.in_slot[slot] for slot in slots]))
            for block in blocks:
                self.on_device.pop(block, None)
