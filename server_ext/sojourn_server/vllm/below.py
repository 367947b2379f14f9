"""What the adapter has done below the device: save what is reused, move what is placed, bring back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, takewhile
from typing import Any, ParamSpec, TypeVar

from sojourn.ids import ProgramId
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from ..engine.placed_chains import PlacedChains
from ..engine.steward import Steward
from ..policy.labels import Label
from ..policy.placement_views import Tier
from ..policy.recovery import NOWHERE_S_PER_TOKEN
from ..tiers.jobs import Key
from ..tiers.planner import Persisted
from ..tiers.ranks import Rank
from .block_owners import BlockOwners
from .connector import SojournConnector
from .free_queue import ProgramFreeQueue
from .held_blocks import HeldBlocks, chain_hash
from .host_ranks import host_rank

AHEAD_STEPS = 2
"""What the largest steps may take of the device is stored that many steps ahead."""
AHEAD_SHARE = 0.25
"""Of the device's blocks, the most that is stored ahead."""
AHEAD_OF_HOST = 0.125
"""Of host memory's, too: what is dropped there before the device reuses it has been copied for nothing."""
MOST_NOT_SAVED = 1 << 16
"""Keys of content that need not be saved that are remembered at once."""
LOOK_AGAIN_SHARE = 0.25
"""Once so much of what was stored ahead has been taken, what is next is looked for."""

_PLAIN = Rank.PLAIN  # to name a member takes long, and each block is asked about

P = ParamSpec("P")
T = TypeVar("T")


