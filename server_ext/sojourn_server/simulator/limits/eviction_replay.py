"""Replay of a fixed access sequence over a pool of blocks, with any eviction order.

A *place* is a physical block of the pool. A *block* is content, and each place caches at most one block. The
pool behaves like vLLM's ``BlockPool`` under a scheduler with prefix caching and chunked prefill:

- A request looks up blocks only at its admission, and reuses the longest cached prefix. If another request
  caches a block later, this request still computes a *duplicate*, because vLLM does not merge equal blocks.
- A block is cached from the moment it is full until its place gets another block, also while no request holds
  it. Places that cache no block are filled first.

A recorded run fits its pool at all times. Under another order, a request may hit more blocks, and then
holds more blocks than it did in the recorded run at that time. If these additional blocks do not fit, the
requests admitted last free their additional blocks, last blocks first, and recompute them later
(``given_back_tokens``). Blocks that still do not fit are held outside the pool and counted
(``overflow_blocks``). In the log of a recorded run, only duplicates can cause such an overflow. (A log made
by hand may exceed the pool without them.)

The replay takes O(1) per block, about 1 µs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import msgspec

from .block_accesses import AccessLog, AccessSequence, BlockAccessKind, SequenceEntry, prepare_access_sequence
from .replay_eviction_orders import ReplayEvictionOrder


class EvictionReplayResult(msgspec.Struct, kw_only=True):
    """Result of one eviction order. Token counts are whole blocks times the block size, and include only
    blocks covered by lookups."""

    order: str
    asked_tokens: int = 0
    """Tokens looked up at admissions. Tokens that the request had not reached when it freed its blocks do not
    count."""
    hit_tokens: int = 0
    computed_tokens: int = 0
    """Looked-up tokens that the request did not find and computed: new, recomputed and duplicate tokens."""
    regenerated_tokens: int = 0
    """Computed tokens whose KV had been computed before, by any request, and evicted since. A better order
    could have kept this KV."""
    duplicated_tokens: int = 0
    """Computed tokens of blocks that another request had cached since this request's admission, or was
    computing at the same time. Always 0 for the offline optimum."""
    regenerated_by_request: list[int] = msgspec.field(default_factory=list)
    """Recomputed tokens of each request of the log."""
    hit_blocks: list[int] = msgspec.field(default_factory=list)
    """Number of leading blocks that each admission reused, in the order of the log."""
    given_back_tokens: int = 0
    """Reused tokens that were freed again for lack of space."""
    overflow_blocks: int = 0
    """Maximum number of blocks that were outside the pool at one time. For the log of a recorded run, the
    number is 0 with the offline optimum. With other orders, only duplicates make it larger."""
    over_belady: float | None = None
    """SAGA's competitive ratio (§7, Definition 3): ``regenerated_tokens`` ÷ ``regenerated_tokens`` of the
    offline optimum; 1 if both are 0. ``None`` if only the optimum's is 0, and in results that do not come
    from ``compare_eviction_orders``."""
    note: str = ""

    def regenerated_since(self, sent_s: Sequence[float], since_s: float) -> int:
        """Recomputed tokens of the requests that were sent at ``since_s`` virtual seconds or later.
        ``sent_s``: the time at which each request of the log was sent, in virtual seconds."""
        if since_s <= 0:
            return self.regenerated_tokens
        times = zip(self.regenerated_by_request, sent_s, strict=True)
        return sum(lost for lost, at_s in times if at_s >= since_s)


class EvictionReplayCounters:
    """Counts blocks during a replay, and converts them into tokens at its end."""

    def __init__(self, requests: int) -> None:
        self.asked = 0
        self.computed = 0
        self.regenerated = 0
        self.duplicated = 0
        self.given_back = 0
        self.overflow = 0
        self.by_request = [0] * requests
        self.hits: list[int] = []

    def result(self, order: str, block_size: int) -> EvictionReplayResult:
        """Convert the counts into tokens."""
        return EvictionReplayResult(
            order=order,
            asked_tokens=self.asked * block_size,
            hit_tokens=(self.asked - self.computed) * block_size,
            computed_tokens=self.computed * block_size,
            regenerated_tokens=self.regenerated * block_size,
            duplicated_tokens=self.duplicated * block_size,
            regenerated_by_request=[lost * block_size for lost in self.by_request],
            hit_blocks=self.hits,
            given_back_tokens=self.given_back * block_size,
            overflow_blocks=self.overflow,
        )


def replay_evictions(
    log: AccessLog | AccessSequence, order: ReplayEvictionOrder, *, name: str = ""
) -> EvictionReplayResult:
    """Replay the sequence with ``order``, a new object that no other replay has used. ``name`` is the name of
    the order in the result; by default it is the name of its class. Raises ``AccessLogError``."""
    sequence = prepare_access_sequence(log)
    pool = _ReplayPool(sequence, order)
    for now, entry in enumerate(sequence.entries):
        pool.take_in(now, entry)
    return pool.tally.result(name or type(order).__name__, sequence.block_size)


class _ReplayPool:
    def __init__(self, sequence: AccessSequence, order: ReplayEvictionOrder) -> None:
        self.tally = EvictionReplayCounters(len(sequence.chains))
        self._sequence = sequence
        self._order = order
        size = sequence.pool_blocks
        self._empty = list(range(size - 1, -1, -1))
        """Free places that cache no block."""
        self._holders = [0] * size
        self._content = [-1] * size
        """Block cached at each place, or -1."""
        self._place = [-1] * sequence.blocks
        """Main place of each cached block, or -1."""
        self._copies: dict[int, list[int]] = {}
        """Further places, in order, of each block that is cached more than once."""
        self._known = bytearray(sequence.blocks)
        """1 for each block that was computed before."""
        self._writing: dict[int, int] = {}
        """Incomplete blocks → number of requests that compute them."""
        self._tables: dict[int, list[int]] = {}
        """Places of each admitted request; in order of admission."""
        self._cached_of: dict[int, int] = {}
        """Number of leading blocks of each admitted request that are full and cached."""
        self._recorded: dict[int, int] = {}
        """Number of blocks that each admitted request held in the recorded run at its latest entry."""
        self._surplus = False
        """Whether any request may now hold more blocks than in the recorded run. If false, ``_give_back`` is
        skipped."""
        self._outside = 0
        """Number of places beyond the pool's size."""

    def take_in(self, now: int, entry: SequenceEntry) -> None:
        request = entry.request
        if entry.kind == BlockAccessKind.ADMIT:
            self._admit(entry)
        self._grow(now, entry)
        if entry.kind == BlockAccessKind.FREE:
            owner = self._sequence.owner_of[request]
            self._recorded.pop(request)
            self._release_places(self._tables.pop(request), self._cached_of.pop(request), owner, now)
            if self._sequence.last_entry[owner] == now:
                self._order.owner_ended(owner)
            self._shrink()

    def _admit(self, entry: SequenceEntry) -> None:
        chain, place, holders = self._sequence.chains[entry.request], self._place, self._holders
        table = []
        was_free = []
        for block in chain[: entry.ask]:
            found = place[block]
            if found < 0:
                break
            table.append(found)
            if not holders[found]:
                was_free.append(found)
            holders[found] += 1
        self._order.reused(was_free)
        self._tables[entry.request] = table
        self._cached_of[entry.request] = len(table)
        self._surplus |= len(table) > entry.held
        self.tally.hits.append(len(table))
        self.tally.asked += len(table)

    def _grow(self, now: int, entry: SequenceEntry) -> None:
        request, table = entry.request, self._tables[entry.request]
        self._recorded[request] = entry.held
        chain = self._sequence.chains[request]
        cached = self._cached_of[request]
        self._decrement_writing(chain[cached : min(len(table), entry.ask)])
        missing = entry.held - len(table)
        if missing > 0:
            if len(table) < entry.ask:
                self._count(chain, len(table), min(entry.held, entry.ask), request)
            table.extend(self._new_places(missing, now))
        if entry.full > cached:
            self._cache(chain, table, cached, entry.full)
            cached = self._cached_of[request] = entry.full
        if entry.kind != BlockAccessKind.FREE:
            # Usually at most one block: the incomplete last block of a chunk.
            for block in chain[cached : min(len(table), entry.ask)]:
                self._writing[block] = self._writing.get(block, 0) + 1

    def _count(self, chain: array[int], start: int, end: int, request: int) -> None:
        tally, place, known, writing = self.tally, self._place, self._known, self._writing
        lost = duplicated = 0
        for block in chain[start:end]:
            if known[block]:
                if place[block] < 0 and block not in writing:
                    lost += 1
                else:
                    duplicated += 1
            elif block in writing:
                duplicated += 1
        tally.asked += end - start
        tally.computed += end - start
        tally.regenerated += lost
        tally.duplicated += duplicated
        tally.by_request[request] += lost

    def _cache(self, chain: array[int], table: list[int], start: int, end: int) -> None:
        place, content, known = self._place, self._content, self._known
        for block, here in zip(chain[start:end], table[start:end], strict=True):
            known[block] = 1
            content[here] = block
            if place[block] < 0:
                place[block] = here
            else:
                self._copies.setdefault(block, []).append(here)

    def _decrement_writing(self, blocks: Iterable[int]) -> None:
        """Remove one request from the count in ``_writing`` of each of ``blocks``. The caller then counts the
        request again for the blocks that it still computes."""
        writing = self._writing
        for block in blocks:
            writing[block] -= 1
            if not writing[block]:
                del writing[block]

    def _release_places(self, table: list[int], cached: int, owner: int, now: int) -> None:
        """Release ``table``, the places of a request. The first ``cached`` places hold cached blocks; those
        that no other request holds join the eviction order, last block first. The places after the first
        ``cached`` become empty."""
        holders = self._holders
        for here in table:
            holders[here] -= 1
        self._empty += table[cached:]
        freed = [here for here in reversed(table[:cached]) if not holders[here]]
        self._order.freed(freed, owner, now)

    def _new_places(self, count: int, now: int) -> list[int]:
        places = self._take_places(count)
        if len(places) < count and self._surplus:
            self._give_back(count - len(places), now)
            places += self._take_places(count - len(places))
        if len(places) < count:
            beyond = range(len(self._holders), len(self._holders) + count - len(places))
            self._holders.extend([0] * len(beyond))
            self._content.extend([-1] * len(beyond))
            self._outside += len(beyond)
            self.tally.overflow = max(self.tally.overflow, self._outside)
            places += beyond
        for here in places:
            self._holders[here] = 1
        return places

    def _take_places(self, count: int) -> list[int]:
        """Take at most ``count`` places that no request holds. Places that cache no block come first; the
        eviction order chooses the others."""
        empty = self._empty
        places = empty[len(empty) - min(count, len(empty)) :]
        del empty[len(empty) - len(places) :]
        if len(places) < count:
            victims = self._order.pop_victims(count - len(places))
            self._forget(victims)
            places += victims
        return places

    def _forget(self, places: list[int]) -> None:
        place, content, copies_of = self._place, self._content, self._copies
        for here in places:
            block = content[here]
            content[here] = -1
            if block not in copies_of:
                place[block] = -1
                continue
            copies = copies_of[block]
            if place[block] == here:
                place[block] = copies.pop(0)
            else:
                copies.remove(here)
            if not copies:
                del copies_of[block]

    def _give_back(self, count: int, now: int) -> None:
        for request in reversed(self._tables):
            table, owner = self._tables[request], self._sequence.owner_of[request]
            while count and len(table) > self._recorded[request]:
                here = table.pop()
                count -= self._holders[here] == 1
                self._release_places([here], 1, owner, now)
                self.tally.given_back += 1
                self.tally.asked -= 1
            self._cached_of[request] = min(self._cached_of[request], len(table))
            if not count:
                return
        self._surplus = False

    def _shrink(self) -> None:
        """Drop free places until the number of places equals the pool's size, or until no place is free."""
        while self._outside:
            gone = self._take_places(self._outside)
            if not gone:
                return
            self._outside -= len(gone)
