"""Copies between host memory and the disk, and the requests that wait for them: no tensors, no clock.

To spill is to write a block from host memory to disk. To stage is to read it back into host memory. To probe
is to ask the store which blocks it has. Other engines write and delete files of the same store, so what is
known of the disk is a guess. Three rules cover a disk that is small, full, broken or slow. A block that the
budget displaces no longer belongs on disk, and a write that fails is counted; neither is repeated until it is
ordered again. A block that cannot be read in time is computed again. While a disk ``hangs``, it is asked
nothing new, and no request waits for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

from .context_keys import ContextKeys
from .host_block_pool import HostBlockPool, HostEntry, RetentionRank
from .offload_jobs import BlockKey, CopyResult, FileCopy, OffloadJobs, OffloadResults

CONFIRMED_S = 10.0
"""``persist`` asks the store again for blocks that it was last known to have this long ago. It does not write
again what the disk has refused, or has not kept for so long, in the last seconds of this number."""

MAX_PINNED_SHARE = 0.5
"""Maximum share of host memory that requests waiting for the disk may pin together, because blocks that the
device evicts need slots too. A single waiting request may pin more."""

MAX_STAGE_WAIT_S = 10.0

_STAGING = 0
"""``HostEntry.job`` of an entry that is read from disk. Store jobs have numbers from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLimits:
    """Limits of host memory and disk of one engine."""

    host_slots: int
    """Number of blocks that fit in host memory."""
    disk_blocks: int = 0
    """Number of blocks that fit on the disk; 0 if there is no disk."""
    spill_below: float = 0.25
    """Blocks are written to disk while less than this share of the slots can be reused without loss, as far
    as the disk has room. Such a slot is empty, or its block is on disk or has the rank ``WORTHLESS``."""
    max_spilling: int = 256
    """Maximum number of blocks being written to disk at once, so that a slow disk's queue stays short."""
    max_stage_wait_s: float = MAX_STAGE_WAIT_S
    """Maximum seconds that a request waits for the store's answer, and again for a disk read."""
    min_probe_blocks: int = 8
    """The store is asked if a request misses at least this many blocks."""


@dataclass(slots=True)
class _DiskWait:
    """What one request wants of the disk."""

    probe: int | None = None
    """Number of the job that asks the store for this request. It is asked once."""
    was_read: bool = False
    """Whether blocks were read for the request since its last load began."""
    since_s: float | None = None
    """Time since which the request waits for the store's answer or a read; ``None`` if it does not."""
    entries: list[HostEntry] = field(default_factory=list)
    """Host memory entries that stay pinned until vLLM looks up the request's blocks again."""


