"""What is on disk below one engine's host memory, and what is on its way to or from it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from .host_block_pool import HostBlockPool, HostEntry, RetentionRank
from .offload_jobs import BlockKey, CopyResult, FileCopy, OffloadJobs, ProbeResult


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLimits:
    """Limits of the planner. Times are in seconds."""

    host_slots: int
    disk_blocks: int = 0
    """0: no disk."""
    spill_below: float = 0.25
    """Write to disk while less than this share of host memory is free or also on disk."""
    max_spilling: int = 256
    """Maximum number of blocks being written at once: a slow disk gets no longer a queue."""
    max_staging: int = 4096
    """Maximum number of blocks being read at once."""
    max_stage_wait_s: float = 10.0
    """Maximum wait of a request for the disk; then it computes the rest."""
    shared: bool = False
    """Read other engines' stores beside this one's."""
    min_probe_blocks: int = 8
    """Minimum number of blocks to search other stores for: fewer are computed sooner than found."""
    max_probe_wait_s: float = 1.0
    """Maximum wait of a request for that search."""


DISK_INDEX_TIMEOUT_STEPS = 100
"""Steps after which nobody waits any more for a mover to say what is on disk."""

NO_SIBLINGS_RECHECK_S = 5.0
"""Seconds for which nobody looks again for other engines' stores, where there was none."""

MAX_FOUND_KEYS = 1 << 16
"""Blocks that are remembered to be in other engines' stores."""

MAX_PINNED_SHARE = 0.5
"""Share of host memory that may be held for requests that wait for the disk, if they are several."""


class DiskBackoff:
    """After a disk has failed it is left alone for a while, for longer each time."""

    LONGEST_STEPS = 4096

    def __init__(self) -> None:
        self._steps = 0
        self._left = 0

    def failed(self) -> None:
        self._steps = min(self.LONGEST_STEPS, max(16, 2 * self._steps))
        self._left = self._steps

    def worked(self) -> None:
        self._steps = 0

    @property
    def lasts(self) -> bool:
        return self._left > 0

    def over(self) -> bool:
        """Whether it may be tried again; asked once a step."""
        self._left = max(0, self._left - 1)
        return not self._left


@dataclass(slots=True, eq=False)
class _PendingStage:
    """A request that waits for blocks from disk."""

    since_s: float
    missing: int = 0
    entries: list[HostEntry] = field(default_factory=list)
    """Pinned for it: what was brought for it must still be there when it is asked again."""
    given_up: bool = False


@dataclass(slots=True, eq=False)
class _PendingProbe:
    """A request that waits to hear what other engines' stores have."""

    since_s: float
    over: bool = False


