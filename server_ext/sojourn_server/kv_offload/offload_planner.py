"""Plans which KV blocks are copied to and from the tiers below the device: no vLLM, no tensors, no clock.

One planner serves one engine's scheduler. ``evicted`` reports blocks that the device overwrites, ``store``
copies blocks ahead of that, ``lookup`` finds blocks, ``load`` orders them, ``take_jobs`` returns a step's
orders, and ``take_loaded`` and ``take_results`` take their results. Three invariants hold. A block is found
only where it is, or will be when it is read, provided that the worker carries out orders in sequence. A slot
that one job reads or writes is used by no other job. The result of a failed copy is forgotten: the worst case
is that KV is computed again. The planner itself manages host memory and look-ups; its ``DiskPlanner`` manages
the disk and copies to and from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count, takewhile
from typing import NamedTuple

from .disk_planner import DiskPlanner
from .host_block_pool import HostBlockPool, HostEntry, RetentionRank
from .offload_jobs import BlockCopy, BlockKey, CopyResult, OffloadJobs, OffloadResults
from .tier_limits import TierLimits

STORE_BATCH_BLOCKS = 32
"""Number of blocks per store job. If one of its blocks is reused early, the step waits for the whole job."""

_WANTED, _IDLE = (
    RetentionRank.WANTED,
    RetentionRank.IDLE,
)  # bound here because enum member access is slow and happens for each block


class _Lookup(NamedTuple):
    """The answer to a request's look-up."""

    of: tuple[int, BlockKey]
    """Number of keys and first key: they identify the look-up, because a request's tokens are only appended
    to."""
    found: list[HostEntry]


class _Load(NamedTuple):
    """Blocks that are being loaded for a request."""

    entries: list[HostEntry]
    """Pinned until the worker has copied them."""
    block_ids: Sequence[int]


class PersistStatus(NamedTuple):
    """Number of blocks of a context that are on disk."""

    stored: int
    """Number of leading blocks on disk, without a gap."""
    pending: int
    """Number of blocks being written that extend the leading blocks."""