class DiskTier:
    """Schedules one engine's use of its disk. Times are seconds on the engine's clock."""

    def __init__(self, limits: TierLimits, host: HostBlockPool, numbers: Iterator[int]) -> None:
        """``numbers``: source of job numbers."""
        self._limits = limits
        self._host = host
        self._numbers = numbers
        self.blocks: OrderedDict[BlockKey, float] = OrderedDict()
        """Block that this engine has written to disk, or that the store has named → time when it was last
        known to be there. Least recently used first, at most ``limits.disk_blocks``."""
        host.on_disk = self.blocks
        self.is_closed = not limits.disk_blocks
        """Whether the disk is neither written nor read: there is none, or the cache was reset. Then the
        weights may have changed, but the store's identity names those with which the engine started."""
        self.jobs = OffloadJobs()
        """Jobs of the step being planned, which the ``OffloadScheduler`` takes and replaces."""
        self.spilling: dict[BlockKey, HostEntry] = {}
        """Blocks being written to disk."""
        self._staging: dict[BlockKey, HostEntry] = {}
        """Blocks being read from disk."""
        self._probing: dict[int, Sequence[BlockKey]] = {}
        """Number of a job that asks the store → the keys."""
        self._confirming: int | None = None
        """Number of the last job that asked the store for ``persist``."""
        self._confirmed: set[BlockKey] = set()
        """Blocks that such jobs have found, until the next ``persist`` whose blocks all are known."""
        self._not_kept: OrderedDict[BlockKey, float] = OrderedDict()
        """Block whose write failed, or that the budget displaced less than ``CONFIRMED_S`` after it was last
        known to be there → time of that. At most ``limits.disk_blocks``."""
        self._waits: dict[str, _DiskWait] = {}
        self._silent_since_s: dict[str, float] = {}
        """``"reads"`` (with probes) or ``"writes"`` → time since which the disk has answered none."""
        self._now = 0.0
        """The latest time that a caller has named."""

    @property
    def under_way(self) -> int:
        """Number of blocks being written or read, and of questions to the store."""
        return len(self.spilling) + len(self._staging) + len(self._probing)

    def note_time(self, now: float) -> None:
        self._now = now
        for lane, work in ("reads", self._staging or self._probing), ("writes", self.spilling):
            if work:
                self._silent_since_s.setdefault(lane, now)

    def hangs(self, lane: str) -> bool:
        """Return whether none of the ``"reads"`` or ``"writes"`` was answered for ``max_stage_wait_s``."""
        silent_s = self._now - self._silent_since_s.get(lane, self._now)
        return silent_s >= (self._limits.max_stage_wait_s or MAX_STAGE_WAIT_S)

    def take_results(self, results: OffloadResults) -> None:
        """Handle the results of earlier jobs."""
        moved = CopyResult.MOVED
        for key, copy_result in reversed(results.spilled.items()):  # the end of a context was written first
            self._spilled(key, copy_result)
        for key, copy_result in results.staged.items():
            self._staged(key, copy_result)
        self._know([key for key, copy_result in reversed(results.spilled.items()) if copy_result is moved])
        self._know([key for key, copy_result in results.staged.items() if copy_result is moved])
        for job, (found, next_is_missing) in results.probed.items():
            # The end of a context is deleted first, so with a missing key the later ones are forgotten too.
            # If the time ran out, nothing is forgotten.
            keys = self._probing.pop(job)
            self._know(keys[:found])
            self._confirmed.update(keys[:found] if job == self._confirming else ())
            for key in keys[found:] if next_is_missing else ():
                self._forget_file(key)
        if results.staged or results.probed:
            self._silent_since_s.pop("reads", None)
        if results.spilled:
            self._silent_since_s.pop("writes", None)

    def close(self) -> None:
        """Forget all blocks, and use the disk no more until a restart. Files stay."""
        for request_id in list(self._waits):
            self.abandon(request_id)
        self.blocks.clear()
        self.is_closed = True

    # -- writes ------------------------------------------------------------------------

    def plan_spills(self) -> None:
        """Plan this step's writes to disk: of blocks that belong there, and of others if host memory has too
        few slots that can be reused without loss (``TierLimits.spill_below``). The blocks stay in host memory
        too. While the disk hangs, those that belong there no longer wait for their write."""
        limits, host = self._limits, self._host
        if self.is_closed:
            return
        if self.hangs("writes"):
            for entry in list(host.unwritten.values()):
                host.set_dirty(entry, False)
            return
        spare = host.room(RetentionRank.WANTED) - host.unspilled + len(self.spilling)
        # Of a smaller disk, each write beyond its size would displace one that this step counts on.
        reusable = min(int(limits.spill_below * limits.host_slots), limits.disk_blocks)
        self.spill(host.next_unspilled(max(0, len(host.unwritten), reusable - spare)))

    def spill(self, entries: Iterable[HostEntry]) -> None:
        """Plan to write filled entries to disk, as many as it may be given now."""
        # No more than fits on the disk. A larger batch would delete files that it has just written.
        room = min(self._limits.max_spilling, self._limits.disk_blocks) - len(self.spilling)
        # The write of a lost entry of the same key may not have ended.
        new = (entry for entry in entries if entry.key not in self.spilling)
        for entry in list(islice(new, max(0, room))):
            self._host.pin(entry)
            self.spilling[entry.key] = entry
            self.jobs.spills.append(FileCopy(entry.slot, entry.key))

    def _spilled(self, key: BlockKey, copy_result: CopyResult) -> None:
        entry = self.spilling.pop(key)
        if copy_result is CopyResult.MOVED:
            self._host.counts["spilled"] += 1
        else:
            self._host.counts[f"spill_{copy_result.value}"] += 1
            self._note_not_kept(key)
        self._host.set_dirty(entry, False)
        self._host.unpin(entry, used=False)

    # -- what is known of the disk -----------------------------------------------------

    def confirm(self, chain: Sequence[BlockKey]) -> int:
        """Ask the store for those of ``chain`` that it was last known to have ``CONFIRMED_S`` ago. This marks
        them as just used: writes delete the least recently used files, and the end of a context must not
        displace its beginning. Return the number of blocks asked for."""
        ages = ((key, self._now - self.blocks.get(key, self._now)) for key in chain)
        old = [key for key, age_s in ages if age_s > CONFIRMED_S and key not in self._confirmed]
        if not old:
            self._confirmed.difference_update(chain)
        elif self._confirming not in self._probing:
            self._confirming = self._probe(old)
        return len(old)

    def keepable(self, chain: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Return the beginning of ``chain`` that the disk can keep, for ``persist``: what fits, up to the
        first block that it has lately not kept. Otherwise the blocks of two programs that do not fit together
        would displace each other without end."""
        since_s = self._now - CONFIRMED_S
        fits = chain[: self._limits.disk_blocks]
        return [*takewhile(lambda key: self._not_kept.get(key, since_s) <= since_s, fits)]

    def leading(self, keys: Sequence[BlockKey]) -> int:
        """Return the number of leading ``keys`` in host memory or on disk."""
        get, blocks = self._host.get, self.blocks
        return sum(1 for _ in takewhile(lambda key: get(key) is not None or key in blocks, keys))

    def _know(self, keys: Sequence[BlockKey]) -> None:
        """Note that the disk has the blocks ``keys``, given in context order."""
        for key in reversed(keys) if not self.is_closed else ():
            self.blocks[key] = self._now
            self.blocks.move_to_end(key)
            if (entry := self._host.get(key)) is not None:
                self._host.set_dirty(entry, False)
        while len(self.blocks) > self._limits.disk_blocks:
            key, known_s = next(iter(self.blocks.items()))
            self._forget_file(key)
            if self._now - known_s < CONFIRMED_S:
                self._note_not_kept(key)
            # Written again for its rank alone, it would displace the next one.
            if (entry := self._host.get(key)) is not None and entry.rank == RetentionRank.COLD:
                self._host.set_rank(entry, RetentionRank.IDLE)

    def _note_not_kept(self, key: BlockKey) -> None:
        self._not_kept[key] = self._now
        self._not_kept.move_to_end(key)
        if len(self._not_kept) > self._limits.disk_blocks:
            self._not_kept.popitem(last=False)

    def _forget_file(self, key: BlockKey) -> None:
        self._confirmed.discard(key)
        if self.blocks.pop(key, None) is not None and (entry := self._host.get(key)) is not None:
            self._host.set_dirty(entry, True)

    def _probe(self, keys: Sequence[BlockKey]) -> int:
        job = next(self._numbers)
        self._probing[job] = self.jobs.probes[job] = keys
        return job

    # -- reads -------------------------------------------------------------------------

    def must_wait(self, request_id: str) -> bool:
        """Return whether a request must still wait for the store's answer or for its disk read. It gives up
        after ``limits.max_stage_wait_s``, or if the disk hangs."""
        wait = self._waits.get(request_id)
        if wait is None or wait.since_s is None:
            return False
        reads = any(entry.job == _STAGING for entry in reversed(wait.entries))  # they end in order
        if not reads and wait.probe not in self._probing:
            return False
        if self._now - wait.since_s < self._limits.max_stage_wait_s and not self.hangs("reads"):
            return True
        self._host.counts["gave_up"] += sum(entry.job == _STAGING for entry in wait.entries)
        wait.since_s = None
        return False

    def search(self, request_id: str, context: ContextKeys, found: int) -> bool:
        """Look on disk for what a context needs besides ``found`` blocks. Returns whether it must wait.

        The store is asked first, beginning with the first block that has no known copy, so that everything
        missing is read together. The entries up to the last one read stay pinned until ``end_read``."""
        if self.is_closed or self.hangs("reads"):
            return False
        wait = self._waits.setdefault(request_id, _DiskWait())
        if wait.was_read:
            return False
        keys = [block.key for block in context.needed(context.end_tokens)]
        unknown = self.leading(keys)
        if wait.probe is None and len(keys) - unknown >= self._limits.min_probe_blocks:
            wait.probe = self._probe(keys[unknown:])
        elif len(keys) > found and self._read(keys, wait, RetentionRank.PLAIN):
            wait.was_read = True
        else:
            return False
        wait.since_s = self._now
        self._silent_since_s.setdefault("reads", self._now)
        return True

    def fetch(self, keys: Sequence[BlockKey], rank: RetentionRank) -> int:
        """Plan to read the leading ``keys`` from disk into host memory, with the rank ``rank``, before a
        request needs them. Returns how many of them are being read now; none while the disk hangs."""
        if not self.blocks or self.hangs("reads"):
            return 0
        return self._read(keys, None, rank)

    def _read(self, keys: Iterable[BlockKey], wait: _DiskWait | None, rank: RetentionRank) -> int:
        """Plan to read the leading ``keys`` from disk, for a request's ``wait`` or ahead of need. Returns how
        many of ``keys`` are being read now, also because of earlier calls.

        Skips blocks that host memory has. Stops when there is no room, or at a key that is neither in host
        memory nor known to be on disk. The new entries have the rank ``rank``."""
        host, here, idle = self._host, list[HostEntry](), RetentionRank.IDLE
        # A request that waits runs next, so it has priority over idle programs.
        at_most = idle if wait is not None else min(rank, idle)
        pinned = sum(len(other.entries) for other in self._waits.values() if other is not wait)
        room = int(MAX_PINNED_SHARE * host.slots) - pinned if pinned else host.slots
        for key in islice(keys, max(0, room)):
            entry = host.get(key)
            if entry is None:
                if key not in self.blocks or key in self._staging:  # the read of a lost entry has not ended
                    break
                entry = host.take(key, rank, _STAGING, at_most=at_most)
                if entry is None:
                    break
                self._staging[key] = entry
                self.jobs.stages.append(FileCopy(entry.slot, key))
            host.pin(entry)  # the next read must not reuse its slot
            here.append(entry)
        missing = sum(entry.job == _STAGING for entry in here)
        if wait is None or not missing:
            host.release(here)
        else:
            wait.entries = here
        return missing

    def _staged(self, key: BlockKey, copy_result: CopyResult) -> None:
        entry = self._staging.pop(key)
        if copy_result is CopyResult.MOVED:
            self._host.counts["staged"] += 1
        else:
            self._host.counts[f"stage_{copy_result.value}"] += 1
            self._host.remove(entry)
            self.blocks.pop(key, None)
        self._host.end_fill(entry)

    def end_read(self, request_id: str) -> None:
        """Unpin the blocks read for a request, whose load begins. The store is not asked for it again."""
        if (wait := self._waits.get(request_id)) is not None:
            self._host.release(wait.entries)
            self._waits[request_id] = _DiskWait(wait.probe)

    def abandon(self, request_id: str) -> None:
        """End the waits of a request that has finished."""
        self.end_read(request_id)
        self._waits.pop(request_id, None)
