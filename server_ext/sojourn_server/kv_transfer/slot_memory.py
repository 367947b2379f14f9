"""The bytes of the buffers: slots of one Full Block, layer after layer."""

from __future__ import annotations

import mmap


class SlotMemory:
    """``slots`` blocks of ``layers`` layers; pages are the system's to give when they are first written."""

    def __init__(self, slots: int, block_bytes: int, layers: int) -> None:
        """Raises ``ValueError`` where layers are of different sizes: its Layer Blocks would differ."""
        if slots < 1 or block_bytes < 1 or layers < 1 or block_bytes % layers:
            raise ValueError(
                f"{slots} blocks of {block_bytes} bytes and {layers} layers; expected at least one of each, "
                "and layers of one size"
            )
        self.slots = slots
        self.block_bytes = block_bytes
        self.layers = layers
        self.layer_bytes = block_bytes // layers
        # Not a bytearray: that writes zeros to all of it at once. And aligned, as direct I/O wants it.
        self._map = mmap.mmap(-1, slots * block_bytes)
        self._view = memoryview(self._map)

    def block(self, slot: int) -> memoryview:
        """All layers of a slot."""
        start = slot * self.block_bytes
        return self._view[start : start + self.block_bytes]

    def layer(self, slot: int, layer: int) -> memoryview:
        """One layer of a slot."""
        start = slot * self.block_bytes + layer * self.layer_bytes
        return self._view[start : start + self.layer_bytes]
