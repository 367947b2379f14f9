"""Plans which blocks are written to disk and read back. The disk is the tier below host memory.

To spill is to write a block from host memory to disk. To stage is to read it back into host memory. To probe
is to ask the store which blocks it has. Other engines write and delete files of the same store, so the
planner's knowledge is a guess: a block that cannot be read is computed again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from .host_block_pool import HostBlockPool, HostEntry, RetentionRank
from .offload_jobs import BlockKey, CopyResult, FileCopy, OffloadJobs

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
    max_stage_wait_s: float = MAX_STAGE_WAIT_S
    """Maximum seconds that a request waits for a disk read. After that it computes the missing blocks."""
    min_probe_blocks: int = 8
    """The store is asked if a request misses at least this many blocks."""
    max_probe_wait_s: float = 1.0
    """Maximum seconds that a request waits for the store's answer. While any answer takes longer than this,
    the store is not asked again."""


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
    def is_hopeless(self) -> bool:
        """Whether writes are paused after two failures in a row, or a write has run for ``LONGEST_STEPS``
        without a result."""
        return (self._left > 0 and self._steps > FIRST_STEPS) or self._unanswered >= self.LONGEST_STEPS

    def count_step(self, writing: bool) -> None:
        """Count one engine step. ``writing``: whether a write is under way."""
        self._left = max(0, self._left - 1)
        self._unanswered = self._unanswered + 1 if writing else 0


@dataclass(slots=True, eq=False)
class _DiskWait:
    """What one request wants of the disk."""

    asked_s: float | None = None
    """Time since which the request waits for the store's answer; ``None`` if it does not."""
    was_asked: bool = False
    """Whether the store was asked for this request. It is asked once."""
    read_s: float | None = None
    """Time since which blocks are read for the request; ``None`` if none are."""
    missing: int = 0
    entries: list[HostEntry] = field(default_factory=list)
    """Host memory entries that stay pinned until vLLM looks up the request's blocks again."""
    given_up: bool = False
    """Whether the request no longer waits for the missing blocks."""
    disk_answers: bool = False
    """Whether any read has ended since ``read_s``."""


