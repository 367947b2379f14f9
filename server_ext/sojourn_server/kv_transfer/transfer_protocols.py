"""What a connector asks of the traffic manager, so that tests can put something else in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .load_table import ReadingPeer
from .transfer_actions import LoadEnded, PromptTransferEnded, PushEnded


class LoadTransfer(Protocol):
    """Blocks on their way here."""

    @property
    def requested_blocks(self) -> int:
        """Of how many: of no more than fit the buffers."""
        ...

    @property
    def outcome(self) -> LoadEnded | None:
        """``None``: it is not over."""
        ...

    @property
    def layers_loaded(self) -> int:
        """Leading layers that are here, of all blocks that will come."""
        ...

    @property
    def streamed_s(self) -> float:
        """Seconds from the moment when its first layer was here to the newest one."""
        ...

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        """Wait until a layer is here, or never will be; whether it is."""
        ...

    def layer(self, layer: int) -> list[memoryview]:
        """One layer's blocks, which are here: of those that will come. Raises ``ValueError``."""
        ...

    def blocks(self) -> list[memoryview]:
        """The blocks that have come; nobody else gets their places before ``end``. Raises ``ValueError``."""
        ...

    def end(self) -> None:
        """It was taken, or is not wanted any more, however far it is."""
        ...


class PushTransfer(Protocol):
    """Blocks on their way to a peer."""

    @property
    def outcome(self) -> PushEnded | None: ...

    def give(self, layer: int, blocks: Sequence[memoryview]) -> bool:
        """The next layer of all blocks; unchanged until it is over. Whether it is still wanted."""
        ...

    def abort(self) -> None: ...


class PromptTransfer(Protocol):
    """A context that is gathered here."""

    @property
    def outcome(self) -> PromptTransferEnded | None: ...

    def blocks(self) -> list[memoryview]:
        """Its blocks in the order in which they were offered, until ``end``. Raises ``ValueError``."""
        ...

    def end(self) -> None:
        """It was taken, or is not wanted any more, however far it is."""
        ...


class TransferService(Protocol):
    """``TransferManager``, as far as the connector's worker needs it. Calls may come from any thread and do
    not wait; all raise ``ValueError`` for what cannot be begun."""

    def load(self, load: str, keys: Sequence[bytes], *, peer: ReadingPeer | None = None) -> LoadTransfer: ...

    def offer(
        self, transfer: str, address: str, keys: Sequence[bytes], *, epoch: str | None = None
    ) -> PushTransfer: ...

    def expect(self, transfer: str, *, epoch: str | None = None) -> PromptTransfer: ...

    def want(self, transfers: Sequence[str]) -> None:
        """Requests in the engine's queue will expect these; to be said again within a lease."""
        ...

    def store(self, request: str, key: bytes, parent: bytes, content: Sequence[memoryview]) -> bool:
        """False: too many wait already."""
        ...
