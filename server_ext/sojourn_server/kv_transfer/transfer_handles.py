"""What the engine holds of a transfer under way: to wait for it, take its blocks, and let go of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .transfer_actions import LayerLoaded, LoadEnded, PromptTransferEnded, PushEnded, TransferEvent


class HandleOwner(Protocol):
    """The traffic manager, as far as handles need it."""

    changed: threading.Condition
    """Notified whenever something has happened to any of them."""

    def do(self, what: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call the core."""
        ...

    def forget(self, handle: TransferHandle) -> None: ...


class TransferHandle:
    """One transfer. Calls may come from any thread."""

    def __init__(self, owner: HandleOwner, kind: str, name: str) -> None:
        self.kind = kind
        self.name = name
        self._owner = owner

    def told(self, event: TransferEvent) -> None:
        """Something has happened to it; under the owner's lock."""
        raise NotImplementedError

    def _wait(self, until: Callable[[], bool], timeout_s: float | None) -> bool:
        with self._owner.changed:
            return self._owner.changed.wait_for(until, timeout_s)


class LoadHandle(TransferHandle):
    """Blocks on their way here."""

    def __init__(self, owner: HandleOwner, name: str, core: Any) -> None:
        super().__init__(owner, "load", name)
        self.requested_blocks = 0
        """Of how many: of no more than fit the buffers."""
        self.outcome: LoadEnded | None = None
        self._layers = 0
        self._first_s = self._newest_s = 0.0
        self._core = core

    def told(self, event: TransferEvent) -> None:
        if isinstance(event, LayerLoaded):
            self._layers = event.layer + 1
            self._newest_s = time.perf_counter()
            if not event.layer:
                self._first_s = self._newest_s
        elif isinstance(event, LoadEnded):
            self.outcome = event

    @property
    def layers_loaded(self) -> int:
        """Leading layers that are here, of all blocks that will come."""
        return self._layers

    @property
    def streamed_s(self) -> float:
        """Seconds from the moment when its first layer was here to the newest one."""
        return self._newest_s - self._first_s

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        """Wait until a layer is here, or never will be; whether it is."""
        self._wait(lambda: self._layers > layer or self.outcome is not None, timeout_s)
        return self._layers > layer and (self.outcome is None or self.outcome.good > 0)

    def wait(self, timeout_s: float | None = None) -> LoadEnded | None:
        """Wait until it is over; ``None``: it is not."""
        self._wait(lambda: self.outcome is not None, timeout_s)
        return self.outcome

    def layer(self, layer: int) -> list[memoryview]:
        """One layer's blocks, which are here. Raises ``ValueError``."""
        found: list[memoryview] = self._owner.do(lambda now: self._core.load_layer(self.name, layer))
        return found

    def blocks(self) -> list[memoryview]:
        """The blocks that have come, until ``end``. Raises ``ValueError`` before it is over."""
        found: list[memoryview] = self._owner.do(lambda now: self._core.load_blocks(self.name))
        return found

    def renew(self) -> None:
        """The engine will come for it."""
        self._owner.do(self._core.renew_load, self.name)

    def end(self) -> None:
        """It was taken, or is not wanted any more, however far it is."""
        self._owner.do(self._core.end_load, self.name)
        self._owner.forget(self)


class PushHandle(TransferHandle):
    """Blocks on their way to a peer."""

    def __init__(self, owner: HandleOwner, name: str, core: Any) -> None:
        super().__init__(owner, "push", name)
        self.outcome: PushEnded | None = None
        self._core = core

    def told(self, event: TransferEvent) -> None:
        if isinstance(event, PushEnded):
            self.outcome = event

    def give(self, layer: int, blocks: Sequence[memoryview]) -> bool:
        """The next layer of all blocks; unchanged until it is over. Whether it is still wanted."""
        wanted: bool = self._owner.do(self._core.give, self.name, layer, blocks)
        return wanted

    def wait(self, timeout_s: float | None = None) -> PushEnded | None:
        """Wait until it is over; ``None``: it is not."""
        self._wait(lambda: self.outcome is not None, timeout_s)
        return self.outcome

    def abort(self) -> None:
        """It is not wanted any more. Its memory is still not the engine's before it is over."""
        self._owner.do(self._core.abort_push, self.name)


class PromptHandle(TransferHandle):
    """A context that is gathered here."""

    def __init__(self, owner: HandleOwner, name: str, core: Any) -> None:
        super().__init__(owner, "prompt", name)
        self.outcome: PromptTransferEnded | None = None
        self._core = core

    def told(self, event: TransferEvent) -> None:
        if isinstance(event, PromptTransferEnded):
            self.outcome = event

    def wait(self, timeout_s: float | None = None) -> PromptTransferEnded | None:
        """Wait until it is over; ``None``: it is not."""
        self._wait(lambda: self.outcome is not None, timeout_s)
        return self.outcome

    def blocks(self) -> list[memoryview]:
        """Its blocks in the order in which they were offered, until ``end``. Raises ``ValueError``."""
        found: list[memoryview] = self._owner.do(lambda now: self._core.prompt_blocks(self.name))
        return found

    def end(self) -> None:
        """It was taken, or is not wanted any more, however far it is."""
        self._owner.do(self._core.end_prompt, self.name)
        self._owner.forget(self)
