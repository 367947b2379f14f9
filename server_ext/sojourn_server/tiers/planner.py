"""Where content of KV blocks is below the device, and what is to move: no vLLM, no tensors, no clock.

One planner goes with one engine's scheduler. It is told what the device is about
to lose (``evicted``) or may spare (``store``), asked what it still has
(``lookup``), and writes the orders of each step (``take_jobs``); what became of
them comes back by ``take_results``. It keeps three promises: content is found
only where it is, or will be by the time it is read, given that the mover carries
out orders in their order; a slot that is read or written by one job is touched by
no other; and what a failed copy left behind is forgotten, so the worst that
happens is that something is computed again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import NamedTuple

from .host_slots import HostEntry, HostSlots, Rank
from .jobs import Copy, Fate, FileCopy, Key, TierJobs, TierResults

WORTHLESS_RANK: Rank = 0
"""Of content that nobody is known to come back for: reused first, and not written to disk."""
SPARE_RANK: Rank = 1
"""Of what the device has too: a copy made in time, where there is room for it."""
PLAIN_RANK: Rank = 3
"""Of content about which nothing else is known."""
WANTED_RANK: Rank = 5
"""Of what is read next: its program has just been let onto the device. Nothing takes its place."""
ASK_STEPS = 100
"""Steps after which nobody waits any more for a mover to say what is on disk."""

STORED_TOGETHER = 32
"""Blocks of one job that is stored ahead: what is reused before its job is over has all of it waited for."""

MAX_PINNED = 0.5
"""Share of host memory that may be held for requests that wait for the disk, if they are several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLimits:
    """What bounds the planner. Times in seconds."""

    host_slots: int
    disk_blocks: int = 0
    """0: no disk."""
    spill_below: float = 0.25
    """Spill while less than this share of host memory is free or on disk too."""
    max_spilling: int = 256
    """Blocks on their way to disk at once: a slow disk is not given more than it takes."""
    max_staging: int = 4096
    """Blocks on their way from disk at once."""
    max_stage_wait_s: float = 10.0
    """A request waits no longer for the disk; it computes the rest."""


@dataclass(slots=True, eq=False)
class _Staging:
    """A request that waits for blocks from disk."""

    since_s: float
    missing: int
    entries: list[HostEntry] = field(default_factory=list)
    """Pinned for it: what was brought for it must still be there when it is asked again."""
    given_up: bool = False


class _Lookup(NamedTuple):
    """What a request was told."""

    of: tuple[int, Key]
    """How many keys it asked for, and the first: a request's tokens only grow, so all others are the same."""
    found: list[HostEntry]


class Pause:
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


