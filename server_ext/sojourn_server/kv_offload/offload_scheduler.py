"""Decides which KV blocks are copied between the device, host memory and disk: no vLLM, no tensors, no clock.

One ``OffloadScheduler`` serves one engine. The engine's scheduler calls ``plan_save`` for a block that this
step overwrites, ``store`` for blocks that may be overwritten later, and ``lookup`` and ``load`` for a
request. ``take_jobs`` returns a step's jobs; ``end_loads`` and ``take_results`` handle their results. The
disk is a part of its own (``disk_tier``).

Three invariants hold. (1) A look-up finds only blocks that can be read when they are needed, provided that
the worker follows the order of ``OffloadJobs``. (2) While a job reads or writes a slot, no other job writes
the slot. (3) Blocks whose copy failed are forgotten. In the worst case, their KV is computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import NamedTuple

from .context_keys import ContextEnds, ContextKeys, subtract
from .disk_tier import DiskTier, TierLimits
from .host_block_pool import HostBlockPool, HostEntry, RetentionRank
from .offload_jobs import BlockCopy, BlockKey, CopyResult, OffloadJobs, OffloadResults

STORE_BATCH_BLOCKS = 32
"""Number of blocks per store job. A step that overwrites one of them waits for the whole job."""

AHEAD = "\0ahead:"
"""Beginning of the names of loads ahead of need. No request id begins with it."""

# Module variables, because ``RetentionRank.WANTED`` is slow to evaluate for each block.
_WANTED, _WORTHLESS, _PLAIN = RetentionRank.WANTED, RetentionRank.WORTHLESS, RetentionRank.PLAIN


@dataclass(slots=True, eq=False)
class Load:
    """Blocks that are copied to the device, until all workers have reported the end (``end_loads``)."""

    entries: list[HostEntry]
    """The blocks' entries in host memory, pinned. Empty if the load was rejected: no block is filled."""
    block_ids: Sequence[int]
    is_sent: bool = False
    """Whether ``take_jobs`` has returned it."""
    is_aborted: bool = False
    """Whether the request has finished. vLLM frees the blocks when the load ends."""
    is_cancelled: bool = False
    """Whether the blocks were freed before the load's end. vLLM must not learn of this end."""
    not_filled: set[int] = field(default_factory=set)
    """Those of ``block_ids`` that at least one worker could not fill."""


class _Lookup(NamedTuple):
    identity: tuple[int, int, bytes]
    """``ContextKeys.identity`` of the keys looked up."""
    found: list[HostEntry]
    """Entries of the found blocks; pinned."""
    tokens: int


