"""Computes the offline optimum (Bélády). No eviction order loses fewer blocks on a fixed access sequence.

**The problem** is a paging problem with pinned pages. Its input is the log of one recorded run: which request
held how many blocks, and when (``block_accesses``). The terms, in order:

- A *place* is a physical block of the pool. It stores one block of content, or nothing.
- The *chain* of a request is the list of its blocks, in the order of their tokens.
- A request *touches* each block of its chain once after its admission. It touches a block that its cache
  lookup covers when it first holds the block in the recorded run. It touches a later block when the block
  becomes full.
- A touched block is *pinned* until the request frees its blocks. A pinned block cannot be evicted.
- A touch is *chargeable* if the cache lookup covers the block, and some request computed the block before.
- A chargeable touch is *charged* if the block is not cached. It costs one recomputed block.
- All other touches are *free*: the first computation of a block loses nothing, and no cache saves the blocks
  that decode steps write.

An incomplete block has no id, but takes a place too. The log alone determines which touches are chargeable,
which blocks are pinned, and how many places remain for blocks with ids. An eviction order chooses only the
victims. The goal is the fewest charged touches.

**The rule.** The *next use* of a block is its next touch, if that touch is chargeable; otherwise it is
"never". To free a place, evict the unpinned block with the latest next use, where "never" is the latest of
all. On a tie, evict the block that is deepest in its chain.

The comments below prove two properties of the rule. It has the fewest charged touches of all orders. And it
evicts no block while a later block of its chain is cached, so hits are the longest cached prefix, as in an
engine. There is one exception: after a missing block, the optimum may use blocks that other requests have
computed since the request's admission. An engine cannot, since it looks up only at admission. The exception
makes the bound lower, so it stays a bound.

**The bound.** The optimum is a lower bound on ``regenerated_tokens`` of every order *on this log*. Reason: a
replay of an order (``eviction_replay``) has hits only at admission, and may hold duplicates of a block. So it
needs at least as many places. Its cached blocks solve the problem above, and its ``regenerated`` blocks
include the charged touches. The optimum does not bound a run in which a better order would have changed the
accesses. ``compare_eviction_orders`` gives each order's ratio to the optimum.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence

from .block_accesses import AccessLog, AccessSequence, BlockAccessKind, SequenceEntry, prepare_access_sequence
from .eviction_replay import EvictionReplayCounters, EvictionReplayResult, replay_evictions
from .replay_eviction_orders import OPTIMAL_ORDER, eviction_order_factory, eviction_order_names

_NEVER = 2**31 - 1
"""The next use "never": larger than the index of every entry, and fits an ``array('i')``."""


def replay_belady(log: AccessLog | AccessSequence) -> EvictionReplayResult:
    """Replay ``log`` with optimal evictions. The result has the fewest recomputed tokens of all orders.

    Takes O(B + (E + R) log R) for B touched blocks, E entries and R runs, about 1 µs per block. A run is
    consecutive blocks that are unpinned together and have the same next use. Raises ``AccessLogError``.
    """
    sequence = prepare_access_sequence(log)
    next_uses = _next_uses(sequence)
    eviction = _OptimalEviction(sequence)
    for index, entry in enumerate(sequence.entries):
        eviction.take_in(entry, next_uses[index])
        next_uses[index] = None  # not needed again
    return eviction.tally.result(OPTIMAL_ORDER, sequence.block_size)


def _touched_blocks(entry: SequenceEntry) -> int:
    """Number of blocks that the request has touched since its admission, up to and including ``entry``. They
    are the first blocks of its chain."""
    return max(min(entry.held, entry.ask), entry.full)


def _next_uses(sequence: AccessSequence) -> list[array[int] | None]:
    """Return one element for each entry: the next uses of the blocks that the entry touches, or ``None`` if
    it touches no block.

    The next use of a block is the index of the entry that touches the block next. It is ``_NEVER`` if no
    entry does, or if that touch is free.
    """
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


# Prefixes stay whole: the rule evicts no block while a later block of its chain is cached. Let block c follow
# block p in a chain. Let both be unpinned, and let c have a next use. The request of this use also looks up
# p, and touches p no later than c. So the next use of p is no later than that of c, and the rule evicts c
# first. On a tie, it evicts c first too, since c is deeper. A request that pins c also pins p. (If a request
# *writes* p before the next use of c, the rule may evict p early; p is back before the lookup of c.)
#
# Optimality: let A be any choice of victims that follows the rule up to some eviction. There the rule evicts
# x, and A evicts y. Let B evict x there, and otherwise act like A. Then the caches differ in one place: A has
# x, and B has b. At first b is y; later it may be another block or nothing. This stays so until one of these
# happens:
#
# - A evicts x: the caches are equal. If A did so for a charged touch of b, only A paid.
# - b is touched, and A evicts another block z for b, or has an empty place: A pays if the touch is charged,
#   and B does not. From now on b is z or nothing, and A still has x.
# - x is touched freely: B replaces b by x; b is not pinned, since A lacks it. The caches are equal, and
#   neither paid.
# - x is touched and charged: B pays one and replaces b by x; the caches are equal. If this is the first touch
#   of x, then y's next touch was chargeable too and came no later, by the choice of x, so A has already paid
#   for y. If x was touched freely in between, the caches were equal from then on.
#
# So B pays no more than A, and follows the rule one eviction longer. Repeat.
class _OptimalEviction:
    def __init__(self, sequence: AccessSequence) -> None:
        self.tally = EvictionReplayCounters(len(sequence.chains))
        self._sequence = sequence
        self._cached = bytearray(sequence.blocks)
        self._pins = [0] * sequence.blocks
        self._next_use = [_NEVER] * sequence.blocks
        """Next use of each block after its latest touch."""
        self._known = bytearray(sequence.blocks)
        self._touched = [0] * len(sequence.chains)
        self._full = [0] * len(sequence.chains)
        self._admission = [0] * len(sequence.chains)
        """Index in ``tally.hits`` of each request's latest admission."""
        self._untracked_blocks = [0] * len(sequence.chains)
        """Number of places that each request holds for incomplete blocks, which have no id."""
        self._space = sequence.pool_blocks
        """Number of free places; if negative, the number of places that eviction must free."""
        self._runs: list[tuple[int, int, int, array[int]]] = []
        """Heap of runs, each of consecutive blocks that were unpinned together: (-next use, -depth of the
        run's end, serial number, blocks). A run is valid for a block only while the block is cached, is
        unpinned and has this next use."""
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


