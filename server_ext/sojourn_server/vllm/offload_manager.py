"""Moves KV blocks of one engine between device, host memory and disk.

It saves blocks before the device reuses them, moves programs between tiers, and loads blocks back. Window
blocks are the blocks of KV cache groups without full attention (``kv_cache_groups``). They, and what is
remembered of them, exist only with several groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, wraps
from itertools import islice
from typing import Any, TypeVar

from sojourn.ids import ProgramId

from ..core.block_owners import BlockOwners
from ..core.context_hashes import PlacedPrefixes
from ..core.program_scheduler import ProgramScheduler
from ..kv_offload.host_block_pool import RetentionRank
from ..kv_offload.offload_jobs import BlockKey
from ..policies.costs.reload_estimate import LinkCosts
from ..policies.eviction_policies import HOST_EVICTION_ORDER
from ..policies.placement.placement_views import Tier
from ..policies.preemption_policies import NO_OFFLOAD_S_PER_TOKEN
from .compat import KVCacheBlock
from .free_block_queue import ProgramFreeBlockQueue
from .kv_cache_groups import KVCacheGroups
from .kv_offload_connector import SojournConnector

STORE_AHEAD_STEPS = 2
"""Number of steps of maximum size. The blocks that these may reuse are copied in advance."""
STORE_AHEAD_DEVICE_SHARE = 0.25
STORE_AHEAD_REFILL_SHARE = 0.25
"""Further copies in advance are made once the device has reused this share of ``_store_ahead_blocks``."""
STORE_AHEAD_HOST_SHARE = 0.125
"""Maximum share of host memory for copies in advance. With a larger share, host memory might evict copies
before the device reuses their blocks."""
MAX_LOOKED_UP = 16
"""Maximum number of blocks that one ``held_blocks`` call looks up. The engine waits for these calls, and a
client may ask about thousands of programs."""

_PLAIN = RetentionRank.PLAIN  # a local name: reading an enum member for each block is slow

_RANKS = dict(zip(HOST_EVICTION_ORDER, RetentionRank, strict=False))
"""Label of a block → its rank in host memory. Those below ``WANTED``: the order of MORI §4.3.2."""

T = TypeVar("T")


def _turns_off(method: Callable[..., T]) -> Callable[..., T | None]:
    """Wrap a method of ``OffloadManager``. It returns ``None`` if host memory and disk are off. An error in
    it turns them off: not the engine, and not the eviction order."""

    @wraps(method)
    def guarded(self: OffloadManager, /, *args: Any, **kwargs: Any) -> T | None:
        return None if self._connector.off else self._connector.attempt(method, self, *args, **kwargs)

    return guarded


class OffloadManager:
    """Moves KV blocks between the device and the lower tiers (host memory and disk)."""

    def __init__(
        self, connector: SojournConnector, program_scheduler: ProgramScheduler, groups: KVCacheGroups
    ) -> None:
        self._connector = connector
        self._planner = connector.planner
        self._program_scheduler = program_scheduler
        self._groups = groups
        pool = program_scheduler.pool
        self._placement_lowers_ranks = program_scheduler.preset.placement.is_used
        """Whether ``place`` lowers the ranks of host copies. If so, ``save`` lowers none: it knows only the
        programs that own the block on the device, but other programs may need the copy."""
        most_taken = STORE_AHEAD_STEPS * -(-pool.step_tokens // pool.block_size)
        self._store_ahead_blocks = min(
            most_taken,
            int(STORE_AHEAD_DEVICE_SHARE * pool.blocks),
            int(STORE_AHEAD_HOST_SHARE * pool.host_blocks),
        )
        """Number of blocks at the front of the eviction order that are copied in advance."""
        self._taken = self._store_ahead_blocks
        """Number of blocks that the device has reused since the last copies in advance were made."""
        self._forget()

    def _forget(self) -> None:
        self._leaving: dict[ProgramId, bool] = {}
        """Programs that have lost a block on the device since their last turn → whether their remaining
        blocks were copied to host memory. Only with several groups."""
        self._placed = PlacedPrefixes()
        self._recomputed: set[BlockKey] = set()
        """Keys of preempted requests' blocks that are faster to recompute than to copy."""

    def reset(self) -> None:
        self._forget()
        self._connector.reset_cache()

    # -- what the device loses ----------------------------------------------------

    @_turns_off
    def save(self, blocks: Sequence[KVCacheBlock], owners: BlockOwners) -> None:
        """Copy the cached blocks among ``blocks`` to host memory, because the device is about to reuse
        ``blocks``. Skip blocks that are faster to recompute, and window blocks from which no request is
        expected to continue. ``owners`` must still have theirs."""
        rank_of = self._ranker(owners)
        planner, may_lower = self._planner, not self._placement_lowers_ranks
        key_of, is_single = self._groups.key_of, self._groups.is_single
        self._taken += len(blocks)
        for block in blocks:
            if block.block_hash is None:
                continue
            key = key_of(block)
            if not is_single:
                for program_id in owners.owners_of(block.block_id):
                    self._leaving.setdefault(program_id, False)
                if self._is_behind_window(key):
                    # A copy to host memory may still be running. The step must then wait for it.
                    planner.await_store(key)
                    continue
            if key in self._recomputed and planner.host.get(key) is None:
                self._recomputed.discard(key)
                continue
            planner.plan_save(key, block.block_id, rank_of(key, block.block_id), may_lower=may_lower)

    @_turns_off
    def store_ahead(self, queue: ProgramFreeBlockQueue) -> None:
        """Before a step, copy to host memory the blocks that the device will evict next, if due."""
        for program_id in [name for name, is_copied in self._leaving.items() if not is_copied]:
            self._leaving[program_id] = True
            self._complete_context(program_id)
        if self._taken <= STORE_AHEAD_REFILL_SHARE * self._store_ahead_blocks:
            return
        self._taken = 0
        planner, worthless = self._planner, RetentionRank.WORTHLESS
        rank_of = self._ranker(queue.owners)
        by_rank: dict[RetentionRank, list[tuple[BlockKey, int]]] = {}
        front = islice(queue.iter_blocks_after(None), self._store_ahead_blocks)
        for key, block_id in self._keyed(block for block in front if block.block_hash is not None):
            entry = planner.host.get(key)
            if key in self._recomputed or self._is_behind_window(key):
                continue
            if entry is None or entry.rank == worthless:
                by_rank.setdefault(rank_of(key, block_id), []).append((key, block_id))
        for rank, blocks in by_rank.items():
            # Eviction takes the end of a context first; copies are made in the order of the context.
            planner.store(reversed(blocks), rank)

    def _complete_context(self, program_id: ProgramId) -> None:
        """Copy to host memory what the device still has of a context that has lost a block. A prefix cache
        hit needs the end of a context in every group, so the rest is useless there."""
        rank = self._rank(program_id)
        if rank > RetentionRank.WORTHLESS and not self._runs(program_id):
            hashes = self._program_scheduler.context(program_id) or ()
            self._planner.store(self._keyed(self._groups.needed_blocks(hashes)), rank)

    # -- turns and programs -------------------------------------------------------

    def remember_turn_end(self, program_id: ProgramId | None, blocks: Iterable[KVCacheBlock]) -> None:
        """Remember the window blocks at the end of a context, from which the next request continues.
        ``blocks``: the blocks that the context needs, in all groups. ``program_id``: ``None`` for none."""
        if not self._groups.is_single and not self._connector.off:
            if program_id is not None:
                self._leaving.pop(program_id, None)
            keys = filter(self._groups.is_of_window, map(self._groups.key_of, blocks))
            self._planner.ends.put("turn", program_id, [*keys])

    def remember_prompt_end(
        self, program_id: ProgramId | None, hashes: Sequence[BlockKey], prompt_tokens: int
    ) -> None:
        """Remember the window blocks at the end of a prompt, as ``remember_turn_end`` does. The next prompt
        continues from this end if a chat template drops the turn's reasoning."""
        if not self._groups.is_single and not self._connector.off:
            self._planner.ends.put("prompt", program_id, self._groups.prompt_end_keys(hashes, prompt_tokens))

    @_turns_off
    def place(self, program_id: ProgramId, tier: Tier) -> None:
        """Set the ranks of a program's blocks in host memory, and start the copies between the tiers."""
        planner = self._planner
        rank = self._rank(program_id)
        before = self._placed.keys_of(program_id)
        keys = self._program_scheduler.context(program_id)
        if keys is None:  # the program has ended: use the keys of its last placement
            keys = before
        kept = self._placed.shared_prefix_length(program_id, keys)
        if kept < len(before):
            # The context has changed, for example by compaction; a shared prefix stays in use.
            kept = max(kept, self._placed.put(program_id, before, RetentionRank.WORTHLESS))
            planner.set_rank(self._groups.needed_keys(before, kept), RetentionRank.WORTHLESS)
        shared = self._placed.put(program_id, keys, rank)
        if tier is Tier.DEVICE:
            # A waiting request will load the KV soon. Without one, as while a tool runs, that may take hours.
            if self._program_scheduler.live_requests(program_id) and not self._runs(program_id):
                # Otherwise programs that leave the device in the same step would replace these blocks in host
                # memory before they are read.
                planner.want(program_id, self._groups.needed_keys(keys))
                # Without blocks on disk the look-up of thousands of keys is skipped.
                on_device = self._groups.cached_prefix(keys).hashes if planner.disk.blocks else 0
                planner.disk.fetch(keys[on_device:], RetentionRank.WANTED)
            return
        planner.unwant(program_id, RetentionRank.IDLE)
        if rank != RetentionRank.WORTHLESS and tier is not Tier.WAITING:
            # Copy now, so that the device need not wait for a copy when it reuses a block. ``IDLE``, because
            # programs of a higher rank may share the beginning.
            planner.store(self._keyed(self._groups.needed_blocks(keys)), RetentionRank.IDLE)
        planner.set_rank(self._groups.needed_keys(keys, shared), rank)
        if rank == RetentionRank.WORTHLESS:
            self._placed.forget(program_id)

    @_turns_off
    def program_ended(self, program_id: ProgramId) -> None:
        """Forget where an ended program's next request would continue. If the preset places programs,
        ``place`` lowers the ranks of its blocks."""
        self._leaving.pop(program_id, None)
        self._planner.ends.forget(program_id)

    @_turns_off
    def admitted(self, program_id: ProgramId, hashes: Sequence[BlockKey]) -> None:
        """Lower the ranks of a program's blocks in host memory, if ``place`` has raised them to ``WANTED``:
        a request of the program, with these block hashes, was admitted. ``hashes``: empty if it left."""
        planner = self._planner
        if not planner.unwant(program_id, RetentionRank.IDLE):
            return
        rank = self._rank(program_id)
        keys = self._placed.keys_of(program_id)
        shared = self._placed.put(program_id, keys, rank)
        on_device = max(shared, self._placed.shared_prefix_length(program_id, hashes))
        planner.set_rank(self._groups.needed_keys(keys, on_device), rank)
        planner.set_rank(self._groups.needed_keys(keys, shared, on_device), RetentionRank.WORTHLESS)

    @_turns_off
    def fetch(self, hashes: Sequence[BlockKey], on_device: int) -> tuple[int, int, int]:
        """Start to read blocks of a context from disk into host memory. The device has the blocks of the
        first ``on_device`` of its block ``hashes``. Return three numbers of the blocks after these: (blocks
        being read from disk, blocks missing in all tiers, leading blocks that host memory can load now)."""
        planner = self._planner
        if self._groups.is_single:
            keys = hashes[on_device:]
            return planner.disk.fetch(keys, _PLAIN), planner.missing(keys), planner.loadable(keys)
        # Models with several groups have no disk, and loads ahead of need support only one group.
        keys = [key for key in self._groups.needed_keys(hashes, on_device) if not self._groups.is_cached(key)]
        return 0, min(planner.missing(keys), len(hashes) - on_device), 0

    # -- clients' questions -------------------------------------------------------

    def persist(self, keys: Sequence[BlockKey]) -> dict[str, Any]:
        """Start to write a context to disk. ``keys``: its block hashes. Return the progress
        (``stored_blocks``, ``pending_blocks``), and a ``reason`` if not all is written. Call it again until
        no blocks are pending."""
        off = 0, 0, f"the tiers below the device are off: {self._connector.off_because}"
        stored, pending, reason = self._persist(keys) or off
        return {"stored_blocks": stored, "pending_blocks": pending, "reason": reason or None}

    @_turns_off
    def _persist(self, keys: Sequence[BlockKey]) -> tuple[int, int, str]:
        planner, on_device, at = self._planner, dict[BlockKey, int](), 0
        while True:  # each tier may have parts of the context
            found = self._groups.cached_prefix(keys[at:]).blocks
            on_device.update(self._keyed(found))
            at += len(found)
            below = planner.disk.leading(keys[at:])
            if not below:
                return planner.persist(keys[:at], on_device, self._connector.clock())
            at += below

    def state(self) -> dict[str, Any]:
        """Return numbers of blocks by tier and state (``host``, ``disk``) and by outcome of a copy
        (``moves``), and totals of copies, jobs in progress and pinned host blocks (``traffic``)."""
        planner, traffic = self._planner, self._connector.traffic
        under_way = {"jobs": planner.under_way, "pinned_host_blocks": planner.pinned_host_blocks}
        return {**planner.state(), "traffic": {**traffic.totals(), **under_way}}

    def held_blocks(self, program_id: ProgramId) -> tuple[int, int]:
        """Return how many blocks of the program's last context are (in host memory, on disk). For a context
        of more than ``MAX_LOOKED_UP`` blocks, the numbers are estimates from every nth block."""
        host, disk = self._planner.host, self._planner.disk.blocks
        hashes = self._program_scheduler.context(program_id) or self._placed.keys_of(program_id)
        count, looked_up = self._groups.sample_keys(hashes, MAX_LOOKED_UP)
        each = count / len(looked_up) if looked_up else 0.0
        in_host = sum(host.get(key) is not None for key in looked_up)
        on_disk = sum(key in disk for key in looked_up)
        return round(each * in_host), round(each * on_disk)

    # -- preempted requests -------------------------------------------------------

    @_turns_off
    def copy_ahead(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Copy cached ``blocks`` of a running request that will probably be preempted, in context order."""
        # A block that is there keeps its rank, for example that of an idle program.
        get = self._planner.host.get
        self._planner.store([keyed for keyed in self._keyed(blocks) if get(keyed[0]) is None], _PLAIN)

    @_turns_off
    def count_copied(self, blocks: Iterable[KVCacheBlock]) -> int:
        """Return how many of these cached blocks are in host memory or being copied to it."""
        host, key_of = self._planner.host, self._groups.key_of
        return sum(host.get(key_of(block)) is not None for block in blocks)

    @_turns_off
    def skip_saving(
        self, blocks: Iterable[KVCacheBlock], program_id: ProgramId | None, owners: BlockOwners
    ) -> None:
        """Exclude the cached blocks of a preempted request from saving, because recomputing them is faster.
        Blocks that other requests use or have used, such as a common prefix, are saved as usual.
        ``program_id``: the request's program; ``None`` for a request of no program."""
        alone = (block for block in blocks if block.ref_cnt <= 1)
        for key, block_id in self._keyed(alone):
            used_by_others = block_id in owners.common or block_id in owners.orphans
            if not used_by_others and owners.of.get(block_id) == program_id:
                self._recomputed.add(key)

    @_turns_off
    def keep_preempted(self, request_id: str, blocks: Sequence[KVCacheBlock]) -> None:
        """Keep copies of a preempted request's blocks in host memory until ``release_preempted``."""
        self._planner.want((request_id,), [*map(self._groups.key_of, blocks)])

    @_turns_off
    def release_preempted(
        self, request_id: str, program_id: ProgramId | None, hashes: Sequence[BlockKey]
    ) -> None:
        """Undo ``keep_preempted`` and ``skip_saving`` for a request that was admitted or has left the engine.
        ``hashes``: its block hashes. ``program_id`` is ``None`` for a request of no program."""
        if self._recomputed:
            self._recomputed.difference_update(self._groups.all_keys(hashes))
        self._planner.unwant((request_id,), self._rank(program_id))

    # -- measured costs of copies -------------------------------------------------

    def offload_costs(self, blocks: int = 1) -> LinkCosts:
        """Return the costs of a copy to host memory and back. If host memory has no space for ``blocks`` more
        blocks of preempted requests, the time to host memory is ``NO_OFFLOAD_S_PER_TOKEN``."""
        to_host = self._token_s("to_host") if self._room() >= blocks else NO_OFFLOAD_S_PER_TOKEN
        stored_tokens = self._planner.storing_blocks * self._groups.tokens_per_block
        stores_s = stored_tokens * (self._token_s("to_host") or 0.0)
        return LinkCosts(to_host, self._token_s("to_device"), stores_s)

    def load_costs(self) -> LinkCosts:
        token_s = self._token_s("to_device")
        queued = sum(len(load.block_ids) for load in self._planner.loads.values())
        queued_s = queued * self._groups.tokens_per_block * (token_s or 0.0)
        return LinkCosts(None, token_s, loads_queued_s=queued_s)

    def _token_s(self, lane: str) -> float | None:
        """Return the seconds of copying a token's share of a block in a direction; ``None`` if not known."""
        byte_s = self._connector.traffic.seconds_a_byte(lane, self._connector.clock())
        token_bytes = self._connector.settings.block_bytes / self._groups.tokens_per_block
        return byte_s * token_bytes if byte_s is not None else None

    def _room(self) -> int:
        host = self._planner.host
        if self._connector.off:
            return 0
        if not self._program_scheduler.forecaster.predictor.predicts:
            return host.room(_PLAIN)
        # Blocks of preempted requests, copied or yet to be copied, do not replace each other.
        return min(host.room(RetentionRank.IDLE), host.slots - len(self._planner.wanted))

    # -- inside -------------------------------------------------------------------

    def _ranker(self, owners: BlockOwners) -> Callable[[BlockKey, int], RetentionRank]:
        """Return a function from a block's key and id to the rank that it gets in host memory: ``WANTED`` if
        a preempted request will load it; that of ended programs if only one of these has used it; otherwise
        the highest of its owners or of the program for which it was loaded ahead of need; ``PLAIN`` without
        any."""
        wanted, rank = self._planner.wanted, cache(self._rank)

        def rank_of(key: BlockKey, block_id: int) -> RetentionRank:
            if key in wanted:
                return RetentionRank.WANTED
            if block_id in owners.orphans:
                return rank(None)
            owner = owners.of.get(block_id, owners.ahead.get(block_id))
            if isinstance(owner, str):
                return rank(owner)
            return max((rank(name) for name in owner or ()), default=_PLAIN)

        return rank_of

    def _rank(self, program_id: ProgramId | None) -> RetentionRank:
        return host_eviction_rank(self._program_scheduler.label(program_id))

    def _runs(self, program_id: ProgramId) -> bool:
        """Return whether the engine has an admitted request of the program. The program then loads no KV."""
        scheduler = self._program_scheduler
        live = map(scheduler.request, scheduler.live_requests(program_id))
        return any(known is not None and known.admitted for known in live)

    def _keyed(self, blocks: Iterable[KVCacheBlock]) -> Iterator[tuple[BlockKey, int]]:
        return ((self._groups.key_of(block), block.block_id) for block in blocks)

    def _is_behind_window(self, key: BlockKey) -> bool:
        """Whether it is a window block from which no request is expected to continue. It is not saved."""
        return (
            self._groups.is_of_window(key)
            and key not in self._planner.ends
            and key not in self._planner.wanted
        )


def host_eviction_rank(label: Tier) -> RetentionRank:
    """Return the rank in host memory of a block with this label."""
    return _RANKS[label]