class OffloadScheduler:
    """Schedules one engine's use of host memory and disk. Times are seconds on the engine's clock."""

    def __init__(self, limits: TierLimits) -> None:
        self.limits = limits
        self.host = HostBlockPool(limits.host_slots)
        self.counts = self.host.counts
        self._numbers = count(1)
        """Source of job numbers."""
        self._storing: dict[int, tuple[list[HostEntry], list[BlockCopy]]] = {}
        """Number of an unfinished store job → the entries that it fills, and its copies."""
        self._looked_up: dict[str, _Lookup] = {}
        self._last_asked: str | None = None
        """Request of the latest look-up."""
        self.loads: dict[str, Load] = {}
        """Unfinished loads by request, or by name."""
        self._loading: Counter[BlockKey] = Counter()
        """Keys of the blocks of all loads. Another request that needs them waits for the running load."""
        self._wanted_by: dict[Hashable, Sequence[BlockKey]] = {}
        """Owner → the blocks that it wants, in context order."""
        self.wanted: Counter[BlockKey] = Counter()
        """Key → number of owners that want the block."""
        self.ends = ContextEnds(limits.host_slots)
        """Keys of the window blocks from which later requests may continue."""
        self.is_on_device: Callable[[BlockKey], bool] = lambda key: False
        """Whether the device has a block with this key. Used only with several KV cache groups."""
        self.disk = DiskTier(limits, self.host, self._numbers)
        self._jobs = self.disk.jobs
        """Jobs of the step being planned."""
        self._persisting = False
        """Whether a ``persist`` waits for the disk. The engine must then run a step even when idle."""

    # -- copies from the device ---------------------------------------------

    def plan_save(
        self, key: BlockKey, block_id: int, rank: RetentionRank = _PLAIN, *, may_lower: bool = True
    ) -> bool:
        """Plan to copy a block to host memory, with the rank ``rank``, because this step overwrites it on the
        device. If host memory has the block, only set its rank. Returns false without room.

        ``may_lower=False``: do not lower a rank above ``WORTHLESS``. The rank ``WANTED`` is never lowered."""
        entry = self.host.get(key)
        if entry is not None:
            self.await_store(key)
            if may_lower or rank >= entry.rank or entry.rank == _WORTHLESS:
                self.host.touch(entry)
                self.host.rerank(entry, rank)
            self.counts["kept"] += 1
            return True
        entry = self.host.take(key, rank, None)
        if entry is None:
            self.counts["no_room"] += 1
            return False
        self._jobs.saves.append(BlockCopy(block_id, entry.slot))
        self.counts["saved"] += 1
        return True

    def await_store(self, key: BlockKey) -> None:
        """If an unfinished store job copies the block, make the job end before this step's loads and forward
        pass, which may overwrite the block. Its slots count as filled from now on."""
        entry = self.host.get(key)
        if entry is None or entry.job not in self._storing:
            return
        job = entry.job
        entries, copies = self._storing.pop(job)
        if self._jobs.stores.pop(job, None) is None:
            self._jobs.awaited[job] = copies
        else:  # not sent to the worker yet
            self._jobs.saves += copies
        for each in entries:
            self.host.end_fill(each)

    def store(
        self,
        blocks: Iterable[tuple[BlockKey, int]],
        rank: RetentionRank = _PLAIN,
        *,
        at_most: RetentionRank | None = None,
    ) -> int:
        """Plan to copy blocks of a context to host memory before the device evicts them. Returns the number
        of copies planned; blocks that host memory already has need none.

        ``blocks``: (key, block id) in context order. If space is short, only the beginning of the context is
        copied. For the new entries, host memory evicts only entries whose rank is at most ``at_most``
        (default: ``rank``). If the device will overwrite a block before the block's copy ends, the caller
        must first call ``plan_save`` for this block.
        """
        used: list[HostEntry] = []
        fresh: list[tuple[HostEntry, BlockCopy]] = []
        for key, block_id in blocks:
            entry = self.host.get(key)
            if entry is not None:
                self.host.touch(entry)  # later blocks must not replace it
                used.append(entry)
                continue
            entry = self.host.take(key, rank, -1, at_most=at_most)
            if entry is None:
                break  # later blocks are useless without it
            fresh.append((entry, BlockCopy(block_id, entry.slot)))
        for entry in reversed(used):
            self.host.touch(entry)
            self.host.rerank(entry, max(rank, entry.rank))
        # Jobs end in order, and the blocks of the job that ends first are evicted first. So the first job
        # copies the end of the context.
        for start in reversed(range(0, len(fresh), STORE_BATCH_BLOCKS)):
            batch, job = fresh[start : start + STORE_BATCH_BLOCKS], next(self._numbers)
            for entry, _ in batch:
                entry.job = job
            self._jobs.stores[job] = [copy for _, copy in batch]
            self._storing[job] = [entry for entry, _ in reversed(batch)], self._jobs.stores[job]
        self.counts["stored"] += len(fresh)
        return len(fresh)

    def set_rank(
        self, keys: Sequence[BlockKey], rank: RetentionRank, *, only: RetentionRank | None = None
    ) -> None:
        """Set the retention rank of a context's blocks in host memory. ``keys`` must be in context order; the
        end of the context will be evicted, and with ``COLD`` written to disk, first. ``only``: change only
        blocks that have this rank now."""
        for key in reversed(keys):
            entry = self.host.get(key)
            if entry is not None and entry.rank != rank and only in (None, entry.rank):
                self.host.set_rank(entry, rank)

    def want(self, owner: Hashable, keys: Sequence[BlockKey]) -> None:
        """Keep ``keys``, and no others for this owner, in host memory with the rank ``WANTED`` until
        ``unwant``, because ``owner`` will load them. Also for blocks that come later."""
        self.unwant(owner, RetentionRank.IDLE)
        self._wanted_by[owner] = keys
        self.wanted.update(keys)
        self.set_rank(keys, _WANTED)

    def unwant(self, owner: Hashable, rank: RetentionRank) -> bool:
        """Undo ``want``. Blocks without another owner get ``rank``. Return False if there was no ``want``."""
        keys = self._wanted_by.pop(owner, None)
        if keys is None:
            return False
        subtract(self.wanted, keys)
        self.set_rank([key for key in keys if key not in self.wanted], rank, only=_WANTED)
        return True

    def persist(
        self, chain: Sequence[BlockKey], on_device: Mapping[BlockKey, int], now: float
    ) -> tuple[int, int, str]:
        """Plan to write a context to disk, so that a program can move to another engine that reads the same
        disk. Return (leading blocks on disk, blocks that wait to be written or are being written, why the
        rest is not written; empty if there is no rest). The writes take several steps: call it in later steps
        too, until no blocks are pending. What the disk does not keep is not written again at once.

        ``chain``: keys of the context's blocks, in order. ``on_device``: key → block id, for blocks that the
        device has. To make room for those that only the device has, host memory evicts only blocks of
        retention rank ``PLAIN`` or below. The store is asked first for blocks that were last known to be
        there ``CONFIRMED_S`` ago, because another engine may have deleted them; they count as pending.
        """
        host, disk, cold = self.host, self.disk, RetentionRank.COLD
        disk.note_time(now)
        if not self.limits.disk_blocks:
            return 0, 0, "this engine has no disk below its host memory"
        if disk.is_closed:
            return 0, 0, "the cache was reset, after which this engine writes nothing to disk"
        if disk.hangs("writes") or disk.hangs("reads"):
            return 0, 0, "the disk does not answer"
        # Writes delete the least recently used files. So write no more than fits. Otherwise the end of the
        # context would displace its beginning.
        wanted, chain = len(chain), disk.keepable(chain)
        why = "the disk has not kept the rest: it is too small, full or broken" if len(chain) < wanted else ""
        stored, pending, unsaved = 0, disk.confirm(chain), list[tuple[BlockKey, int]]()
        if not pending:
            in_use: list[HostEntry] = []
            for key in reversed(chain):
                if key not in disk.blocks:
                    if (entry := host.get(key)) is not None:
                        host.set_rank(entry, cold)
                        if entry.pins and entry.job is None:
                            in_use.append(entry)
                    elif key in on_device:
                        unsaved.append((key, on_device[key]))
            disk.spill(in_use)  # a waiting request may pin them for long
            self.store(reversed(unsaved), cold, at_most=_PLAIN)
            for key in chain[: disk.leading(chain)]:
                if key in disk.blocks:
                    stored += not pending
                else:
                    pending += 1
        self._persisting |= pending > 0
        if not pending and stored < len(chain):
            why = "host memory, through which blocks go to disk, has no room for the rest"
        return stored, pending, why

    # -- requests -------------------------------------------------

    def lookup(self, request_id: str, context: ContextKeys, now: float) -> int | None:
        """Return how many tokens of a context, after those that the device has (``context.start_tokens``),
        can be loaded from host memory now.

        ``None`` means: look up again in a later step. A search of the disk or a disk read for this
        request is in progress, perhaps begun by this call. Or another load brings the beginning of the
        context. Or a cancelled load of this request has not ended. A repeated look-up takes O(1).

        To load, pass the keys of ``context.needed(…)`` to ``load`` in the same order. Found blocks are
        pinned. ``take_jobs`` unpins them, except those of the latest look-up. The scheduler looks up the
        first waiting request in every step, so this request's blocks stay.
        """
        self.disk.note_time(now)
        if request_id in self.loads:
            return None  # the end of the old load would be taken for the end of the new one
        if context.begins(self._loading.__contains__):
            self._drop_lookup(request_id)
            return None
        if context.end_tokens == context.start_tokens:
            self._drop_lookup(request_id)
            return 0
        if self.disk.must_wait(request_id):
            return None
        self._last_asked, before = request_id, self._looked_up.get(request_id)
        if before is not None and before.identity == context.identity:
            return before.tokens
        end = context.covered(self._in_host)
        keys = [block.key for block in context.needed(end)]
        for key in keys:
            self.await_store(key)
        # Models with several groups, whose contexts have window blocks, have no disk.
        if self.disk.search(request_id, context, len(keys)):
            self._drop_lookup(request_id)  # the read may change the answer
            return None
        found = self._pin(keys)
        self._drop_lookup(request_id)
        self._looked_up[request_id] = _Lookup(context.identity, found, end - context.start_tokens)
        # A request computes the window blocks that its look-up missed. Others probably share the longer
        # prefix, for example a system prompt.
        missed = context.missed_windows(end, lambda key: self._in_host(key) or self.is_on_device(key))
        if missed:
            self.ends.put("missed", None, missed)
        return end - context.start_tokens

    def load(self, request_id: str, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> None:
        """Plan to copy the blocks ``keys``, in order, to the request's device blocks ``block_ids``. ``keys``
        are those of the request's last look-up, or the first of them. This ends the look-up."""
        self.disk.end_read(request_id)
        before = self._looked_up.pop(request_id, None)
        found = before.found if before is not None else []
        self.host.release(found[len(keys) :])
        assert [entry.key for entry in found[: len(keys)]] == list(keys), (
            "a look-up must have found the blocks"
        )
        if keys:
            self._begin_load(request_id, found[: len(keys)], block_ids)

    def reject(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Make the workers report the request's load into ``block_ids`` as failed."""
        self.loads[request_id] = Load([], block_ids)

    def loadable(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading ``keys`` ``load_ahead`` can load now. A key can be loaded if its copy in
        host memory is complete and no other load is copying it to the device."""

        def is_loadable(key: BlockKey) -> bool:
            entry = self.host.get(key)
            return entry is not None and entry.job is None and key not in self._loading

        return sum(1 for _ in takewhile(is_loadable, keys))

    def load_ahead(self, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> str:
        """Plan to copy blocks from host memory to the device before a request needs them. All ``keys`` must
        be ``loadable``. Returns the load's name, which takes the place of a request id."""
        name = f"{AHEAD}{next(self._numbers)}"
        self._begin_load(name, self._pin(keys), block_ids)
        return name

    def is_loading(self, request_id: str) -> bool:
        """Return whether vLLM keeps blocks for the request's load until its end is reported."""
        load = self.loads.get(request_id)
        return load is not None and not load.is_cancelled

    def cancel_load(self, request_id: str) -> None:
        """Handle the end of a load's right to its blocks, which are freed at once. If the load was sent, the
        workers end its copies before the next step writes to the device."""
        load = self.loads.get(request_id)
        if load is not None and load.is_sent:
            load.is_cancelled = self._jobs.settles = True
        elif load is not None:
            self._end_load(request_id)

    def end_loads(
        self, request_ids: Iterable[str], not_filled: Set[int]
    ) -> tuple[set[str], set[str], dict[str, int]]:
        """Handle the workers' reports. ``request_ids``: loads that all workers have ended. ``not_filled``:
        device blocks that a worker could not fill; it may report them before the others end the load. The
        copies of these blocks in host memory are removed, and those on disk are forgotten.

        Returns, of loads that were not cancelled, (requests that can be computed, and finished ones; requests
        that miss a block; name of a load ahead of need → number of its leading blocks that arrived)."""
        for load in self.loads.values() if not_filled else ():
            load.not_filled.update(not_filled & {*load.block_ids})
        done, incomplete, ahead = set[str](), set[str](), dict[str, int]()
        for request_id in request_ids:
            if request_id not in self.loads:
                done.add(request_id)
                continue
            load = self._end_load(request_id)
            pairs = zip(load.entries, load.block_ids, strict=False)
            failed = [entry for entry, block_id in pairs if block_id in load.not_filled]
            self.counts["loaded"] += len(load.entries) - len(failed)
            for entry in failed:
                if not entry.removal_pending:  # otherwise the key may have a new, correct entry
                    self._drop_lookups()
                    self.host.remove(entry)
                    self.disk.blocks.pop(entry.key, None)
                    self.counts["discarded"] += 1
            if request_id.startswith(AHEAD) and not load.is_cancelled:
                filled = [block_id not in load.not_filled for block_id in load.block_ids]
                ahead[request_id] = [*filled, False].index(False)
            elif not load.is_cancelled:
                (incomplete if load.not_filled and not load.is_aborted else done).add(request_id)
        return done, incomplete, ahead

    def abandon(self, request_id: str) -> None:
        """End the look-up and disk waits of a request that has finished."""
        self.disk.abandon(request_id)
        self._drop_lookup(request_id)
        if (load := self.loads.get(request_id)) is not None:
            load.is_aborted = True

    def missing(self, keys: Sequence[BlockKey]) -> int:
        """Return the number of ``keys`` that are neither in host memory nor on disk."""
        return sum(1 for key in keys if self.host.get(key) is None and key not in self.disk.blocks)

    # -- steps ----------------------------------------------------------------------

    def take_jobs(self, *, spill: bool = True) -> OffloadJobs:
        """Return the jobs of the step just planned, and unpin the blocks of earlier look-ups (``lookup``).
        ``spill``: whether new writes from host memory to disk may begin."""
        for request_id in [name for name in self._looked_up if name != self._last_asked]:
            self._drop_lookup(request_id)
        if spill:
            self.disk.plan_spills()
        jobs, self._persisting = self._jobs, False
        self._jobs = self.disk.jobs = OffloadJobs()
        for request_id, load in self.loads.items():
            if not load.is_sent and load.entries:
                slots = (entry.slot for entry in load.entries)
                jobs.loads[request_id] = [*map(BlockCopy, load.block_ids, slots)]
            elif not load.is_sent:
                jobs.rejected[request_id] = list(load.block_ids)
            load.is_sent = True
        return jobs

    def reject_loads(self) -> OffloadJobs:
        """Return the jobs of a step whose planning failed: its loads are rejected, or requests would wait."""
        jobs = OffloadJobs(settles=True)  # a load may have been cancelled
        self._jobs = self.disk.jobs = OffloadJobs()
        for request_id, load in self.loads.items():
            if not load.is_sent:
                load.is_sent, jobs.rejected[request_id] = True, list(load.block_ids)
        return jobs

    def take_results(self, results: OffloadResults) -> None:
        """Handle the results of earlier jobs."""
        for job, copy_result in results.stored.items():
            for entry in self._storing.pop(job, ((), ()))[0]:
                if copy_result is not CopyResult.MOVED:
                    self.counts["failed"] += 1
                    self.host.remove(entry)
                self.host.end_fill(entry)
        self.disk.take_results(results)

    @property
    def has_jobs(self) -> bool:
        """Whether the engine must run a step even without requests, for jobs or writes to disk."""
        unsent = any(not load.is_sent for load in self.loads.values())
        copied = any(entries[0].rank == RetentionRank.COLD for entries, _ in self._storing.values())
        # While a block is being written, an idle engine would spin.
        writes = not self.disk.is_closed and not self.disk.spilling and (copied or self.host.unwritten)
        return bool(self._jobs or unsent or self._persisting or writes)

    def state(self) -> dict[str, dict[str, int]]:
        """Return ``{"host": {"used": …, "free": …}, "disk": as host, "moves": counts}``, in blocks."""
        state = {"host": {"used": len(self.host), "free": self.host.slots - len(self.host)}}
        if self.limits.disk_blocks:
            used = len(self.disk.blocks)
            state["disk"] = {"used": used, "free": self.limits.disk_blocks - used}
        return {**state, "moves": dict(self.counts)}

    @property
    def pinned_host_blocks(self) -> int:
        """Number of slots that cannot be reused now: a copy uses the slot or a request waits for it."""
        return self.host.slots - self.host.room(_WANTED)

    @property
    def storing_blocks(self) -> int:
        """Number of blocks in store jobs (device to host memory) that have not ended."""
        return sum(len(entries) for entries, _ in self._storing.values())

    @property
    def under_way(self) -> int:
        """Number of jobs without results yet. Each block that is written to disk or read is a job."""
        return len(self._storing) + len(self.loads) + self.disk.under_way

    def forget(self) -> None:
        """Forget all blocks, because the engine's cache was reset, for example after a change of weights.
        Running jobs end as usual, but the blocks that they copied are not kept. Files stay: their identity
        names the weights with which this engine started, and other engines may use them."""
        self._drop_lookups()
        self._wanted_by.clear()
        self.wanted.clear()
        self.ends = ContextEnds(self.limits.host_slots)
        self.disk.close()
        for entry in list(self.host):
            self.host.remove(entry)

    # -- inside ------------------------------------------------------------------------

    def _begin_load(self, name: str, entries: list[HostEntry], block_ids: Sequence[int]) -> None:
        self.loads[name] = Load(entries, block_ids)
        self._loading.update(entry.key for entry in entries)

    def _end_load(self, name: str) -> Load:
        load = self.loads.pop(name)
        subtract(self._loading, [entry.key for entry in load.entries])
        self.host.release(load.entries)
        return load

    def _in_host(self, key: BlockKey) -> bool:
        """Return whether this step can read the block from host memory, perhaps after ``await_store``."""
        entry = self.host.get(key)
        return entry is not None and (entry.job is None or entry.job in self._storing)

    def _pin(self, keys: Sequence[BlockKey]) -> list[HostEntry]:
        entries = [self.host.entries[key] for key in keys]
        for entry in entries:
            self.host.pin(entry)
        return entries

    def _drop_lookup(self, request_id: str) -> None:
        if (before := self._looked_up.pop(request_id, None)) is not None:
            self.host.release(before.found)

    def _drop_lookups(self) -> None:
        """Drop all look-ups, because a block that they may have found was lost."""
        for request_id in list(self._looked_up):
            self._drop_lookup(request_id)
