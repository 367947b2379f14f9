"""Whose context is in which cached block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sojourn.ids import ProgramId
from vllm.v1.core.kv_cache_utils import KVCacheBlock

Owner = ProgramId | set[ProgramId] | frozenset[ProgramId]
"""One program; the set of several; or ``MANY``."""

MAX_OWNERS = 16
"""Owners of a block who are known by name. More would cost memory and tell nothing."""

MANY: frozenset[ProgramId] = frozenset()
"""Owner of a block of more programs than that. It stays shared, whoever ends, until it is reused or reset."""


class BlockOwners:
    """The programs whose contexts are in the cached blocks of one pool, and what is left of ended ones.

    Every operation is O(1) a block, however many programs share it.
    """

    def __init__(self) -> None:
        self.of: dict[int, Owner] = {}
        """Of each block that has one, its owner."""
        self.blocks: dict[ProgramId, dict[int, KVCacheBlock]] = {}
        """Of each program the blocks it is named as an owner of, in the order of its context."""
        self.orphans: dict[int, ProgramId] = {}
        """Of cached blocks without an owner that one program alone has used, that program."""
        self.common: set[int] = set()
        """Cached blocks that somebody else has used besides an owner, with or without one now."""

    def __len__(self) -> int:
        """How many blocks have an owner."""
        return len(self.of)

    def names(self, block_id: int) -> frozenset[ProgramId]:
        """Programs whose context is in the block; none where they are too ``MANY`` to be named."""
        owner = self.of.get(block_id, MANY)
        return frozenset((owner,)) if isinstance(owner, str) else frozenset(owner)

    def add(self, blocks: Iterable[KVCacheBlock], program_id: ProgramId) -> list[KVCacheBlock]:
        """The program's context is (also) in these. Returns those that had one other owner until now."""
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
        """The program is no owner any more.

        Returns the blocks that have one owner now, or none, against the order
        of its context. Blocks of ``MANY`` are not among them.
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
        """Somebody uses what the block holds."""
        # Where no program is known there is nobody whose end would matter.
        if (self.of or self.orphans) and block_id not in self.of:
            self.orphans.pop(block_id, None)
            self.common.add(block_id)

    def taken(self, blocks: Iterable[KVCacheBlock]) -> Iterator[tuple[KVCacheBlock, Owner]]:
        """These are reused for something else. Yields those that are cached, and whose they were, to the end
        of a program that alone had used them."""
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
        """Nobody owns anything any more."""
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
