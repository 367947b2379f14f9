"""Keeps track of the slots of host memory: which block each slot holds, and which slot is reused next."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain, islice

from .offload_jobs import BlockKey


class RetentionRank(IntEnum):
    """Rank of a block in host memory. Blocks of the lowest rank are evicted first. Within a rank, the least
    recently used block is evicted first.

    Members hash and compare as fast as numbers. But ``RetentionRank.COLD`` is a slow expression, so code that
    runs for each block assigns the members to variables first.
    """

    WORTHLESS = 0
    """No request is known to need it: ended programs', or on the device too. Not written to disk."""
    COLD = 1
    """Block of a program that has been idle so long that its KV belongs on disk. While host memory has the
    only copy, which waits for its write, the block is evicted as those of ``IDLE`` are."""
    PLAIN = 2
    """Block of a busy program whose KV belongs on the device, or of an unknown program."""
    IDLE = 3
    """Block of an idle program whose KV belongs in host memory."""
    WANTED = 4
    """Block that a request will load soon: its program's KV was just assigned to the device, or the request
    was preempted. It is not evicted for a block of a lower rank."""


_RANKS = tuple(map(int, RetentionRank))
_WORTHLESS, _COLD, _, _IDLE, _WANTED = RetentionRank


@dataclass(slots=True, eq=False)
class HostEntry:
    """A block in host memory, and its slot."""

    key: BlockKey
    slot: int
    rank: RetentionRank
    job: int | None
    """Number of the job that is filling the slot; ``None`` if the slot is filled."""
    dirty: bool
    """Whether the disk has no copy, and no write of this entry has failed."""
    pins: int = 0
    """Number of current or expected readers. A pinned entry is not evicted."""
    removal_pending: bool = False
    """Whether the entry was removed. Its slot becomes free once no job reads or fills it."""


