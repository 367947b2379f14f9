"""What a store of Full Blocks is to those who read and write it, wherever its bytes lie.

A Full Block is a run of tokens, all layers: layer by layer, within a layer one engine block after the other.
So it is cut into Layer Blocks without a copy: the buffers that are given to a store are one a layer, or one
for all. Its key is the chain hash of its last engine block, which names all tokens up to its end
(DualPath §4.1, A.5).

    ``SharedStore``   this engine's own files, checked, within a budget, and other engines' beside them
    ``VllmFsStore``   the folders of vLLM's ``fs`` tier, shared with stock engines; sizes are all it can check
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .block_file import Buffer, KvIdentity
from .disk_store import PutOutcome

FULL_BLOCK_TOKENS = 64
"""Tokens of a Full Block where nobody says otherwise (DualPath §4.1)."""


class BlockStore(Protocol):
    """Full Blocks by key. Every call waits for a disk, may come from any thread, and raises ``OffloadError``s
    as each says; nothing that is damaged or of something else is ever handed out."""

    @property
    def identity(self) -> KvIdentity:
        """Whose KV it is."""
        ...

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of the leading ``keys`` are there. No promise: they may be gone when they are read."""
        ...

    def get_into(self, key: bytes, buffers: Sequence[Buffer]) -> None:
        """Fill ``buffers``, together ``identity.block_bytes`` long, with the block of ``key``.

        Only when it returns are they good. Raises ``BlockNotFound``, ``BlockCorrupt``, ``StoreError``, and
        ``ValueError`` for buffers of another size.
        """
        ...

    def put(self, key: bytes, buffers: Sequence[Buffer], *, parent: bytes = b"") -> PutOutcome:
        """Store ``buffers`` as the block of ``key``, which follows the block of ``parent``, if any.

        A store that is full says so (``FULL``, ``DISK_FULL``) and has nothing of it. Raises ``StoreError``,
        after which nothing is left of the block, and ``ValueError`` for buffers of another size.
        """
        ...

    def close(self) -> None: ...


def blocks_per_full(engine_block_tokens: int, block_tokens: int) -> int:
    """Engine blocks of one Full Block. Raises ``ValueError`` where that is no whole number, or none."""
    if engine_block_tokens < 1 or block_tokens < engine_block_tokens or block_tokens % engine_block_tokens:
        raise ValueError(
            f"a Full Block of {block_tokens} tokens is not a whole number of engine blocks of "
            f"{engine_block_tokens}; choose a multiple of the engine's --block-size"
        )
    return block_tokens // engine_block_tokens