class Below:
    """The tiers of one engine, as its adapter commands them. What fails in here turns them off, not it."""

    def __init__(self, connector: SojournConnector, steward: Steward) -> None:
        self._connector = connector
        self._steward = steward
        self._placed = PlacedChains()
        self._not_worth_saving: dict[Key, None] = {}
        """Content of preempted requests that is sooner computed again than copied, oldest first."""
        self._away: dict[ProgramId, list[Sequence[Key]]] = {}
        """Programs of preempted requests, and what each of these will load."""
        self._wanted: Counter[Key] = Counter()
        """All that is in ``_away``, and how often; what else such a program has is worth what it was."""
        self._coming: set[ProgramId] = set()
        """Let onto the device, and yet to be admitted there."""
        pool = steward.pool
        most_taken = AHEAD_STEPS * -(-pool.step_tokens // pool.block_size)
        self._ahead = min(most_taken, int(AHEAD_SHARE * pool.blocks), int(AHEAD_OF_HOST * pool.host_blocks))
        """Of what the device reuses next, blocks that are stored before they are."""
        self._taken = self._ahead
        """Of those, taken since they were last looked for."""
        self._under_pressure = False
        """The device has lost something, or somebody was sent away: what it has is worth a copy."""

    def save(self, blocks: Sequence[KVCacheBlock], owners: BlockOwners) -> None:
        """Blocks are about to be reused: save what is in them. From the first such time on copies are made
        ahead."""
        self._guarded(self._save, blocks, owners)

    def store_ahead(self, queue: ProgramFreeQueue) -> None:
        """Before a step is planned: what is soon reused is copied beside computing, not waited for then."""
        if self._taken > LOOK_AGAIN_SHARE * self._ahead:
            self._guarded(self._store_ahead, queue)

    def turn_over(self, program_id: ProgramId, blocks: Sequence[KVCacheBlock]) -> None:
        """A turn of a program has ended, and its whole context is in these blocks."""
        if self._under_pressure and self._steward.label(program_id) is not Label.INACTIVE:
            self._guarded(self._turn_over, blocks)

    def place(self, program_id: ProgramId, tier: Tier, held: HeldBlocks) -> None:
        """A program's KV belongs in ``tier`` from now on."""
        self._guarded(self._place, program_id, tier, held)

    def over(self, program_id: ProgramId, owners: BlockOwners) -> None:
        """A program has ended, and is about to own nothing any more: spare copies of what it alone has used
        are worthless from now on. Where programs are placed, ``place`` says the same of all they had."""
        if self._under_pressure:
            self._guarded(self._over, program_id, owners)

    def arrived(self, program_id: ProgramId, hashes: Sequence[Key]) -> None:
        """A program's request has been admitted, and has on the device what begins as these do; or it never
        will be, and nothing does."""
        if program_id in self._coming:
            self._guarded(self._arrived, program_id, hashes)

    def fetch(self, keys: Sequence[Key]) -> tuple[int, int]:
        """Bring these closer: how many are coming from disk, and how many are nowhere below the device."""
        found = self._guarded(self._fetch, keys)
        return found if found is not None else (0, len(keys))

    def persist(self, keys: Sequence[Key], held: HeldBlocks) -> dict[str, Any]:
        """Have a context written to disk: as ``Service`` is told it."""
        connector = self._connector
        if connector.off:
            return {"reason": f"the tiers below the device are off: {connector.off_because}"}
        if connector.settings.disk is None and not connector.planner.limits.disk_blocks:
            return {"reason": "this engine has no disk below its host memory"}
        if connector.planner.disk.closed:
            return {"reason": "the cache was reset, after which nothing is written where other engines read"}
        told = self._guarded(self._persist, keys, held)
        if told is None:
            return {"reason": f"the tiers below the device are off: {connector.off_because}"}
        block_bytes = connector.settings.block_bytes
        return {
            "stored_blocks": told.stored,
            "pending_blocks": told.pending,
            "pending_bytes": told.pending * block_bytes,
            "shared": connector.planner.limits.shared,
        }

    def loading(self) -> Iterable[Sequence[int]]:
        """All blocks of requests that loaded something in the steps that may still be under way; of those
        that have been aborted meanwhile too."""
        return self._connector.loading()

    def discard(self, blocks: Iterable[KVCacheBlock]) -> None:
        """What these hold is not what their names say: copies of it may not be found either."""
        self._guarded(
            self._connector.planner.discard,
            [chain_hash(block) for block in blocks if block.block_hash is not None],
        )

    def loaded_tokens(self, request_id: str) -> int:
        """Tokens that a request which was just admitted had from below; asked once."""
        return self._connector.loaded_tokens.pop(request_id, 0)

    def state(self) -> dict[str, Any]:
        """Blocks by tier and state, and under ``moves`` and ``traffic`` what was moved so far."""
        planner, traffic = self._connector.planner, self._connector.traffic
        return {**planner.state(), "traffic": {**traffic.totals(), "jobs": planner.under_way}}

    def link(self, blocks: int = 1) -> tuple[float | None, float | None, float]:
        """Seconds that copying a token's KV to host memory and back has taken of late, ``None`` before the
        first; and how long copies that are queued to go there will take. ``NOWHERE_S_PER_TOKEN`` for the
        first where there is no room for ``blocks`` more blocks of a request that is preempted."""
        traffic, settings = self._connector.traffic, self._connector.settings
        token_bytes = settings.block_bytes / settings.block_tokens
        now = self._connector.clock()
        out_s, back_s = (traffic.seconds_a_byte(lane, now) for lane in ("to_host", "to_device"))
        queued = self._connector.planner.storing_blocks * settings.block_bytes
        to_host = out_s * token_bytes if out_s is not None else None
        return (
            to_host if self._room() >= blocks else NOWHERE_S_PER_TOKEN,
            back_s * token_bytes if back_s is not None else None,
            queued * out_s if out_s is not None else 0.0,
        )

    def copied_in_a_row(self, keys: Iterable[Key]) -> int:
        """How many of the leading ``keys`` are in host memory, or on their way there."""
        host = self._connector.planner.host
        return sum(1 for _ in takewhile(lambda key: host.get(key) is not None, keys))

    def copy_ahead(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Blocks of a request that runs, in the order of its context, which it will probably lose soon."""
        self._guarded(
            self._connector.planner.store,
            [(chain_hash(block), block.block_id) for block in blocks],
            _PLAIN,
        )

    def copied(self, blocks: Iterable[KVCacheBlock]) -> int:
        """How many of these are in host memory, or on their way there: copying them costs nothing more."""
        return self._guarded(self._copied, blocks) or 0

    def not_to_save(
        self, blocks: Iterable[KVCacheBlock], program_id: ProgramId | None, owners: BlockOwners
    ) -> None:
        """A request of a program, or of none, is about to lose these, and what is reused of them is to be
        computed again. Of what others use or have used too, such as a common beginning, they decide."""
        for block in blocks:
            block_id = block.block_id
            theirs = block_id in owners.common or block_id in owners.orphans
            if block.ref_cnt <= 1 and not theirs and owners.of.get(block_id) == program_id:
                self._not_worth_saving[chain_hash(block)] = None
        while len(self._not_worth_saving) > MOST_NOT_SAVED:
            del self._not_worth_saving[next(iter(self._not_worth_saving))]

    def to_keep(self, program_id: ProgramId, blocks: Iterable[KVCacheBlock]) -> None:
        """A program's request is about to lose these, and will load them again: nobody else's content takes
        their place in host memory until then."""
        self._guarded(self._to_keep, program_id, [chain_hash(block) for block in blocks])

    def no_longer_away(self, program_id: ProgramId | None, hashes: Sequence[Key]) -> None:
        """A request that may have been preempted has its blocks again, or has left the engine: what it had is
        worth what anybody's is. Of one that names none, what all of its program's would load."""
        if self._not_worth_saving:
            for key in hashes:
                self._not_worth_saving.pop(key, None)
        if program_id in self._away:
            self._guarded(self._no_longer_away, program_id, hashes)

    def reset(self) -> None:
        """The engine's cache was reset."""
        self._not_worth_saving.clear()
        self._away.clear()
        self._wanted.clear()
        self._placed = PlacedChains()
        self._coming.clear()
        self._connector.reset_cache()

    def turn_off(self, why: str) -> None:
        """Nothing is saved and nothing found any more."""
        self._connector.turn_off(why)

    def _room(self) -> int:
        """Blocks that host memory would take of requests that are preempted."""
        planner = self._connector.planner
        if self._connector.off:
            return 0
        if not self._steward.prospects.predicts:
            return planner.host.room(_PLAIN)
        # Nobody who is away makes way for another, nor what is yet to be copied of them.
        return min(planner.host.room(Rank.IDLE), planner.host.slots - len(self._wanted))

    def _copied(self, blocks: Iterable[KVCacheBlock]) -> int:
        host = self._connector.planner.host
        return sum(host.get(chain_hash(block)) is not None for block in blocks)

    def _to_keep(self, program_id: ProgramId, keys: Sequence[Key]) -> None:
        if keys:
            self._away.setdefault(program_id, []).append(keys)
            self._wanted.update(keys)
            self._connector.planner.set_rank(keys, Rank.WANTED)

    def _no_longer_away(self, program_id: ProgramId, hashes: Sequence[Key]) -> None:
        planner, rank = self._connector.planner, host_rank(self._steward.label(program_id))
        still = []
        for keys in self._away.pop(program_id):
            # Hashes are chained: what agrees in the last is the same from the first.
            if hashes and list(hashes[len(keys) - 1 : len(keys)]) != [keys[-1]]:
                still.append(keys)
            else:
                planner.set_rank(self._no_longer_wanted(keys), rank, only=Rank.WANTED)
        if still:
            self._away[program_id] = still

    def _no_longer_wanted(self, keys: Sequence[Key]) -> list[Key]:
        """One who is away does without these any more; which nobody else who is away would load."""
        wanted, by_nobody = self._wanted, []
        for key in keys:
            if wanted[key] > 1:  # they may begin alike
                wanted[key] -= 1
            else:
                del wanted[key]
                by_nobody.append(key)
        return by_nobody

    def _save(self, blocks: Sequence[KVCacheBlock], owners: BlockOwners) -> None:
        ranks: dict[ProgramId | None, Rank] = {}
        planner, cold = self._connector.planner, Rank.COLD
        self._taken += len(blocks)
        for block in blocks:
            if block.block_hash is not None:
                self._under_pressure = True
                key = chain_hash(block)
                # What is there already may be on its way still, and has to be waited for.
                if key in self._not_worth_saving and planner.host.get(key) is None:
                    del self._not_worth_saving[key]
                    continue
                rank = self._rank_of(key, block.block_id, owners, ranks)
                if planner.evicted(key, block.block_id, rank.until_written) and rank == cold:
                    planner.write_out([key], rank)

    def _store_ahead(self, queue: ProgramFreeQueue) -> None:
        self._taken = 0
        planner, spare = self._connector.planner, Rank.SPARE
        ranks: dict[ProgramId | None, Rank] = {}
        by_rank: dict[Rank, list[tuple[Key, int]]] = {}
        for block in islice(queue.iter_blocks_after(None), self._ahead):
            if block.block_hash is not None:
                key = chain_hash(block)
                if key in self._not_worth_saving:
                    continue
                entry = planner.host.get(key)
                if entry is None or entry.rank == spare:
                    rank = self._rank_of(key, block.block_id, queue.owners, ranks)
                    by_rank.setdefault(rank, []).append((key, block.block_id))
        for rank, blocks in by_rank.items():
            # As contexts have them: reused is the end first.
            planner.store(reversed(blocks), rank.until_written)
            if rank == Rank.COLD:
                planner.write_out([key for key, _ in reversed(blocks)], rank)

    def _turn_over(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._connector.planner.store_spare((chain_hash(block), block.block_id) for block in reversed(blocks))

    def _over(self, program_id: ProgramId, owners: BlockOwners) -> None:
        owner_of, common = owners.of, owners.common
        alone = [
            chain_hash(block)
            for block_id, block in owners.blocks.get(program_id, {}).items()
            if owner_of[block_id] == program_id and block_id not in common and block.block_hash is not None
        ]
        # Another copy may be of somebody who has lost it from the device, and is no owner for that. Where
        # another block of the device has the same content, that is copied once more when it is lost.
        self._connector.planner.set_rank(alone, Rank.WORTHLESS, only=Rank.SPARE)

    def _rank_of(
        self, key: Key, block_id: int, owners: BlockOwners, ranks: dict[ProgramId | None, Rank]
    ) -> Rank:
        """The rank of what is in a block: somebody who is away wants it, or the highest of its owners'."""
        if key in self._wanted:
            return Rank.WANTED
        if block_id in owners.orphans:
            return self._rank(None, ranks)
        owner = owners.of.get(block_id)
        if isinstance(owner, str):
            return self._rank(owner, ranks)
        return max((self._rank(name, ranks) for name in owner or ()), default=_PLAIN)

    def _rank(self, program_id: ProgramId | None, ranks: dict[ProgramId | None, Rank]) -> Rank:
        rank = ranks.get(program_id)
        if rank is None:
            rank = ranks[program_id] = host_rank(self._steward.label(program_id))
        return rank

    def _place(self, program_id: ProgramId, tier: Tier, held: HeldBlocks) -> None:
        planner = self._connector.planner
        rank = host_rank(self._steward.label(program_id))
        keys = self._steward.contexts.get(program_id)
        if keys is None:  # it is over: what is known of it is what was placed
            keys = self._placed.keys_of(program_id)
        before, alike = self._placed.keys_of(program_id), self._placed.alike(program_id, keys)
        if alike < len(before):
            # What a context was before it was compacted, say, nobody names after this; but who begins alike.
            alike = max(alike, self._placed.put(program_id, before, Rank.WORTHLESS))
            planner.set_rank(before[alike:], Rank.WORTHLESS)
        shared = self._placed.put(program_id, keys, rank)
        if tier is Tier.DEVICE:
            if not self._runs(program_id):
                # Else those who leave in the same step take its place in host memory before it was read.
                planner.set_rank(keys, Rank.WANTED)
                self._coming.add(program_id)
                # With nothing on disk, thousands of keys need not be looked up to find nothing.
                on_device = len(held.still_cached(keys)) if planner.disk_blocks else 0
                planner.fetch(keys[on_device:], Rank.WANTED)
            return
        planner.set_rank(keys[shared:], rank.until_written)
        self._coming.discard(program_id)
        if rank == Rank.WORTHLESS:
            self._placed.forget(program_id)
            return
        if tier is not Tier.WAITING:
            # Ahead of need: what is stored by then is not waited for when it is reused.
            blocks = [(chain_hash(block), block.block_id) for block in held.still_cached(keys)]
            planner.store(blocks, rank.until_written)
            self._under_pressure = True
            if rank == Rank.COLD:
                planner.write_out(keys[shared:], rank)

    def _arrived(self, program_id: ProgramId, hashes: Sequence[Key]) -> None:
        self._coming.discard(program_id)
        planner, rank = self._connector.planner, host_rank(self._steward.label(program_id))
        keys = self._placed.keys_of(program_id)
        shared = self._placed.put(program_id, keys, rank)
        here = max(shared, self._placed.alike(program_id, hashes))
        planner.set_rank(keys[here:], rank)
        planner.set_rank(keys[shared:here], Rank.SPARE)
        planner.set_rank(keys[:shared], Rank.IDLE, only=Rank.WANTED)

    def _runs(self, program_id: ProgramId) -> bool:
        """Whether a request of the program has been admitted: it reads nothing any more."""
        program, tickets = self._steward.table.get(program_id), self._steward.tickets
        live = program.live_requests if program is not None else ()
        return any(ticket is not None and ticket.admitted for ticket in map(tickets.get, live))

    def _fetch(self, keys: Sequence[Key]) -> tuple[int, int]:
        planner = self._connector.planner
        return planner.fetch(keys), planner.missing(keys)

    def _persist(self, keys: Sequence[Key], held: HeldBlocks) -> Persisted:
        planner, on_device, at = self._connector.planner, dict[Key, int](), 0
        while True:  # parts of it may be here and parts there
            found = held.still_cached(keys[at:])
            on_device.update((chain_hash(block), block.block_id) for block in found)
            at += len(found)
            below = planner.leading(keys[at:])
            if not below:
                return planner.persist(keys[:at], on_device)
            at += below

    def _guarded(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        if self._connector.off:
            return None
        try:
            return call(*args, **kwargs)
        except Exception as error:  # the tiers' failure, and not the engine's or the order of reuse's
            self._connector.failed(error)
            return None
