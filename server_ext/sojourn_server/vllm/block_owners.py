"""The programs whose context is in each cached block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sojourn.ids import ProgramId

from .compat import KVCacheBlock

Owner = ProgramId | set[ProgramId] | frozenset[ProgramId]
"""One program; the set of several programs; or ``MANY``."""

MAX_OWNERS = 16
"""Maximum number of owners that a block records by id. More would cost memory and change no decision."""

MANY: frozenset[ProgramId] = frozenset()
"""Owner of a block with more than ``MAX_OWNERS`` owners. The block stays shared until it is reused or
reset."""


class BlockOwners:
    """Owners of the cached blocks of one pool, and the blocks that ended programs left.

    Every operation is O(1) a block for any number of owners.
    """

    def __init__(self) -> None:
        self.of: dict[int, Owner] = {}
        """Block id → owner, for blocks that have one."""
        self.blocks: dict[ProgramId, dict[int, KVCacheBlock]] = {}
        """Program → blocks that record it as an owner, in the order of its context."""
        self.orphans: dict[int, ProgramId] = {}
        """Cached block without an owner → the ended program that used it, if no other request has used the
        block."""
        self.common: set[int] = set()
        """Cached blocks that a second program or another request has used."""

    def __len__(self) -> int:
        """Return the number of blocks with an owner."""
        return len(self.of)

    def names(self, block_id: int) -> frozenset[ProgramId]:
        """Return the owners of the block; empty for ``MANY``."""
        owner = self.of.get(block_id, MANY)
        return frozenset((owner,)) if isinstance(owner, str) else frozenset(owner)

    def add(self, blocks: Iterable[KVCacheBlock], program_id: ProgramId) -> list[KVCacheBlock]:
        """Add an owner to blocks. Return those that had exactly one other owner before."""
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
        """Remove the program from all its blocks.

        Return the blocks that now have one owner or none, in reverse order of the context, without blocks of
        ``MANY``.
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

    def found(self, block_id: int) -> None:
        """Record that a request reuses the content of the block."""
        # Without known programs no later end of a program depends on it.
        if (self.of or self.orphans) and block_id not in self.of:
            self.orphans.pop(block_id, None)
            self.common.add(block_id)

    def taken(self, blocks: Iterable[KVCacheBlock]) -> Iterator[tuple[KVCacheBlock, Owner]]:
        """Forget blocks that are reused for other content. Yield each cached block that had an owner, with
        the owner.

        For a block that only an ended program has used, the owner is that program.
        """
        if not (self.of or self.orphans or self.common):
            return
        for block in blocks:
            block_id = block.block_id
            self.common.discard(block_id)
            owner = self.of.pop(block_id, None)
            if owner is None:
                owner = self.orphans.pop(block_id, None)
                if owner is None:
                    continue
            elif isinstance(owner, str):
                owned = self.blocks[owner]
                del owned[block_id]
                if not owned:
                    del self.blocks[owner]
            else:
                self._forget_names(block_id, owner)
            if block.block_hash is not None:
                yield block, owner

    def clear(self) -> None:
        """Remove all owners."""
        self.of.clear()
        self.blocks.clear()
        self.orphans.clear()
        self.common.clear()

    def _forget_names(self, block_id: int, owners: Iterable[ProgramId]) -> None:
        for program_id in owners:
            owned = self.blocks[program_id]
            del owned[block_id]
            if not owned:
                del self.blocks[program_id]