class TierPlanner:
    """The tiers below one engine's device. Times are the engine's monotonic seconds."""

    def __init__(self, limits: TierLimits) -> None:
        self.limits = limits
        self.host = HostSlots(limits.host_slots)
        self.counts: Counter[str] = Counter()
        """Blocks by what became of them; names in ``docs/tiers.md``."""
        self._disk: OrderedDict[Key, None] = OrderedDict()
        """What is on disk, the longest unused first."""
        self._disk_known = False
        """Whether the mover has said what an earlier engine left there."""
        self._forgotten = False
        """What was left there was computed before a reset."""
        self._disk_room = limits.disk_blocks
        """Less for a while where the disk itself was full before that."""
        self._pause = Pause()
        self._storing: dict[int, tuple[list[HostEntry], list[Copy]]] = {}
        self._spilling: dict[int, list[HostEntry]] = {}
        self._being_spilled: set[Key] = set()
        self._ordered: OrderedDict[Key, Rank] = OrderedDict()
        """What is to be written to disk though there is room, and its rank once it is there."""
        self._staged_by: dict[int, list[HostEntry]] = {}
        self._being_staged: dict[Key, list[_Staging]] = {}
        """Of each block on its way from disk, the requests that wait for it."""
        self._staging: dict[str, _Staging] = {}
        self._looked_up: dict[str, _Lookup] = {}
        """What was found for requests, pinned."""
        self._steps = 0
        self._last_asked: str | None = None
        self._lost = False
        """Something has been found in this step that is not there any more."""
        self._loading: list[HostEntry] = []
        """Pinned until the step that reads them was carried out; orders of later steps come after it."""
        self._jobs = TierJobs()
        self._last_job = 0

    # -- the device loses something ---------------------------------------------

    def evicted(self, key: Key, block_id: int, rank: Rank = PLAIN_RANK) -> bool:
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
        self, blocks: Iterable[tuple[Key, int]], rank: Rank = PLAIN_RANK, *, at_most: Rank | None = None
    ) -> int:
        """Copy cached blocks ahead of their eviction; returns how many. They stay where they are.

        Each must stay as it is until the store is over, or be reported ``evicted``. ``blocks`` are in the
        order of their context: where room is short its beginning is stored, and of what is stored its end
        goes first. What takes up the room must be worth no more than ``at_most``, by default ``rank``.
        """
        used: list[HostEntry] = []
        begun: list[tuple[HostEntry, Copy]] = []
        for key, block_id in blocks:
            entry = self.host.get(key)
            if entry is not None:
                self.host.touch(entry)  # what follows must not take its place
                used.append(entry)
                continue
            job = self._last_job + 1 + len(begun) // STORED_TOGETHER
            entry = self._begin(key, rank, job, at_most=at_most)
            if entry is None:
                break  # what follows is worth nothing without it
            begun.append((entry, Copy(block_id, entry.slot)))
        for entry in reversed(used):
            self.host.touch(entry)
            self._rerank(entry, rank)
        # Jobs end in their order, and what ends first is reused first; of the device too the end goes first.
        for first in reversed(range(0, len(begun), STORED_TOGETHER)):
            together = begun[first : first + STORED_TOGETHER]
            job = self._last_job + 1 + first // STORED_TOGETHER
            copies = [copy for _, copy in together]
            self._storing[job] = [entry for entry, _ in reversed(together)], copies
            self._jobs.stores[job] = copies
        self._last_job += -(-len(begun) // STORED_TOGETHER)
        self.counts["stored"] += len(begun)
        return len(begun)

    def store_spare(self, newest_first: Iterable[tuple[Key, int]]) -> int:
        """Copy what a turn has added to its context, where there is room to spare; returns how many blocks.

        Of the context, against its order, only what is not here is looked at, and the first that is.
        """
        added = [*takewhile(lambda block: self.host.get(block[0]) is None, newest_first)]
        # Not each other's place: where there is no room for all, each turn would copy a whole context.
        return self.store(reversed(added), SPARE_RANK, at_most=WORTHLESS_RANK)

    def discard(self, keys: Iterable[Key]) -> None:
        """Copies of these are not to be found: they may not hold what the keys say."""
        for key in keys:
            entry = self.host.get(key)
            if entry is not None:
                self._lost = True
                self.host.remove(entry)
            if key in self._disk:
                del self._disk[key]
                self._jobs.drops.append(key)
            self.counts["discarded"] += entry is not None

    def set_rank(self, keys: Sequence[Key], rank: Rank, *, only: Rank | None = None) -> None:
        """Content of these, of a context in its order, is reused with that of another rank from now on, the
        end first. Orders to write it out are void. ``only``: what has this rank now."""
        for key in reversed(keys):
            entry = self.host.get(key)
            if only is not None and (entry is None or entry.rank != only):
                continue
            self._ordered.pop(key, None)
            if entry is not None:
                self.host.set_rank(entry, rank)

    def write_out(self, keys: Iterable[Key], rank: Rank) -> None:
        """Write these to disk, in this order, as soon as it takes them; from then on they have this rank."""
        for key in keys:
            entry = self.host.get(key)
            if entry is not None and entry.on_disk:
                self._rerank(entry, rank)
            elif entry is not None:
                self._ordered[key] = rank

    # -- somebody asks for something -------------------------------------------------

    def lookup(self, request_id: str, keys: Sequence[Key], now: float) -> int | None:
        """How many of the leading ``keys`` can be loaded now; ``None``: ask again, the disk is being read.

        What is found is pinned until the next ``take_jobs``, and that of the last one who asked until
        somebody else does: whoever is next in line is asked every step. Asked again so, or while the disk is
        read, it answers in O(1).
        """
        if not keys:
            self._drop_lookup(request_id)
            return 0
        waiting = self._staging.get(request_id)
        if waiting is not None and waiting.missing and not waiting.given_up:
            if now - waiting.since_s < self.limits.max_stage_wait_s:
                return None
            waiting.given_up = True
            self.counts["gave_up"] += waiting.missing
        before = self._looked_up.get(request_id)
        asked_before = before is not None and before.of == (len(keys), keys[0])
        # Who gave up on the disk may find more by and by.
        if before is not None and asked_before and waiting is None and not self._lost:
            self._last_asked = request_id
            return len(before.found)
        found = self._found(keys)
        if waiting is None and len(found) < len(keys) and self._stage(request_id, keys, len(found), now):
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
        self._end_staging(request_id)
        before = self._looked_up.pop(request_id, None)
        found = before.found if before is not None else []
        if [entry.key for entry in found[: len(keys)]] != list(keys):
            self._release(found)
            raise KeyError(
                f"request {request_id}: these {len(keys)} blocks are not what its last lookup found"
            )
        self._release(found[len(keys) :])
        if not keys:
            return
        self._loading += found[: len(keys)]
        self._jobs.loads.setdefault(request_id, []).extend(
            Copy(block_id, entry.slot) for entry, block_id in zip(found, block_ids, strict=False)
        )
        self.counts["loaded"] += len(keys)

    def abandon(self, request_id: str) -> None:
        """The request has finished, or will not be asked for again."""
        self._end_staging(request_id)
        self._drop_lookup(request_id)

    def missing(self, keys: Sequence[Key]) -> int:
        """How many of ``keys`` are neither in host memory nor on disk."""
        return sum(1 for key in keys if self.host.get(key) is None and key not in self._disk)

    def fetch(self, keys: Sequence[Key], rank: Rank = PLAIN_RANK) -> int:
        """Bring leading ``keys`` from disk to host memory, ahead of need; returns how many are coming."""
        if not self._disk:
            return 0
        found = self._found(keys)
        for entry in found:  # what is here must not make way for the rest
            self.host.pin(entry)
        coming = self._order_stage(keys[len(found) :], None, rank, at_most=min(rank, WANTED_RANK - 1))
        self._release(found)
        return coming

    # -- steps ----------------------------------------------------------------------

    def take_jobs(self, *, spill: bool = True) -> TierJobs:
        """The orders of the step that was just planned. ``spill``: host memory may be written to disk."""
        for request_id in [name for name in self._looked_up if self._lost or name != self._last_asked]:
            self._drop_lookup(request_id)
        self._lost = False
        # The mover is through with a step's loads before it begins with the next step's orders.
        self._release(self._loading)
        self._loading = []
        self._steps += 1
        if spill:
            self._spill()
        jobs, self._jobs = self._jobs, TierJobs()
        return jobs

    def take_results(self, results: TierResults) -> None:
        """What became of earlier orders."""
        if results.on_disk is not None:
            self._take_in_disk(results.on_disk)
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
            self._spilled(job, fates)
        for job, fates in results.staged.items():
            self._staged(job, fates)

    @property
    def has_orders(self) -> bool:
        """Whether a step is needed though no request asks for one: orders wait, or it is not known yet what
        an earlier engine left on disk."""
        if self.limits.disk_blocks and not self._disk_known:
            return bool(self._jobs) or self._steps < ASK_STEPS
        # While a batch is being written nothing is asked for: an idle engine would turn in circles.
        writes = bool(self._ordered) and not self._spilling and not self._pause.lasts
        return bool(self._jobs) or writes

    def state(self) -> dict[str, dict[str, int]]:
        """Blocks below the device by tier, and what became of blocks so far."""
        host = len(self.host)
        state = {"host": {"used": host, "free": self.host.slots - host}}
        if self.limits.disk_blocks:
            used = len(self._disk)
            state["disk"] = {"used": used, "free": max(0, self._disk_room - used)}
        return {**state, "moves": dict(self.counts)}

    @property
    def under_way(self) -> int:
        """Jobs whose results are still to come."""
        return len(self._storing) + len(self._spilling) + len(self._staged_by)

    def on_disk(self, key: Key) -> bool:
        """Whether the content is on disk."""
        return key in self._disk

    @property
    def disk_blocks(self) -> int:
        """Blocks on disk."""
        return len(self._disk)

    def forget(self) -> None:
        """The engine's cache was reset, as after new weights: nothing computed before may be found.

        Jobs under way end as they would, and their results are thrown away.
        """
        for request_id in [*self._staging, *self._looked_up]:
            self.abandon(request_id)
        for entry in list(self.host):
            self.host.remove(entry)
        self._jobs.drops += self._disk
        self._disk.clear()
        self._ordered.clear()
        self._forgotten = True

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
        if entry.rank != WANTED_RANK:
            self.host.set_rank(entry, rank)

    def _begin(
        self,
        key: Key,
        rank: Rank,
        job: int | None,
        *,
        on_disk: bool = False,
        at_most: Rank | None = None,
    ) -> HostEntry | None:
        """A slot for this: a free one, or that of something worth ``at_most`` so much, by default as much."""
        if not self.host.free:
            reused = self.host.reuse(at_most=rank if at_most is None else at_most)
            if reused is None:
                return None
            self.counts["dropped" if not reused.on_disk else "dropped_on_disk"] += 1
        return self.host.begin(key, rank, job, on_disk=on_disk or key in self._disk)

    def _drop_lookup(self, request_id: str) -> None:
        before = self._looked_up.pop(request_id, None)
        if before is not None:
            self._release(before.found)

    def _release(self, entries: Sequence[HostEntry]) -> None:
        for entry in reversed(entries):  # of a context the end is reused first
            self.host.unpin(entry)

    def _end_fill(self, entry: HostEntry, fate: Fate) -> None:
        if fate is not Fate.MOVED:
            self.counts["failed"] += 1
            self.host.remove(entry)
        self.host.filled(entry)

    # disk

    def _take_in_disk(self, keys: Sequence[Key]) -> None:
        self._disk_known = True
        if self._forgotten:
            self._jobs.drops += keys
            return
        for key in keys:
            self._disk[key] = None
        self._make_disk_room(0)

    def _make_disk_room(self, blocks: int) -> None:
        """Drop the longest unused files until so many more fit; what is being read stays."""
        excess = len(self._disk) + len(self._being_spilled) + blocks - self._disk_room
        if excess <= 0:
            return
        unread = (key for key in self._disk if key not in self._being_staged)
        for key in list(islice(unread, excess)):
            self._disk_lost(key)
            self._jobs.drops.append(key)
            self.counts["disk_dropped"] += 1

    def _disk_lost(self, key: Key) -> None:
        self._disk.pop(key, None)
        entry = self.host.get(key)
        if entry is not None:
            self.host.set_on_disk(entry, False)

    def _spill(self) -> None:
        """Keep a part of host memory reusable without loss, a batch at a time."""
        limits = self.limits
        if not self._disk_known or not self._pause.over():
            return
        self._disk_room = limits.disk_blocks
        if not self._disk_room:
            return
        room = limits.max_spilling - len(self._being_spilled)
        room -= self.spill(self._first_ordered(min(room, self._disk_room)))
        lost = self.host.idle_not_on_disk(WORTHLESS_RANK) + self.host.idle_not_on_disk(SPARE_RANK)
        spare = self.host.free + self.host.idle_on_disk + lost + len(self._being_spilled)
        # More than the disk takes would push out what was written just before, for ever.
        wanted = min(int(limits.spill_below * limits.host_slots), self._disk_room) - spare
        if room <= 0 or wanted <= 0:
            return
        self.spill(self.host.first_not_on_disk(min(room, wanted), above=SPARE_RANK))

    def _first_ordered(self, most: int) -> list[HostEntry]:
        """The first of what is to be written to disk by order, as far as it has been stored."""
        found: list[HostEntry] = []
        for key in list(islice(self._ordered, max(0, most))):
            entry = self.host.get(key)
            if entry is None or entry.on_disk:
                del self._ordered[key]
            elif entry.job is not None:
                break
            else:
                found.append(entry)
        return found[::-1]  # as any batch: the end first

    def spill(self, entries: Sequence[HostEntry]) -> int:
        """Write idle entries to disk; they stay in host memory too. Returns how many."""
        entries = [entry for entry in entries if not entry.on_disk and entry.key not in self._being_spilled]
        self._make_disk_room(min(len(entries), self._disk_room))
        # Files that are being written or read make no room.
        fits = self._disk_room - len(self._disk) - len(self._being_spilled)
        entries = entries[: max(0, fits)]
        if not entries:
            return 0
        self._last_job += 1
        for entry in entries:
            self.host.pin(entry)
            self._being_spilled.add(entry.key)
        self._spilling[self._last_job] = list(entries)
        self._jobs.spills[self._last_job] = [FileCopy(entry.slot, entry.key) for entry in entries]
        return len(entries)

    def _spilled(self, job: int, fates: Mapping[Key, Fate]) -> None:
        seen: set[Fate] = set()
        written: list[Key] = []
        for entry in reversed(self._spilling.pop(job, ())):
            self._being_spilled.discard(entry.key)
            fate = fates.get(entry.key, Fate.FAILED)
            seen.add(fate)
            if fate is not Fate.MOVED:
                self.counts[f"spill_{fate.value}"] += 1
            elif entry.doomed:  # forgotten meanwhile
                self._jobs.drops.append(entry.key)
            else:
                self.counts["spilled"] += 1
                written.append(entry.key)
                self.host.set_on_disk(entry, True)
                self.host.set_rank(entry, self._ordered.pop(entry.key, entry.rank))
            if fate is Fate.FULL:
                # Somebody else fills the disk too: for a while what we have there is all we may have.
                self._disk_room = min(self._disk_room, len(self._disk))
                self.host.set_rank(entry, self._ordered.pop(entry.key, entry.rank))
            self.host.unpin(entry, used=False)
        # Of a context the end is deleted first.
        self._disk.update(dict.fromkeys(reversed(written)))
        # Once a job: a batch that fails is one failure.
        if Fate.FAILED in seen or Fate.FULL in seen:
            self._pause.failed()
        elif Fate.MOVED in seen:
            self._pause.worked()

    def _stage(self, request_id: str, keys: Sequence[Key], found: int, now: float) -> bool:
        """Have the disk read what follows the first ``found`` keys. False: it has nothing of it."""
        waiting = _Staging(since_s=now, missing=0)
        # What is found already must not make way for the rest.
        for entry in self._found(keys[:found]):
            self.host.pin(entry)
            waiting.entries.append(entry)
        # It runs next, and what it waits for is pinned: it is worth more than what waits for its turn.
        if not self._order_stage(keys[found:], waiting, PLAIN_RANK, at_most=WANTED_RANK - 1):
            self._release(waiting.entries)
            return False
        self._staging[request_id] = waiting
        return True

    def _order_stage(
        self, keys: Sequence[Key], waiting: _Staging | None, rank: Rank, *, at_most: Rank
    ) -> int:
        """Have leading ``keys`` read, as far as the disk has them; returns how many are on their way."""
        self._last_job += 1
        ordered: list[HostEntry] = []
        here: list[HostEntry] = []
        missing = 0
        # What requests wait for is pinned, and running ones must find room for what they lose.
        pinned = sum(len(waiting.entries) for waiting in self._staging.values())
        room = self.limits.max_staging - len(self._being_staged)
        if pinned:
            room = min(room, int(MAX_PINNED * self.limits.host_slots) - pinned)
        for key in keys:
            entry = self.host.get(key)
            if entry is None:
                if key not in self._disk or len(ordered) >= room:
                    break
                entry = self._begin(key, rank, self._last_job, on_disk=True, at_most=at_most)
                if entry is None:
                    break
                self._disk.move_to_end(key)
                self._being_staged[key] = []
                ordered.append(entry)
            if key in self._being_staged:
                missing += 1
                if waiting is not None:
                    self._being_staged[key].append(waiting)
            self.host.pin(entry)  # the next one must not take its slot
            here.append(entry)
        if ordered:
            self._staged_by[self._last_job] = ordered
            self._jobs.stages[self._last_job] = [FileCopy(entry.slot, entry.key) for entry in ordered]
        if waiting is None or not missing:
            self._release(here)
        else:
            waiting.missing = missing
            waiting.entries += here
        return missing

    def _staged(self, job: int, fates: Mapping[Key, Fate]) -> None:
        for entry in self._staged_by.pop(job, ()):
            fate = fates.get(entry.key, Fate.FAILED)
            for waiting in self._being_staged.pop(entry.key, ()):
                waiting.missing -= 1
            if fate is Fate.MOVED:
                self.counts["staged"] += 1
            else:
                self.counts[f"stage_{fate.value}"] += 1
                self._disk.pop(entry.key, None)
                self._jobs.drops.append(entry.key)
                self.host.remove(entry)
            self.host.filled(entry)

    def _end_staging(self, request_id: str) -> None:
        waiting = self._staging.pop(request_id, None)
        if waiting is not None:
            self._release(waiting.entries)
