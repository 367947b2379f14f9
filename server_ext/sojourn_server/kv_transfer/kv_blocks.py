"""The protocol by which transfers copy a device's KV blocks. ``KvBlockArrays`` (CPU) and ``CudaBlockArrays``
implement it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class KvBlocks(Protocol):
    """Copies a device's KV blocks layer by layer. ``per_full`` engine blocks make up a Full Block.

    A *fence* marks a point in the device's queue of model work. It completes when the device has done all
    work queued before that point. A copy begins once its fence ``after`` has completed.
    """

    @property
    def index(self) -> Mapping[str, int]:
        """Name of each layer → its number, in the order of the forward pass."""
        ...

    @property
    def per_full(self) -> int: ...
    @property
    def engine_bytes(self) -> int:
        """Bytes of one layer of an engine block."""
        ...

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a Full Block."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of a Full Block, all layers."""
        ...

    def __len__(self) -> int:
        """Return the number of layers."""
        ...

    def fence(self) -> Any:
        """Return a fence. The thread that runs the model calls this."""
        ...

    def gather(self, layer: int, block_ids: Sequence[int], after: Any) -> list[memoryview]:
        """Return copies of one layer of engine blocks, as Layer Blocks. Waits until the device has read the
        blocks."""
        ...

    def gather_full(self, block_ids: Sequence[int], after: Any) -> list[memoryview]:
        """Return a copy of the Full Block that consists of these engine blocks, one buffer per layer. Waits
        until the device has read the blocks."""
        ...

    def scatter(
        self,
        layer: int,
        blocks: Sequence[memoryview],
        skip: int,
        block_ids: Sequence[int],
        part: int = 0,
        *,
        after: Any,
        hold: bool = False,
    ) -> list[int]:
        """Copy one layer of the Full Blocks ``blocks`` into the engine blocks ``block_ids``. Returns the ids
        of the filled blocks. The first ``skip`` engine blocks of ``blocks`` are left out. ``part``: index of
        the layer within each of ``blocks``.

        With ``hold``, the call may return before the copy ends; model work queued later waits for the copy.
        Without ``hold``, the call returns after the copy."""
        ...
