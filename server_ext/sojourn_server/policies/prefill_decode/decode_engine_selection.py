"""Selection of the decode engine that writes a request's answer (DualPath §6.1; mechanism D5).

Phase 1 chooses a group of engines for a request, phase 2 an engine of the group.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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

    If some of these engines would have at most ``most_tokens`` tokens with the request, the one with the
    fewest requests is chosen. Ties go to the fewest tokens, then to the lowest number. If all would have
    more, the one with the fewest tokens is chosen. Ties go to the fewest requests, then to the lowest number.
    """
    fitting = [
        engine
        for engine in engines
        if engine.free_kv_tokens >= request.kv_tokens and engine.requests < engine.most_requests
    ]
    below = [engine for engine in fitting if engine.tokens + request.tokens <= most_tokens]
    if below:
        return min((engine.requests, engine.tokens, engine.number) for engine in below)[2]
    return min(((engine.tokens, engine.requests, engine.number) for engine in fitting), default=(0, 0, None))[
        2
    ]


class _DecodeGroup:
    """Available decode engines that share one queue."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.engines: list[DecodeEngine] = []
        self.queue: deque[PdRequest] = deque()
        self.queued_tokens = 0

    @property
    def largest(self) -> int:
        """KV capacity in tokens of the group's largest engine."""
        return max((engine.kv_tokens for engine in self.engines), default=0)

    @property
    def tokens(self) -> int:
        """Tokens of the requests on the group's engines and in its queue. If the queue did not count, all
        requests of a burst would go to one group."""
        return self.queued_tokens + sum(engine.tokens for engine in self.engines)

    @property
    def is_at_limit(self) -> bool:
        """Whether the group has as many requests, queued ones included, as its engines may have."""
        requests = len(self.queue) + sum(engine.requests for engine in self.engines)
        return requests >= sum(engine.most_requests for engine in self.engines)

    def enqueue(self, request: PdRequest) -> None:
        """Add a request to the end of the queue."""
        self.queue.append(request)
        self.queued_tokens += request.tokens

    def dequeue(self, request: PdRequest) -> None:
        """Remove a request from the queue."""
        self.queue.remove(request)
        self.queued_tokens -= request.tokens


