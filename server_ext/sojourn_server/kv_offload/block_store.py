"""The interface of a store of Full Blocks.

A Full Block is the KV of a fixed number of tokens: one layer after the other, and within a layer one engine
block after the other. It can be divided into its layers (Layer Blocks) without a copy, so callers may give a
store one buffer per layer or one for all layers. The key of a Full Block is the chain hash of its last engine
block, which identifies all tokens up to the block's end (DualPath §4.1, A.5).

    ``SharedStore``   files of this engine, with checksums and a budget; other engines' files are read too
    ``VllmFsStore``   the folders of vLLM's ``fs`` tier, shared with stock engines; only sizes are checked
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .block_file import Buffer, KvIdentity
from .disk_store import PutOutcome

FULL_BLOCK_TOKENS = 64
"""Default number of tokens of a Full Block (DualPath §4.1)."""


class BlockStore(Protocol):
    """Stores Full Blocks (the unit of storage) by key. Thread-safe; every call waits for the disk. A read
    raises ``BlockCorrupt`` if it detects damaged content or content of another model."""

    @property
    def identity(self) -> KvIdentity:
        """The kind of KV in the store."""
        ...

    def leading(self, keys: Sequence[bytes]) -> int:
        """Return how many leading ``keys`` the store has. The store may delete blocks before they are
        read."""
        ...

    def get_into(self, key: bytes, buffers: Sequence[Buffer]) -> None:
        """Fill ``buffers``, ``identity.block_bytes`` long in total, with the block of ``key``.

        After any exception the content of ``buffers`` is undefined. Raises ``BlockNotFound``,
        ``BlockCorrupt``, ``StoreError``, and ``ValueError`` for buffers of another size.
        """
        ...

    def put(self, key: bytes, buffers: Sequence[Buffer], *, parent: bytes = b"") -> PutOutcome:
        """Store ``buffers`` as the block of ``key``. ``parent``: key of the previous block of the context, if
        any.

        A full store returns ``FULL`` or ``DISK_FULL``, and keeps nothing of the block. Raises ``StoreError``,
        after which nothing of the block is left, and ``ValueError`` for buffers of another size.
        """
        ...

    def close(self) -> None: ...


def blocks_per_full(engine_block_tokens: int, block_tokens: int) -> int:
    """Return the number of engine blocks per Full Block. Raises ``ValueError`` if ``block_tokens`` is not a
    positive multiple of ``engine_block_tokens``."""
    if engine_block_tokens < 1 or block_tokens < engine_block_tokens or block_tokens % engine_block_tokens:
        raise ValueError(
            f"a Full Block of {block_tokens} tokens is not a whole number of engine blocks of "
            f"{engine_block_tokens}; choose a multiple of the engine's --block-size"
        )
    return block_tokens // engine_block_tokens