class HostBlockPool:
    """The slots of one engine's host memory and their order of reuse. Every operation is O(1) per block."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.counts: Counter[str] = Counter()
        """Number of blocks by outcome; ``docs/kv-offload.md`` explains the names."""
        self.on_disk: Container[BlockKey] = ()
        """Keys of the blocks with a copy on disk."""
        self.free = list(range(slots - 1, -1, -1))
        """Empty slots."""
        self.entries: dict[BlockKey, HostEntry] = {}
        self.get = self.entries.get
        """Returns the entry of a block, filled or being filled; ``None`` if the block has no entry."""
        self._idle: dict[int, OrderedDict[BlockKey, HostEntry]] = {rank: OrderedDict() for rank in _RANKS}
        """Idle (filled and unpinned) entries by rank. Only these may be reused."""
        self._dirty: dict[int, OrderedDict[BlockKey, HostEntry]] = {rank: OrderedDict() for rank in _RANKS}
        """Idle ``dirty`` entries by rank."""
        self.unwritten = self._dirty[_COLD]
        """Idle entries that belong on disk and wait for their write."""

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[HostEntry]:
        return iter(self.entries.values())

    @property
    def unspilled(self) -> int:
        """Number of idle ``dirty`` entries above ``WORTHLESS``: reusing them would lose something."""
        return sum(map(len, self._dirty.values())) - len(self._dirty[_WORTHLESS])

    def room(self, at_most: RetentionRank) -> int:
        """Return the number of slots that are empty or have an idle block of rank ``at_most`` or below."""
        return len(self.free) + sum(len(idle) for rank, idle in self._idle.items() if rank <= at_most)

    def take(
        self,
        key: BlockKey,
        rank: RetentionRank,
        job: int | None,
        *,
        at_most: RetentionRank | None = None,
    ) -> HostEntry | None:
        """Assign a slot to a new block and return its entry. If no slot is empty, evict the least recently
        used idle entry of the lowest rank, at most ``at_most`` (default: ``rank``; for ``COLD``, ``IDLE``).
        ``None`` if none is.

        ``job``: number of the job that will fill the slot, ``None`` if the slot already counts as filled."""
        if not self.free:
            if at_most is None:
                at_most = _IDLE if rank == _COLD else rank
            ranks = _RANKS[: at_most + 1]
            reused = next((next(iter(idle.values())) for each in ranks if (idle := self._idle[each])), None)
            if reused is None:
                return None
            self.remove(reused)
            self.counts["dropped_on_disk" if reused.key in self.on_disk else "dropped"] += 1
        entry = HostEntry(key, self.free.pop(), rank, job, dirty=key not in self.on_disk)
        self.entries[key] = entry
        self._settle(entry)
        return entry

    def end_fill(self, entry: HostEntry) -> None:
        """Record that the job that fills the entry has ended."""
        entry.job = None
        self._settle(entry)

    def pin(self, entry: HostEntry) -> None:
        """Protect the entry from eviction until a matching ``unpin``."""
        self._unsettle(entry)
        entry.pins += 1

    def unpin(self, entry: HostEntry, *, used: bool = True) -> None:
        """Remove one pin. If no pin is left, the entry becomes the most recently used of its rank.
        ``used=False``: the entry was only copied to disk, and becomes the least recently used."""
        entry.pins -= 1
        self._settle(entry)
        if not used and self._is_idle(entry):
            for order in self._orders(entry):
                order.move_to_end(entry.key, last=False)

    def release(self, entries: Sequence[HostEntry]) -> None:
        """Unpin the entries of a context, given in context order. The last block will be evicted first."""
        for entry in reversed(entries):
            self.unpin(entry)

    def touch(self, entry: HostEntry) -> None:
        """Make an entry the most recently used of its rank, unless it was removed."""
        self._change(entry, entry.rank, entry.dirty)

    def set_rank(self, entry: HostEntry, rank: RetentionRank) -> None:
        """Make an entry the most recently used of the rank ``rank``, unless it was removed. For ``COLD`` it
        is to be written to disk, also if an earlier write has failed."""
        self._change(entry, rank, entry.key not in self.on_disk if rank == _COLD else entry.dirty)

    def rerank(self, entry: HostEntry, rank: RetentionRank) -> None:
        """Give an entry the rank ``rank``, unless it has that rank or ``WANTED``."""
        if entry.rank not in (rank, _WANTED):
            self.set_rank(entry, rank)

    def set_dirty(self, entry: HostEntry, dirty: bool) -> None:
        """Record whether the entry is ``dirty``. If that changes, it becomes the most recently used."""
        if dirty != entry.dirty:
            self._change(entry, entry.rank, dirty)

    def _change(self, entry: HostEntry, rank: RetentionRank, dirty: bool) -> None:
        if not entry.removal_pending:
            self._unsettle(entry)
            entry.rank, entry.dirty = rank, dirty
            self._settle(entry)

    def next_unspilled(self, most: int) -> list[HostEntry]:
        """Return up to ``most`` idle ``dirty`` entries above ``WORTHLESS``, in their order of eviction."""
        members = chain.from_iterable(self._dirty[rank].values() for rank in _RANKS[1:])
        return list(islice(members, most))

    def remove(self, entry: HostEntry) -> None:
        """Remove an entry. Its slot becomes free once no job reads or fills it."""
        if entry.removal_pending:
            return
        self._unsettle(entry)
        entry.removal_pending = True
        del self.entries[entry.key]
        self._settle(entry)

    def _is_idle(self, entry: HostEntry) -> bool:
        return not entry.pins and entry.job is None and not entry.removal_pending

    def _orders(self, entry: HostEntry) -> Sequence[OrderedDict[BlockKey, HostEntry]]:
        """The orders in which the entry stands while it is idle."""
        if not entry.dirty:
            return (self._idle[entry.rank],)
        return self._idle[_IDLE if entry.rank == _COLD else entry.rank], self._dirty[entry.rank]

    def _settle(self, entry: HostEntry) -> None:
        """If no pin or job uses the entry, make it idle or, if it was removed, free its slot."""
        if self._is_idle(entry):
            for order in self._orders(entry):
                order[entry.key] = entry
        elif entry.removal_pending and not entry.pins and entry.job is None:
            self.free.append(entry.slot)

    def _unsettle(self, entry: HostEntry) -> None:
        """Before a change: if the entry is idle, it is so no more until ``_settle``."""
        if self._is_idle(entry):
            for order in self._orders(entry):
                del order[entry.key]
