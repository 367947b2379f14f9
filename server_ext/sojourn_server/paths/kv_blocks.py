"""The engine's KV blocks as arrays of bytes, a layer at a time, and Full Blocks cut from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, Any]
"""Of ``uint8``."""


class KvBlocks:
    """Layer by layer in the order of the forward pass. A Full Block is ``per_full`` engine blocks."""

    def __init__(self, layers: Mapping[str, Bytes], per_full: int) -> None:
        """``layers``: of each layer the engine's own memory, one row of bytes for each engine block.

        Raises ``ValueError`` for layers of different sizes: their Layer Blocks would differ.
        """
        self.index = {name: at for at, name in enumerate(layers)}
        self._layers = list(layers.values())
        self.per_full = per_full
        sizes = {int(layer.shape[1]) for layer in self._layers}
        if len(sizes) != 1:
            raise ValueError(f"layers have blocks of {sorted(sizes)} bytes; expected one size")
        self.engine_bytes = sizes.pop()
        self.layer_bytes = self.engine_bytes * per_full
        self.block_bytes = self.layer_bytes * len(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def gather(self, layer: int, block_ids: Sequence[int]) -> list[memoryview]:
        """A copy of one layer of blocks, as Layer Blocks; what the last of them lacks is zeros."""
        full = -(-len(block_ids) // self.per_full)
        made = np.zeros((full * self.per_full, self.engine_bytes), np.uint8)
        ids = np.asarray(block_ids, np.intp)
        np.take(self._layers[layer], ids, axis=0, out=made[: len(ids)], mode="clip")  # lets go of the GIL
        rows: Any = made.reshape(full, self.layer_bytes)
        return [memoryview(row) for row in rows]

    def gather_full(self, block_ids: Sequence[int]) -> list[memoryview]:
        """A copy of all layers of one Full Block."""
        return [self.gather(layer, block_ids)[0] for layer in range(len(self))]

    def scatter(
        self, layer: int, blocks: Sequence[memoryview], skip: int, block_ids: Sequence[int], part: int = 0
    ) -> list[int]:
        """Fill engine blocks from one layer of Full Blocks: the first ``skip`` that these hold are left out,
        and what is behind the last of ``block_ids``. Returns the ids that were filled.

        ``part`` is the place of the layer in each of ``blocks``: 0 where they are of one layer only.
        """
        into = self._layers[layer]
        filled: list[int] = []
        start, size = part * self.layer_bytes, self.layer_bytes
        for at, block in enumerate(blocks):
            rows = np.frombuffer(block, np.uint8, size, start).reshape(self.per_full, self.engine_bytes)
            low = at * self.per_full - skip  # the place in ``block_ids`` of its first engine block
            ids = block_ids[max(0, low) : max(0, low + self.per_full)]
            if ids:
                begin = max(0, -low)
                into[ids] = rows[begin : begin + len(ids)]
                filled += ids
        return filled
