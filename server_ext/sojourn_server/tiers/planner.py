"""Where content of KV blocks is below the device, and what is to move: no vLLM, no tensors, no clock.

One planner goes with one engine's scheduler. It is told what the device is about
to lose (``evicted``) or may spare (``store``), asked what it still has
(``lookup``), and writes the orders of each step (``take_jobs``); what became of
them comes back by ``take_results``. It keeps three promises: content is found
only where it is, or will be by the time it is read, given that the mover carries
out orders in their order; a slot that is read or written by one job is touched by
no other; and what a failed copy left behind is forgotten, so the worst that
happens is that something is computed again. Host memory and requests' look-ups
are its own; what is on disk, and on its way there and back, is its ``DiskPlan``'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import count, takewhile
from typing import NamedTuple

from .disk_plan import DiskPlan
from .host_slots import HostEntry, HostSlots
from .jobs import Copy, Fate, Key, TierJobs, TierResults
from .limits import TierLimits
from .ranks import Rank

STORED_TOGETHER = 32
"""Blocks of one job that is stored ahead: what is reused before its job is over has all of it waited for."""

_WANTED, _IDLE = Rank.WANTED, Rank.IDLE  # to name a member takes long, and each block is asked about


class _Lookup(NamedTuple):
    """What a request was told."""

    of: tuple[int, Key]
    """How many keys it asked for, and the first: a request's tokens only grow, so all others are the same."""
    found: list[HostEntry]


class Persisted(NamedTuple):
    """Where a context is that was to be written to disk, in blocks."""

    stored: int
    """On disk, from the beginning without a gap."""
    pending: int
    """On their way there, of what will then be there without a gap."""


