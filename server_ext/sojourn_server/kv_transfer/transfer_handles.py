"""Handles of open transfers: wait for a transfer, get its blocks, end it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from .transfer_actions import LayerLoaded, LoadEnded, PromptTransferEnded, PushEnded, TransferEvent

if TYPE_CHECKING:
    from .transfer_manager import TransferManager

OutcomeT = TypeVar("OutcomeT", LoadEnded, PushEnded, PromptTransferEnded)


class TransferHandle(Generic[OutcomeT]):
    """The engine's handle of one open transfer. Thread-safe."""

    kind: str
    _ended_by: type[OutcomeT]

    def __init__(self, owner: TransferManager, name: str) -> None:
        self.name = name
        self.outcome: OutcomeT | None = None
        """Outcome of the transfer; ``None`` while it is open."""
        self._owner = owner

    def on_event(self, event: TransferEvent) -> None:
        """Handle an event of this transfer. The caller holds the owner's lock."""
        if isinstance(event, self._ended_by):
            self.outcome = event

    def wait(self, timeout_s: float | None = None) -> OutcomeT | None:
        """Wait at most ``timeout_s`` seconds (``None``: without limit) for the end of the transfer. Returns
        the outcome; ``None`` if the transfer is still open."""
        self._wait(lambda: self.outcome is not None, timeout_s)
        return self.outcome

    def _wait(self, until: Callable[[], bool], timeout_s: float | None) -> None:
        with self._owner.changed:
            self._owner.changed.wait_for(until, timeout_s)


class LoadHandle(TransferHandle[LoadEnded]):
    """Handle of a load of blocks into this engine's buffers."""

    kind = "load"
    _ended_by = LoadEnded

    def __init__(self, owner: TransferManager, name: str) -> None:
        super().__init__(owner, name)
        self.requested_blocks = 0
        """Number of blocks that the load tries to get: at most as many as fit the buffers."""
        self.layers_loaded = 0
        """Number of leading layers that have arrived for all blocks that the load still expects."""
        self._first_s = self._newest_s = 0.0

    def on_event(self, event: TransferEvent) -> None:
        super().on_event(event)
        if isinstance(event, LayerLoaded):
            self.layers_loaded = event.layer + 1
            self._newest_s = time.perf_counter()
            if not event.layer:
                self._first_s = self._newest_s

    @property
    def streamed_s(self) -> float:
        """Seconds between the arrival of the first layer and of the newest one."""
        return self._newest_s - self._first_s

    def ready(self, layerwise: bool) -> int | None:
        """Return how many leading blocks a request can use now; ``None`` if it must wait. Blocks can be used
        once the load is over. With ``layerwise``, they can be used once their first layer has arrived."""
        if self.outcome is None:
            return self.requested_blocks if layerwise and self.layers_loaded else None
        if not self.outcome.good:
            return 0
        try:
            return len(self.blocks())  # pins them, so that their buffers are not reused
        except ValueError:
            return 0

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        """Wait for a layer or the end of the load, at most ``timeout_s`` seconds (``None``: without limit).
        Returns whether the layer has arrived."""
        self._wait(lambda: self.layers_loaded > layer or self.outcome is not None, timeout_s)
        return self.layers_loaded > layer and (self.outcome is None or self.outcome.good > 0)

    def layer(self, layer: int) -> list[memoryview]:
        """Return one layer of each block of the load. Raises ``ValueError`` if it has not arrived."""
        found: list[memoryview] = self._owner.do(lambda now: self._owner.core.loads.layer(self.name, layer))
        return found

    def blocks(self) -> list[memoryview]:
        """Return the leading blocks that have arrived. They are valid until ``end``. Raises ``ValueError``
        before the load is over."""
        found: list[memoryview] = self._owner.do(lambda now: self._owner.core.loads.blocks(self.name))
        return found

    def end(self) -> None:
        """End the load, whether or not its blocks have arrived, and release its buffers."""
        self._owner.do(self._owner.core.loads.end, self.name)
        self._owner.forget(self)


class PushHandle(TransferHandle[PushEnded]):
    """Handle of a push of blocks to a peer."""

    kind = "push"
    _ended_by = PushEnded

    def give(self, layer: int, blocks: Sequence[memoryview]) -> bool:
        """Add the next layer of all blocks. The memory of ``blocks`` must not change until ``outcome`` is
        set. Returns whether the push is still open. Raises ``ValueError`` if ``layer`` is not the next, or
        the number or size of the blocks is wrong."""
        wanted: bool = self._owner.do(self._owner.core.pushes.give, self.name, layer, blocks)
        return wanted

    def abort(self) -> None:
        """Cancel the push. The memory of its blocks stays in use until ``outcome`` is set."""
        self._owner.do(self._owner.core.pushes.abort, self.name)


class PromptHandle(TransferHandle[PromptTransferEnded]):
    """Handle of a prompt that a peer pushes to this engine."""

    kind = "prompt"
    _ended_by = PromptTransferEnded

    def blocks(self) -> list[memoryview]:
        """Return the prompt's blocks, in order. They are valid until ``end``. Raises ``ValueError`` if the
        prompt is not complete."""
        found: list[memoryview] = self._owner.do(lambda now: self._owner.core.prompts.blocks(self.name))
        return found

    def end(self) -> None:
        """End the prompt's transfer, complete or not, and release its buffers."""
        self._owner.do(self._owner.core.prompts.forget, self.name)
        self._owner.forget(self)
