"""Which blocks' content is in which slot of host memory."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from .offload_jobs import BlockKey


class RetentionRank(IntEnum):
    """Slots of the lowest rank are reused first; within a rank, the least recently used.

    Members hash and compare as fast as numbers. Attribute access is slower: code that runs for each block
    binds members first."""

    WORTHLESS = 0
    """No request is known to need it again. Not written to disk."""
    SPARE = 1
    """The device has it too: a copy made ahead of eviction. Not written to disk."""
    COLD = 2
    """Of a program idle for so long that its KV belongs on disk; the disk has it."""
    PLAIN = 3
    """Of a busy program whose KV belongs on the device, and of blocks of unknown programs."""
    IDLE = 4
    """Of an idle program whose KV belongs in host memory."""
    WANTED = 5
    """Read next: its program has just been admitted. Nothing replaces it."""

    @property
    def until_written(self) -> RetentionRank:
        """The rank until the disk has the block: the only copy of a cold block is kept like an idle one."""
        return _IDLE if self is _COLD else self


_COLD, _IDLE = RetentionRank.COLD, RetentionRank.IDLE


@dataclass(slots=True, eq=False)
class HostEntry:
    """One block's place in host memory."""

    key: BlockKey
    slot: int
    rank: RetentionRank
    job: int | None
    """The job that fills it; ``None``: it is filled."""
    on_disk: bool
    pins: int = 0
    """Who reads it, or is about to. It is reused by nobody meanwhile."""
    removal_pending: bool = False
    """Not to be found any more; its slot is free once nobody reads or fills it."""


