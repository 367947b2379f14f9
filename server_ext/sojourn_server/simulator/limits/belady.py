"""The offline optimum: no order of eviction loses fewer blocks over a fixed access sequence.

**The sequence.** A request *touches* block i of its chain when the recorded run
first held more than i blocks for it (for blocks behind what it may ask for:
when block i was full). It *pins* what it has touched until it is freed. A touch
is *charged* if the block may be asked for and has been computed before, by
anybody, and yet is not in the cache. All other touches are free whatever was
evicted: the first computation of a block is nobody's loss, and what a decode
step writes no cache could have spared. A block not yet full and not yet named
takes a place too. So which touches can be charged, what is pinned and what
space is left for named blocks are properties of the log alone; only what is
evicted is chosen. This makes it a paging problem with pins and a pool of
varying size, the same for every order.

**The rule.** When space is needed, evict among the unpinned blocks the one
whose next touch, if that can be charged, lies furthest ahead. A block that is
never touched again, or next by a touch that is free anyway, is worth nothing
and goes first. Ties: the deepest in its chain first.

**Prefixes stay whole.** Say block c follows block p, both are unpinned, and c's
next touch can be charged. The request that makes it asks for p as well, and
touches p no later. So p is next needed no later than c: c goes first, and on a
tie too, for it is deeper. And whoever pins c pins p. (Where p is next *written*
by a request before that, p may go early; it is back before c is asked for.)
So no head is lost whose tail is kept: the optimum needs no hits that an engine
which looks for the longest cached prefix would not see. (Behind a block that it
misses, a request may find what another has computed since it was admitted. An
engine that looks only once does not; the bound is the lower for it.)

**Nothing does better.** Let A be any way to evict that follows this rule up to
some eviction, where the rule takes x and A takes y. Let B take x there and
otherwise do as A does. B's cache is then A's without x, with y. It stays so, with
some other block or an empty place for y, until one of these happens:

- A evicts x, or the block that B has and A lacks is touched, and A evicts x for
  it: now the caches are equal. A paid for that touch if anybody did.
- The block that B has and A lacks is touched, and A evicts z for it, or has
  space: A pays where the touch can be charged, B does not, and z or the empty
  place is the one difference now.
- x is touched freely: B takes it in for its odd block, which is not pinned since A
  lacks it. The caches are equal, nobody has paid.
- x is touched and charged: B pays one and takes it in as before; the caches are
  equal. If x is charged at its first touch, y's next touch could be charged too
  and came no later, by the choice of x, so A has paid for y before. If x was
  touched freely in between, the caches were equal from then on.

So B pays no more than A, and follows the rule one eviction longer. Repeat. ∎

**What it bounds.** A replay (``cache.py``) under any order, with hits only on
admission and equal blocks held twice, needs at least the places that are needed
here, and its set of cached blocks is a way to play this game in which each
charge is one of its ``regenerated`` blocks. So the optimum is a lower bound on
``regenerated_tokens`` of every order *on this log*; it says nothing of a run that a
better order would have turned into another sequence.
"""

from __future__ import annotations

import heapq
from array import array

from .block_accesses import AccessLog, AccessSequence, BlockAccessKind, SequenceEntry, prepare_access_sequence
from .eviction_replay import (
    PROGRESS_INTERVAL,
    EvictionReplayCounters,
    EvictionReplayResult,
    ReplayProgress,
)
from .replay_eviction_orders import OPTIMAL_ORDER

_NEVER = 2**31 - 1
"""Later than every entry, and still fits an ``array('i')``."""


def replay_belady(
    log: AccessLog | AccessSequence, *, progress: ReplayProgress | None = None
) -> EvictionReplayResult:
    """The least that any order of eviction regenerates over the sequence.

    O(B + (E + R) log R) for B touched blocks, E entries and R runs of blocks
    freed together with the same next use; about 1 µs a block.

    Raises ``AccessLogError``.
    """
    sequence = prepare_access_sequence(log) if isinstance(log, AccessLog) else log
    next_uses = _next_uses(sequence)
    game = _OptimalEviction(sequence)
    total = len(sequence.entries)
    for index, entry in enumerate(sequence.entries):
        if progress is not None and index % PROGRESS_INTERVAL == 0:
            progress(index, total)
        game.take_in(entry, next_uses[index])
        next_uses[index] = None  # not needed again
    if progress is not None:
        progress(total, total)
    return game.tally.result(OPTIMAL_ORDER, sequence.block_size, sequence.owners, sequence.owner_of)


def _touched_blocks(entry: SequenceEntry) -> int:
    """Blocks of its chain that the request has touched up to now."""
    return max(min(entry.held, entry.ask), entry.full)


