"""The interface through which transfers copy a device's KV blocks. ``KvBlockArrays`` (CPU) and
``CudaBlockArrays`` implement it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class KvBlocks(Protocol):
    """Copies a device's KV blocks layer by layer. A Full Block consists of ``per_full`` engine blocks.

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
        """Return copies of one layer of engine blocks, as Layer Blocks (one layer of a Full Block each). An
        incomplete last Layer Block is padded with zeros. Waits until the device has read the blocks."""
        ...

    def gather_full(self, block_ids: Sequence[int], after: Any) -> list[memoryview]:
        """Return a copy of the Full Block that consists of the engine blocks ``block_ids``, one buffer per
        layer. Waits until the device has read the blocks."""
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
        """Copy layer number ``layer`` of the Full Blocks ``blocks`` into the engine blocks ``block_ids``.
        Returns the ids of the filled blocks.

        ``skip``: number of engine blocks at the beginning of ``blocks`` that are not copied. ``part``:
        position of the layer in each of ``blocks``; 0 if they hold only this layer. With ``hold``, the call
        may return before the copy ends, and model work queued later waits for the copy."""
        ...