class HostBlockPool:
    """The slots of one engine's host memory, and the order in which they are reused. All O(1) a block."""

    def __init__(self, slots: int, counts: Counter[str] | None = None) -> None:
        """``counts`` is where blocks are counted that had to make way for others."""
        self.slots = slots
        self._counts: Counter[str] = counts if counts is not None else Counter()
        self._free = list(range(slots - 1, -1, -1))
        self._entries: dict[BlockKey, HostEntry] = {}
        self._by_slot: dict[int, HostEntry] = {}
        self._idle: dict[RetentionRank, OrderedDict[BlockKey, HostEntry]] = {}
        """Filled, unpinned entries: the only ones that may be reused."""
        self._dirty: dict[RetentionRank, OrderedDict[BlockKey, HostEntry]] = {}
        """Those of them that are not on disk."""
        self.idle_on_disk = 0
        """Idle entries that are on disk too: reusing their slots loses nothing."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[HostEntry]:
        return iter(self._entries.values())

    def get(self, key: BlockKey) -> HostEntry | None:
        """The entry of a block's content, filled or being filled."""
        return self._entries.get(key)

    def entry_in_slot(self, slot: int) -> HostEntry | None:
        """Whose content is, or will be, in a slot."""
        return self._by_slot.get(slot)

    @property
    def free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def room(self, at_most: RetentionRank) -> int:
        """Slots that hold nothing, or something worth no more that may be reused. O(1)."""
        return len(self._free) + sum(len(idle) for rank, idle in self._idle.items() if rank <= at_most)

    def begin(
        self, key: BlockKey, rank: RetentionRank, job: int | None, *, on_disk: bool = False
    ) -> HostEntry | None:
        """A slot for a block that is not here, or ``None`` where none may be reused: call ``reuse`` first."""
        if not self._free:
            return None
        entry = HostEntry(key=key, slot=self._free.pop(), rank=rank, job=job, on_disk=on_disk)
        self._entries[key] = entry
        self._by_slot[entry.slot] = entry
        self._settle(entry)
        return entry

    def take(
        self,
        key: BlockKey,
        rank: RetentionRank,
        job: int | None,
        *,
        on_disk: bool = False,
        at_most: RetentionRank | None = None,
    ) -> HostEntry | None:
        """A slot for a block that is not here: a free one, or that of something worth ``at_most`` so much, by
        default as much. ``None``: there is none."""
        if not self._free:
            reused = self.reuse(at_most=rank if at_most is None else at_most)
            if reused is None:
                return None
            self._counts["dropped" if not reused.on_disk else "dropped_on_disk"] += 1
        return self.begin(key, rank, job, on_disk=on_disk)

    def reuse(self, *, at_most: RetentionRank) -> HostEntry | None:
        """Free the slot whose turn it is, of a rank that is no higher; ``None``: the others are worth more,
        pinned, or being filled."""
        rank = min(self._idle, default=None)
        if rank is None or rank > at_most:
            return None
        entry = next(iter(self._idle[rank].values()))
        self.remove(entry)
        return entry

    def filled(self, entry: HostEntry) -> None:
        """Its job is done."""
        entry.job = None
        self._settle(entry)

    def pin(self, entry: HostEntry) -> None:
        """Somebody reads it, or is about to."""
        if self._is_idle(entry):
            self._unsettle(entry)
        entry.pins += 1

    def unpin(self, entry: HostEntry, *, used: bool = True) -> None:
        """One reader is through; that was its newest use, unless it was only copied on (``used=False``):
        then it is as old as the oldest of its rank."""
        entry.pins -= 1
        self._settle(entry)
        if not used and self._is_idle(entry):
            self._idle[entry.rank].move_to_end(entry.key, last=False)
            if not entry.on_disk:
                self._dirty[entry.rank].move_to_end(entry.key, last=False)

    def release(self, entries: Sequence[HostEntry]) -> None:
        """A reader of these, of a context in its order, is through: its end is reused first."""
        for entry in reversed(entries):
            self.unpin(entry)

    def touch(self, entry: HostEntry) -> None:
        """It was used, or would have been."""
        if self._is_idle(entry):
            self._unsettle(entry)
            self._settle(entry)

    def set_rank(self, entry: HostEntry, rank: RetentionRank) -> None:
        """It is reused with those of another rank, after them."""
        if entry.rank == rank:
            return
        idle = self._is_idle(entry)
        if idle:
            self._unsettle(entry)
        entry.rank = rank
        if idle:
            self._settle(entry)

    def set_on_disk(self, entry: HostEntry, on_disk: bool) -> None:
        """A copy of it is on disk now, or no longer."""
        if entry.on_disk == on_disk:
            return
        idle = self._is_idle(entry)
        entry.on_disk = on_disk
        if idle and on_disk:
            self._drop(self._dirty, entry)
            self.idle_on_disk += 1
        elif idle:
            self._dirty.setdefault(entry.rank, OrderedDict())[entry.key] = entry
            self.idle_on_disk -= 1

    def idle_unspilled(self, rank: RetentionRank) -> int:
        """Idle entries of this rank that a reuse would lose."""
        return len(self._dirty.get(rank, ()))

    def next_unspilled(self, most: int, *, above: RetentionRank) -> list[HostEntry]:
        """Idle entries of higher ranks that a reuse would lose, the next to be reused first."""
        found: list[HostEntry] = []
        for rank in sorted(rank for rank in self._dirty if rank > above):
            for entry in self._dirty[rank].values():
                if len(found) >= most:
                    return found
                found.append(entry)
        return found

    def remove(self, entry: HostEntry) -> None:
        """It is found no more; its slot is free now, or once nobody reads or fills it."""
        if entry.removal_pending:
            return
        if self._is_idle(entry):
            self._unsettle(entry)
        entry.removal_pending = True
        del self._entries[entry.key]
        self._settle(entry)

    def _is_idle(self, entry: HostEntry) -> bool:
        return not entry.pins and entry.job is None and not entry.removal_pending

    def _settle(self, entry: HostEntry) -> None:
        if entry.removal_pending and not entry.pins and entry.job is None:
            del self._by_slot[entry.slot]
            self._free.append(entry.slot)
        if not self._is_idle(entry):
            return
        self._idle.setdefault(entry.rank, OrderedDict())[entry.key] = entry
        if entry.on_disk:
            self.idle_on_disk += 1
        else:
            self._dirty.setdefault(entry.rank, OrderedDict())[entry.key] = entry

    def _unsettle(self, entry: HostEntry) -> None:
        self._drop(self._idle, entry)
        if entry.on_disk:
            self.idle_on_disk -= 1
        else:
            self._drop(self._dirty, entry)

    @staticmethod
    def _drop(classes: dict[RetentionRank, OrderedDict[BlockKey, HostEntry]], entry: HostEntry) -> None:
        members = classes[entry.rank]
        del members[entry.key]
        if not members:
            del classes[entry.rank]
