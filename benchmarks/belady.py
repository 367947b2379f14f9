"""The offline optimum (Bélády): no eviction order loses fewer blocks on a fixed sequence of accesses.

**The problem** is a paging problem with pinned pages. Its input is the log of one run: which request held how
many blocks, and when.

- A *place* is a physical block of the pool. It stores one block of content, or nothing.
- The *chain* of a request is the list of its blocks, in the order of their tokens.
- A request *touches* each block of its chain once after its admission: a block that its cache lookup covers
  when it first holds the block in the run, a later block when the block becomes full.
- A touched block is *pinned* until the request frees its blocks. A pinned block cannot be evicted.
- A touch is *charged* if the cache lookup covers the block, some request computed the block before, and it is
  not cached. It costs one recomputed block. All other touches are free: no cache saves the first computation.

An incomplete block has no id, but takes a place too. An eviction order chooses only the victims.

**The rule.** The *next use* of a block is its next touch, if the cache lookup covers that one and the block
is known; otherwise it is "never". To free a place, evict the unpinned block with the latest next use, where
"never" is the latest of all. On a tie, evict the block that is deepest in its chain.

Prefixes stay whole: let block c follow block p in a chain, both unpinned, and let c have a next use. The
request of this use also touches p, no later than c. So the rule evicts c first; on a tie too, since c is
deeper.

Optimality: let A be any choice of victims that follows the rule up to some eviction. There the rule evicts x,
and A evicts y. Let B evict x there, and otherwise act like A. Then the caches differ in one place: A has x,
and B has b (at first y), until A evicts x (the caches are equal), or b is touched (A pays if the touch is
charged, and B does not), or x is touched (B replaces b by x; if that was charged, A has already paid for y,
whose next use came no later). So B pays no more than A, and follows the rule one eviction longer. Repeat.

The optimum bounds every order *on this log*, not a run in which a better order would have changed the
accesses. ``prefix-lru`` stands for "LRU + Prefix" of SAGA's Table 2, which the paper does not describe
further: LRU by program, the last blocks of a chain first. Every request of a program counts as a use of all
its blocks.
"""

from __future__ import annotations

import heapq
from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from sojourn_server.simulator.simulation import Simulation

NEVER = 2**31 - 1
"""The next use "never": larger than the index of every entry, and fits an ``array('i')``."""


class Kind(IntEnum):
    """What happened to a request's blocks."""

    ADMIT = 0
    GROW = 1
    FREE = 2


class Access(NamedTuple):
    """One entry of a log. Blocks are counted after the access; for ``FREE``, before it."""

    kind: Kind
    request: int
    held: int
    """Blocks that the request holds, including incomplete ones."""
    full: int
    """Full blocks among them, which a cache may keep. Both never shrink while the request is admitted."""
    asked: int
    """Leading blocks of the chain that the cache lookup at admission covers."""


@dataclass
class AccessLog:
    """Accesses of one run. ``chains`` and ``owners`` have one element per request."""

    pool_blocks: int
    """Blocks of the KV pool, without vLLM's null block."""
    block_size: int
    chains: list[list[int]] = field(default_factory=list)
    """Ids of each request's full blocks. Equal ids mean equal content and equal preceding blocks."""
    owners: list[str] = field(default_factory=list)
    """Program of each request."""
    accesses: list[Access] = field(default_factory=list)


