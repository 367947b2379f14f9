"""The programs that own each cached KV block, as ids. A program owns the blocks of its contexts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sojourn.ids import ProgramId

Owner = ProgramId | set[ProgramId] | frozenset[ProgramId]
"""Owner of a block: one program, a set of programs, or ``MANY`` (too many to list)."""

MAX_OWNERS = 16
"""Maximum number of owners recorded per block, to bound memory. A block with more has the owner ``MANY``."""

MANY: frozenset[ProgramId] = frozenset()
"""Owner of a block that has had more than ``MAX_OWNERS`` owners. The block counts as shared until the engine
reuses or resets it, even if all its owners have ended."""


class BlockOwners:
    """The owners of one engine's cached blocks. Every operation takes O(1) time per block.

    ``ProgramScheduler.handle`` alone changes owners. The engine reads them, changes ``ahead``, and calls
    ``record_hit``, on which only the eviction order of blocks without an owner depends, and no action."""

    def __init__(self) -> None:
        self.of: dict[int, Owner] = {}
        """Block id → owner. Blocks without an owner have no entry."""
        self.blocks: dict[ProgramId, dict[int, None]] = {}
        """Program → ids of the blocks that list the program as an owner, in context order."""
        self.orphans: dict[int, ProgramId] = {}
        """Block id → ended program, for cached blocks that only requests of this ended program have used."""
        self.ahead: dict[int, ProgramId] = {}
        """Block id → program, for cached blocks loaded ahead of need for the program. No request has used
        these blocks yet, and they have no owner."""
        self.common: set[int] = set()
        """Ids of cached blocks of common prefixes. A second program has used such a block, or a request has
        reused the block while it had no owner."""
        self.contexts: dict[ProgramId, Sequence[int]] = {}
        """Program → ids of the blocks that its last turn left, in context order. Some may be evicted."""
        self._is_off = False

    def owners_of(self, block_id: int) -> frozenset[ProgramId]:
        """Return the owners of the block; an empty set if the block has no owner, or is owned by ``MANY``."""
        owner = self.of.get(block_id, MANY)
        return frozenset((owner,)) if isinstance(owner, str) else frozenset(owner)

    def own(self, block_ids: Iterable[int], program_id: ProgramId) -> None:
        """Add the program as an owner of the cached blocks, which are in context order."""
        if self._is_off:
            return
        owned = self.blocks.setdefault(program_id, {})
        for block_id in block_ids:
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
            elif isinstance(owner, frozenset) or program_id in owner:
                continue
            elif len(owner) < MAX_OWNERS:
                owner.add(program_id)
            else:
                self.remove_evicted([block_id])
                self.of[block_id] = MANY
                self.common.add(block_id)
                continue
            owned[block_id] = None
        if not owned:
            del self.blocks[program_id]

    def cached_context(self, program_id: ProgramId, *, whole: bool) -> list[int]:
        """Return the blocks of a program's last turn before the first evicted one; ``whole``: all or none."""
        found: list[int] = []
        owned = self.blocks.get(program_id, {})
        for block_id in self.contexts.get(program_id, ()):
            if block_id not in owned and self.of.get(block_id) is not MANY:
                return [] if whole else found
            found.append(block_id)
        return found

    def end(self, program_id: ProgramId) -> list[int]:
        """Remove an ended program as an owner. Return the blocks that now have one owner or none, the last
        block of the context first. Blocks with the owner ``MANY`` do not change and are not returned."""
        changed: list[int] = []
        self.contexts.pop(program_id, None)
        for block_id in reversed(self.blocks.pop(program_id, {})):
            owner = self.of[block_id]
            if isinstance(owner, set):
                owner.discard(program_id)
                if len(owner) > 1:
                    continue
                self.of[block_id] = owner.pop()
            else:
                del self.of[block_id]
                if block_id not in self.common:
                    self.orphans[block_id] = program_id
            changed.append(block_id)
        return changed

    def record_hit(self, block_id: int) -> None:
        """Record that a request reuses the block's cached content."""
        # The record matters only when a program ends, so it is skipped while no block has an owner.
        if (self.of or self.orphans) and block_id not in self.of:
            self.orphans.pop(block_id, None)
            self.common.add(block_id)

    def remove_evicted(self, block_ids: Sequence[int]) -> list[ProgramId | None]:
        """Remove blocks that the engine reuses for other content, and return the only owner of each. If only
        an ended program has used a block, that program counts as its owner. ``None``: several owners, or
        none."""
        found: list[ProgramId | None] = []
        for block_id in block_ids:
            owner = self.of.pop(block_id, None)
            if owner is None:
                found.append(self.orphans.pop(block_id, None))
                continue
            names = owner if isinstance(owner, set | frozenset) else (owner,)
            found.append(None if isinstance(owner, set | frozenset) else owner)
            for program_id in names:
                owned = self.blocks[program_id]
                del owned[block_id]
                if not owned:
                    del self.blocks[program_id]
        self.common.difference_update(block_ids)
        return found

    def clear(self) -> None:
        """Forget everything, after a reset of the cache."""
        self.of.clear()
        self.blocks.clear()
        self.orphans.clear()
        self.ahead.clear()
        self.common.clear()
        self.contexts.clear()

    def turn_off(self) -> None:
        """Forget everything, and record nothing from now on, since evictions are no longer reported."""
        self.clear()
        self._is_off = True