class DiskPlanner:
    """The disk's half of a planner, which tells it what to bring and asks it what it has.

    It keeps three promises. What it says is on disk is there by the time it is
    read, given that the mover deletes before it writes, and what turns out not to
    be there is forgotten. Files, with those being written, are never more than
    the disk has room for. A slot of host memory stays its block's while it is
    written or read; that a block is on disk is noted in its entry (``on_disk``).

    Where other engines' stores lie beside this one's (``limits.shared``), what they
    have is looked for when a request asks for it, and read as what is here is. It is
    theirs: never counted as this engine's, and it may be gone by the time it is read.
    """

    def __init__(
        self, limits: TierLimits, host: HostBlockPool, counts: Counter[str], numbers: Iterator[int]
    ) -> None:
        """``counts`` is where blocks are counted by what became of them; ``numbers`` are those of jobs."""
        self.limits = limits
        self._host = host
        self._counts = counts
        self._numbers = numbers
        self._files: OrderedDict[BlockKey, None] = OrderedDict()
        """What is on disk, the longest unused first."""
        self.known = False
        """Whether the mover has said what an earlier engine left there."""
        self._asked_steps = 0
        """Steps in which it could have."""
        self._forgotten = False
        """What was left there was computed before a reset."""
        self.room = limits.disk_blocks
        """Blocks there may be. Less for a while where the disk itself was full before that."""
        self._pause = DiskBackoff()
        self._spilling: dict[int, list[HostEntry]] = {}
        self.being_spilled: set[BlockKey] = set()
        self._ordered: OrderedDict[BlockKey, RetentionRank] = OrderedDict()
        """What is to be written though there is room, and its rank once it is there."""
        self._staged_by: dict[int, list[HostEntry]] = {}
        self._being_staged: dict[BlockKey, list[_PendingStage]] = {}
        """Of each block on its way from disk, the requests that wait for it."""
        self._staging: dict[str, _PendingStage] = {}
        self._elsewhere: OrderedDict[BlockKey, None] = OrderedDict()
        """Of what other engines' stores have, what was asked for, the longest unused first."""
        self._borrowed: set[BlockKey] = set()
        """Of what is on its way from disk, what comes from there."""
        self._probed: dict[str, _PendingProbe] = {}
        """Requests for which they were looked through."""
        self._probing: dict[int, tuple[_PendingProbe, Sequence[BlockKey]]] = {}
        self._alone_until_s = float("-inf")
        # Orders of the step that is being planned.
        self._probes: dict[int, Sequence[BlockKey]] = {}
        self._drops: list[BlockKey] = []
        self._spills: dict[int, list[FileCopy]] = {}
        self._stages: dict[int, list[FileCopy]] = {}

    def __len__(self) -> int:
        """Blocks on disk."""
        return len(self._files)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._files

    def __iter__(self) -> Iterator[BlockKey]:
        """What is on disk, the longest unused first."""
        return iter(self._files)

    @property
    def under_way(self) -> int:
        """Jobs whose results are still to come."""
        return len(self._spilling) + len(self._staged_by) + len(self._probing)

    @property
    def closed(self) -> bool:
        """Nothing is written any more: after a reset this engine may have other weights than its name says,
        and other engines would read what it writes."""
        return self.limits.shared and self._forgotten

    @property
    def has_jobs(self) -> bool:
        """Whether a step is needed though no request asks for one: orders wait, or it is not known yet what
        an earlier engine left on disk."""
        if self._drops or self._spills or self._stages or self._probes:
            return True
        if not self.known:
            return bool(self.limits.disk_blocks) and self._asked_steps < DISK_INDEX_TIMEOUT_STEPS
        # While a batch is being written nothing is asked for: an idle engine would turn in circles.
        return bool(self._ordered) and not self._spilling and not self._pause.lasts

    def add_jobs(self, jobs: OffloadJobs) -> None:
        """Add the orders of the step that was just planned."""
        self._asked_steps += 1
        jobs.drops, self._drops = self._drops, []
        jobs.spills, self._spills = self._spills, {}
        jobs.stages, self._stages = self._stages, {}
        jobs.probes, self._probes = self._probes, {}

    # -- what is there --------------------------------------------------------------

    def take_in(self, keys: Sequence[BlockKey]) -> None:
        """An earlier engine left these there, the longest unused first."""
        self.known = True
        if self._forgotten:
            self._drops += keys
            return
        for key in keys:
            self._files[key] = None
        self.make_room(0)

    def make_room(self, blocks: int) -> None:
        """Drop the longest unused files until so many more fit; what is being read stays."""
        excess = len(self._files) + len(self.being_spilled) + blocks - self.room
        if excess <= 0:
            return
        unread = (key for key in self._files if key not in self._being_staged)
        for key in list(islice(unread, excess)):
            self._lost(key)
            self._drops.append(key)
            self._counts["disk_dropped"] += 1

    def discard(self, key: BlockKey) -> None:
        """The file of this is not to be found any more. What host memory had of it is gone already."""
        if key in self._files:
            del self._files[key]
            self._drops.append(key)

    def forget(self) -> None:
        """What is there was computed before a reset. Nobody waits for it any more."""
        for request_id in list(self._staging):
            self.abandon(request_id)
        self._drops += self._files
        self._files.clear()
        self._ordered.clear()
        self._elsewhere.clear()
        self._forgotten = True

    def _lost(self, key: BlockKey) -> None:
        self._files.pop(key, None)
        entry = self._host.get(key)
        if entry is not None:
            self._host.set_on_disk(entry, False)

    # -- to disk --------------------------------------------------------------------

    def order(self, key: BlockKey, rank: RetentionRank) -> None:
        """Write what host memory has of this as soon as the disk takes it; from then on it has this rank."""
        if self.closed:
            return
        self._ordered[key] = rank
        if len(self._ordered) > 2 * self.limits.host_slots:
            # A disk that always fails never comes to them. One in two at least has left host memory, or more
            # would be here than there are slots, so to look at all of them costs O(1) an order.
            has = self._host.get
            self._ordered = OrderedDict(order for order in self._ordered.items() if has(order[0]) is not None)

    def cancel_spill(self, key: BlockKey) -> None:
        """It is not to be written by order any more."""
        self._ordered.pop(key, None)

    def plan_spills(self) -> None:
        """Once a step: write what was ordered, and keep a part of host memory reusable without loss, a batch
        at a time."""
        limits, host = self.limits, self._host
        if not self.known or self.closed or not self._pause.over():
            return
        self.room = limits.disk_blocks
        if not self.room:
            return
        room = limits.max_spilling - len(self.being_spilled)
        room -= self.spill(self._first_ordered(min(room, self.room)))
        lost = host.idle_unspilled(RetentionRank.WORTHLESS) + host.idle_unspilled(RetentionRank.SPARE)
        spare = host.free + host.idle_on_disk + lost + len(self.being_spilled)
        # More than the disk takes would push out what was written just before, for ever.
        wanted = min(int(limits.spill_below * limits.host_slots), self.room) - spare
        if room <= 0 or wanted <= 0:
            return
        self.spill(host.next_unspilled(min(room, wanted), above=RetentionRank.SPARE))

    def _first_ordered(self, most: int) -> list[HostEntry]:
        """The first of what is to be written to disk by order, as far as it has been stored."""
        found: list[HostEntry] = []
        for key in list(islice(self._ordered, max(0, most))):
            entry = self._host.get(key)
            if entry is None or entry.on_disk:
                del self._ordered[key]
            elif entry.job is not None:
                break
            else:
                found.append(entry)
        return found[::-1]  # as any batch: the end first

    def spill(self, entries: Sequence[HostEntry]) -> int:
        """Write idle entries to disk; they stay in host memory too. Returns how many."""
        entries = [entry for entry in entries if not entry.on_disk and entry.key not in self.being_spilled]
        self.make_room(min(len(entries), self.room))
        # Files that are being written or read make no room.
        fits = self.room - len(self._files) - len(self.being_spilled)
        entries = entries[: max(0, fits)]
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
        """What became of a batch."""
        host = self._host
        seen: set[CopyResult] = set()
        written: list[BlockKey] = []
        for entry in reversed(self._spilling.pop(job, ())):
            self.being_spilled.discard(entry.key)
            copy_result = copy_results.get(entry.key, CopyResult.FAILED)
            seen.add(copy_result)
            if copy_result is not CopyResult.MOVED:
                self._counts[f"spill_{copy_result.value}"] += 1
            elif entry.removal_pending:  # forgotten meanwhile
                self._drops.append(entry.key)
            else:
                self._counts["spilled"] += 1
                written.append(entry.key)
                host.set_on_disk(entry, True)
                host.set_rank(entry, self._ordered.pop(entry.key, entry.rank))
            if copy_result is CopyResult.FULL:
                # Somebody else fills the disk too: for a while what we have there is all we may have.
                self.room = min(self.room, len(self._files))
                host.set_rank(entry, self._ordered.pop(entry.key, entry.rank))
            host.unpin(entry, used=False)
        # Of a context the end is deleted first.
        self._files.update(dict.fromkeys(reversed(written)))
        # Once a job: a batch that fails is one failure.
        if CopyResult.FAILED in seen or CopyResult.FULL in seen:
            self._pause.failed()
        elif CopyResult.MOVED in seen:
            self._pause.worked()

    # -- from disk ------------------------------------------------------------------

    def disk_read_requested(self, request_id: str) -> bool:
        """Whether something was read for the request since it last loaded anything."""
        return request_id in self._staging

    def waits(self, request_id: str, now: float) -> bool:
        """Whether the request waits on for what is looked for or read for it: for so long, and then never
        again."""
        probe = self._probed.get(request_id)
        if probe is not None and not probe.over:
            if now - probe.since_s < self.limits.max_probe_wait_s:
                return True
            probe.over = True
        waiting = self._staging.get(request_id)
        if waiting is None or not waiting.missing or waiting.given_up:
            return False
        if now - waiting.since_s < self.limits.max_stage_wait_s:
            return True
        waiting.given_up = True
        self._counts["gave_up"] += waiting.missing
        return False

    def probe(self, request_id: str, keys: Sequence[BlockKey], now: float) -> bool:
        """Have other engines' stores looked through for ``keys``, from the first on that this engine has
        nowhere. Once a request; False: there is no reason to."""
        if not self.limits.shared or self._forgotten or request_id in self._probed:
            return False
        missing = self._from_first_missing(keys)
        if len(missing) < self.limits.min_probe_blocks or now < self._alone_until_s:
            return False
        job = next(self._numbers)
        probe = self._probed[request_id] = _PendingProbe(now)
        self._probing[job] = probe, missing
        self._probes[job] = missing
        return True

    def probed(self, job: int, answer: ProbeResult) -> None:
        """What other engines' stores have."""
        probe, keys = self._probing.pop(job, (None, ()))
        if probe is None:
            return
        probe.over = True
        if not answer.stores:
            self._alone_until_s = probe.since_s + NO_SIBLINGS_RECHECK_S
        if self._forgotten:
            return
        for key in keys[: answer.found]:
            self._elsewhere[key] = None
            self._elsewhere.move_to_end(key)
        while len(self._elsewhere) > MAX_FOUND_KEYS:
            self._elsewhere.popitem(last=False)

    def _from_first_missing(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        get, files, elsewhere = self._host.get, self._files, self._elsewhere
        for index, key in enumerate(keys):
            if get(key) is None and key not in files and key not in elsewhere:
                return keys[index:]
        return ()

    def stage(
        self, request_id: str, found: Sequence[HostEntry], keys: Iterable[BlockKey], now: float
    ) -> bool:
        """Have leading ``keys`` read for a request that has ``found`` what comes before them. False: the disk
        has nothing of them. What is here or comes stays until it is ``abandoned``."""
        waiting = _PendingStage(since_s=now)
        # What is found already must not make way for the rest.
        for entry in found:
            self._host.pin(entry)
            waiting.entries.append(entry)
        # It runs next, and what it waits for is pinned: it is worth more than what waits for its turn.
        if not self._read(keys, waiting, RetentionRank.PLAIN, at_most=RetentionRank.IDLE):
            self._host.release(waiting.entries)
            return False
        self._staging[request_id] = waiting
        return True

    def fetch(self, keys: Iterable[BlockKey], rank: RetentionRank) -> int:
        """Have leading ``keys`` read, for nobody yet; returns how many are on their way."""
        return self._read(keys, None, rank, at_most=min(rank, RetentionRank.IDLE))

    def _read(
        self,
        keys: Iterable[BlockKey],
        waiting: _PendingStage | None,
        rank: RetentionRank,
        *,
        at_most: RetentionRank,
    ) -> int:
        """Have leading ``keys`` read, as far as the disk has them; returns how many are on their way."""
        host, job = self._host, next(self._numbers)
        ordered: list[HostEntry] = []
        here: list[HostEntry] = []
        missing = 0
        # What requests wait for is pinned, and running ones must find room for what they lose.
        pinned = sum(len(other.entries) for other in self._staging.values())
        room = self.limits.max_staging - len(self._being_staged)
        if pinned:
            room = min(room, int(MAX_PINNED_SHARE * self.limits.host_slots) - pinned)
        for key in keys:
            entry = host.get(key)
            if entry is None:
                ours = key in self._files
                if not (ours or key in self._elsewhere) or len(ordered) >= room:
                    break
                entry = host.take(key, rank, job, on_disk=ours, at_most=at_most)
                if entry is None:
                    break
                (self._files if ours else self._elsewhere).move_to_end(key)
                if not ours:
                    self._borrowed.add(key)
                self._being_staged[key] = []
                ordered.append(entry)
            if key in self._being_staged:
                missing += 1
                if waiting is not None:
                    self._being_staged[key].append(waiting)
            host.pin(entry)  # the next one must not take its slot
            here.append(entry)
        if ordered:
            self._staged_by[job] = ordered
            borrowed = self._borrowed
            self._stages[job] = [FileCopy(each.slot, each.key, each.key in borrowed) for each in ordered]
        if waiting is None or not missing:
            host.release(here)
        else:
            waiting.missing = missing
            waiting.entries += here
        return missing

    def staged(self, job: int, copy_results: Mapping[BlockKey, CopyResult]) -> None:
        """What became of what was to be read."""
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
            self._host.filled(entry)

    def abandon(self, request_id: str) -> None:
        """The request loads what there is, or nothing: it waits no more."""
        self._probed.pop(request_id, None)
        waiting = self._staging.pop(request_id, None)
        if waiting is not None:
            self._host.release(waiting.entries)
