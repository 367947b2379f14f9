"""Blocks of preempted requests: which are recomputed instead of saved, and which will be loaded again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sojourn.ids import ProgramId

from ..kv_offload.offload_jobs import BlockKey

MAX_RECOMPUTE_KEYS = 1 << 16
"""Maximum number of remembered keys of blocks that are recomputed instead of saved."""


class KeptContext(NamedTuple):
    """The context of a preempted request, whose blocks are kept in host memory."""

    keys: Sequence[BlockKey]
    """Keys of the kept blocks, in all KV cache groups."""
    hashes: int
    """Number of block hashes of the context."""
    last_hash: Sequence[BlockKey]
    """The context's last block hash, as a sequence of one; empty for an empty context."""


class PreemptedContexts:
    """The blocks of preempted requests that have not been admitted again. Holds only keys; the
    ``OffloadManager`` acts on them."""

    def __init__(self) -> None:
        self.recomputed: dict[BlockKey, None] = {}
        """Keys of blocks that are faster to recompute than to copy, oldest first."""
        self.wanted: Counter[BlockKey] = Counter()
        """Key of a block that a preempted request will load → number of kept contexts with it."""
        self._kept: dict[ProgramId, list[KeptContext]] = {}
        """Program → the contexts of its preempted requests. These requests will load the contexts' blocks."""

    def __contains__(self, program_id: ProgramId | None) -> bool:
        """Whether contexts of the program are kept."""
        return program_id in self._kept

    def add_recomputed(self, keys: Iterable[BlockKey]) -> None:
        """Add blocks to ``recomputed``. The oldest are dropped above ``MAX_RECOMPUTE_KEYS``."""
        self.recomputed.update(dict.fromkeys(keys))
        while len(self.recomputed) > MAX_RECOMPUTE_KEYS:
            del self.recomputed[next(iter(self.recomputed))]

    def keep(self, program_id: ProgramId, context: KeptContext) -> None:
        """Add the context of a preempted request."""
        self._kept.setdefault(program_id, []).append(context)
        self.wanted.update(context.keys)

    def release(self, program_id: ProgramId, hashes: Sequence[BlockKey]) -> list[list[BlockKey]]:
        """Remove the program's contexts that are prefixes of ``hashes``; all of them if ``hashes`` is empty.
        Return, for each removed context, the keys that no preempted request will load any more. Raises
        ``KeyError`` if the program has no context."""
        still, unwanted = [], []
        for context in self._kept.pop(program_id):
            # Hashes are chained, so an equal last hash means an equal prefix.
            if hashes and list(hashes[context.hashes - 1 : context.hashes]) != list(context.last_hash):
                still.append(context)
            else:
                unwanted.append(self._unwanted_keys(context.keys))
        if still:
            self._kept[program_id] = still
        return unwanted

    def clear(self) -> None:
        """Forget all blocks, after a reset of the engine's cache."""
        self.recomputed.clear()
        self.wanted.clear()
        self._kept.clear()

    def _unwanted_keys(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Lower the count of each key by one. Return the keys that no preempted request will load again."""
        wanted, unwanted = self.wanted, []
        for key in keys:
            if wanted[key] > 1:  # requests may share a prefix
                wanted[key] -= 1
            else:
                del wanted[key]
                unwanted.append(key)
        return unwanted