class DecodeEngineSelector:
    """Chooses a decode engine for each request, in two phases, and keeps a queue for each group.

    Phase 1 chooses a group and adds the request to its queue (``enqueue``): of the groups with a large enough
    engine, the one with the fewest tokens. Phase 2 chooses an engine of the group (``assign_queued``). A
    request's KV memory counts as used as soon as its engine is chosen. The engine allocates the memory later,
    when decoding begins. The early count prevents preemptions.

    The paper has no limit on an engine's requests. Here a request counts towards the limit as soon as its
    engine is chosen, because a request in an engine's own queue holds KV buffers. A request is not queued in
    a group at its limit, since another group may have a free slot first.
    """

    def __init__(self, ratio: float = HIGH_TOKENS_RATIO) -> None:
        if not ratio > 0:
            raise ValueError(f"ratio is {ratio}; expected above 0")
        self._ratio = ratio
        self.engines: dict[int, DecodeEngine] = {}
        self._groups: dict[int, _DecodeGroup] = {}
        self._changed: dict[int, None] = {}
        """Groups whose queue or memory has changed since the last ``assign_queued``."""

    def add(self, number: int, node: int, group: int, kv_tokens: int) -> None:
        """Add an engine without requests and with KV memory for ``kv_tokens`` tokens."""
        engine = self.engines[number] = DecodeEngine(number, node, group, kv_tokens, kv_tokens)
        self._enter(engine)

    def _enter(self, engine: DecodeEngine) -> None:
        """Make an engine available in its group. The group is created if it does not exist."""
        self._groups.setdefault(engine.group, _DecodeGroup(engine.group)).engines.append(engine)
        self._changed[engine.group] = None

    def set_request_limit(self, number: int, most_requests: float) -> None:
        """Set an engine's request limit; ``inf``, the initial value, means unknown. Requests that are on the
        engine stay there, even above the limit. Raises ``ValueError`` for a limit below 1."""
        if not most_requests >= 1:
            raise ValueError(f"decode engine {number}: most_requests is {most_requests}; expected at least 1")
        engine = self.engines[number]
        if engine.most_requests != most_requests:
            engine.most_requests = most_requests
            if not engine.is_suspended:
                self._changed[engine.group] = None

    def remove(self, number: int) -> list[PdRequest]:
        """Remove an engine. Returns the requests that leave the group's queue, because no remaining engine of
        the group is large enough for them."""
        unqueued = self.suspend(number)
        del self.engines[number]
        return unqueued

    def suspend(self, number: int) -> list[PdRequest]:
        """Make an engine unavailable until ``resume``. The requests on the engine still count as its load.
        Returns the requests that leave the group's queue, because no available engine of the group is large
        enough for them. No effect on a suspended engine."""
        engine = self.engines[number]
        if engine.is_suspended:
            return []
        engine.is_suspended = True
        group = self._groups[engine.group]
        group.engines.remove(engine)
        largest = group.largest
        unqueued = [request for request in group.queue if request.kv_tokens > largest]
        if not group.engines:
            del self._groups[group.number]
            self._changed.pop(group.number, None)
        for request in unqueued:
            group.dequeue(request)
        return unqueued

    def resume(self, number: int) -> None:
        """Make a suspended engine available again, with the requests that it still has. No effect on an
        available engine."""
        engine = self.engines[number]
        if engine.is_suspended:
            engine.is_suspended = False
            self._enter(engine)

    def largest_kv_tokens(self) -> int:
        """Return the KV capacity, in tokens, of the largest available engine; 0 without available engines."""
        return max((group.largest for group in self._groups.values()), default=0)

    def enqueue(self, request: PdRequest) -> bool:
        """Add a request to a group's queue (phase 1). Returns whether a group below its request limit has a
        large enough engine. Raises ``ValueError`` if all available engines are too small, because the request
        would block the queue for ever."""
        fitting = [
            group
            for group in self._groups.values()
            if group.largest >= request.kv_tokens and not group.is_at_limit
        ]
        if not fitting:
            largest = self.largest_kv_tokens()
            if self._groups and request.kv_tokens > largest:
                raise ValueError(
                    f"request {request.request_id!r} needs {request.kv_tokens:,} tokens of KV; expected at "
                    f"most {largest:,}, the capacity of the largest decode engine"
                )
            return False
        group = min(fitting, key=lambda one: (one.tokens, one.number))
        group.enqueue(request)
        self._changed[group.number] = None
        return True

    def has_room(self) -> bool:
        """Return whether any group is below its request limit and can queue another request."""
        return any(not group.is_at_limit for group in self._groups.values())

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
                group.dequeue(request)
                engine = self.engines[chosen]
                engine.free_kv_tokens -= request.kv_tokens
                engine.tokens += request.tokens
                engine.requests += 1
                yield request, chosen
            self._changed.pop(number, None)

    def finish(self, number: int, request: PdRequest) -> None:
        """Free the KV memory and the slot that an ended or cancelled request holds on engine ``number``. No
        effect if the engine was removed."""
        engine = self.engines.get(number)
        if engine is None:
            return
        engine.free_kv_tokens += request.kv_tokens
        engine.tokens -= request.tokens
        engine.requests -= 1
        if not engine.is_suspended and self._groups[engine.group].queue:
            self._changed[engine.group] = None

    def withdraw(self, request: PdRequest) -> None:
        """Remove a waiting request from its group's queue. No effect if it is in no queue."""
        for group in self._groups.values():
            if request in group.queue:
                group.dequeue(request)
                self._changed[group.number] = None

    def available(self) -> list[DecodeEngine]:
        """Return all engines that are not suspended."""
        return [engine for engine in self.engines.values() if not engine.is_suspended]
