"""Plans which blocks are written to disk, read back and deleted. The disk is the tier below host memory.

To spill is to write a block from host memory to disk. To stage is to read it back into host memory. A probe
is a search in the stores of other engines.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from .host_block_pool import HostBlockPool, HostEntry, RetentionRank
from .offload_jobs import BlockKey, CopyResult, FileCopy, OffloadJobs, ProbeResult

DISK_INDEX_TIMEOUT_STEPS = 100
"""Number of steps after which the engine stops waiting for the worker's list of files left on disk."""

NO_SIBLINGS_RECHECK_S = 5.0
"""If a search finds no store of another engine, the next search begins at least this many seconds after that
one began."""

MAX_OPEN_PROBES = 256
"""Maximum number of open searches of other engines' stores. At this number no further search begins."""

MAX_FOUND_KEYS = 1 << 16
"""Maximum number of blocks for which the planner remembers that another engine's store has them. The least
recently used are forgotten."""

STAGE_BATCH_BLOCKS = 32
"""Maximum number of blocks per job that reads from disk. The worker reports only whole jobs. With longer
jobs, blocks would be usable later, and a slow disk would look like one that hangs."""

MAX_PINNED_SHARE = 0.5
"""Maximum share of host memory that requests waiting for the disk may pin together. A single waiting request
may pin more."""


MAX_STAGE_WAIT_S = 10.0
"""Default of ``TierLimits.max_stage_wait_s``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLimits:
    """Limits of host memory and disk of one engine. Times are in seconds."""

    host_slots: int
    """Number of blocks that fit in host memory."""
    disk_blocks: int = 0
    """Number of blocks that fit on the disk; 0 if there is no disk."""
    spill_below: float = 0.25
    """Blocks are written to disk while less than this share of the slots can be reused without loss. Such a
    slot is empty, or its block is on disk or has the rank ``WORTHLESS`` or ``SPARE``."""
    max_spilling: int = 256
    """Maximum number of blocks being written to disk at once, so that a slow disk's queue stays short."""
    max_staging: int = 4096
    """Maximum number of blocks being read from disk at once."""
    max_stage_wait_s: float = MAX_STAGE_WAIT_S
    """Maximum seconds that a request waits for a disk read. After that it computes the missing blocks."""
    shared: bool = False
    """Whether this engine also reads the stores of other engines in the same root folder."""
    min_probe_blocks: int = 8
    """Other engines' stores are searched if a request misses at least this many blocks. Computing fewer
    blocks is faster than the search."""
    max_probe_wait_s: float = 1.0
    """Maximum seconds that a request waits for a search of other engines' stores. While any search runs
    longer than this, no further search begins."""


FIRST_STEPS = 16
"""Length of the first pause after a failed disk write, in engine steps."""


class DiskBackoff:
    """Pauses disk writes after a failure, at first for ``FIRST_STEPS`` engine steps. Each further failure
    doubles the pause, up to ``LONGEST_STEPS``. After a success, the next pause is ``FIRST_STEPS`` again."""

    LONGEST_STEPS = 4096

    def __init__(self) -> None:
        self._steps = 0
        self._left = 0
        self._unanswered = 0

    def failed(self) -> None:
        self._steps = min(self.LONGEST_STEPS, max(FIRST_STEPS, 2 * self._steps))
        self._left = self._steps
        self._unanswered = 0

    def worked(self) -> None:
        self._steps = self._unanswered = 0

    @property
    def is_active(self) -> bool:
        """Whether writes are paused now."""
        return self._left > 0

    @property
    def is_broken(self) -> bool:
        """Whether the last two writes have failed, or a write has run for ``LONGEST_STEPS`` without a
        result."""
        return self._steps > FIRST_STEPS or self._unanswered >= self.LONGEST_STEPS

    def count_step(self, writing: bool) -> None:
        """Count one engine step. ``writing``: whether a write is under way."""
        self._left = max(0, self._left - 1)
        self._unanswered = self._unanswered + 1 if writing else 0