class OffloadPlanner:
    """Plans host memory and disk of one engine. Times are seconds on the engine's monotonic clock."""

    def __init__(self, limits: TierLimits) -> None:
        self.limits = limits
        self.counts: Counter[str] = Counter()
        """Number of blocks by outcome; ``docs/kv-offload.md`` explains the names."""
        self.host = HostBlockPool(limits.host_slots, self.counts)
        self._numbers = count(1)
        """Job numbers, shared with the ``DiskPlanner``: an entry's job number then shows whether device or
        disk fills it."""
        self.disk = DiskPlanner(limits, self.host, self.counts, self._numbers)
        self._storing: dict[int, tuple[list[HostEntry], list[BlockCopy]]] = {}
        self._looked_up: dict[str, _Lookup] = {}
        """Request → the pinned blocks that its look-up found."""
        self._last_asked: str | None = None
        self._lost = False
        """A block found in this step was lost since."""
        self._loads: dict[str, _Load] = {}
        """Loads that have not been answered, by request."""
        self._being_loaded: set[BlockKey] = set()
        """Their keys: other requests that need one wait for it instead of loading it too."""
        self._jobs = OffloadJobs()
        """Jobs of the step being planned, without the disk's."""
        self._wants_step = False
        """Whether a caller waits for results of earlier jobs."""

    # -- copies from the device ---------------------------------------------

    def evicted(self, key: BlockKey, block_id: int, rank: RetentionRank = RetentionRank.PLAIN) -> bool:
        """Save the content of a block that this step overwrites. Returns whether host memory has the content
        now."""
        entry = self.host.get(key)
        if entry is not None:
            if entry.job is not None and entry.job in self._storing:
                # Its store may be running: it must end before the step writes.
                self._await_store(entry.job)
            self.host.touch(entry)
            self._rerank(entry, rank)
            self.counts["kept"] += 1
            return True
        entry = self._begin(key, rank, None)
        if entry is None:
            self.counts["no_room"] += 1
            return False
        self._jobs.saves.append(BlockCopy(block_id, entry.slot))
        self.counts["saved"] += 1
        return True

    def store(
        self,
        blocks: Iterable[tuple[BlockKey, int]],
        rank: RetentionRank = RetentionRank.PLAIN,
        *,
        at_most: RetentionRank | None = None,
    ) -> int:
        """Copy cached blocks before their eviction; returns their number. The device keeps its copies.

        A block must not change until its store ends, or must be reported ``evicted``. ``blocks`` are in the
        order of their context: if space is short, its beginning is stored; its end is evicted first. Only
        entries whose rank is at most ``at_most`` (default: ``rank``) are replaced.
        """
        used: list[HostEntry] = []
        begun: dict[int, list[tuple[HostEntry, BlockCopy]]] = {}
        job = stored = 0
        for key, block_id in blocks:
            entry = self.host.get(key)
            if entry is not None:
                self.host.touch(entry)  # later blocks must not replace it
                used.append(entry)
                continue
            if stored % STORE_BATCH_BLOCKS == 0:
                job = next(self._numbers)
            entry = self._begin(key, rank, job, at_most=at_most)
            if entry is None:
                break  # later blocks are useless without it
            begun.setdefault(job, []).append((entry, BlockCopy(block_id, entry.slot)))
            stored += 1
        for entry in reversed(used):
            self.host.touch(entry)
            self._rerank(entry, rank)
        # Jobs end in order and the first to end is reused first, so the end of a context must come first.
        for job, together in reversed(begun.items()):
            copies = [copy for _, copy in together]
            self._storing[job] = [entry for entry, _ in reversed(together)], copies
            self._jobs.stores[job] = copies
        self.counts["stored"] += stored
        return stored

    def store_if_room(self, newest_first: Iterable[tuple[BlockKey, int]]) -> int:
        """Copy the blocks that a turn added to its context into unused space; returns their number.

        Reads ``newest_first`` up to the first block that host memory already has.
        """
        added = [*takewhile(lambda block: self.host.get(block[0]) is None, newest_first)]
        # Spare copies do not replace each other: without room for all, each turn would copy a whole context.
        return self.store(reversed(added), RetentionRank.SPARE, at_most=RetentionRank.WORTHLESS)

    def discard(self, keys: Iterable[BlockKey]) -> None:
        """Remove copies of these keys: their content may be wrong."""
        for key in keys:
            entry = self.host.get(key)
            if entry is not None:
                self._lost = True
                self.host.remove(entry)
            self.disk.discard(key)
            self.counts["discarded"] += entry is not None

    def set_rank(
        self, keys: Sequence[BlockKey], rank: RetentionRank, *, only: RetentionRank | None = None
    ) -> None:
        """Give the blocks of a context, in its order, another rank; its end is evicted first. Cancels
        requested writes to disk. ``only``: change only blocks that have this rank now."""
        get, cancel_spill = self.host.get, self.disk.cancel_spill
        for key in reversed(keys):
            entry = get(key)
            if only is not None and (entry is None or entry.rank != only):
                continue
            cancel_spill(key)
            if entry is not None:
                self.host.set_rank(entry, rank)

    def write_to_disk(self, keys: Iterable[BlockKey], rank: RetentionRank) -> None:
        """Write blocks to disk in this order, as soon as the disk allows; after the write they have
        ``rank``."""
        for key in keys:
            entry = self.host.get(key)
            if entry is not None and entry.on_disk:
                self._rerank(entry, rank)
            elif entry is not None:
                self.disk.order(key, rank)

    def persist(self, chain: Sequence[BlockKey], on_device: Mapping[BlockKey, int]) -> PersistStatus:
        """Write a context to disk, because its program moves to an engine that shares only the disk.

        ``on_device`` maps keys of ``chain`` to the device's blocks. Blocks pass through host memory, where
        they do not replace those of idle programs. Call again to write further blocks and to get the
        progress.
        """
        disk, get = self.disk, self.host.get
        if disk.closed:
            return PersistStatus(0, 0)
        chain = chain[: disk.room]  # more would evict its own beginning
        unsaved: list[tuple[BlockKey, int]] = []
        for key in chain:
            entry = get(key)
            if entry is not None and entry.rank < _IDLE and key not in disk:
                self.host.set_rank(entry, _IDLE)  # until it is written, this is the only copy
            elif entry is None and key in on_device and key not in disk:
                unsaved.append((key, on_device[key]))
        self.store(unsaved, _IDLE, at_most=RetentionRank.PLAIN)
        stored = pending = 0
        whole = True
        for key in chain:
            if key in disk:
                whole = whole and not pending
                stored += whole
                continue
            entry = get(key)
            if entry is None:
                break
            if key not in disk.being_spilled:
                disk.order(key, RetentionRank.COLD if entry.rank == _IDLE else entry.rank)
            pending += 1
        self._wants_step = self._wants_step or pending > 0
        return PersistStatus(stored, pending)

    # -- requests -------------------------------------------------

    def lookup(self, request_id: str, keys: Sequence[BlockKey], now: float) -> int | None:
        """Number of leading ``keys`` that can be loaded now; ``None``: ask again, the disk is being read,
        other engines' stores are being searched, or another request is loading the first of them.

        Found blocks are pinned until the next ``take_jobs``. Those of the latest request are pinned until
        ``lookup`` is called for another one: the scheduler calls it for the head of its queue in every step.
        Repeated calls for that request, and calls while the disk is being read, take O(1).
        """
        if not keys:
            self._drop_lookup(request_id)
            return 0
        if keys[0] in self._being_loaded:
            # The other request's copy will be on the device. Hashes are chained, and its load began at the
            # device's last block: a load of later blocks alone cannot overlap.
            return None
        disk = self.disk
        if disk.must_wait(request_id, now):
            return None
        was_read = disk.disk_read_requested(request_id)
        before = self._looked_up.get(request_id)
        asked_before = before is not None and before.of == (len(keys), keys[0])
        # After a disk read the answer may have changed.
        if before is not None and asked_before and not was_read and not self._lost:
            self._last_asked = request_id
            return len(before.found)
        found = self._found(keys)
        missing = keys[len(found) :]
        # Search other stores first, so that everything missing is read together.
        if missing and not was_read and disk.probe(request_id, missing, now):
            return None
        if missing and not was_read and disk.stage(request_id, found, missing, now):
            return None
        for entry in found:
            self.host.pin(entry)
        self._drop_lookup(request_id)
        self._looked_up[request_id] = _Lookup((len(keys), keys[0]), found)
        self._last_asked = request_id
        return len(found)

    def load(self, request_id: str, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> None:
        """Fill the request's new device blocks with these keys, all found by ``lookup`` in this step.

        Their slots are pinned until ``take_loaded``. Raises ``KeyError`` if they were not found."""
        self.disk.abandon(request_id)
        before = self._looked_up.pop(request_id, None)
        found = before.found if before is not None else []
        if [entry.key for entry in found[: len(keys)]] != list(keys) or (keys and request_id in self._loads):
            self.host.release(found)
            raise KeyError(
                f"request {request_id}: these {len(keys)} blocks are not what its last lookup found, or it "
                "is loading already"
            )
        self.host.release(found[len(keys) :])
        if not keys:
            return
        load = self._loads[request_id] = _Load(found[: len(keys)], block_ids[: len(keys)])
        self._being_loaded.update(keys)
        self._jobs.loads[request_id] = [
            BlockCopy(block_id, entry.slot)
            for entry, block_id in zip(load.entries, load.block_ids, strict=True)
        ]

    def cancel_load(self, request_id: str) -> bool:
        """The request gives its blocks up while they are being loaded: the next step lets the copies end
        before it writes anything. Returns whether there was a load; ``take_loaded`` still takes its end."""
        self._jobs.settles = self._jobs.settles or request_id in self._loads
        return request_id in self._loads

    def loading_blocks(self, without: Collection[str] = ()) -> set[int]:
        """Device blocks of unanswered loads, except those of the requests ``without``."""
        return {
            block_id
            for request_id, load in self._loads.items()
            if request_id not in without
            for block_id in load.block_ids
        }

    def take_loaded(self, request_id: str, not_filled: Collection[int] = ()) -> int:
        """The worker has copied a request's blocks, except ``not_filled``. Returns how many leading ones
        arrived. What could not be copied is not found again."""
        load = self._loads.pop(request_id, None)
        if load is None:
            return 0
        self._being_loaded.difference_update(entry.key for entry in load.entries)
        self.host.release(load.entries)
        failed = [
            entry
            for entry, block_id in zip(load.entries, load.block_ids, strict=True)
            if block_id in not_filled
        ]
        # A key whose entry was removed meanwhile may have a new, correct entry.
        self.discard([entry.key for entry in failed if not entry.removal_pending])
        self.counts["loaded"] += len(load.entries) - len(failed)
        return sum(1 for _ in takewhile(lambda block_id: block_id not in not_filled, load.block_ids))

    def abandon(self, request_id: str) -> None:
        """End the look-ups of a request that has finished, or will not be looked up again."""
        self.disk.abandon(request_id)
        self._drop_lookup(request_id)

    def leading(self, keys: Sequence[BlockKey]) -> int:
        """Number of leading ``keys`` in host memory or on disk."""
        get, disk = self.host.get, self.disk
        return sum(1 for _ in takewhile(lambda key: get(key) is not None or key in disk, keys))

    def missing(self, keys: Sequence[BlockKey]) -> int:
        """Number of ``keys`` neither in host memory nor on disk."""
        return sum(1 for key in keys if self.host.get(key) is None and key not in self.disk)

    def fetch(self, keys: Sequence[BlockKey], rank: RetentionRank = RetentionRank.PLAIN) -> int:
        """Read the leading ``keys`` from disk into host memory before a request needs them; returns the
        number of blocks being read."""
        if not self.disk:
            return 0
        found = self._found(keys)
        for entry in found:  # the rest must not replace these
            self.host.pin(entry)
        coming = self.disk.fetch(keys[len(found) :], rank)
        self.host.release(found)
        return coming

    # -- steps ----------------------------------------------------------------------

    def take_jobs(self, *, spill: bool = True) -> OffloadJobs:
        """The jobs of the step just planned. ``spill``: whether host memory may be written to disk."""
        for request_id in [name for name in self._looked_up if self._lost or name != self._last_asked]:
            self._drop_lookup(request_id)
        self._lost = self._wants_step = False
        if spill:
            self.disk.plan_spills()
        jobs, self._jobs = self._jobs, OffloadJobs()
        self.disk.add_jobs(jobs)
        return jobs

    def take_results(self, results: OffloadResults) -> None:
        """Handle the results of earlier jobs."""
        if results.on_disk is not None:
            self.disk.add_existing(results.on_disk)
        for slot in results.lost_slots:
            entry = self.host.entry_in_slot(slot)
            if entry is not None:
                self.counts["failed"] += 1
                self._lost = True
                self.host.remove(entry)
        for job, copy_result in results.stored.items():
            for entry in self._storing.pop(job, ((), ()))[0]:
                self._end_fill(entry, copy_result)
        for job, copy_results in results.spilled.items():
            self.disk.spilled(job, copy_results)
        self.disk.drop_parts(results.partly_on_disk)
        for job, copy_results in results.staged.items():
            self.disk.staged(job, copy_results)
        for job, answer in results.probed.items():
            self.disk.probed(job, answer)

    @property
    def has_jobs(self) -> bool:
        """Whether a step is needed although no request needs one: jobs wait for a step, or the keys left on
        disk by an earlier engine are not known yet."""
        return bool(self._jobs) or self._wants_step or self.disk.has_jobs

    def state(self) -> dict[str, dict[str, int]]:
        """Used and free blocks by tier, and ``counts``."""
        host = len(self.host)
        state = {"host": {"used": host, "free": self.host.slots - host}}
        if self.limits.disk_blocks:
            used = len(self.disk)
            state["disk"] = {"used": used, "free": max(0, self.disk.room - used)}
        return {**state, "moves": dict(self.counts)}

    @property
    def pinned_host_blocks(self) -> int:
        """Number of blocks of host memory that cannot be reused now: a request waits for them, or a copy uses
        them."""
        return self.host.slots - self.host.room(_WANTED)

    @property
    def storing_blocks(self) -> int:
        """Number of blocks in stores that have not ended."""
        return sum(len(entries) for entries, _ in self._storing.values())

    @property
    def under_way(self) -> int:
        """Number of jobs without results yet."""
        return len(self._storing) + len(self._loads) + self.disk.under_way

    def on_disk(self, key: BlockKey) -> bool:
        """Whether the block is on disk."""
        return key in self.disk

    @property
    def disk_blocks(self) -> int:
        """Number of blocks on disk."""
        return len(self.disk)

    def forget(self) -> None:
        """Forget all blocks, because the engine's cache was reset, as after a change of weights.

        Running jobs end as usual; their results are discarded.
        """
        for request_id in list(self._looked_up):
            self._drop_lookup(request_id)
        self.disk.forget()
        for entry in list(self.host):
            self.host.remove(entry)

    # -- inside ------------------------------------------------------------------------

    def _found(self, keys: Sequence[BlockKey]) -> list[HostEntry]:
        found: list[HostEntry] = []
        get = self.host.get
        for key in keys:
            entry = get(key)
            if entry is None:
                break
            if entry.job is not None:
                if entry.job not in self._storing:
                    break
                self._await_store(entry.job)
            found.append(entry)
        return found

    def _await_store(self, job: int) -> None:
        """Make the store end before this step's loads and forward pass, so that its slots count as filled."""
        entries, copies = self._storing.pop(job)
        if self._jobs.stores.pop(job, None) is None:
            self._jobs.awaited[job] = copies
        else:  # not sent to the worker yet
            self._jobs.saves += copies
        for entry in entries:
            self.host.filled(entry)

    def _rerank(self, entry: HostEntry, rank: RetentionRank) -> None:
        """Change an entry's rank, unless the block is wanted next."""
        if entry.rank != _WANTED:
            self.host.set_rank(entry, rank)

    def _begin(
        self, key: BlockKey, rank: RetentionRank, job: int | None, *, at_most: RetentionRank | None = None
    ) -> HostEntry | None:
        return self.host.take(key, rank, job, on_disk=key in self.disk, at_most=at_most)

    def _drop_lookup(self, request_id: str) -> None:
        before = self._looked_up.pop(request_id, None)
        if before is not None:
            self.host.release(before.found)

    def _end_fill(self, entry: HostEntry, copy_result: CopyResult) -> None:
        if copy_result is not CopyResult.MOVED:
            self.counts["failed"] += 1
            self.host.remove(entry)
        self.host.filled(entry)