class AccessRecorder:
    """Records the accesses of the only engine of ``simulation``. Make it before the run; ``close`` ends
    it."""

    def __init__(self, simulation: Simulation) -> None:
        (self._replica,) = simulation.replicas
        options = self._replica.engine.options
        self.log = AccessLog(options.blocks - 1, options.block_size)
        self._size = options.block_size
        self._index: dict[str, int] = {}
        self._now: dict[int, Access] = {}
        """Latest access of each admitted request."""
        self._asked: dict[int, int] = {}
        self._reached: dict[int, int] = {}
        account: Any = self._replica.account
        step, finished = account.step, account.finished

        def recorded_step(planned: Any, requests: dict[str, Any], now: float) -> Any:
            result = step(planned, requests, now)
            self._step(planned, requests)
            return result

        def recorded_finish(request_id: str, now: float) -> Any:
            turn = finished(request_id, now)
            self._finished(turn.request)
            return turn

        account.step, account.finished = recorded_step, recorded_finish

    def _step(self, planned: Any, requests: dict[str, Any]) -> None:
        for request_id in sorted(planned.preempted_req_ids or ()):
            self._free(self._index[request_id])
        for request_id in planned.num_scheduled_tokens:
            request = requests[request_id]
            number = self._number(request)
            held = -(-request.num_computed_tokens // self._size)
            # vLLM caches a block when it schedules the block's last token. With asynchronous scheduling, a
            # token is unknown until its step has a result; unknown tokens do not count.
            full = min(request.num_computed_tokens, request.num_tokens) // self._size
            before = self._now.get(number)
            if before is not None:
                held, full = max(held, before.held), max(full, before.full)
            self._reached[number] = max(full, self._reached.get(number, 0))
            kind = Kind.ADMIT if before is None else Kind.GROW
            access = Access(kind, number, held, full, self._asked[number])
            if before is None or (before.held, before.full) != (held, full):
                self.log.accesses.append(access)
            self._now[number] = access

    def _free(self, number: int) -> None:
        _, _, held, full, asked = self._now.pop(number)
        self.log.accesses.append(Access(Kind.FREE, number, held, full, asked))
        # As in vLLM's ``get_computed_blocks``, the lookup of a resumed request also covers generated tokens.
        self._asked[number] = max(asked, full)

    def _finished(self, request: Any) -> None:
        number = self._number(request)
        if number in self._now:
            self._free(number)
        self.log.chains[number] = _block_ids(request, (request.num_tokens - 1) // self._size)
        del self._index[request.request_id]

    def _number(self, request: Any) -> int:
        number = self._index.get(request.request_id)
        if number is None:
            number = self._index[request.request_id] = len(self.log.chains)
            self.log.chains.append([])
            self.log.owners.append(request.request_id.rpartition("/")[0])
            self._asked[number] = (request.num_prompt_tokens - 1) // self._size
        return number

    def close(self) -> AccessLog:
        """Return the log. The chain of an unfinished request has its computed full blocks."""
        requests = self._replica.engine.scheduler.requests
        for request_id, number in self._index.items():
            if request := requests.get(request_id):
                known = max(self._reached.get(number, 0), self._asked[number])
                self.log.chains[number] = _block_ids(request, min(len(request.block_hashes), known))
        return self.log


def _block_ids(request: Any, count: int) -> list[int]:
    return [int.from_bytes(each, "little", signed=True) for each in request.block_hashes[:count]]


def recomputed_tokens(log: AccessLog, order: str) -> int:
    """Tokens that ``order`` (``belady``, ``lru`` or ``prefix-lru``) recomputes on ``log``.

    Takes about 1 µs per block: unpinned blocks are kept in runs of neighbours with equal keys."""
    return Replay(log, order).run() * log.block_size


def _touched(access: Access) -> int:
    """Number of leading blocks of its chain that a request has touched since its admission."""
    return max(min(access.held, access.asked), access.full)


class Replay:
    """One replay of a log. A run of blocks is valid for a block only while the block is cached, unpinned, and
    has not been unpinned again (``_stamp``)."""

    def __init__(self, log: AccessLog, order: str) -> None:
        self._order = order
        self._log = log
        ids: dict[int, int] = {}
        self._chains = [
            array("i", [ids.setdefault(block, len(ids)) for block in chain]) for chain in log.chains
        ]
        self._known = bytearray(len(ids))
        self._cached = bytearray(len(ids))
        self._pins = [0] * len(ids)
        self._stamp = [0] * len(ids)
        self._next_use = [NEVER] * len(ids)
        self._owners: list[tuple[str, ...]] = [()] * len(ids)
        self._last_turn: dict[str, int] = {}
        """Program → index of the access at which a request of it last freed its blocks."""
        self._done = [(0, 0, 0)] * len(self._chains)
        """(Touched blocks, full blocks, places of incomplete blocks) of each admitted request."""
        self._space = log.pool_blocks
        """Number of free places; if negative, the number of places that eviction must free."""
        self._runs: list[tuple[tuple[int, ...], int, int, array[int]]] = []
        """Heap of (key, -depth of the run's end, serial number, blocks)."""
        self._serial = 0
        self._lost = 0

    def run(self) -> int:
        """Return the number of charged touches."""
        next_uses = self._next_uses() if self._order == "belady" else None
        for index, access in enumerate(self._log.accesses):
            self._take_in(index, access, next_uses[index] if next_uses is not None else None)
        return self._lost

    def _take_in(self, index: int, access: Access, next_uses: array[int] | None) -> None:
        kind, request, held, full, asked = access
        chain = self._chains[request]
        start, full_before, incomplete = self._done[request] if kind != Kind.ADMIT else (0, 0, 0)
        end = _touched(access)
        for place in range(start, end):
            block = chain[place]
            if not self._cached[block]:
                self._cached[block] = 1
                self._space -= 1
                self._lost += place < asked and self._known[block]
            self._pins[block] += 1
            if next_uses is not None:
                self._next_use[block] = next_uses[place - start]
        for block in chain[full_before:full]:
            self._known[block] = 1
        left = 0 if kind == Kind.FREE else held - end
        self._space += incomplete - left
        self._done[request] = end, full, left
        if kind == Kind.FREE:
            self._unpin(index, chain[:end], self._log.owners[request])
        if self._space < 0:
            self._evict()

    def _unpin(self, index: int, blocks: array[int], owner: str) -> None:
        self._last_turn[owner] = index
        start, before = 0, None
        for place, block in enumerate(blocks):
            self._pins[block] -= 1
            if self._order == "prefix-lru" and owner not in self._owners[block]:
                self._owners[block] = (*self._owners[block], owner)
            key = None if self._pins[block] else self._key(block, index)
            if key != before:
                self._push(before, blocks[start:place], place)
                start, before = place, key
        self._push(before, blocks[start:], len(blocks))

    def _key(self, block: int, index: int) -> tuple[int, ...]:
        """Blocks with the smallest key are evicted first."""
        if self._order == "belady":
            return (-self._next_use[block],)
        if self._order == "lru":
            return (index,)
        owners = self._owners[block]
        return max(self._last_turn[owner] for owner in owners), len(owners)

    def _push(self, key: tuple[int, ...] | None, blocks: array[int], end: int) -> None:
        if key is None or not blocks:
            return
        self._serial += 1
        for block in blocks:
            self._stamp[block] = self._serial
        heapq.heappush(self._runs, (key, -end, self._serial, blocks))

    def _evict(self) -> None:
        runs = self._runs
        while self._space < 0 and runs:
            key, end, serial, blocks = heapq.heappop(runs)
            while self._space < 0 and blocks:
                block = blocks[-1]
                if not self._cached[block] or self._pins[block] or self._stamp[block] != serial:
                    blocks.pop()
                elif self._order == "prefix-lru" and (now := self._key(block, 0)) != key:
                    key = now  # its program has run since
                    break
                else:
                    blocks.pop()
                    self._cached[block] = 0
                    self._owners[block] = ()
                    self._space += 1
            if blocks:
                heapq.heappush(runs, (key, end, serial, blocks))

    def _next_uses(self) -> list[array[int] | None]:
        """For each access, the next uses of the blocks that it touches: the index of the access that touches
        the block next, or ``NEVER`` if none does or that touch is free."""
        accesses, chains = self._log.accesses, self._chains
        known = bytearray(len(self._known))
        done = [(0, 0)] * len(chains)
        charged_of: list[tuple[int, list[int]]] = []
        for access in accesses:
            start, full_before = done[access.request] if access.kind != Kind.ADMIT else (0, 0)
            end, chain = _touched(access), chains[access.request]
            charged_of.append((start, [p < access.asked and known[chain[p]] for p in range(start, end)]))
            for block in chain[full_before : access.full]:
                known[block] = 1
            done[access.request] = end, access.full
        upcoming = array("i", [NEVER]) * len(known)
        found: list[array[int] | None] = [None] * len(accesses)
        for index in range(len(accesses) - 1, -1, -1):
            start, charged = charged_of[index]
            blocks = chains[accesses[index].request][start : start + len(charged)]
            found[index] = array("i", [upcoming[block] for block in blocks])
            for block, counts in zip(blocks, charged, strict=True):
                upcoming[block] = index if counts else NEVER
        return found
