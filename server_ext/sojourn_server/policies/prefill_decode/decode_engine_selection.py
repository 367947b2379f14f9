"""Selection of the decode engine that writes a request's answer (DualPath §6.1; mechanism D5).

Phase 1 chooses a group of engines for a request, phase 2 an engine of the group.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from .prefill_decode_views import PdRequest

HIGH_TOKENS_RATIO = 1.05
"""An engine's token count is high if it exceeds this multiple of the group's mean tokens per engine (see
``high_token_threshold``). The rule is our reading of the paper, whose formula is illegible in our copy."""


@dataclass(slots=True)
class DecodeEngine:
    """A decode engine and its assigned requests that have not ended."""

    number: int
    node: int
    group: int
    """Number of the engine's group. The engines of a group share a queue. All engines of a node are in one
    group."""
    kv_tokens: int
    """KV memory in tokens."""
    free_kv_tokens: int
    """Free KV memory in tokens. A request's memory counts as used from its assignment on."""
    tokens: int = 0
    """Prompt tokens of the assigned requests."""
    requests: int = 0
    """Number of the assigned requests."""
    most_requests: float = math.inf
    """Request limit; ``inf``: unknown."""
    is_suspended: bool = False


def high_token_threshold(
    engines: Sequence[DecodeEngine], queue: Iterable[PdRequest], ratio: float = HIGH_TOKENS_RATIO
) -> float:
    """Return Z, the threshold above which an engine's token count is high.

    Z is ``ratio`` times the group's tokens divided by its number of engines. The group's tokens include those
    of the first requests in ``queue``: as many as fit into the free request slots and the free memory of all
    engines.
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


def choose_decode(engines: Iterable[DecodeEngine], request: PdRequest, most_tokens: float) -> int | None:
    """Return the number of the engine for a request (phase 2). ``None``: no engine has both enough free
    memory and a free request slot.

    Only engines with enough free memory and a free slot are compared. If some of them would have at most
    ``most_tokens`` tokens with the request, the engine with the fewest requests among these is chosen. Ties
    go to the fewest tokens, then to the lowest number.

    If all would have more, the engine with the fewest tokens is chosen. Ties go to the fewest requests, then
    to the lowest number.
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
            if below and requests > fewest:  # the common case; there are a thousand decisions per second
                continue
            mine = (requests, engine.tokens, engine.number)
            if not below or best is None or mine < best:
                best, below, fewest = mine, True, requests
        elif not below:
            mine = (engine.tokens, engine.requests, engine.number)
            if best is None or mine < best:
                best = mine
    return None if best is None else best[2]


@dataclass(slots=True, eq=False)
class _DecodeGroup:
    """Available decode engines that share one queue."""

    number: int
    engines: list[DecodeEngine] = field(default_factory=list)
    tokens: int = 0
    """Tokens of the requests on the group's engines and in its queue. If the queue did not count, all
    requests of a burst would go to one group."""
    queue: deque[PdRequest] = field(default_factory=deque)
    largest: int = 0
    """KV capacity in tokens of the group's largest engine."""
    requests: int = 0
    """Number of requests on the group's engines. The queue's requests are not counted."""
    most_requests: float = 0
    """Sum of the request limits of the group's engines."""

    def key(self) -> tuple[bool, int, int]:
        """Return the group's sort key for phase 1: (is at its request limit, tokens, number). The group with
        the lowest key is chosen.

        The queue's requests count towards the request limit."""
        return self.requests + len(self.queue) >= self.most_requests, self.tokens, self.number

    def enter(self, engine: DecodeEngine) -> None:
        """Add an engine that became available, and count its load as the group's."""
        self.engines.append(engine)
        self.tokens += engine.tokens
        self.requests += engine.requests
        self.largest = max(self.largest, engine.kv_tokens)
        self.update_request_limit()

    def leave(self, engine: DecodeEngine) -> None:
        """Remove an engine that became unavailable, and subtract its load from the group's."""
        self.engines.remove(engine)
        self.tokens -= engine.tokens
        self.requests -= engine.requests
        self.largest = max((left.kv_tokens for left in self.engines), default=0)
        self.update_request_limit()

    def update_request_limit(self) -> None:
        """Compute the group's request limit ``most_requests`` again, from its engines."""
        self.most_requests = sum(engine.most_requests for engine in self.engines)