def compare_eviction_orders(
    log: AccessLog | AccessSequence, orders: Sequence[str] | None = None
) -> dict[str, EvictionReplayResult]:
    """Replay ``log`` with each of ``orders``, or with all orders if ``orders`` is ``None``. Returns the
    results by name of the order, each with its ratio to the offline optimum. The optimum's own result is the
    first.

    Raises ``ValueError`` for an unknown order, before any replay. Raises ``AccessLogError`` for an
    inconsistent log.
    """
    wanted = dict.fromkeys(eviction_order_names() if orders is None else orders)
    wanted.pop(OPTIMAL_ORDER, None)
    factories = {name: eviction_order_factory(name) for name in wanted}
    sequence = prepare_access_sequence(log)
    optimum = replay_belady(sequence)
    results = {OPTIMAL_ORDER: _with_competitive_ratio(optimum, optimum)}
    for name, factory in factories.items():
        result = replay_evictions(sequence, factory(sequence.owners), name=name)
        results[name] = _with_competitive_ratio(result, optimum)
    return results


def competitive_ratio(regenerated_tokens: int, optimum_tokens: int) -> float | None:
    """Recomputed tokens of an order ÷ those of the offline optimum on the same log: SAGA's competitive ratio
    (§7; mechanism S10). 1 if both are 0; ``None`` if only ``optimum_tokens`` is 0."""
    if optimum_tokens == 0:
        return 1.0 if regenerated_tokens == 0 else None
    return regenerated_tokens / optimum_tokens


def _with_competitive_ratio(
    result: EvictionReplayResult, optimum: EvictionReplayResult
) -> EvictionReplayResult:
    result.over_belady = competitive_ratio(result.regenerated_tokens, optimum.regenerated_tokens)
    notes = []
    if result.over_belady is None:
        notes.append("no ratio: the offline optimum loses nothing")
    if result.given_back_tokens:
        notes.append(f"{result.given_back_tokens} reused tokens were freed again because memory was short")
    if result.overflow_blocks:
        notes.append(f"the sequence overflowed the pool by up to {result.overflow_blocks} blocks")
    result.note = "; ".join(notes)
    return result
