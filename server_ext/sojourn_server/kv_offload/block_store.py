"""The interface of a store of Full Blocks.

A Full Block is the KV of a fixed number of tokens: one layer after the other, and within a layer one engine
block after the other. It can be divided into its layers (Layer Blocks) without a copy, so callers may pass
one buffer per layer or one for all layers. The key of a Full Block is the chain hash of its last engine
block, which identifies all tokens up to the block's end (DualPath §4.1, A.5).

Implementations:

    ``SharedStore``   writes this engine's files, with checksums and a budget; also reads other engines' files
    ``VllmFsStore``   uses the folders of vLLM's ``fs`` tier, like stock engines; checks only file sizes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .block_file import Buffer, KvIdentity
from .disk_store import PutOutcome

FULL_BLOCK_TOKENS = 64
"""Default number of tokens of a Full Block (DualPath §4.1)."""


class BlockStore(Protocol):
    """Stores Full Blocks (the unit of storage) by key. Thread-safe. Each call waits for the disk."""

    @property
    def identity(self) -> KvIdentity:
        """Model, layout and rank of the KV in the store."""
        ...

    def leading(self, keys: Sequence[bytes]) -> int:
        """Return how many leading ``keys`` the store has. A later read may still find no block, because
        the store may delete blocks at any time."""
        ...

    def get_into(self, key: bytes, buffers: Sequence[Buffer]) -> None:
        """Fill ``buffers``, ``identity.block_bytes`` long in total, with the block of ``key``.

        Raises ``BlockNotFound``; ``BlockCorrupt`` for damaged content, or content of another model;
        ``StoreError``; and ``ValueError`` for buffers of another size. After any exception the content of
        ``buffers`` is undefined.
        """
        ...

    def put(self, key: bytes, buffers: Sequence[Buffer], *, parent: bytes = b"") -> PutOutcome:
        """Store ``buffers`` as the block of ``key``. ``parent``: key of the previous block of the context;
        empty if there is none.

        Returns ``FULL`` or ``DISK_FULL`` if the block does not fit. Raises ``StoreError``, and ``ValueError``
        for buffers of another size. In all these cases the store does not have the block.
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