@dataclass(slots=True, eq=False)
class _PendingStage:
    """The wait of one request for blocks from disk."""

    since_s: float
    missing: int = 0
    entries: list[HostEntry] = field(default_factory=list)
    """Host memory entries that stay pinned until vLLM looks up the request's blocks again."""
    given_up: bool = False
    """Whether the request no longer waits for the missing blocks."""
    disk_answers: bool = False
    """Whether any read has ended since the wait began."""


@dataclass(slots=True, eq=False)
class _PendingProbe:
    """The wait of one request for a search of other engines' stores."""

    since_s: float
    over: bool = False


class DiskPlanner:
    """Plans disk writes, reads and deletions for an ``OffloadPlanner``.

    Three invariants hold. (1) A block that the planner reports as on disk can be read, if the worker does a
    step's deletions before its writes. A block that turns out to be missing is forgotten. (2) The files,
    including those being written, never exceed the disk's budget. (3) A slot of host memory keeps its block
    while the block is written to disk or read from disk.

    With ``limits.shared``, other engines' stores in the same folder are searched when a request needs blocks.
    Blocks found there can be read like this engine's own. They do not count as on disk, because their engine
    may delete them at any time.
    """

    def __init__(
        self, limits: TierLimits, host: HostBlockPool, counts: Counter[str], numbers: Iterator[int]
    ) -> None:
        """``counts``: receives the number of blocks by outcome. ``numbers``: source of job numbers."""
        self.limits = limits
        self._host = host
        self._counts = counts
        self._numbers = numbers
        self._files: OrderedDict[BlockKey, None] = OrderedDict()
        """Blocks on disk, least recently used first."""
        self.known = False
        """Whether the worker has reported the files that an earlier engine left."""
        self._asked_steps = 0
        """Number of steps planned so far, to compare with ``DISK_INDEX_TIMEOUT_STEPS``."""
        self.closed = False
        """Whether the cache was reset. From then on the disk is neither written nor read: the weights may
        have changed, but the store's identity still names the weights with which the engine started."""
        self.room = limits.disk_blocks
        """Maximum number of files. It is lowered for a while after the disk itself was full."""
        self._pause = DiskBackoff()
        self._spilling: dict[int, list[HostEntry]] = {}
        """Number of a job that writes to disk → the entries that it writes."""
        self.being_spilled: set[BlockKey] = set()
        self._requested_writes: OrderedDict[BlockKey, RetentionRank] = OrderedDict()
        """Blocks in host memory whose write to disk was requested → the rank that the block gets after the
        write."""
        self._lowered = False
        """Whether the blocks of ``_requested_writes`` already have their new ranks, because the disk is
        broken."""
        self._staged_by: dict[int, list[HostEntry]] = {}
        """Number of a job that reads from disk → the entries that it fills."""
        self._being_staged: dict[BlockKey, list[_PendingStage]] = {}
        """Block being read → requests that wait for it."""
        self._staging: dict[str, _PendingStage] = {}
        self._reads_hang = False
        """Whether a request has waited ``limits.max_stage_wait_s`` seconds, and no read ended meanwhile.
        Reset when a read ends."""
        self._elsewhere: OrderedDict[BlockKey, None] = OrderedDict()
        """Blocks found in other engines' stores for requests, least recently used first."""
        self._borrowed: set[BlockKey] = set()
        """Blocks being read from other engines' stores."""
        self._probed: dict[str, _PendingProbe] = {}
        """Request → its search of other engines' stores."""
        self._probing: dict[int, tuple[_PendingProbe, Sequence[BlockKey]]] = {}
        self._no_siblings_until_s = float("-inf")
        # Jobs of the step being planned.
        self._probes: dict[int, Sequence[BlockKey]] = {}
        self._drops: list[BlockKey] = []
        self._spills: dict[int, list[FileCopy]] = {}
        self._stages: dict[int, list[FileCopy]] = {}

    def __len__(self) -> int:
        """Number of blocks on disk."""
        return len(self._files)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._files

    def __iter__(self) -> Iterator[BlockKey]:
        """Iterate over the blocks on disk, least recently used first."""
        return iter(self._files)

    @property
    def under_way(self) -> int:
        """Number of jobs that have no result yet."""
        return len(self._spilling) + len(self._staged_by) + len(self._probing)

    @property
    def has_jobs(self) -> bool:
        """Whether the engine must run a step even without requests. True if jobs or requested writes wait for
        a step, or if the worker has not yet listed the files that an earlier engine left."""
        if self._drops or self._spills or self._stages or self._probes:
            return True
        if not self.known:
            return bool(self.limits.disk_blocks) and self._asked_steps < DISK_INDEX_TIMEOUT_STEPS
        # No step while a batch is being written, otherwise an idle engine would spin.
        return bool(self._requested_writes) and not self._spilling and not self._pause.is_active

    def add_jobs(self, jobs: OffloadJobs) -> None:
        """Move the planned disk jobs into ``jobs``, the jobs of the step just planned."""
        self._asked_steps += 1
        jobs.drops, self._drops = self._drops, []
        jobs.spills, self._spills = self._spills, {}
        jobs.stages, self._stages = self._stages, {}
        jobs.probes, self._probes = self._probes, {}

    # -- files --------------------------------------------------------------------

    def add_existing(self, keys: Sequence[BlockKey]) -> None:
        """Add the files that an earlier engine left. ``keys``: their blocks, least recently used first. Files
        beyond the budget are deleted. After a cache reset, all files are deleted."""
        self.known = True
        if self.closed:
            self._drops += keys
            return
        for key in keys:
            self._files[key] = None
        self.make_room(0)

    def drop_parts(self, keys: Iterable[BlockKey]) -> None:
        """Delete the files of ``keys``, blocks that only some of the engine's workers have on disk. Blocks
        that the planner counts as on disk are kept."""
        self._drops += [key for key in keys if key not in self._files]

    def make_room(self, blocks: int) -> None:
        """Delete least recently used files, except files being read, until ``blocks`` further files fit."""
        excess = len(self._files) + len(self.being_spilled) + blocks - self.room
        unread = (key for key in self._files if key not in self._being_staged)
        for key in list(islice(unread, max(0, excess))):
            del self._files[key]
            if (entry := self._host.get(key)) is not None:
                self._host.set_on_disk(entry, False)
            self._drops.append(key)
            self._counts["disk_dropped"] += 1

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Mark the files of ``keys``, in context order, as just used. The end of the context is deleted
        first."""
        for key in reversed(keys):
            if key in self._files:
                self._files.move_to_end(key)

    def discard(self, key: BlockKey) -> None:
        """Delete a key's file, if there is one."""
        if key in self._files:
            del self._files[key]
            self._drops.append(key)

    def forget(self) -> None:
        """Delete all files, end all waits for disk reads and close the planner, because the cache was
        reset."""
        for request_id in list(self._staging):
            self.abandon(request_id)
        self._drops += self._files
        self._files.clear()
        self._requested_writes.clear()
        self._elsewhere.clear()
        self.closed = True

    # -- to disk --------------------------------------------------------------------

    def request_spill(self, key: BlockKey, rank: RetentionRank) -> None:
        """Request that a block in host memory is written to disk as soon as possible. After the write, the
        block gets the retention rank ``rank``. Does nothing if the planner is ``closed``.

        If the disk is broken, the block gets this rank at once. So host memory does not fill with blocks that
        wait for ever."""
        if self.closed:
            return
        self._requested_writes[key] = rank
        if self._lowered:
            self._lower([key])
        if len(self._requested_writes) > 2 * self.limits.host_slots:
            # If the disk always fails, requested writes pile up. Host memory has slots for at most half of
            # these keys, so each scan removes at least half of them. It costs O(1) per requested write.
            has = self._host.get
            kept = [order for order in self._requested_writes.items() if has(order[0]) is not None]
            self._requested_writes = OrderedDict(kept)

    def cancel_spill(self, key: BlockKey) -> None:
        """Cancel the requested write of a block."""
        self._requested_writes.pop(key, None)

    def plan_spills(self) -> None:
        """Plan this step's writes to disk. Requested blocks come first. Others follow if host memory has too
        few slots that can be reused without loss (``TierLimits.spill_below``)."""
        limits, host = self.limits, self._host
        if not self.known or self.closed:
            return
        self._pause.count_step(writing=bool(self._spilling))
        if self._pause.is_broken and not self._lowered:
            self._lower(reversed(self._requested_writes))  # the end of a context is evicted first
        self._lowered = self._pause.is_broken
        if self._pause.is_active:
            return
        self.room = limits.disk_blocks
        if not self.room:
            return
        room = limits.max_spilling - len(self.being_spilled)
        room -= self.spill(self._first_requested(min(room, self.room)))
        lost = host.idle_unspilled(RetentionRank.WORTHLESS) + host.idle_unspilled(RetentionRank.SPARE)
        spare = host.free + host.idle_on_disk + lost + len(self.being_spilled)
        # No more than fits on the disk. A larger batch would delete files that it has just written.
        wanted = min(int(limits.spill_below * limits.host_slots), self.room) - spare
        if room <= 0 or wanted <= 0:
            return
        self.spill(host.next_unspilled(min(room, wanted), above=RetentionRank.SPARE))

    def _lower(self, keys: Iterable[BlockKey]) -> None:
        """Give the blocks ``keys`` the ranks that ``_requested_writes`` names, except ``WANTED`` blocks."""
        for key in keys:
            entry = self._host.get(key)
            if entry is not None and entry.rank != RetentionRank.WANTED:
                self._host.set_rank(entry, self._requested_writes[key])

    def _first_requested(self, most: int) -> list[HostEntry]:
        """Return the entries of up to ``most`` requested writes: the oldest requests, newest first. Requests
        that need no write any more are removed. Stops at a block whose slot is still being filled."""
        found: list[HostEntry] = []
        for key in list(islice(self._requested_writes, max(0, most))):
            entry = self._host.get(key)
            if entry is None or entry.on_disk:
                del self._requested_writes[key]
            elif entry.job is not None:
                break
            else:
                found.append(entry)
        return found[::-1]  # as in any batch, the end of a context first

    def spill(self, entries: Sequence[HostEntry]) -> int:
        """Plan to write idle entries to disk, as many as fit. The entries stay in host memory too. Returns
        the number of entries to write."""
        entries = [entry for entry in entries if not entry.on_disk and entry.key not in self.being_spilled]
        self.make_room(min(len(entries), self.room))
        # Files being written or read cannot be deleted.
        entries = entries[: max(0, self.room - len(self._files) - len(self.being_spilled))]
        if not entries:
            return 0
        job = next(self._numbers)
        for entry in entries:
            self._host.pin(entry)
            self.being_spilled.add(entry.key)
        self._spilling[job] = list(entries)
        self._spills[job] = [FileCopy(entry.slot, entry.key) for entry in entries]
        return len(entries)

    def spilled(self, job: int, copy_results: Mapping[BlockKey, CopyResult]) -> None:
        """Handle the results of a batch of writes to disk."""
        host = self._host
        seen: set[CopyResult] = set()
        written: list[BlockKey] = []
        for entry in reversed(self._spilling.pop(job, ())):
            self.being_spilled.discard(entry.key)
            copy_result = copy_results.get(entry.key, CopyResult.FAILED)
            seen.add(copy_result)
            if copy_result is not CopyResult.MOVED:
                self._counts[f"spill_{copy_result.value}"] += 1
            elif entry.removal_pending:  # the cache was reset meanwhile
                self._drops.append(entry.key)
            else:
                self._counts["spilled"] += 1
                written.append(entry.key)
                host.set_on_disk(entry, True)
                host.set_rank(entry, self._requested_writes.pop(entry.key, entry.rank))
            if copy_result is CopyResult.FULL:
                host.set_rank(entry, self._requested_writes.pop(entry.key, entry.rank))
            host.unpin(entry, used=False)
        # In this order, the end of a context is deleted first.
        self._files.update(dict.fromkeys(reversed(written)))
        if CopyResult.FULL in seen:
            # Other data fills the disk, so keep to the current number of files for a while.
            self.room = min(self.room, len(self._files))
        # A failed batch counts as one failure.
        if CopyResult.FAILED in seen or CopyResult.FULL in seen:
            self._pause.failed()
        elif CopyResult.MOVED in seen:
            self._pause.worked()

    # -- from disk ------------------------------------------------------------------

    def disk_read_requested(self, request_id: str) -> bool:
        """Whether ``stage`` has planned a disk read for the request, and ``abandon`` has not been called
        since."""
        return request_id in self._staging

    def must_wait(self, request_id: str, now: float) -> bool:
        """Return whether the request must still wait for its search of other stores or for its disk read.

        It waits at most ``limits.max_probe_wait_s`` for the search and ``limits.max_stage_wait_s`` for the
        read, then gives up. While reads hang, it does not wait for a read."""
        probe = self._probed.get(request_id)
        if probe is not None and not probe.over:
            if now - probe.since_s < self.limits.max_probe_wait_s:
                return True
            probe.over = True
        waiting = self._staging.get(request_id)
        if waiting is None or not waiting.missing or waiting.given_up:
            return False
        if now - waiting.since_s < self.limits.max_stage_wait_s and not self._reads_hang:
            return True
        waiting.given_up = True
        if self.limits.max_stage_wait_s > 0 and not waiting.disk_answers:  # otherwise the disk is just busy
            self._reads_hang = True
        self._counts["gave_up"] += waiting.missing
        return False

    def probe(self, request_id: str, keys: Sequence[BlockKey], now: float) -> bool:
        """Plan a search of other engines' stores for a request's ``keys``, beginning with the first key that
        has no known copy. Returns whether a search was planned. A request gets at most one search."""
        if not self.limits.shared or self.closed or request_id in self._probed or self._probes_hang(now):
            return False
        missing = self._from_first_missing(keys)
        if len(missing) < self.limits.min_probe_blocks or now < self._no_siblings_until_s:
            return False
        job = next(self._numbers)
        probe = self._probed[request_id] = _PendingProbe(now)
        self._probing[job] = probe, missing
        self._probes[job] = missing
        return True

    def probed(self, job: int, answer: ProbeResult) -> None:
        """Handle the result of a search of other engines' stores."""
        probe, keys = self._probing.pop(job, (None, ()))
        if probe is None:
            return
        probe.over = True
        if not answer.stores:
            self._no_siblings_until_s = probe.since_s + NO_SIBLINGS_RECHECK_S
        if self.closed:
            return
        for key in keys[: answer.found]:
            self._elsewhere[key] = None
            self._elsewhere.move_to_end(key)
        while len(self._elsewhere) > MAX_FOUND_KEYS:
            self._elsewhere.popitem(last=False)

    def _probes_hang(self, now: float) -> bool:
        """Return whether a search takes too long, or too many searches are open. If so, no further search
        begins. Searches run one after the other, so a further one would only wait."""
        oldest = next((probe for probe, _ in self._probing.values()), None)
        return oldest is not None and (
            now - oldest.since_s >= self.limits.max_probe_wait_s or len(self._probing) >= MAX_OPEN_PROBES
        )

    def _from_first_missing(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        get, files, elsewhere = self._host.get, self._files, self._elsewhere
        for index, key in enumerate(keys):
            if get(key) is None and key not in files and key not in elsewhere:
                return keys[index:]
        return ()

    def stage(
        self, request_id: str, found: Sequence[HostEntry], keys: Sequence[BlockKey], now: float
    ) -> bool:
        """Plan to read the leading ``keys`` of a request from disk. Returns false if no block can be read.

        ``found``: entries of the request's blocks before ``keys``, which are in host memory. These entries,
        and the entries of the blocks to read, stay pinned until ``abandon``."""
        self.touch([*(entry.key for entry in found), *keys])
        waiting = _PendingStage(since_s=now, entries=list(found))
        for entry in found:  # reads must not evict them
            self._host.pin(entry)
        # The request runs next, so it has priority over idle programs.
        if not self._read(keys, waiting, RetentionRank.PLAIN, at_most=RetentionRank.IDLE):
            self._host.release(waiting.entries)
            return False
        self._staging[request_id] = waiting
        return True

    def fetch(self, keys: Iterable[BlockKey], rank: RetentionRank) -> int:
        """Plan to read the leading ``keys`` from disk before a request needs them. Returns how many of
        ``keys`` are being read now."""
        return self._read(keys, None, rank, at_most=min(rank, RetentionRank.IDLE))

    def _read(
        self,
        keys: Iterable[BlockKey],
        waiting: _PendingStage | None,
        rank: RetentionRank,
        *,
        at_most: RetentionRank,
    ) -> int:
        """Plan to read the leading ``keys`` from disk. Returns how many of ``keys`` are being read now, also
        by earlier jobs. While reads hang, plans nothing and returns 0.

        Skips blocks that host memory has. Stops when there is no room, or at a key that is neither in host
        memory nor in a known file of this or another engine.

        ``waiting``: the request's wait, if a request waits. ``rank``: rank of the new entries. ``at_most``:
        highest rank of entries that host memory may evict for the new entries."""
        if self._reads_hang:
            return 0
        host, job, coming, missing = self._host, 0, 0, 0
        ordered, here = dict[int, list[HostEntry]](), list[HostEntry]()
        # Waiting requests may not pin all of host memory, because blocks that the device evicts need slots
        # too.
        pinned = sum(len(other.entries) for other in self._staging.values())
        room = self.limits.max_staging - len(self._being_staged)
        if pinned:
            room = min(room, int(MAX_PINNED_SHARE * self.limits.host_slots) - pinned)
        for key in keys:
            entry = host.get(key)
            if entry is None:
                ours = key in self._files
                if not (ours or key in self._elsewhere) or coming >= room:
                    break
                if coming % STAGE_BATCH_BLOCKS == 0:
                    job = next(self._numbers)
                entry = host.take(key, rank, job, on_disk=ours, at_most=at_most)
                if entry is None:
                    break
                if not ours:
                    self._elsewhere.move_to_end(key)
                    self._borrowed.add(key)
                self._being_staged[key] = []
                ordered.setdefault(job, []).append(entry)
                coming += 1
            if key in self._being_staged:
                missing += 1
                if waiting is not None:
                    self._being_staged[key].append(waiting)
            host.pin(entry)  # the next read must not reuse its slot
            here.append(entry)
        borrowed = self._borrowed
        for job, entries in ordered.items():
            self._staged_by[job] = entries
            self._stages[job] = [FileCopy(each.slot, each.key, each.key in borrowed) for each in entries]
        if waiting is None or not missing:
            host.release(here)
        else:
            waiting.missing = missing
            waiting.entries += here
        return missing

    def staged(self, job: int, copy_results: Mapping[BlockKey, CopyResult]) -> None:
        """Handle the results of a batch of reads from disk."""
        self._reads_hang = False
        for waiting in self._staging.values():
            waiting.disk_answers = True
        for entry in self._staged_by.pop(job, ()):
            copy_result = copy_results.get(entry.key, CopyResult.FAILED)
            for waiting in self._being_staged.pop(entry.key, ()):
                waiting.missing -= 1
            borrowed = entry.key in self._borrowed
            self._borrowed.discard(entry.key)
            if copy_result is CopyResult.MOVED:
                self._counts["shared" if borrowed else "staged"] += 1
            else:
                self._counts[f"stage_{copy_result.value}"] += 1
                self._host.remove(entry)
                if borrowed:
                    self._elsewhere.pop(entry.key, None)
                else:
                    self._files.pop(entry.key, None)
                    self._drops.append(entry.key)
            self._host.end_fill(entry)

    def abandon(self, request_id: str) -> None:
        """End the waits of a request and unpin its blocks."""
        self._probed.pop(request_id, None)
        if (waiting := self._staging.pop(request_id, None)) is not None:
            self._host.release(waiting.entries)