class DecodeEngineSelector:
    """Chooses a decode engine for each request, in two phases, and keeps a queue for each group.

    Phase 1 chooses a group and adds the request to its queue (``enqueue``). Phase 2 chooses an engine of the
    group (``assign_queued``). A heap orders the groups by tokens. Outdated entries of the heap are dropped
    when they reach the top. Within a group, all engines are compared, as in the paper. A request's KV memory
    counts as used as soon as its engine is chosen. The engine allocates the memory later, when decoding
    begins. The early count prevents preemptions.

    The paper has no limit on an engine's requests. Here a request counts towards the limit as soon as its
    engine is chosen, because a request in an engine's own queue holds KV buffers. A request is not queued in
    a group at its limit, since another group may have a free slot first.
    """

    def __init__(self, ratio: float = HIGH_TOKENS_RATIO) -> None:
        if not ratio > 0:
            raise ValueError(f"ratio is {ratio}; expected above 0")
        self._ratio = ratio
        self._engines: dict[int, DecodeEngine] = {}
        self._given: set[int] = set()
        self._groups: dict[int, _DecodeGroup] = {}
        self._heap: list[tuple[bool, int, int]] = []
        self._changed: dict[int, None] = {}
        """Groups whose queue or memory has changed since the last ``assign_queued``."""

    def add(self, number: int, node: int, group: int, kv_tokens: int) -> None:
        """Add an engine without requests and with KV memory for ``kv_tokens`` tokens.

        Raises ``ValueError`` for a number used before, or ``kv_tokens`` below 1."""
        if number in self._given:
            raise ValueError(f"decode engine {number} was used before; expected a new number")
        if kv_tokens < 1:
            raise ValueError(f"decode engine {number}: kv_tokens is {kv_tokens}; expected at least 1")
        self._given.add(number)
        engine = self._engines[number] = DecodeEngine(number, node, group, kv_tokens, kv_tokens)
        self._enter(engine)

    def _enter(self, engine: DecodeEngine) -> None:
        """Make an engine available in its group. The group is created if it does not exist."""
        group = self._groups.setdefault(engine.group, _DecodeGroup(engine.group))
        group.enter(engine)
        self._push(group)
        self._changed[group.number] = None

    def set_request_limit(self, number: int, most_requests: float) -> None:
        """Set an engine's request limit. ``inf``, the initial value, means unknown.

        Requests that are on the engine stay there, even above the limit. Raises ``ValueError`` for a limit
        below 1, and ``KeyError`` for an unknown engine."""
        if not most_requests >= 1:
            raise ValueError(f"decode engine {number}: most_requests is {most_requests}; expected at least 1")
        engine = self._engines[number]
        if engine.most_requests == most_requests:
            return
        engine.most_requests = most_requests
        if not engine.is_suspended:
            group = self._groups[engine.group]
            group.update_request_limit()
            self._push(group)
            self._changed[group.number] = None

    def remove(self, number: int) -> list[PdRequest]:
        """Remove an engine. Returns the requests that leave the group's queue, because no remaining engine of
        the group is large enough for them. Raises ``KeyError`` for an unknown engine."""
        unqueued = self.suspend(number)
        del self._engines[number]
        return unqueued

    def suspend(self, number: int) -> list[PdRequest]:
        """Make an engine unavailable until ``resume``. The requests on the engine still count as its load.

        Returns the requests that leave the group's queue, because no available engine of the group is large
        enough for them. No effect on a suspended engine. Raises ``KeyError`` for an unknown engine.
        """
        engine = self._engines[number]
        if engine.is_suspended:
            return []
        engine.is_suspended = True
        group = self._groups[engine.group]
        group.leave(engine)
        unqueued = [request for request in group.queue if request.kv_tokens > group.largest]
        if not group.engines:
            unqueued = list(group.queue)
            del self._groups[group.number]
            self._changed.pop(group.number, None)
            return unqueued
        for request in unqueued:
            group.queue.remove(request)
            group.tokens -= request.tokens
        self._push(group)
        return unqueued

    def resume(self, number: int) -> None:
        """Make a suspended engine available again, with the requests that it still has. No effect on an
        available engine. Raises ``KeyError`` for an unknown engine."""
        engine = self._engines[number]
        if engine.is_suspended:
            engine.is_suspended = False
            self._enter(engine)

    def largest_kv_tokens(self) -> int:
        """Return the KV capacity, in tokens, of the largest available engine; 0 without available engines."""
        return max((group.largest for group in self._groups.values()), default=0)

    def enqueue(self, request: PdRequest) -> bool:
        """Add a request to a group's queue (phase 1). Of the groups that are below their request limit and
        have a large enough engine, the group with the fewest tokens is chosen. Returns whether there is such
        a group.

        Raises ``ValueError`` if all available engines are too small, because the request would block the
        queue for ever.
        """
        heap, groups = self._heap, self._groups
        too_small = []
        chosen: _DecodeGroup | None = None
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
                    f"most {self.largest_kv_tokens():,}, the capacity of the largest decode engine"
                )
            return False
        chosen.queue.append(request)
        chosen.tokens += request.tokens
        self._push(chosen)
        self._changed[chosen.number] = None
        return True

    def has_room(self) -> bool:
        """Return whether any group is below its request limit and can queue another request."""
        heap = self._heap
        while heap:
            group = self._groups.get(heap[0][2])
            if group is not None and group.key() == heap[0]:
                return not heap[0][0]
            heappop(heap)
        return False

    def assign_queued(self) -> Iterator[tuple[PdRequest, int]]:
        """Assign queued requests to engines (phase 2), and yield each as (request, engine number).

        Only groups whose queue or memory has changed are examined. The requests of a group come in the order
        of its queue. A request is assigned when the caller takes it from the iterator. Requests that are not
        taken stay queued.
        """
        while self._changed:
            number = next(iter(self._changed))
            group = self._groups[number]
            if group.queue:
                most = high_token_threshold(group.engines, group.queue, self._ratio)
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
        """Free the KV memory and the slot that an ended or cancelled request holds on engine ``number``. No
        effect if the engine was removed."""
        engine = self._engines.get(number)
        if engine is None:
            return
        engine.free_kv_tokens += request.kv_tokens
        engine.tokens -= request.tokens
        engine.requests -= 1
        if engine.is_suspended:
            return
        group = self._groups[engine.group]
        group.tokens -= request.tokens
        group.requests -= 1
        self._push(group)
        if group.queue:
            self._changed[group.number] = None

    def withdraw(self, request_id: int | str) -> bool:
        """Remove a waiting request from its group's queue. Returns whether the request was in a queue."""
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
        """Return the number of the engine's node. Raises ``KeyError`` for an unknown engine."""
        return self._engines[number].node

    def available(self) -> list[DecodeEngine]:
        """Return all engines that are not suspended."""
        return [engine for engine in self._engines.values() if not engine.is_suspended]

    def _push(self, group: _DecodeGroup) -> None:
        """Push a group onto the heap with its present key. Earlier entries of the group become outdated."""
        heappush(self._heap, group.key())
        if len(self._heap) > 64 + 8 * len(self._groups):
            # Drop all outdated entries together.
            self._heap = [g.key() for g in self._groups.values()]
            heapify(self._heap)