class TierPlanner:
    """The tiers below one engine's device. Times are the engine's monotonic seconds."""

    def __init__(self, limits: TierLimits) -> None:
        self.limits = limits
        self.counts: Counter[str] = Counter()
        """Blocks by what became of them; names in ``docs/tiers.md``."""
        self.host = HostSlots(limits.host_slots, self.counts)
        self._numbers = count(1)
        """Of jobs: a slot tells by its job's whether it is filled from the device or from disk."""
        self.disk = DiskPlan(limits, self.host, self.counts, self._numbers)
        self._storing: dict[int, tuple[list[HostEntry], list[Copy]]] = {}
        self._looked_up: dict[str, _Lookup] = {}
        """What was found for requests, pinned."""
        self._last_asked: str | None = None
        self._lost = False
        """Something has been found in this step that is not there any more."""
        self._loading: list[HostEntry] = []
        """Pinned until the step that reads them was carried out; orders of later steps come after it."""
        self._jobs = TierJobs()
        """Orders of the step that is being planned, but for the disk's."""
        self._wants_step = False
        """Somebody waits to hear what has come of earlier orders."""

    # -- the device loses something ---------------------------------------------

    def evicted(self, key: Key, block_id: int, rank: Rank = Rank.PLAIN) -> bool:
        """This step writes something else into a block: save what is in it. False: no room, or not needed."""
        entry = self.host.get(key)
        if entry is not None:
            if entry.job is not None and entry.job in self._storing:
                # A copy of just this may be under way: it must be over before the step writes.
                self._await_store(entry.job)
            self.host.touch(entry)
            self._rerank(entry, rank)
            self.counts["kept"] += 1
            return True
        entry = self._begin(key, rank, None)
        if entry is None:
            self.counts["no_room"] += 1
            return False
        self._jobs.saves.append(Copy(block_id, entry.slot))
        self.counts["saved"] += 1
        return True

    def store(
        self, blocks: Iterable[tuple[Key, int]], rank: Rank = Rank.PLAIN, *, at_most: Rank | None = None
    ) -> int:
        """Copy cached blocks ahead of their eviction; returns how many. They stay where they are.

        Each must stay as it is until the store is over, or be reported ``evicted``. ``blocks`` are in the
        order of their context: where room is short its beginning is stored, and of what is stored its end
        goes first. What takes up the room must be worth no more than ``at_most``, by default ``rank``.
        """
        used: list[HostEntry] = []
        begun: dict[int, list[tuple[HostEntry, Copy]]] = {}
        job = stored = 0
        for key, block_id in blocks:
            entry = self.host.get(key)
            if entry is not None:
                self.host.touch(entry)  # what follows must not take its place
                used.append(entry)
                continue
            if stored % STORED_TOGETHER == 0:
                job = next(self._numbers)
            entry = self._begin(key, rank, job, at_most=at_most)
            if entry is None:
                break  # what follows is worth nothing without it
            begun.setdefault(job, []).append((entry, Copy(block_id, entry.slot)))
            stored += 1
        for entry in reversed(used):
            self.host.touch(entry)
            self._rerank(entry, rank)
        # Jobs end in their order, and what ends first is reused first; of the device too the end goes first.
        for job, together in reversed(begun.items()):
            copies = [copy for _, copy in together]
            self._storing[job] = [entry for entry, _ in reversed(together)], copies
            self._jobs.stores[job] = copies
        self.counts["stored"] += stored
        return stored

    def store_spare(self, newest_first: Iterable[tuple[Key, int]]) -> int:
        """Copy what a turn has added to its context, where there is room to spare; returns how many blocks.

        Of the context, against its order, only what is not here is looked at, and the first that is.
        """
        added = [*takewhile(lambda block: self.host.get(block[0]) is None, newest_first)]
        # Not each other's place: where there is no room for all, each turn would copy a whole context.
        return self.store(reversed(added), Rank.SPARE, at_most=Rank.WORTHLESS)

    def discard(self, keys: Iterable[Key]) -> None:
        """Copies of these are not to be found: they may not hold what the keys say."""
        for key in keys:
            entry = self.host.get(key)
            if entry is not None:
                self._lost = True
                self.host.remove(entry)
            self.disk.discard(key)
            self.counts["discarded"] += entry is not None

    def set_rank(self, keys: Sequence[Key], rank: Rank, *, only: Rank | None = None) -> None:
        """Content of these, of a context in its order, is reused with that of another rank from now on, the
        end first. Orders to write it out are void. ``only``: what has this rank now."""
        get, void = self.host.get, self.disk.void
        for key in reversed(keys):
            entry = get(key)
            if only is not None and (entry is None or entry.rank != only):
                continue
            void(key)
            if entry is not None:
                self.host.set_rank(entry, rank)

    def write_out(self, keys: Iterable[Key], rank: Rank) -> None:
        """Write these to disk, in this order, as soon as it takes them; from then on they have this rank."""
        for key in keys:
            entry = self.host.get(key)
            if entry is not None and entry.on_disk:
                self._rerank(entry, rank)
            elif entry is not None:
                self.disk.order(key, rank)

    def persist(self, chain: Sequence[Key], on_device: Mapping[Key, int]) -> Persisted:
        """Have a context written to disk, since its program is about to go where only the disk is shared.

        ``on_device``: of ``chain`` what the device has, and in which blocks. It goes by host memory, where
        nothing makes way for it that is kept for the idle. Asked again, it orders what has found no room so
        far, and tells how far it has come.
        """
        disk, get = self.disk, self.host.get
        if disk.closed:
            return Persisted(0, 0)
        chain = chain[: disk.room]  # more would push out its own beginning
        unsaved: list[tuple[Key, int]] = []
        for key in chain:
            entry = get(key)
            if entry is not None and entry.rank < _IDLE and key not in disk:
                self.host.set_rank(entry, _IDLE)  # until it is written: nothing else has it
            elif entry is None and key in on_device and key not in disk:
                unsaved.append((key, on_device[key]))
        self.store(unsaved, _IDLE, at_most=Rank.PLAIN)
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
                disk.order(key, Rank.COLD if entry.rank == _IDLE else entry.rank)
            pending += 1
        self._wants_step = self._wants_step or pending > 0
        return Persisted(stored, pending)

    # -- somebody asks for something -------------------------------------------------

    def lookup(self, request_id: str, keys: Sequence[Key], now: float) -> int | None:
        """How many of the leading ``keys`` can be loaded now; ``None``: ask again, the disk is being read, or
        other engines' stores are looked through.

        What is found is pinned until the next ``take_jobs``, and that of the last one who asked until
        somebody else does: whoever is next in line is asked every step. Asked again so, or while the disk is
        read, it answers in O(1).
        """
        if not keys:
            self._drop_lookup(request_id)
            return 0
        disk = self.disk
        if disk.waits(request_id, now):
            return None
        was_read = disk.was_asked(request_id)
        before = self._looked_up.get(request_id)
        asked_before = before is not None and before.of == (len(keys), keys[0])
        # Who gave up on the disk may find more by and by.
        if before is not None and asked_before and not was_read and not self._lost:
            self._last_asked = request_id
            return len(before.found)
        found = self._found(keys)
        missing = keys[len(found) :]
        # What others have is looked for first: then all that is missing is read together.
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

    def load(self, request_id: str, keys: Sequence[Key], block_ids: Sequence[int]) -> None:
        """The request has been given device blocks: fill them with the content of these keys, all of which
        ``lookup`` has found in this step. Raises ``KeyError`` for one that it has not."""
        self.disk.abandon(request_id)
        before = self._looked_up.pop(request_id, None)
        found = before.found if before is not None else []
        if [entry.key for entry in found[: len(keys)]] != list(keys):
            self.host.release(found)
            raise KeyError(
                f"request {request_id}: these {len(keys)} blocks are not what its last lookup found"
            )
        self.host.release(found[len(keys) :])
        if not keys:
            return
        self._loading += found[: len(keys)]
        self._jobs.loads.setdefault(request_id, []).extend(
            Copy(block_id, entry.slot) for entry, block_id in zip(found, block_ids, strict=False)
        )
        self.counts["loaded"] += len(keys)

    def abandon(self, request_id: str) -> None:
        """The request has finished, or will not be asked for again."""
        self.disk.abandon(request_id)
        self._drop_lookup(request_id)

    def leading(self, keys: Sequence[Key]) -> int:
        """How many of the leading ``keys`` are in host memory or on disk."""
        get, disk = self.host.get, self.disk
        return sum(1 for _ in takewhile(lambda key: get(key) is not None or key in disk, keys))

    def missing(self, keys: Sequence[Key]) -> int:
        """How many of ``keys`` are neither in host memory nor on disk."""
        return sum(1 for key in keys if self.host.get(key) is None and key not in self.disk)

    def fetch(self, keys: Sequence[Key], rank: Rank = Rank.PLAIN) -> int:
        """Bring leading ``keys`` from disk to host memory, ahead of need; returns how many are coming."""
        if not self.disk:
            return 0
        found = self._found(keys)
        for entry in found:  # what is here must not make way for the rest
            self.host.pin(entry)
        coming = self.disk.fetch(keys[len(found) :], rank)
        self.host.release(found)
        return coming

    # -- steps ----------------------------------------------------------------------

    def take_jobs(self, *, spill: bool = True) -> TierJobs:
        """The orders of the step that was just planned. ``spill``: host memory may be written to disk."""
        for request_id in [name for name in self._looked_up if self._lost or name != self._last_asked]:
            self._drop_lookup(request_id)
        self._lost = self._wants_step = False
        # The mover is through with a step's loads before it begins with the next step's orders.
        self.host.release(self._loading)
        self._loading = []
        if spill:
            self.disk.plan_spills()
        jobs, self._jobs = self._jobs, TierJobs()
        self.disk.give_orders(jobs)
        return jobs

    def take_results(self, results: TierResults) -> None:
        """What became of earlier orders."""
        if results.on_disk is not None:
            self.disk.take_in(results.on_disk)
        for slot in results.lost_slots:
            entry = self.host.in_slot(slot)
            if entry is not None:
                self.counts["failed"] += 1
                self._lost = True
                self.host.remove(entry)
        for job, fate in results.stored.items():
            for entry in self._storing.pop(job, ((), ()))[0]:
                self._end_fill(entry, fate)
        for job, fates in results.spilled.items():
            self.disk.spilled(job, fates)
        for job, fates in results.staged.items():
            self.disk.staged(job, fates)
        for job, answer in results.probed.items():
            self.disk.probed(job, answer)

    @property
    def has_orders(self) -> bool:
        """Whether a step is needed though no request asks for one: orders wait, or it is not known yet what
        an earlier engine left on disk."""
        return bool(self._jobs) or self._wants_step or self.disk.has_orders

    def state(self) -> dict[str, dict[str, int]]:
        """Blocks below the device by tier, and what became of blocks so far."""
        host = len(self.host)
        state = {"host": {"used": host, "free": self.host.slots - host}}
        if self.limits.disk_blocks:
            used = len(self.disk)
            state["disk"] = {"used": used, "free": max(0, self.disk.room - used)}
        return {**state, "moves": dict(self.counts)}

    @property
    def storing_blocks(self) -> int:
        """Blocks that are being copied to host memory ahead of need, or queued for it."""
        return sum(len(entries) for entries, _ in self._storing.values())

    @property
    def under_way(self) -> int:
        """Jobs whose results are still to come."""
        return len(self._storing) + self.disk.under_way

    def on_disk(self, key: Key) -> bool:
        """Whether the content is on disk."""
        return key in self.disk

    @property
    def disk_blocks(self) -> int:
        """Blocks on disk."""
        return len(self.disk)

    def forget(self) -> None:
        """The engine's cache was reset, as after new weights: nothing computed before may be found.

        Jobs under way end as they would, and their results are thrown away.
        """
        for request_id in list(self._looked_up):
            self._drop_lookup(request_id)
        self.disk.forget()
        for entry in list(self.host):
            self.host.remove(entry)

    # -- inside ------------------------------------------------------------------------

    def _found(self, keys: Sequence[Key]) -> list[HostEntry]:
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
        """The store is over before this step's forward pass and its loads: its slots count as filled."""
        entries, copies = self._storing.pop(job)
        if self._jobs.stores.pop(job, None) is None:
            self._jobs.awaited[job] = copies
        else:  # not even begun
            self._jobs.saves += copies
        for entry in entries:
            self.host.filled(entry)

    def _rerank(self, entry: HostEntry, rank: Rank) -> None:
        """The device has another copy of it, or had: that it is wanted remains true."""
        if entry.rank != _WANTED:
            self.host.set_rank(entry, rank)

    def _begin(
        self, key: Key, rank: Rank, job: int | None, *, at_most: Rank | None = None
    ) -> HostEntry | None:
        return self.host.take(key, rank, job, on_disk=key in self.disk, at_most=at_most)

    def _drop_lookup(self, request_id: str) -> None:
        before = self._looked_up.pop(request_id, None)
        if before is not None:
            self.host.release(before.found)

    def _end_fill(self, entry: HostEntry, fate: Fate) -> None:
        if fate is not Fate.MOVED:
            self.counts["failed"] += 1
            self.host.remove(entry)
        self.host.filled(entry)