class DiskPlanner:
    """Plans disk writes, reads and questions for an ``OffloadPlanner``.

    A slot of host memory keeps its block while the block is written to disk or read from disk. ``len`` and
    ``in`` cover the blocks that this engine has written, and those that the store has named.
    """

    def __init__(
        self, limits: TierLimits, host: HostBlockPool, counts: Counter[str], numbers: Iterator[int]
    ) -> None:
        """``counts``: receives the number of blocks by outcome. ``numbers``: source of job numbers."""
        self.limits = limits
        self._host = host
        self._counts = counts
        self._numbers = numbers
        self._known: OrderedDict[BlockKey, None] = OrderedDict()
        """Blocks known to be on disk, least recently used first, at most ``limits.disk_blocks``."""
        self.closed = not limits.disk_blocks
        """Whether the disk is neither written nor read: there is none, or the cache was reset. Then the
        weights may have changed, but the store's identity names those with which the engine started."""
        self._pause = DiskBackoff()
        self._spilling: dict[int, list[HostEntry]] = {}
        """Number of a job that writes to disk → the entries that it writes."""
        self.being_spilled: set[BlockKey] = set()
        self._requested_writes: OrderedDict[BlockKey, RetentionRank] = OrderedDict()
        """Blocks in host memory whose write to disk was requested → the rank that the block gets after the
        write."""
        self._staged_by: dict[int, list[HostEntry]] = {}
        """Number of a job that reads from disk → the entries that it fills."""
        self._being_staged: dict[BlockKey, list[_DiskWait]] = {}
        """Block being read → requests that wait for it."""
        self._waits: dict[str, _DiskWait] = {}
        self._reads_hang = False
        """Whether a request has waited ``limits.max_stage_wait_s`` seconds, and no read ended meanwhile.
        Reset when a read ends."""
        self._probing: dict[int, tuple[_DiskWait, float, Sequence[BlockKey]]] = {}
        """Number of a job that asks the store → its request, the time, and the keys."""
        # Jobs of the step being planned.
        self._probes: dict[int, Sequence[BlockKey]] = {}
        self._spills: dict[int, list[FileCopy]] = {}
        self._stages: dict[int, list[FileCopy]] = {}
        self._touches: list[BlockKey] = []

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._known

    @property
    def under_way(self) -> int:
        """Number of jobs that have no result yet."""
        return len(self._spilling) + len(self._staged_by) + len(self._probing)

    @property
    def has_jobs(self) -> bool:
        """Whether the engine must run a step even without requests, because jobs or requested writes wait for
        it."""
        if self._spills or self._stages or self._probes:
            return True
        # No step while a batch is being written, otherwise an idle engine would spin.
        return bool(self._requested_writes) and not self._spilling and not self._pause.is_active

    def add_jobs(self, jobs: OffloadJobs) -> None:
        """Move the planned disk jobs into ``jobs``, the jobs of the step just planned."""
        jobs.spills, self._spills = self._spills, {}
        jobs.stages, self._stages = self._stages, {}
        jobs.probes, self._probes = self._probes, {}
        jobs.touches, self._touches = self._touches, []

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Mark the files of ``keys``, in context order, as just used. The end of the context is deleted
        first."""
        known = [key for key in keys if key in self._known]
        for key in reversed(known):
            self._known.move_to_end(key)
        self._touches += known

    def discard(self, key: BlockKey) -> None:
        """Forget that the disk has a block, because it could not be loaded. Its file stays, since its
        checksum was right."""
        self._known.pop(key, None)

    def forget(self) -> None:
        """End all waits and close the planner, because the cache was reset. Files stay: their identity names
        the weights with which this engine started, and other engines may use them."""
        for request_id in list(self._waits):
            self.abandon(request_id)
        self._requested_writes.clear()
        self._known.clear()
        self.closed = True

    # -- to disk --------------------------------------------------------------------

    def request_spill(self, key: BlockKey, rank: RetentionRank) -> None:
        """Request that a block in host memory is written to disk as soon as possible. After the write, the
        block gets the retention rank ``rank``. Does nothing if the planner is ``closed``.

        If the disk is broken, the block gets this rank at once and is not written on request. So host memory
        does not fill with blocks that wait for ever."""
        if self.closed:
            return
        self._requested_writes[key] = rank
        if self._pause.is_hopeless:
            self._cancel_requested()

    def cancel_spill(self, key: BlockKey) -> None:
        """Cancel the requested write of a block."""
        self._requested_writes.pop(key, None)

    def plan_spills(self) -> None:
        """Plan this step's writes to disk. Requested blocks come first. Others follow if host memory has too
        few slots that can be reused without loss (``TierLimits.spill_below``)."""
        limits, host = self.limits, self._host
        if self.closed:
            return
        self._pause.count_step(writing=bool(self._spilling))
        if self._pause.is_hopeless:
            self._cancel_requested()
        if self._pause.is_active:
            return
        # No more than fits on the disk. A larger batch would delete files that it has just written.
        room = min(limits.max_spilling, limits.disk_blocks) - len(self.being_spilled)
        room -= self._spill(self._first_requested(room))
        lost = host.idle_unspilled(RetentionRank.WORTHLESS) + host.idle_unspilled(RetentionRank.SPARE)
        spare = host.free + host.idle_on_disk + lost + len(self.being_spilled)
        wanted = min(room, int(limits.spill_below * limits.host_slots) - spare)
        if wanted > 0:
            self._spill(host.next_unspilled(wanted, above=RetentionRank.SPARE))

    def _cancel_requested(self) -> None:
        """Give the blocks of requested writes their new ranks, except ``WANTED`` blocks, and forget the
        requests."""
        for key, rank in reversed(self._requested_writes.items()):  # the end of a context is evicted first
            entry = self._host.get(key)
            if entry is not None and entry.rank != RetentionRank.WANTED:
                self._host.set_rank(entry, rank)
        self._requested_writes.clear()

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

    def _spill(self, entries: Sequence[HostEntry]) -> int:
        """Plan to write idle entries to disk. They stay in host memory too. Returns how many are written."""
        entries = [entry for entry in entries if not entry.on_disk and entry.key not in self.being_spilled]
        if not entries:
            return 0
        job = next(self._numbers)
        for entry in entries:
            self._host.pin(entry)
            self.being_spilled.add(entry.key)
        self._spilling[job] = entries
        self._spills[job] = [FileCopy(entry.slot, entry.key) for entry in entries]
        return len(entries)

    def spilled(self, job: int, copy_results: Mapping[BlockKey, CopyResult]) -> None:
        """Handle the results of a batch of writes to disk."""
        host = self._host
        seen: set[CopyResult] = set()
        for entry in reversed(self._spilling.pop(job, ())):
            self.being_spilled.discard(entry.key)
            copy_result = copy_results.get(entry.key, CopyResult.FAILED)
            seen.add(copy_result)
            written = copy_result is CopyResult.MOVED
            self._counts["spilled" if written else f"spill_{copy_result.value}"] += 1
            if written and not self.closed:
                host.set_on_disk(entry, True)
                host.set_rank(entry, self._requested_writes.pop(entry.key, entry.rank))
                self._know([entry.key])
            host.unpin(entry, used=False)
        # A failed batch counts as one failure.
        if CopyResult.FAILED in seen or CopyResult.FULL in seen:
            self._pause.failed()
        elif CopyResult.MOVED in seen:
            self._pause.worked()

    def _know(self, keys: Sequence[BlockKey]) -> None:
        """Note that the disk has the blocks ``keys``, given in context order."""
        for key in reversed(keys):
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > self.limits.disk_blocks:
            key, _ = self._known.popitem(last=False)
            if (entry := self._host.get(key)) is not None:
                self._host.set_on_disk(entry, False)

    # -- from disk ------------------------------------------------------------------

    def was_read(self, request_id: str) -> bool:
        """Whether blocks were read for the request since its last load began."""
        wait = self._waits.get(request_id)
        return wait is not None and wait.read_s is not None

    def must_wait(self, request_id: str, now: float) -> bool:
        """Return whether the request must still wait for the store's answer or for its disk read.

        It waits at most ``limits.max_probe_wait_s`` for the answer and ``limits.max_stage_wait_s`` for the
        read, then gives up. While reads hang, it does not wait for a read."""
        wait = self._waits.get(request_id)
        if wait is None:
            return False
        if wait.asked_s is not None:
            if now - wait.asked_s < self.limits.max_probe_wait_s:
                return True
            wait.asked_s = None
        if wait.read_s is None or not wait.missing or wait.given_up:
            return False
        if now - wait.read_s < self.limits.max_stage_wait_s and not self._reads_hang:
            return True
        wait.given_up = True
        if self.limits.max_stage_wait_s > 0 and not wait.disk_answers:  # otherwise the disk is just busy
            self._reads_hang = True
        self._counts["gave_up"] += wait.missing
        return False

    def search(
        self, request_id: str, found: Sequence[HostEntry], keys: Sequence[BlockKey], now: float
    ) -> bool:
        """Look for the blocks ``keys`` of a request on disk. Returns whether the request must wait.

        ``found``: entries of the request's blocks before ``keys``, which are in host memory. If the disk is
        read, these entries, and the entries of the blocks to read, stay pinned until ``end_read``."""
        # The store is asked first, so that everything missing is read together.
        return not self.closed and (
            self._ask(request_id, keys, now) or self._stage(request_id, found, keys, now)
        )

    def _ask(self, request_id: str, keys: Sequence[BlockKey], now: float) -> bool:
        """Plan to ask the store for ``keys``, beginning with the first that has no known copy. Returns
        whether it is asked."""
        wait = self._waits.get(request_id) or _DiskWait()
        oldest_s = next((asked_s for _, asked_s, _ in self._probing.values()), now)
        # Answers come one after the other, so a further question would only wait.
        if wait.was_asked or now - oldest_s >= self.limits.max_probe_wait_s:
            return False
        unknown = next(
            (at for at, key in enumerate(keys) if self._host.get(key) is None and key not in self._known),
            len(keys),
        )
        if len(keys) - unknown < self.limits.min_probe_blocks:
            return False
        wait.asked_s, wait.was_asked = now, True
        self._waits[request_id] = wait
        job = next(self._numbers)
        self._probing[job] = wait, now, keys[unknown:]
        self._probes[job] = keys[unknown:]
        return True

    def probed(self, job: int, found: int) -> None:
        """Handle the store's answer: the number of leading keys that it has."""
        if job not in self._probing:
            return
        wait, _, keys = self._probing.pop(job)
        wait.asked_s = None
        if not self.closed:
            self._know(keys[:found])

    def _stage(
        self, request_id: str, found: Sequence[HostEntry], keys: Sequence[BlockKey], now: float
    ) -> bool:
        """Plan to read the leading ``keys`` of a request from disk. Returns false if none can be read."""
        wait = self._waits.get(request_id) or _DiskWait()
        wait.entries = list(found)
        for entry in found:  # reads must not evict them
            self._host.pin(entry)
        # The request runs next, so it has priority over idle programs.
        if not self._read(keys, wait, RetentionRank.PLAIN, at_most=RetentionRank.IDLE):
            self._host.release(wait.entries)
            wait.entries = []
            return False
        self.touch([*(entry.key for entry in found), *keys])
        wait.read_s, wait.given_up, wait.disk_answers = now, False, False
        self._waits[request_id] = wait
        return True

    def fetch(self, keys: Iterable[BlockKey], rank: RetentionRank) -> int:
        """Plan to read the leading ``keys`` from disk before a request needs them. Returns how many of
        ``keys`` are being read now."""
        return self._read(keys, None, rank, at_most=min(rank, RetentionRank.IDLE))

    def _read(
        self, keys: Iterable[BlockKey], wait: _DiskWait | None, rank: RetentionRank, *, at_most: RetentionRank
    ) -> int:
        """Plan to read the leading ``keys`` from disk. Returns how many of ``keys`` are being read now, also
        by earlier jobs. While reads hang, plans nothing and returns 0.

        Skips blocks that host memory has. Stops when there is no room, or at a key that is neither in host
        memory nor known to be on disk.

        ``wait``: the request's wait, if a request waits. ``rank``: rank of the new entries. ``at_most``:
        highest rank of entries that host memory may evict for the new entries."""
        if self._reads_hang:
            return 0
        host, job, coming, missing = self._host, 0, 0, 0
        ordered, here = dict[int, list[HostEntry]](), list[HostEntry]()
        # Waiting requests may not pin all of host memory, because blocks that the device evicts need slots
        # too.
        pinned = sum(len(other.entries) for other in self._waits.values() if other is not wait)
        room = int(MAX_PINNED_SHARE * self.limits.host_slots) - pinned if pinned else self.limits.host_slots
        for key in keys:
            entry = host.get(key)
            if entry is None:
                if key not in self._known or coming >= room:
                    break
                if coming % STAGE_BATCH_BLOCKS == 0:
                    job = next(self._numbers)
                entry = host.take(key, rank, job, on_disk=True, at_most=at_most)
                if entry is None:
                    break
                self._being_staged[key] = []
                ordered.setdefault(job, []).append(entry)
                coming += 1
            if key in self._being_staged:
                missing += 1
                if wait is not None:
                    self._being_staged[key].append(wait)
            host.pin(entry)  # the next read must not reuse its slot
            here.append(entry)
        for job, entries in ordered.items():
            self._staged_by[job] = entries
            self._stages[job] = [FileCopy(each.slot, each.key) for each in entries]
        if wait is None or not missing:
            host.release(here)
        else:
            wait.missing = missing
            wait.entries += here
        return missing

    def staged(self, job: int, copy_results: Mapping[BlockKey, CopyResult]) -> None:
        """Handle the results of a batch of reads from disk."""
        self._reads_hang = False
        for wait in self._waits.values():
            wait.disk_answers = True
        for entry in self._staged_by.pop(job, ()):
            copy_result = copy_results.get(entry.key, CopyResult.FAILED)
            for wait in self._being_staged.pop(entry.key, ()):
                wait.missing -= 1
            if copy_result is CopyResult.MOVED:
                self._counts["staged"] += 1
            else:
                self._counts[f"stage_{copy_result.value}"] += 1
                self._host.remove(entry)
                self._known.pop(entry.key, None)
            self._host.end_fill(entry)

    def end_read(self, request_id: str) -> None:
        """Unpin the blocks that were read for a request, because its load begins. The store is not asked
        again for this request."""
        wait = self._waits.get(request_id)
        if wait is not None:
            self._host.release(wait.entries)
            # A new object, because reads that have not ended count down the old one.
            self._waits[request_id] = _DiskWait(was_asked=wait.was_asked)

    def abandon(self, request_id: str) -> None:
        """Forget a request: end its waits and unpin its blocks."""
        self.end_read(request_id)
        self._waits.pop(request_id, None)
