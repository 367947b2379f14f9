"""Handles of open transfers: wait for a transfer, take its blocks, end it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .transfer_actions import LayerLoaded, LoadEnded, PromptTransferEnded, PushEnded, TransferEvent


class HandleOwner(Protocol):
    """The part of ``TransferManager`` that handles use."""

    changed: threading.Condition
    """Notified after every event."""

    def do(self, what: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call the core."""
        ...

    def forget(self, handle: TransferHandle) -> None: ...


class TransferHandle:
    """One transfer. Thread-safe."""

    def __init__(self, owner: HandleOwner, kind: str, name: str) -> None:
        self.kind = kind
        self.name = name
        self._owner = owner

    def on_event(self, event: TransferEvent) -> None:
        """Take an event. The caller holds the owner's lock."""
        raise NotImplementedError

    def _wait(self, until: Callable[[], bool], timeout_s: float | None) -> bool:
        with self._owner.changed:
            return self._owner.changed.wait_for(until, timeout_s)


class LoadHandle(TransferHandle):
    """Blocks being loaded."""

    def __init__(self, owner: HandleOwner, name: str, core: Any) -> None:
        super().__init__(owner, "load", name)
        self.requested_blocks = 0
        """Number of blocks, limited by the buffers."""
        self.outcome: LoadEnded | None = None
        self._layers = 0
        self._first_s = self._newest_s = 0.0
        self._core = core

    def on_event(self, event: TransferEvent) -> None:
        if isinstance(event, LayerLoaded):
            self._layers = event.layer + 1
            self._newest_s = time.perf_counter()
            if not event.layer:
                self._first_s = self._newest_s
        elif isinstance(event, LoadEnded):
            self.outcome = event

    @property
    def layers_loaded(self) -> int:
        """Number of leading layers that have arrived for all blocks of the load."""
        return self._layers

    @property
    def streamed_s(self) -> float:
        """Seconds between the arrival of the first and the newest layer."""
        return self._newest_s - self._first_s

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        """Wait for a layer or the end of the load. Returns whether the layer has arrived."""
        self._wait(lambda: self._layers > layer or self.outcome is not None, timeout_s)
        return self._layers > layer and (self.outcome is None or self.outcome.good > 0)

    def wait(self, timeout_s: float | None = None) -> LoadEnded | None:
        """Wait for the end; ``None``: timed out."""
        self._wait(lambda: self.outcome is not None, timeout_s)
        return self.outcome

    def layer(self, layer: int) -> list[memoryview]:
        """One layer that has arrived, by block. Raises ``ValueError``."""
        found: list[memoryview] = self._owner.do(lambda now: self._core.load_layer(self.name, layer))
        return found

    def blocks(self) -> list[memoryview]:
        """The blocks that have arrived, valid until ``end``. Raises ``ValueError`` before the load is
        over."""
        found: list[memoryview] = self._owner.do(lambda now: self._core.load_blocks(self.name))
        return found

    def renew(self) -> None:
        """Renew the load's lease."""
        self._owner.do(self._core.renew_load, self.name)

    def end(self) -> None:
        """End the load at any stage."""
        self._owner.do(self._core.end_load, self.name)
        self._owner.forget(self)


class PushHandle(TransferHandle):
    """Blocks being sent to a peer."""

    def __init__(self, owner: HandleOwner, name: str, core: Any) -> None:
        super().__init__(owner, "push", name)
        self.outcome: PushEnded | None = None
        self._core = core

    def on_event(self, event: TransferEvent) -> None:
        if isinstance(event, PushEnded):
            self.outcome = event

    def give(self, layer: int, blocks: Sequence[memoryview]) -> bool:
        """Give the next layer of all blocks, unchanged until the push is over. Returns whether it is still
        open."""
        wanted: bool = self._owner.do(self._core.give, self.name, layer, blocks)
        return wanted

    def wait(self, timeout_s: float | None = None) -> PushEnded | None:
        """Wait for the end; ``None``: timed out."""
        self._wait(lambda: self.outcome is not None, timeout_s)
        return self.outcome

    def abort(self) -> None:
        """Cancel the push. Its memory stays in use until the push is over."""
        self._owner.do(self._core.abort_push, self.name)


class PromptHandle(TransferHandle):
    """A prompt being received."""

    def __init__(self, owner: HandleOwner, name: str, core: Any) -> None:
        super().__init__(owner, "prompt", name)
        self.outcome: PromptTransferEnded | None = None
        self._core = core

    def on_event(self, event: TransferEvent) -> None:
        if isinstance(event, PromptTransferEnded):
            self.outcome = event

    def wait(self, timeout_s: float | None = None) -> PromptTransferEnded | None:
        """Wait for the end; ``None``: timed out."""
        self._wait(lambda: self.outcome is not None, timeout_s)
        return self.outcome

    def blocks(self) -> list[memoryview]:
        """Its blocks in the order of the offer, valid until ``end``. Raises ``ValueError``."""
        found: list[memoryview] = self._owner.do(lambda now: self._core.prompt_blocks(self.name))
        return found

    def end(self) -> None:
        """End the prompt at any stage."""
        self._owner.do(self._core.end_prompt, self.name)
        self._owner.forget(self)
