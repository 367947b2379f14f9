"""Which decode engine writes the answer (DualPath §6.1, DE scheduling; D5)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Protocol

from .pd_views import DecodeView, PdRequest

HIGH_TOKENS_RATIO = 1.05
"""An engine counts as high in tokens above so many times what each would have if all were spread evenly. The
paper's formula for its threshold is lost in the text that we have; this is our reading of it."""


class DecodeLoad(Protocol):
    """What the rules read of a decode engine: a ``DecodeView``, or what changes behind one."""

    @property
    def number(self) -> int: ...
    @property
    def free_kv_tokens(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def requests(self) -> int: ...
    @property
    def most_requests(self) -> float: ...


def group_for(loads: Iterable[tuple[int, int]]) -> int | None:
    """Phase 1, of (group, tokens), of groups that can run more: the one with the fewest, then the lowest
    number; ``None`` of none."""
    return min(loads, key=lambda load: (load[1], load[0]), default=(None, 0))[0]


def high_tokens(
    engines: Sequence[DecodeLoad], queue: Iterable[PdRequest], ratio: float = HIGH_TOKENS_RATIO
) -> float:
    """Z: ``ratio`` times an engine's even share of the group's tokens, those of R included.

    R are the requests from the head of the group's queue that would fit its free memory if that were in one
    piece, and no more than its engines can still run.
    """
    free = tokens = 0
    places: float = 0
    for engine in engines:
        free += engine.free_kv_tokens
        tokens += engine.tokens
        places += max(0, engine.most_requests - engine.requests)
    for request in queue:
        free -= request.kv_tokens
        places -= 1
        if free < 0 or places < 0:
            break
        tokens += request.tokens
    return ratio * tokens / len(engines)


def choose_decode(engines: Iterable[DecodeLoad], request: PdRequest, most_tokens: float) -> int | None:
    """Phase 2, for one request: an engine of the group; ``None``: none has the memory, or each has as many
    requests as it runs at once, and it waits.

    Of those with room for it: where it brings nobody above ``most_tokens``, the fewest requests, then fewest
    tokens; else the fewest tokens. Then the lowest number.
    """
    needs, adds = request.kv_tokens, request.tokens
    best: tuple[int, int, int] | None = None
    below = False
    fewest = 0
    for engine in engines:
        if engine.free_kv_tokens < needs or engine.requests >= engine.most_requests:
            continue
        if engine.tokens + adds <= most_tokens:
            requests = engine.requests
            if below and requests > fewest:  # most of them, and a thousand decisions a second are made
                continue
            mine = (requests, engine.tokens, engine.number)
            if not below or best is None or mine < best:
                best, below, fewest = mine, True, requests
        elif not below:
            mine = (engine.tokens, engine.requests, engine.number)
            if best is None or mine < best:
                best = mine
    return None if best is None else best[2]


class _Engine:
    """A ``DecodeView`` that changes."""

    __slots__ = (
        "free_kv_tokens", "group", "is_suspended", "kv_tokens", "most_requests", "node", "number", "requests",
        "tokens",
    )  # fmt: skip

    def __init__(self, number: int, node: int, group: _Group, kv_tokens: int) -> None:
        self.number = number
        self.node = node
        self.group = group
        self.kv_tokens = self.free_kv_tokens = kv_tokens
        self.tokens = self.requests = 0
        self.most_requests = math.inf
        self.is_suspended = False

    def view(self) -> DecodeView:
        return DecodeView(
            self.number, self.node, self.group.number, self.free_kv_tokens, self.tokens, self.requests,
            self.most_requests,
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class _Group:
    number: int
    engines: list[_Engine] = field(default_factory=list)
    tokens: int = 0
    """Of its engines and of its own queue: else all that come at once would go to one group."""
    queue: deque[PdRequest] = field(default_factory=deque)
    largest: int = 0
    """KV tokens of its largest engine."""
    requests: int = 0
    """Of its engines, without those of its own queue."""
    most_requests: float = 0
    """Of its engines together."""

    def key(self) -> tuple[bool, int, int]:
        """The least is the next to be chosen."""
        return self.requests + len(self.queue) >= self.most_requests, self.tokens, self.number

    def enter(self, engine: _Engine) -> None:
        """It may be chosen."""
        self.engines.append(engine)
        self.tokens += engine.tokens
        self.requests += engine.requests
        self.largest = max(self.largest, engine.kv_tokens)
        self.bound()

    def leave(self, engine: _Engine) -> None:
        """It may not be chosen any more."""
        self.engines.remove(engine)
        self.tokens -= engine.tokens
        self.requests -= engine.requests
        self.largest = max((left.kv_tokens for left in self.engines), default=0)
        self.bound()

    def bound(self) -> None:
        """Its engines run another number of requests at once."""
        self.most_requests = sum(engine.most_requests for engine in self.engines)


class DecodeEngines:
    """Both phases with the books behind them: a queue for each group, in the order of arrival.

    The groups lie in a heap by their tokens; entries that are no longer true are dropped when they come up.
    Inside a group all engines are looked at, as the paper has it. KV memory counts as taken from the choice
    on, though an engine takes it when decoding begins: so nobody is preempted.

    Of how many requests an engine runs at once the paper does not speak. Here that is a bound as memory is,
    from the choice on as well: who waits in an engine's own queue holds its buffers for KV meanwhile.
    A request joins no group that has as many as it runs, since another one may have room first.
    """

    def __init__(self, ratio: float = HIGH_TOKENS_RATIO) -> None:
        if not ratio > 0:
            raise ValueError(f"ratio is {ratio}; expected above 0")
        self._ratio = ratio
        self._engines: dict[int, _Engine] = {}
        self._given: set[int] = set()
        self._groups: dict[int, _Group] = {}
        self._heap: list[tuple[bool, int, int]] = []
        self._changed: dict[int, None] = {}
        """Groups whose queue or memory has changed since they were last asked."""

    def add(self, number: int, node: int, group: int, kv_tokens: int) -> None:
        """An empty engine. Raises ``ValueError`` for a number that was ever given, or less than a token."""
        if number in self._given:
            raise ValueError(f"decode engine {number} was there already; expected a new number")
        if kv_tokens < 1:
            raise ValueError(f"decode engine {number}: kv_tokens is {kv_tokens}; expected at least 1")
        self._given.add(number)
        place = self._groups.setdefault(group, _Group(group))
        engine = self._engines[number] = _Engine(number, node, place, kv_tokens)
        place.enter(engine)
        self._push(place)
        self._changed[group] = None

    def limit(self, number: int, most_requests: float) -> None:
        """The engine runs so many requests at once; ``inf``, as at first: not known. Those that are there
        stay. Raises ``ValueError`` for less than one, ``KeyError`` for an engine that is not there."""
        if not most_requests >= 1:
            raise ValueError(f"decode engine {number}: most_requests is {most_requests}; expected at least 1")
        engine = self._engines[number]
        if engine.most_requests == most_requests:
            return
        engine.most_requests = most_requests
        if not engine.is_suspended:
            engine.group.bound()
            self._push(engine.group)
            self._changed[engine.group.number] = None

    def remove(self, number: int) -> list[PdRequest]:
        """Nothing more goes to the engine. Returns who waited for its group and could not be served by
        what is left of it.

        Raises ``KeyError`` for one that is not there.
        """
        stranded = self.suspend(number)
        del self._engines[number]
        return stranded

    def suspend(self, number: int) -> list[PdRequest]:
        """As ``remove``, until ``resume``: what is there still counts. Nobody, where it is suspended already.

        Raises ``KeyError`` for one that is not there.
        """
        engine = self._engines[number]
        if engine.is_suspended:
            return []
        engine.is_suspended = True
        group = engine.group
        group.leave(engine)
        stranded = [request for request in group.queue if request.kv_tokens > group.largest]
        if not group.engines:
            stranded = list(group.queue)
            del self._groups[group.number]
            self._changed.pop(group.number, None)
            return stranded
        for request in stranded:
            group.queue.remove(request)
            group.tokens -= request.tokens
        self._push(group)
        return stranded

    def resume(self, number: int) -> None:
        """It may be chosen again, with what it has by now. Raises ``KeyError``."""
        engine = self._engines[number]
        if not engine.is_suspended:
            return
        engine.is_suspended = False
        group = engine.group = self._groups.setdefault(engine.group.number, _Group(engine.group.number))
        group.enter(engine)
        self._push(group)
        self._changed[group.number] = None

    def largest_kv_tokens(self) -> int:
        """The most that any engine could hold that may be chosen; 0 where there is none."""
        return max((group.largest for group in self._groups.values()), default=0)

    def queue(self, request: PdRequest) -> bool:
        """Phase 1: the request joins the queue of a group that could hold it. False: there is no group, or
        all that could hold it have as many requests as they run at once.

        Raises ``ValueError`` where none ever could: it would stay at a queue's head for ever.
        """
        heap, groups = self._heap, self._groups
        too_small = []
        chosen: _Group | None = None
        while heap and chosen is None:
            group = groups.get(heap[0][2])
            if group is None or group.key() != heap[0]:
                heappop(heap)
            elif heap[0][0]:
                break
            elif group.largest < request.kv_tokens:
                too_small.append(heappop(heap))
            else:
                chosen = group
        for entry in too_small:
            heappush(heap, entry)
        if chosen is None:
            if groups and request.kv_tokens > self.largest_kv_tokens():
                raise ValueError(
                    f"request {request.request_id!r} needs {request.kv_tokens:,} tokens of KV; expected at "
                    f"most {self.largest_kv_tokens():,}, what the largest decode engine holds"
                )
            return False
        chosen.queue.append(request)
        chosen.tokens += request.tokens
        self._push(chosen)
        self._changed[chosen.number] = None
        return True

    def has_room(self) -> bool:
        """Some group has fewer requests than it runs at once, those in its queue included."""
        heap = self._heap
        while heap:
            group = self._groups.get(heap[0][2])
            if group is not None and group.key() == heap[0]:
                return not heap[0][0]
            heappop(heap)
        return False

    def fetch(self) -> Iterator[tuple[PdRequest, int]]:
        """Phase 2 for each group where anything has changed: requests with their engines, in each queue's
        order. What is not taken from the iterator is still queued."""
        while self._changed:
            number = next(iter(self._changed))
            group = self._groups[number]
            if group.queue:
                most = high_tokens(group.engines, group.queue, self._ratio)
            while group.queue:
                request = group.queue[0]
                chosen = choose_decode(group.engines, request, most)
                if chosen is None:
                    break
                group.queue.popleft()
                engine = self._engines[chosen]
                engine.free_kv_tokens -= request.kv_tokens
                engine.tokens += request.tokens
                engine.requests += 1
                group.requests += 1
                yield request, chosen
            self._changed.pop(number, None)

    def finish(self, number: int, request: PdRequest) -> None:
        """A request has ended, or was given up. An engine that was removed is nobody's concern any more."""
        engine = self._engines.get(number)
        if engine is None:
            return
        engine.free_kv_tokens += request.kv_tokens
        engine.tokens -= request.tokens
        engine.requests -= 1
        if engine.is_suspended:
            return
        group = engine.group
        group.tokens -= request.tokens
        group.requests -= 1
        self._push(group)
        if group.queue:
            self._changed[group.number] = None

    def withdraw(self, request_id: int | str) -> bool:
        """Take a request that waits out of its queue; False: it waits nowhere."""
        for group in self._groups.values():
            for request in group.queue:
                if request.request_id == request_id:
                    group.queue.remove(request)
                    group.tokens -= request.tokens
                    self._push(group)
                    self._changed[group.number] = None
                    return True
        return False

    def node_of(self, number: int) -> int:
        """Raises ``KeyError`` for an engine that is not there."""
        return self._engines[number].node

    def views(self) -> list[DecodeView]:
        """All engines that may be chosen, as they stand."""
        return [engine.view() for engine in self._engines.values() if not engine.is_suspended]

    def waiting(self, group: int) -> int:
        """Requests in the group's queue."""
        return len(self._groups[group].queue)

    def _push(self, group: _Group) -> None:
        heappush(self._heap, group.key())
        if len(self._heap) > 64 + 8 * len(self._groups):
            # What nobody came across is dropped together.
            self._heap = [g.key() for g in self._groups.values()]
            heapify(self._heap)
