"""Eviction orders for replays: LRU as in vLLM, and two orders that group blocks by program.

A *place* is a physical block of the simulated pool, given by its number from 0. A *free* place is held by no
request. The block cached there can be reused or evicted. The *owners* of a block are the programs whose
requests have used it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from sojourn_server.policies.custom_policies import did_you_mean
from sojourn_server.policies.eviction.eviction_policies import LatestProgramEviction
from sojourn_server.policies.policy_views import EvictionCandidateView


class FreeRunQueue:
    """FIFO of free places, stored in runs. A run is a list of places that were added together.

    To remove a place from the middle, delete it from the dict ``run_of``. Its entry in the run is then stale,
    and ``pop`` skips the entry. Operations take O(1) per place, a third of the time of an ``OrderedDict``.
    """

    __slots__ = ("_run_of", "_runs")

    def __init__(self, run_of: dict[int, int]) -> None:
        """``run_of``: free place → number of the run that has its valid entry. Entries of the place in other
        runs are stale. Several queues may share ``run_of`` if no place is in two of the queues."""
        self._run_of = run_of
        self._runs: deque[tuple[int, list[int]]] = deque()
        """The runs, oldest first: (number of the run, remaining places of the run in reverse order)."""

    def append(self, places: Sequence[int], number: int) -> None:
        """Add a run of places; ``number`` must be new to ``run_of``."""
        if places:
            self._run_of.update(dict.fromkeys(places, number))
            self._runs.append((number, list(reversed(places))))

    def pop(self, count: int) -> list[int]:
        """Remove and return the next ``count`` places, or all if there are fewer."""
        runs, run_of = self._runs, self._run_of
        given: list[int] = []
        while count and runs:
            number, run = runs[0]
            while count and run:
                place = run.pop()
                if run_of.get(place) == number:
                    del run_of[place]
                    given.append(place)
                    count -= 1
            if not run:
                runs.popleft()
        return given

    def __bool__(self) -> bool:
        """Whether any entry is left, stale entries included."""
        return bool(self._runs)


class LruEvictionOrder:
    """LRU: evicts the block that has been free longest; among blocks of one request, the last one first.

    This is the order of vLLM: ``BlockPool.free_blocks`` appends a request's blocks, last block first, to a
    queue. Allocation takes blocks from the front; ``touch`` removes them from the middle.
    """

    def __init__(self, owners: list[str] | None = None) -> None:
        """``owners`` has no effect. It makes the class an ``EvictionOrderFactory``."""
        self._run_of: dict[int, int] = {}
        self._queue = FreeRunQueue(self._run_of)
        self._frees = 0

    def freed(self, blocks: Sequence[int], owner: int, now: int) -> None:
        self._frees += 1
        self._queue.append(blocks, self._frees)

    def reused(self, blocks: Sequence[int]) -> None:
        run_of = self._run_of
        for block in blocks:
            del run_of[block]

    def pop_victims(self, count: int) -> list[int]:
        return self._queue.pop(count)

    def owner_ended(self, owner: int) -> None:
        pass


EvictionScore = tuple[float, ...]

MAX_OWNERS = 16
"""Maximum number of owners that are stored for a block, as in the engine's free block queue. Blocks with more
owners are evicted last."""

_EVICTED_LAST: EvictionScore = (float("inf"),)
_TOO_MANY_OWNERS = -1
_NO_GROUP = -2


def prefix_lru(owners: list[str]) -> ProgramEvictionOrder:
    """LRU by program, last blocks of a chain first. It stands for "LRU + Prefix" in SAGA's Table 2. The paper
    does not describe that order further.

    Every request of a program counts as a use of all blocks of the program. A block of several programs is
    used when any of them is used. vLLM's LRU differs only for abandoned branches: blocks that the program's
    later requests no longer contain. In vLLM's LRU, these requests do not count as uses of such blocks.
    In replays, vLLM's LRU recomputes at most as many tokens as this order, with few exceptions.
    """
    return ProgramEvictionOrder(owners, lambda view: (view.last_turn_s,), shared_last=False)


def latest_program(owners: list[str]) -> ProgramEvictionOrder:
    """The policy ``latest-program``. Blocks of ended programs are evicted first, then those of the latest
    program. Blocks shared by running programs are evicted last."""
    return ProgramEvictionOrder(owners, LatestProgramEviction().score_inputs, shared_last=True)


class ProgramEvictionOrder:
    """Evicts groups of blocks, the group with the lowest score first. A policy gives scores to programs.

    A group holds all free blocks with the same owners: one program, or several that share the blocks. Within
    a group the order is LRU, with the last blocks of a chain first. All owners of a block also own the blocks
    before it in the chain. So no block is evicted before a later block of its chain.

    Without ``shared_last``, the score of a group is the highest score of its owners. With ``shared_last``:

    - Groups of two or more running programs are evicted after all other groups, the fewest owners first.
    - A group with one running owner has the score of this owner.
    - A group without a running owner has the highest score of its owners.

    A log has no times. So a program's ``last_turn_s`` is the index of a log entry: the one in which the
    program's latest request freed its blocks. After its last entry in the log, a program counts as ended,
    even if the end of the run cut it off. The owner "" stands for no program. Its blocks count as those of an
    ended program.

    Takes O(1) per block. A program's change of score takes O(groups of the program · log groups).
    """

    def __init__(
        self, owners: list[str], score: Callable[[EvictionCandidateView], EvictionScore], *, shared_last: bool
    ) -> None:
        self._score = score
        self._shared_last = shared_last
        self._over = [owner == "" for owner in owners]
        self._last_turn = [0] * len(owners)
        self._members: list[tuple[int, ...]] = []
        """Owners of each group, sorted."""
        self._with: dict[tuple[int, int], int] = {}
        """(group, program) → the group whose owners are those of the first group and the program."""
        self._groups_of: list[list[int]] = [[] for _ in owners]
        self._group_at: list[int] = []
        """Group of the block at each place: ``_NO_GROUP`` without owners, ``_TOO_MANY_OWNERS`` with more than
        ``MAX_OWNERS``."""
        self._run_of: dict[int, int] = {}
        self._free: dict[int, FreeRunQueue] = {}
        """Free places of each group."""
        self._frees = 0
        self._key: dict[int, tuple[EvictionScore, int, int]] = {}
        """Valid heap entry of each group with free places."""
        self._heap: list[tuple[tuple[EvictionScore, int, int], int]] = []

    def freed(self, blocks: Sequence[int], owner: int, now: int) -> None:
        self._last_turn[owner] = now
        group_at = self._group_at
        if blocks and max(blocks) >= len(group_at):
            group_at.extend([_NO_GROUP] * (max(blocks) + 1 - len(group_at)))
        runs: dict[int, list[int]] = {}
        before, group, run = None, _NO_GROUP, []
        for block in blocks:
            if group_at[block] != before:
                before = group_at[block]
                group = self._group_with(before, owner)
                run = runs.setdefault(group, [])
            group_at[block] = group
            run.append(block)
        for group, run in runs.items():
            self._frees += 1
            if group not in self._free:
                self._free[group] = FreeRunQueue(self._run_of)
            self._free[group].append(run, self._frees)
            self._rank(group)
        for group in self._groups_of[owner]:
            if group not in runs:
                self._rank(group)

    def reused(self, blocks: Sequence[int]) -> None:
        run_of = self._run_of
        for block in blocks:
            del run_of[block]

    def pop_victims(self, count: int) -> list[int]:
        given: list[int] = []
        while len(given) < count and self._heap:
            key, group = self._heap[0]
            counts = self._key.get(group) == key
            if counts and self._free[group]:
                given += self._free[group].pop(count - len(given))
                continue
            heapq.heappop(self._heap)
            if counts:
                del self._key[group]
        for block in given:
            self._group_at[block] = _NO_GROUP
        return given

    def owner_ended(self, owner: int) -> None:
        self._over[owner] = True
        for group in self._groups_of[owner]:
            self._rank(group)

    def _group_with(self, group: int, owner: int) -> int:
        """Return the group with the owners of ``group`` plus ``owner``. Creates the group if it is
        missing."""
        found = self._with.get((group, owner))
        if found is None:
            found = self._with[group, owner] = self._new_group(group, owner)
        return found

    def _new_group(self, group: int, owner: int) -> int:
        if group == _TOO_MANY_OWNERS:
            return _TOO_MANY_OWNERS
        before = () if group == _NO_GROUP else self._members[group]
        if owner in before:
            return group
        if len(before) == MAX_OWNERS:
            return _TOO_MANY_OWNERS
        members = tuple(sorted((*before, owner)))
        known = [other for other in self._groups_of[owner] if self._members[other] == members]
        if known:
            return known[0]
        self._members.append(members)
        for member in members:
            self._groups_of[member].append(len(self._members) - 1)
        return len(self._members) - 1

    def _rank(self, group: int) -> None:
        if not self._free.get(group):
            return
        size = len(self._members[group]) if group != _TOO_MANY_OWNERS else MAX_OWNERS + 1
        # At equal scores, groups with fewer owners go first: they have the later blocks of chains.
        key = (self._score_of(group), size, group)
        if self._key.get(group) != key:
            self._key[group] = key
            heapq.heappush(self._heap, (key, group))

    def _score_of(self, group: int) -> EvictionScore:
        if group == _TOO_MANY_OWNERS:
            return _EVICTED_LAST
        members = self._members[group]
        living = [member for member in members if not self._over[member]] or list(members)
        if self._shared_last and len(living) > 1 and not self._over[living[0]]:
            return _EVICTED_LAST
        return max(
            self._score(
                EvictionCandidateView(
                    program_rank=member, over=self._over[member], last_turn_s=float(self._last_turn[member])
                )
            )
            for member in (living if self._shared_last else members)
        )


class ReplayEvictionOrder(Protocol):
    """Order in which free cached blocks are evicted. Blocks are given by their places in the pool.

    ``freed`` adds a block that no request holds any more. The block stays in the order until a request reuses
    it (``reused``) or the order evicts it (``pop_victims``). An order knows only past accesses.
    """

    def freed(self, blocks: Sequence[int], owner: int, now: int) -> None:
        """Add blocks that no request holds any more, last blocks of a chain first. ``owner`` is the index of
        the program whose request freed them, ``now`` the index of the log entry."""
        ...

    def reused(self, blocks: Sequence[int]) -> None:
        """Remove blocks that an admitted request has found."""
        ...

    def pop_victims(self, count: int) -> list[int]:
        """Remove and return ``count`` blocks to evict, or all if there are fewer."""
        ...

    def owner_ended(self, owner: int) -> None:
        """Record that the program with index ``owner`` has ended."""
        ...


EvictionOrderFactory = Callable[[list[str]], ReplayEvictionOrder]
"""Function that builds an eviction order for a log. The argument lists the log's programs in order of first
admission."""

_FACTORIES: dict[str, EvictionOrderFactory] = {
    "lru": LruEvictionOrder,
    "prefix-lru": prefix_lru,
    "latest-program": latest_program,
}

OPTIMAL_ORDER = "belady"
"""Name of the offline optimum. It is not an eviction order, since it knows future accesses."""


def eviction_order_names() -> list[str]:
    return list(_FACTORIES)


def eviction_order_factory(name: str) -> EvictionOrderFactory:
    """The factory of the eviction order ``name``. For an unknown name, raises ``ValueError`` with the nearest
    known name."""
    factory = _FACTORIES.get(name)
    if factory is None:
        hint = did_you_mean(name, _FACTORIES)
        raise ValueError(f"unknown eviction order {name!r}; expected one of {', '.join(_FACTORIES)}{hint}")
    return factory
