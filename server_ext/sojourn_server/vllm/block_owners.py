"""Table of the programs that own each cached KV block. A program owns the blocks of its context."""

from __future__ import annotations

from collections.abc import Iterable

from sojourn.ids import ProgramId

from .compat import KVCacheBlock

Owner = ProgramId | set[ProgramId] | frozenset[ProgramId]
"""Owner of a block: one program, a set of programs, or ``MANY`` (too many to list)."""

MAX_OWNERS = 16
"""Maximum number of owners recorded per block, to bound memory. A block with more has the owner ``MANY``."""

MANY: frozenset[ProgramId] = frozenset()
"""Owner of a block that has had more than ``MAX_OWNERS`` owners. The block counts as shared until the pool
reuses or resets it, even if all its owners have ended."""


class BlockOwners:
    """Table of one pool's cached blocks: the programs that own each block, and the blocks whose only program
    has ended. Every operation takes O(1) time per block, for any number of owners."""

    def __init__(self) -> None:
        self.of: dict[int, Owner] = {}
        """Block id → owner. Blocks without an owner have no entry."""
        self.blocks: dict[ProgramId, dict[int, KVCacheBlock]] = {}
        """Program → block id → block: the blocks that list the program as an owner, in context order."""
        self.orphans: dict[int, ProgramId] = {}
        """Block id → ended program, for cached blocks that only requests of this ended program have used."""
        self.ahead: dict[int, ProgramId] = {}
        """Block id → program, for cached blocks loaded ahead of need for the program. No request has used
        these blocks yet, and they have no owner."""
        self.common: set[int] = set()
        """Ids of cached blocks of common prefixes. A second program has used such a block, or a request has
        reused the block while it had no owner."""

    def owners_of(self, block_id: int) -> frozenset[ProgramId]:
        """Return the owners of the block; an empty set if the block has no owner, or is owned by ``MANY``."""
        owner = self.of.get(block_id, MANY)
        return frozenset((owner,)) if isinstance(owner, str) else frozenset(owner)

    def add(self, blocks: Iterable[KVCacheBlock], program_id: ProgramId) -> list[KVCacheBlock]:
        """Add the program as an owner of the blocks, which are in context order. Return the blocks that went
        from one owner to two."""
        owned = self.blocks.setdefault(program_id, {})
        shared: list[KVCacheBlock] = []
        for block in blocks:
            block_id = block.block_id
            owner = self.of.get(block_id)
            if owner is None:
                self.of[block_id] = program_id
                if self.orphans and self.orphans.pop(block_id, program_id) != program_id:
                    self.common.add(block_id)
            elif isinstance(owner, str):
                if owner == program_id:
                    continue
                self.of[block_id] = {owner, program_id}
                self.common.add(block_id)
                shared.append(block)
            elif isinstance(owner, frozenset) or program_id in owner:
                continue
            elif len(owner) < MAX_OWNERS:
                owner.add(program_id)
            else:
                self._forget_names(block_id, owner)
                self.of[block_id] = MANY
                continue
            owned[block_id] = block
        if not owned:
            del self.blocks[program_id]
        return shared

    def end(self, program_id: ProgramId) -> list[KVCacheBlock]:
        """Remove an ended program as an owner of its blocks.

        Return the blocks that now have one owner or none, the last block of the context first. Blocks with
        the owner ``MANY`` do not change and are not returned.
        """
        changed: list[KVCacheBlock] = []
        for block_id, block in reversed(self.blocks.pop(program_id, {}).items()):
            owner = self.of[block_id]
            if isinstance(owner, set):
                owner.discard(program_id)
                if len(owner) > 1:
                    continue
                self.of[block_id] = owner.pop()
            else:
                del self.of[block_id]
                if block.block_hash is not None and block_id not in self.common:
                    self.orphans[block_id] = program_id
            changed.append(block)
        return changed

    def record_hit(self, block_id: int) -> None:
        """Record that a request reuses the block's cached content."""
        # The record matters only when a program ends, so it is skipped while no block has an owner.
        if (self.of or self.orphans) and block_id not in self.of:
            self.orphans.pop(block_id, None)
            self.common.add(block_id)

    def remove_reused(self, blocks: Iterable[KVCacheBlock]) -> list[tuple[KVCacheBlock, Owner]]:
        """Remove the owners of ``blocks``, which the pool is about to reuse for other content. Return (block,
        owner) for each cached block that had an owner.

        If only an ended program has used a block, that program counts as the block's owner.
        """
        reused: list[tuple[KVCacheBlock, Owner]] = []
        if not (self.of or self.orphans or self.common):
            return reused
        for block in blocks:
            block_id = block.block_id
            self.common.discard(block_id)
            owner = self.of.pop(block_id, None)
            if owner is None:
                owner = self.orphans.pop(block_id, None)
                if owner is None:
                    continue
            elif isinstance(owner, str) and len(self.blocks[owner]) > 1:
                del self.blocks[owner][block_id]
            else:
                self._forget_names(block_id, (owner,) if isinstance(owner, str) else owner)
            if block.block_hash is not None:
                reused.append((block, owner))
        return reused

    def clear(self) -> None:
        """Empty all tables."""
        self.of.clear()
        self.blocks.clear()
        self.orphans.clear()
        self.ahead.clear()
        self.common.clear()

    def _forget_names(self, block_id: int, owners: Iterable[ProgramId]) -> None:
        for program_id in owners:
            owned = self.blocks[program_id]
            del owned[block_id]
            if not owned:
                del self.blocks[program_id]
