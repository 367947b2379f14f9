"""A replay of a fixed access sequence over a pool of blocks, with any eviction order.

The pool behaves as vLLM's ``BlockPool`` does under a scheduler with prefix
caching and chunked prefill:

- A request that is admitted reuses the longest cached prefix of what it may
  ask for, and holds it from then on. It looks only then: what somebody else
  caches later it computes a second time, in blocks of its own (vLLM does not
  merge equal blocks).
- A block is cached from the moment it is full, and stays so when it is freed,
  until it is reused for something else. Blocks that hold nothing are reused
  first.

The recorded run held, at every moment, no more than fitted. Under another order
a request may find more than it found there, and holds that at once, before the
recorded run had prefilled so far. Where that surplus does not fit, the requests
admitted last give theirs back, tails first, down to what they held in the
recorded run, and compute what they lost by it when the recorded run gets there
(``given_back_tokens``). What does not fit even then is held outside the pool
and counted (``overflow_blocks``); a log of a real run has none of it, except
for equal blocks held twice.

O(1) a block; about 1 µs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

import msgspec

from .block_accesses import AccessLog, AccessSequence, BlockAccessKind, SequenceEntry, prepare_access_sequence
from .replay_eviction_orders import ReplayEvictionOrder

ReplayProgress = Callable[[int, int], None]
"""Called now and then with (entries done, entries in all), and once at the end."""

PROGRESS_INTERVAL = 2048
"""Entries between two calls."""


class EvictionReplayResult(msgspec.Struct, kw_only=True):
    """Tokens are whole blocks times the block size; only blocks a cache may be asked for are counted."""

    order: str
    admissions: int = 0
    asked_tokens: int = 0
    """Looked up when requests were admitted, and reached before they were freed."""
    hit_tokens: int = 0
    computed_tokens: int = 0
    """Asked for, not found, hence computed: first-time, regenerated and duplicated ones."""
    regenerated_tokens: int = 0
    """Of these, such as had been computed before, by any request, and were lost since: what a better
    order could have spared."""
    duplicated_tokens: int = 0
    """Of these, such as were in the cache at that moment: computed a second time because the engine looks
    only when it admits a request, whatever the order. The optimum has none by definition."""
    regenerated_by_owner: dict[str, int] = msgspec.field(default_factory=dict)
    """Program → tokens regenerated for it; programs without any are left out."""
    regenerated_by_request: list[int] = msgspec.field(default_factory=list)
    """Tokens regenerated for each request of the log."""
    hit_blocks: list[int] = msgspec.field(default_factory=list)
    """Of each admission, in order of the log: leading blocks reused."""
    given_back_tokens: int = 0
    """Reused ones let go again, because the recorded run had nothing there yet and the space was needed."""
    overflow_blocks: int = 0
    """The most blocks by which the sequence did not fit the pool, whatever was evicted; 0 in a sound log."""
    over_belady: float | None = None
    """``regenerated_tokens`` over those of the offline optimum: SAGA's competitive ratio (§7, Definition 3).
    None where the optimum is 0 and this is not, or where nobody has compared."""
    note: str = ""

    def regenerated_since(self, sent_s: Sequence[float], since_s: float) -> int:
        """Tokens regenerated for requests that were sent from ``since_s`` on; ``sent_s`` has the time of each
        request of the log."""
        if since_s <= 0:
            return self.regenerated_tokens
        times = zip(self.regenerated_by_request, sent_s, strict=True)
        return sum(lost for lost, at_s in times if at_s >= since_s)


class EvictionReplayCounters:
    """Counts blocks while a replay runs, and turns them into tokens at its end."""

    def __init__(self, requests: int) -> None:
        self.asked = 0
        self.computed = 0
        self.regenerated = 0
        self.duplicated = 0
        self.given_back = 0
        self.overflow = 0
        self.by_request = [0] * requests
        self.hits: list[int] = []

    def result(
        self, order: str, block_size: int, owners: list[str], owner_of: list[int]
    ) -> EvictionReplayResult:
        """``owner_of`` has the place in ``owners`` of each request's program."""
        by_owner: dict[str, int] = {}
        for owner, lost in zip(owner_of, self.by_request, strict=True):
            if lost:
                by_owner[owners[owner]] = by_owner.get(owners[owner], 0) + lost * block_size
        return EvictionReplayResult(
            order=order,
            admissions=len(self.hits),
            asked_tokens=self.asked * block_size,
            hit_tokens=(self.asked - self.computed) * block_size,
            computed_tokens=self.computed * block_size,
            regenerated_tokens=self.regenerated * block_size,
            duplicated_tokens=self.duplicated * block_size,
            regenerated_by_owner=by_owner,
            regenerated_by_request=[lost * block_size for lost in self.by_request],
            hit_blocks=self.hits,
            given_back_tokens=self.given_back * block_size,
            overflow_blocks=self.overflow,
        )


