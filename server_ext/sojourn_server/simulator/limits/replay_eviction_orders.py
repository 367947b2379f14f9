"""Eviction orders for replays: vLLM's own, and two that group blocks by program."""

from __future__ import annotations

import difflib
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from sojourn_server.policies.eviction.eviction_policies import LatestProgramEviction
from sojourn_server.policies.policy_views import EvictionCandidateView


class FreeRunQueue:
    """Places, first in first out. What is taken out of the middle stays in its run, unseen, until its turn.

    O(1) a place. A third of the time of an ``OrderedDict``, which has a node for each.
    """

    __slots__ = ("_run_of", "_runs")

    def __init__(self, run_of: dict[int, int]) -> None:
        """``run_of`` may be shared by several queues, if a place is in one of them only."""
        self._run_of = run_of
        """Of each free place the run that holds it; other runs have it from earlier."""
        self._runs: deque[tuple[int, list[int]]] = deque()
        """(number, places not yet given, the next one last)."""

    def append(self, places: Sequence[int], number: int) -> None:
        """``number`` must be new to ``run_of``."""
        if places:
            self._run_of.update(dict.fromkeys(places, number))
            self._runs.append((number, list(reversed(places))))

    def pop(self, count: int) -> list[int]:
        """The next ``count`` places, or all there are."""
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
        """False: surely empty."""
        return bool(self._runs)


class LruEvictionOrder:
    """The block that has been free for longest goes first; of one request the tail before the head.

    ``BlockPool.free_blocks`` appends blocks, tails first, to a queue which is
    reused from its front, and ``touch`` takes them out of it.
    """

    def __init__(self, owners: list[str] | None = None) -> None:
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

    def victims(self, count: int) -> list[int]:
        return self._queue.pop(count)

    def over(self, owner: int) -> None:
        pass


EvictionScore = tuple[float, ...]

MAX_OWNERS = 16
"""Owners of a block that are known by name, as in the engine's queue; a block of more goes last."""

_EVICTED_LAST: EvictionScore = (float("inf"),)
_TOO_MANY_OWNERS = -1
_NO_GROUP = -2


def prefix_lru(owners: list[str]) -> ProgramEvictionOrder:
    """LRU over programs' prefixes, leaf first: SAGA's "LRU + Prefix" (Table 2; it says no more of it).

    All that a program has cached is as recent as its last request, and what
    several share as recent as the latest of them. vLLM's own order lets a
    program's abandoned branches age by themselves, and so does as well or
    better: the two differ only there.
    """
    return ProgramEvictionOrder(owners, lambda view: (view.last_turn_s,), shared_last=False)


def latest_program(owners: list[str]) -> ProgramEvictionOrder:
    """The policy ``latest-program``: what living programs share goes last, of no living one first."""
    return ProgramEvictionOrder(owners, LatestProgramEviction().standing, shared_last=True)


class ProgramEvictionOrder:
    """Groups ordered by a policy's score of their owners.

    ``shared_last``: groups of two or more programs that are not over go after
    all others, those with the fewest owners first; else a group is worth what
    its highest-scored owner is.

    A program's ``last_turn_s`` is the number of the entry at which its last
    request was freed: a log has no times. A program is over with its last entry
    in the log, as its ``program_end`` would say; so are those that the end of the
    run cut off, when nothing more is asked of them. The owner "" is no program:
    its blocks are taken for those of one that is over.

    O(1) a block, O(groups of a program · log groups) when its score changes.
    """

    def __init__(
        self, owners: list[str], score: Callable[[EvictionCandidateView], EvictionScore], *, shared_last: bool
    ) -> None:
        self._score = score
        self._shared_last = shared_last
        self._over = [owner == "" for owner in owners]
        self._last_turn = [0] * len(owners)
        self._members: list[tuple[int, ...]] = []
        """Of each group its owners, sorted."""
        self._with: dict[tuple[int, int], int] = {}
        """(group, program) → the group with it."""
        self._groups_of: list[list[int]] = [[] for _ in owners]
        self._group_at: list[int] = []
        """Of each place the group of the block in it; ``_TOO_MANY_OWNERS``: owners too many to name."""
        self._run_of: dict[int, int] = {}
        self._free: dict[int, FreeRunQueue] = {}
        """Of each group its free places."""
        self._frees = 0
        self._key: dict[int, tuple[EvictionScore, int, int]] = {}
        """Of each group with free places the one entry of the heap that counts."""
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

    def victims(self, count: int) -> list[int]:
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

    def over(self, owner: int) -> None:
        self._over[owner] = True
        for group in self._groups_of[owner]:
            self._rank(group)

    def _group_with(self, group: int, owner: int) -> int:
        """The group of a block of ``group`` that ``owner`` uses too."""
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
        # Of the same score, a child's group before its parent's, which has more owners.
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
    """In what order free cached blocks are reused. Blocks are places in the pool, 0, 1, ….

    A block is handed over when nobody holds it any more (``freed``) and is the
    order's until somebody finds it (``reused``) or the order gives it up
    (``victims``). Orders see the past only.
    """

    def freed(self, blocks: Sequence[int], owner: int, now: int) -> None:
        """Nobody holds these any more; tails come before heads. ``now`` is the entry's number in the log."""
        ...

    def reused(self, blocks: Sequence[int]) -> None:
        """These were found by a request that was admitted: they are no longer free."""
        ...

    def victims(self, count: int) -> list[int]:
        """Give up ``count`` blocks, or all there are if these are fewer."""
        ...

    def over(self, owner: int) -> None:
        """The program has ended."""
        ...


EvictionOrderFactory = Callable[[list[str]], ReplayEvictionOrder]
"""Builds an order for the programs of a log, by rank of arrival."""

_FACTORIES: dict[str, EvictionOrderFactory] = {
    "lru": LruEvictionOrder,
    "prefix-lru": prefix_lru,
    "latest-program": latest_program,
}

OPTIMAL_ORDER = "belady"
"""Not an order: it decides from the future."""


def eviction_order_names() -> list[str]:
    return list(_FACTORIES)


def eviction_order_factory(name: str) -> EvictionOrderFactory:
    """The factory of a named order. Raises ``ValueError`` with the nearest name for an unknown one."""
    factory = _FACTORIES.get(name)
    if factory is None:
        near = difflib.get_close_matches(name, _FACTORIES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown eviction order {name!r}; expected one of {', '.join(_FACTORIES)}{hint}")
    return factory