def _next_uses(sequence: AccessSequence) -> list[array[int] | None]:
    """Of each entry, for each block it touches: the entry that touches it next, or ``_NEVER`` if none does or
    that touch is free anyway."""
    known = bytearray(sequence.blocks)
    reached = [0] * len(sequence.chains)
    full_before = [0] * len(sequence.chains)
    charged_of: list[tuple[int, bytearray] | None] = []
    for entry in sequence.entries:
        request, chain = entry.request, sequence.chains[entry.request]
        if entry.kind == BlockAccessKind.ADMIT:
            reached[request] = full_before[request] = 0
        start, end = reached[request], _touched_blocks(entry)
        reached[request] = end
        if end == start:
            charged_of.append(None)
        else:
            charged = bytearray([known[block] for block in chain[start : min(end, entry.ask)]])
            charged_of.append((start, charged + bytearray(end - start - len(charged))))
        for block in chain[full_before[request] : entry.full]:
            known[block] = 1
        full_before[request] = entry.full
    upcoming = array("i", [_NEVER]) * sequence.blocks
    next_uses: list[array[int] | None] = [None] * len(sequence.entries)
    for index in range(len(sequence.entries) - 1, -1, -1):
        touches = charged_of.pop()
        if touches is None:
            continue
        start, charged = touches
        entry = sequence.entries[index]
        blocks = sequence.chains[entry.request][start : start + len(charged)]
        next_uses[index] = array("i", [upcoming[block] for block in blocks])
        for block, counts in zip(blocks, charged, strict=True):
            upcoming[block] = index if counts else _NEVER
    return next_uses


class _OptimalEviction:
    def __init__(self, sequence: AccessSequence) -> None:
        self.tally = EvictionReplayCounters(len(sequence.chains))
        self._sequence = sequence
        self._cached = bytearray(sequence.blocks)
        self._pins = [0] * sequence.blocks
        self._next_use = [_NEVER] * sequence.blocks
        """As of its last touch."""
        self._known = bytearray(sequence.blocks)
        self._touched = [0] * len(sequence.chains)
        self._full = [0] * len(sequence.chains)
        self._admission = [0] * len(sequence.chains)
        """Of each request, the number of its latest admission."""
        self._untracked_blocks = [0] * len(sequence.chains)
        """Of each request, places it holds whose block has no name yet."""
        self._space = sequence.pool_blocks
        """Places neither cached nor unnamed; negative: to be made by eviction."""
        self._runs: list[tuple[int, int, int, array[int]]] = []
        """Heap of runs of blocks unpinned together: (-next use, -depth of its end, number, blocks). It counts
        for a block only while that is cached, unpinned and still has this next use."""
        self._pushes = 0

    def take_in(self, entry: SequenceEntry, next_uses: array[int] | None) -> None:
        request = entry.request
        if entry.kind == BlockAccessKind.ADMIT:
            self._touched[request] = self._full[request] = self._untracked_blocks[request] = 0
            self._admission[request] = len(self.tally.hits)
            self.tally.hits.append(0)
        if next_uses is not None:
            self._touch(entry, next_uses)
        self._learn(entry)
        untracked_blocks = 0 if entry.kind == BlockAccessKind.FREE else entry.held - self._touched[request]
        self._space += self._untracked_blocks[request] - untracked_blocks
        self._untracked_blocks[request] = untracked_blocks
        if entry.kind == BlockAccessKind.FREE:
            self._unpin(self._sequence.chains[request][: self._touched[request]])
        if self._space < 0:
            self._evict()

    def _touch(self, entry: SequenceEntry, next_uses: array[int]) -> None:
        start = self._touched[entry.request]
        end = self._touched[entry.request] = start + len(next_uses)
        cached, pins, known, next_use = self._cached, self._pins, self._known, self._next_use
        blocks = self._sequence.chains[entry.request][start:end]
        asked = max(0, min(end, entry.ask) - start)
        lost = missed = leading = 0
        for block in blocks[:asked]:
            if not cached[block]:
                missed += 1
                lost += known[block]
            elif not missed:
                leading += 1
        came = 0
        for block, use in zip(blocks, next_uses, strict=True):
            if not cached[block]:
                cached[block] = 1
                came += 1
            pins[block] += 1
            next_use[block] = use
        self._space -= came
        tally = self.tally
        tally.asked += asked
        tally.computed += missed
        tally.regenerated += lost
        tally.by_request[entry.request] += lost
        if tally.hits[self._admission[entry.request]] == start:
            tally.hits[self._admission[entry.request]] += leading

    def _learn(self, entry: SequenceEntry) -> None:
        known = self._known
        for block in self._sequence.chains[entry.request][self._full[entry.request] : entry.full]:
            known[block] = 1
        self._full[entry.request] = entry.full

    def _unpin(self, blocks: array[int]) -> None:
        pins, next_use = self._pins, self._next_use
        start, use = 0, -1
        for index, block in enumerate(blocks):
            pins[block] -= 1
            here = -1 if pins[block] else next_use[block]
            if here != use:
                self._push(blocks, start, index, use)
                start, use = index, here
        self._push(blocks, start, len(blocks), use)

    def _push(self, blocks: array[int], start: int, end: int, next_use: int) -> None:
        if next_use >= 0 and end > start:
            self._pushes += 1
            heapq.heappush(self._runs, (-next_use, -end, self._pushes, blocks[start:end]))

    def _evict(self) -> None:
        cached, pins, next_use, runs = self._cached, self._pins, self._next_use, self._runs
        while self._space < 0 and runs:
            use, run = -runs[0][0], runs[0][3]
            while self._space < 0 and run:
                block = run.pop()
                if cached[block] and not pins[block] and next_use[block] == use:
                    cached[block] = 0
                    self._space += 1
            if not run:
                heapq.heappop(runs)
        self.tally.overflow = max(self.tally.overflow, -self._space)