def replay_evictions(
    log: AccessLog | AccessSequence,
    order: ReplayEvictionOrder,
    *,
    name: str = "",
    progress: ReplayProgress | None = None,
) -> EvictionReplayResult:
    """What ``order``, which must be new, loses over the sequence. Raises ``AccessLogError``."""
    sequence = prepare_access_sequence(log) if isinstance(log, AccessLog) else log
    pool = _ReplayPool(sequence, order)
    total = len(sequence.entries)
    for now, entry in enumerate(sequence.entries):
        if progress is not None and now % PROGRESS_INTERVAL == 0:
            progress(now, total)
        pool.take_in(now, entry)
    if progress is not None:
        progress(total, total)
    return pool.tally.result(
        name or type(order).__name__, sequence.block_size, sequence.owners, sequence.owner_of
    )


class _ReplayPool:
    def __init__(self, sequence: AccessSequence, order: ReplayEvictionOrder) -> None:
        self.tally = EvictionReplayCounters(len(sequence.chains))
        self._sequence = sequence
        self._order = order
        size = sequence.pool_blocks
        self._empty = list(range(size - 1, -1, -1))
        """Free places that hold nothing."""
        self._holders = [0] * size
        self._content = [-1] * size
        """Of each place the block cached there, or -1."""
        self._place = [-1] * sequence.blocks
        """Of each block the place where it was cached first, or -1."""
        self._copies: dict[int, list[int]] = {}
        """Of blocks cached more than once, the other places, in order."""
        self._known = bytearray(sequence.blocks)
        """1: has been computed before."""
        self._writing: dict[int, int] = {}
        """Blocks that are being computed and not yet full → by how many requests."""
        self._tables: dict[int, list[int]] = {}
        """Of each admitted request its places; in order of admission."""
        self._cached_of: dict[int, int] = {}
        """Of each admitted request how many of its blocks are cached."""
        self._recorded: dict[int, int] = {}
        """Of each admitted request what it held in the recorded run."""
        self._surplus = False
        """Whether any request may hold more than it did in the recorded run."""
        self._outside = 0
        """Places beyond the pool."""

    def take_in(self, now: int, entry: SequenceEntry) -> None:
        request = entry.request
        if entry.kind == BlockAccessKind.ADMIT:
            self._admit(entry)
        self._grow(now, entry)
        if entry.kind == BlockAccessKind.FREE:
            owner = self._sequence.owner_of[request]
            self._recorded.pop(request)
            self._let_go(self._tables.pop(request), self._cached_of.pop(request), owner, now)
            if self._sequence.last_entry[owner] == now:
                self._order.over(owner)
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
        self._written(chain[cached : min(len(table), entry.ask)])
        missing = entry.held - len(table)
        if missing > 0:
            if len(table) < entry.ask:
                self._count(chain, len(table), min(entry.held, entry.ask), request)
            table.extend(self._new_places(missing, now))
        if entry.full > cached:
            self._cache(chain, table, cached, entry.full)
            cached = self._cached_of[request] = entry.full
        if entry.kind != BlockAccessKind.FREE:
            # Rarely more than one: the last block of a chunk.
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

    def _written(self, blocks: Iterable[int]) -> None:
        """They are full, or nobody will ever fill them."""
        writing = self._writing
        for block in blocks:
            writing[block] -= 1
            if not writing[block]:
                del writing[block]

    def _let_go(self, table: list[int], cached: int, owner: int, now: int) -> None:
        """One holder less of each; tails are reused before heads."""
        holders = self._holders
        for here in table:
            holders[here] -= 1
        self._empty += table[cached:]
        freed = [here for here in reversed(table[:cached]) if not holders[here]]
        self._order.freed(freed, owner, now)

    def _new_places(self, count: int, now: int) -> list[int]:
        places = self._free_places(count)
        if len(places) < count and self._surplus:
            self._give_back(count - len(places), now)
            places += self._free_places(count - len(places))
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

    def _free_places(self, count: int) -> list[int]:
        """As many as there are, at most ``count``; empty ones first."""
        empty = self._empty
        places = empty[len(empty) - min(count, len(empty)) :]
        del empty[len(empty) - len(places) :]
        if len(places) < count:
            victims = self._order.victims(count - len(places))
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
                self._let_go([here], 1, owner, now)
                self.tally.given_back += 1
                self.tally.asked -= 1
            self._cached_of[request] = min(self._cached_of[request], len(table))
            if not count:
                return
        self._surplus = False

    def _shrink(self) -> None:
        """Places outside the pool go first."""
        while self._outside:
            gone = self._free_places(self._outside)
            if not gone:
                return
            self._outside -= len(gone)
