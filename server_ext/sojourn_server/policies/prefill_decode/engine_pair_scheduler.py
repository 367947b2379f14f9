"""Values of prefill/decode disaggregation: requests, engine pairs and storage reads (DualPath §6).

An engine is one device; a node is one machine, whose engines share its storage NIC. The caller numbers the
engines and nodes. Of equally good engines, the engine with the lowest number is chosen.

Read-side policies: which node reads a request's KV from storage (DualPath §6.1; mechanism D6)?

Assigns a prefill engine, a decode engine and a read side to requests (DualPath §6.1; mechanisms D4–D6).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

FULL_BLOCK_TOKENS = 64
"""Tokens of a Full Block, with all layers: the unit of storage (DualPath §4.1, A.5)."""


class PdRequest(NamedTuple):
    """A request to prefill on one engine and decode on another."""

    request_id: int | str
    tokens: int
    """Prompt length in tokens: the paper's estimate of the request's cost for devices, NICs and memory."""
    hit_blocks: int = 0
    """Number of the prompt's first Full Blocks whose KV is in storage."""
    kv_tokens: int = 0
    """KV tokens that the request needs on the decode engine: the prompt and, if known, the output."""


class StorageReadView(NamedTuple):
    """A request's read from storage, and the state of the two storage NICs that could do the read. One NIC is
    on the prefill engine's node, the other on the decode engine's node."""

    prefill_queue_s: float
    """Seconds of reads queued at the prefill engine's node; negative: seconds since its NIC became idle."""
    decode_queue_s: float
    """Seconds of reads queued at the decode engine's node; negative: seconds since its NIC became idle."""
    one_node: bool = False
    """Whether both engines are on one node and share its NIC."""


class EnginePair(NamedTuple):
    """A request's engines, and the side of its storage read."""

    request: PdRequest
    prefill: int
    decode: int
    decode_reads: bool
    """Whether the decode engine's node reads the stored blocks. If not, the prefill engine's node does."""


class ReadSidePolicy(Protocol):
    """Chooses the engine whose node reads all of a request's stored blocks."""

    def decode_reads(self, view: StorageReadView) -> bool:
        """Return whether the decode engine's node reads the blocks. If not, the prefill engine's node
        does."""
        ...


@dataclass(frozen=True, slots=True)
class PrefillSideRead:
    """The prefill engine's node reads everything: one path, as in systems before DualPath."""

    def decode_reads(self, view: StorageReadView) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class ShorterQueueRead:
    """The side with the shorter read queue reads everything (DualPath §6.1).

    If neither side has queued reads, the side that has been idle longer reads. The prefill side reads if both
    sides are equal, or if both engines are on one node.

    The paper does not say which of two idle sides reads. A fixed choice would give one side all reads of a
    lightly loaded fleet.
    """

    def decode_reads(self, view: StorageReadView) -> bool:
        return view.decode_queue_s < view.prefill_queue_s and not view.one_node


SPEED_WINDOW_S = 60.0
"""Seconds of engines' work over which their speed is averaged, with exponential weights."""
MIN_SPEED_S = 1.0
"""The speed counts as known after this many seconds of engines' work."""
HIGH_TOKENS_RATIO = 1.05
"""An engine's token count is high if it exceeds this multiple of the group's mean tokens per engine (see
``high_token_threshold``). The rule is our reading of the paper, whose formula is illegible in our copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSelectionLimits:
    """Limits for the selection, the paper's α and β.

    In the paper, both limits are token counts: α is what a node reads within a fixed time, and β what an
    engine computes within a fixed time. Both times are illegible in the text available to us; router and
    simulator use 3 s and 5 s. Here α is the time itself, since nodes may differ in speed. β is a token count,
    a time, or both (then the lower limit applies). The measured speed of the engines converts the time to
    tokens. Raises ``ValueError`` for limits < 0, and for ``most_tokens_s`` of 0.
    """

    short_queue_s: float = 3.0
    """α: engines on nodes whose storage NIC has a longer read queue are chosen last."""
    most_tokens: float = math.inf
    """β: an engine with more unfinished tokens gets no new request. ``inf``, the default: no limit."""
    most_tokens_s: float = math.inf
    """β as seconds of an engine's computation. This limit does not apply until the engines' speed is
    known."""

    def __post_init__(self) -> None:
        if not (self.short_queue_s >= 0 and self.most_tokens >= 0 and self.most_tokens_s > 0):
            raise ValueError(
                f"short_queue_s is {self.short_queue_s}, expected seconds ≥ 0; most_tokens is "
                f"{self.most_tokens}, expected ≥ 0; most_tokens_s is {self.most_tokens_s}, "
                "expected seconds > 0"
            )


class PrefillSpeed:
    """The mean number of prompt tokens that a prefill engine finishes per second while it has requests.

    Tokens that are read from storage count like computed tokens, both here and in an engine's unfinished
    tokens. The end of a request takes effect at the next call to ``advance``.
    """

    def __init__(self) -> None:
        self._unfinished: dict[int, int] = {}
        """Engine → number of its requests. Engines without requests are absent."""
        self._since_s: dict[int, float] = {}
        """Engine → time up to which its work is counted."""
        self._done: list[tuple[int, int]] = []
        """(engine, prompt tokens) of each request that left since ``advance``; 0 tokens if not computed."""
        self._work_s = self._tokens = 0.0

    def begin(self, engine: int, now: float) -> None:
        """Record that an engine got a request."""
        if not self._unfinished.get(engine):
            self._since_s[engine] = now
        self._unfinished[engine] = self._unfinished.get(engine, 0) + 1

    def end(self, engine: int, tokens: int) -> None:
        """Record that a request left an engine. ``tokens``: length of the request's prompt; 0 if the prompt
        was not computed."""
        self._done.append((engine, tokens))

    def advance(self, now: float) -> None:
        """Count the requests that ended since the last call."""
        for engine, tokens in self._done:
            since_s = self._since_s.get(engine)
            if since_s is None:
                continue
            spent_s = max(0.0, now - since_s)
            kept = max(0.0, 1.0 - spent_s / SPEED_WINDOW_S)
            self._work_s = self._work_s * kept + spent_s
            self._tokens = self._tokens * kept + tokens
            self._since_s[engine] = now
            self._unfinished[engine] -= 1
            if not self._unfinished[engine]:
                del self._unfinished[engine], self._since_s[engine]
        self._done.clear()

    @property
    def tokens_per_s(self) -> float | None:
        """Mean tokens per second of work; ``None``: unknown."""
        return self._tokens / self._work_s if self._work_s >= MIN_SPEED_S and self._tokens else None


@dataclass(slots=True, eq=False)
class StorageNic:
    """A node's storage NIC and its read queue, in seconds of reading (DualPath §6.1, ``read_q``).

    The queue is an estimate. Each read that the scheduler assigns is added. The NIC does one read after the
    other, so the queue shrinks by one second per second. A node's report of its real queue replaces the
    estimate."""

    block_s: float
    """Seconds per Full Block."""
    busy_until_s: float = -math.inf
    """Time at which all assigned reads are done; in the past: the NIC is idle since then."""

    def add_read(self, blocks: int, now: float) -> None:
        """Add a read of ``blocks`` Full Blocks."""
        self.busy_until_s = max(self.busy_until_s, now) + blocks * self.block_s

    def report(self, queue_s: float, now: float) -> None:
        """Replace the estimate by the reported ``queue_s``; 0 means that the NIC is idle. Raises
        ``ValueError`` unless ``queue_s`` is finite and ≥ 0."""
        if not 0 <= queue_s < math.inf:
            raise ValueError(f"queue_s is {queue_s}; expected seconds, finite and ≥ 0")
        # An idle NIC keeps the time at which it became idle.
        self.busy_until_s = now + queue_s if queue_s else min(self.busy_until_s, now)


@dataclass(slots=True, eq=False)
class PrefillEngine:
    """A prefill engine and its load."""

    number: int
    nic: StorageNic
    tokens: int = 0
    """Prompt tokens of the requests that are assigned to the engine and not prefilled yet."""
    is_suspended: bool = False


@dataclass(slots=True, eq=False)
class DecodeEngine:
    """A decode engine and its assigned requests that have not ended."""

    number: int
    nic: StorageNic
    group: int
    """Number of the engine's group. The engines of a group share a queue. All engines of a node are in one
    group."""
    kv_tokens: int
    """KV memory in tokens."""
    free_kv_tokens: int
    """Free KV memory in tokens. A request's memory counts as used from its assignment on. The engine
    allocates it later, when decoding begins; the early count prevents preemptions."""
    tokens: int = 0
    """Prompt tokens of the assigned requests."""
    requests: int = 0
    """Number of the assigned requests."""
    most_requests: float = math.inf
    """Request limit; ``inf``: unknown. The paper has none. A request counts as soon as the engine is chosen,
    because a request in an engine's own queue holds KV buffers."""
    is_suspended: bool = False

    def assign(self, request: PdRequest, sign: int = 1) -> None:
        """Count a request on the engine; with ``sign`` −1, stop counting it."""
        self.free_kv_tokens -= sign * request.kv_tokens
        self.tokens += sign * request.tokens
        self.requests += sign


def choose_prefill(
    engines: Iterable[PrefillEngine], short_queue_s: float, most_tokens: float, now: float
) -> PrefillEngine | None:
    """Return the engine for the next request; ``None``: the request must wait.

    Of the engines with at most ``most_tokens`` (β) unfinished tokens, those on nodes with a read queue of at
    most ``short_queue_s`` (α) are preferred. Of these, the engine with the fewest tokens is chosen. Ties go
    to the lowest number.
    """
    below = [engine for engine in engines if not engine.is_suspended and engine.tokens <= most_tokens]
    return min(
        below,
        key=lambda one: (one.nic.busy_until_s - short_queue_s > now, one.tokens, one.number),
        default=None,
    )


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


def choose_decode(
    engines: Iterable[DecodeEngine], request: PdRequest, most_tokens: float
) -> DecodeEngine | None:
    """Return the engine for a request (phase 2). ``None``: no engine has both enough free memory and a free
    request slot.

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
        return min(below, key=lambda engine: (engine.requests, engine.tokens, engine.number))
    return min(fitting, key=lambda engine: (engine.tokens, engine.requests, engine.number), default=None)


@dataclass(slots=True, eq=False)
class _RequestInFlight:
    """A submitted request that has not ended."""

    request: PdRequest
    group: _DecodeGroup | None = None
    """The decode group in whose queue the request waits; ``None``: in none."""
    prefill: PrefillEngine | None = None
    """``None``: not chosen yet."""
    decode: DecodeEngine | None = None
    """``None``: not chosen yet."""
    prefilled: bool = False
    """Whether the prompt is computed."""


@dataclass(slots=True, eq=False)
class _DecodeGroup:
    """Available decode engines that share one queue."""

    number: int
    engines: list[DecodeEngine] = field(default_factory=list)
    queue: dict[int | str, _RequestInFlight] = field(default_factory=dict)
    """Requests that wait for an engine of the group, in order, by id."""
    queued_tokens: int = 0

    @property
    def largest(self) -> int:
        """KV capacity in tokens of the group's largest engine."""
        return max(engine.kv_tokens for engine in self.engines)

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

    def enqueue(self, flight: _RequestInFlight) -> None:
        """Add a request to the end of the queue."""
        flight.group = self
        self.queue[flight.request.request_id] = flight
        self.queued_tokens += flight.request.tokens

    def dequeue(self, flight: _RequestInFlight) -> None:
        """Remove a request from the queue."""
        flight.group = None
        del self.queue[flight.request.request_id]
        self.queued_tokens -= flight.request.tokens


class PairScheduler:
    """Assigns a prefill and a decode engine to each request. It has no clock and does no I/O.

    A request waits at the same time in the queue for prefill engines, first come first served, and in the
    queue of a decode group: of the groups with a large enough engine and below their request limit, the one
    with the fewest tokens (DualPath's phase 1). ``choose_prefill`` and ``choose_decode`` choose the engines.
    When both are chosen, ``side`` decides which of their nodes reads the request's KV from storage. In the
    paper, engines fetch requests periodically. Here any event may free capacity, so call ``dispatch`` after
    each event. ``dispatch`` returns the requests that can start.

    A router and a simulator that report the same events get the same pairs. This holds while no request waits
    and the nodes report their read queues correctly.
    """

    def __init__(
        self,
        limits: PrefillSelectionLimits | None = None,
        side: ReadSidePolicy | None = None,
        high_tokens_ratio: float = HIGH_TOKENS_RATIO,
    ) -> None:
        """Raises ``ValueError`` unless ``high_tokens_ratio`` is above 0."""
        if not high_tokens_ratio > 0:
            raise ValueError(f"high_tokens_ratio is {high_tokens_ratio}; expected above 0")
        self.nics: dict[int, StorageNic] = {}
        """Node → its storage NIC."""
        self.prefill: dict[int, PrefillEngine] = {}
        self.decode: dict[int, DecodeEngine] = {}
        self.limits = limits or PrefillSelectionLimits()
        self.most_prefill_tokens = self.limits.most_tokens
        """β in tokens, at present."""
        self._speed = PrefillSpeed() if self.limits.most_tokens_s < math.inf else None
        """Measured speed of prefill engines; ``None`` if ``limits.most_tokens_s`` is ``inf``."""
        self._side = side or ShorterQueueRead()
        self._high_tokens_ratio = high_tokens_ratio
        self._groups: dict[int, _DecodeGroup] = {}
        """Decode groups with an available engine."""
        self._prefill_queue: dict[int | str, _RequestInFlight] = {}
        """Requests that wait for a prefill engine, in order."""
        self._unplaced: dict[int | str, _RequestInFlight] = {}
        """Requests in no queue. Either no available decode engine is large enough for them, or all groups
        with such an engine are at their request limit. They are queued as soon as a group with such an engine
        is below its limit: another group may have a free slot first."""
        self.in_flight: dict[int | str, _RequestInFlight] = {}
        """Requests that were submitted and have not ended, in order of arrival."""

    # -- the fleet ---------------------------------------------------------------------

    def add_node(self, node: int, block_s: float) -> None:
        """Add a node whose storage NIC reads a Full Block in ``block_s`` seconds, or change its speed. Raises
        ``ValueError`` unless ``block_s`` is finite and above 0."""
        if not 0 < block_s < math.inf:
            raise ValueError(f"node {node}: block_s is {block_s}; expected seconds, finite and above 0")
        self.nics.setdefault(node, StorageNic(block_s)).block_s = block_s

    def remove_node(self, node: int) -> None:
        """Remove a node without engines."""
        del self.nics[node]

    def add_prefill(self, number: int, node: int) -> None:
        """Add a prefill engine, whose number no earlier one had. Raises ``KeyError`` for an unknown node."""
        self.prefill[number] = PrefillEngine(number, self.nics[node])

    def add_decode(self, number: int, node: int, group: int, kv_tokens: int) -> None:
        """Add a decode engine with KV memory for ``kv_tokens`` tokens, whose number no earlier engine had.
        Raises ``ValueError`` for ``kv_tokens`` below 1, and ``KeyError`` for an unknown node."""
        if kv_tokens < 1:
            raise ValueError(f"decode engine {number}: kv_tokens is {kv_tokens}; expected at least 1")
        self.decode[number] = DecodeEngine(number, self.nics[node], group, kv_tokens, kv_tokens)
        self._enter_group(self.decode[number])

    def set_decode_request_limit(self, number: int, most_requests: float) -> None:
        """Set a decode engine's request limit. ``inf``, the initial value, means unknown. Requests on the
        engine stay there, even above the limit. Raises ``ValueError`` for a limit below 1."""
        if not most_requests >= 1:
            raise ValueError(f"decode engine {number}: most_requests is {most_requests}; expected at least 1")
        self.decode[number].most_requests = most_requests

    # A removed or suspended engine keeps the requests that have both engines; a suspended one still counts
    # them as load. All others are queued again. Unknown numbers raise ``KeyError``.

    def remove_prefill(self, number: int) -> None:
        """Remove a prefill engine."""
        del self.prefill[number]
        self._requeue_unpaired()

    def remove_decode(self, number: int) -> None:
        """Remove a decode engine."""
        self.suspend_decode(number)
        del self.decode[number]

    def suspend_prefill(self, number: int) -> None:
        """Make a prefill engine unavailable until ``resume_prefill``."""
        self.prefill[number].is_suspended = True
        self._requeue_unpaired()

    def suspend_decode(self, number: int) -> None:
        """Make a decode engine unavailable until ``resume_decode``."""
        engine = self.decode[number]
        if not engine.is_suspended:
            engine.is_suspended = True
            self._groups[engine.group].engines.remove(engine)
        self._requeue_unpaired()

    def resume_prefill(self, number: int) -> None:
        """Make a suspended prefill engine available again."""
        self.prefill[number].is_suspended = False

    def resume_decode(self, number: int) -> None:
        """Make a suspended decode engine available again."""
        engine = self.decode[number]
        if engine.is_suspended:
            engine.is_suspended = False
            self._enter_group(engine)

    def _enter_group(self, engine: DecodeEngine) -> None:
        self._groups.setdefault(engine.group, _DecodeGroup(engine.group)).engines.append(engine)

    def largest_kv_tokens(self) -> int:
        """Return the KV capacity, in tokens, of the largest available decode engine; 0 without one."""
        return max((group.largest for group in self._groups.values()), default=0)

    # -- events ------------------------------------------------------------------------

    def submit(self, request: PdRequest) -> None:
        """Add a request. Raises ``ValueError`` if the request's id is in flight already, if the request has
        no tokens, or if all available decode engines are too small: it would block the queue for ever."""
        if request.request_id in self.in_flight:
            raise ValueError(f"request {request.request_id!r} is already in flight; expected a new id")
        if request.tokens < 1 or request.hit_blocks < 0 or request.kv_tokens < 0:
            raise ValueError(f"{request}; expected at least one token, and nothing below 0")
        if self._groups and request.kv_tokens > (largest := self.largest_kv_tokens()):
            raise ValueError(
                f"request {request.request_id!r} needs {request.kv_tokens:,} tokens of KV; expected at "
                f"most {largest:,}, the capacity of the largest decode engine"
            )
        flight = _RequestInFlight(request)
        self.in_flight[request.request_id] = self._unplaced[request.request_id] = flight
        self._place_unplaced()

    def prefilled(self, request_id: int | str) -> None:
        """Record that a request's prompt is computed. The request no longer counts as load of its prefill
        engine. Raises ``KeyError`` for an unknown request."""
        flight = self.in_flight[request_id]
        if flight.prefill is not None and not flight.prefilled:
            flight.prefilled = True
            self._leave_prefill(flight, flight.request.tokens)

    def end(self, request_id: int | str) -> None:
        """Remove a request that was answered or cancelled, at any stage. Raises ``KeyError`` for an unknown
        request."""
        flight = self.in_flight.pop(request_id)
        self._unplaced.pop(request_id, None)
        self._prefill_queue.pop(request_id, None)
        if flight.group is not None:
            flight.group.dequeue(flight)
        if not flight.prefilled:
            self._leave_prefill(flight, 0)
        if flight.decode is not None:
            flight.decode.assign(flight.request, -1)

    def report(self, node: int, queue_s: float, now: float) -> None:
        """Record a node's report that ``queue_s`` seconds of reads are queued at its storage NIC.

        Raises ``ValueError`` unless ``queue_s`` is finite and ≥ 0, and ``KeyError`` for an unknown node."""
        self.nics[node].report(queue_s, now)

    # -- decisions ---------------------------------------------------------------------

    def dispatch(self, now: float) -> list[EnginePair]:
        """Assign engines to waiting requests. Returns the pairs that became complete, in order of completion.
        The requests of these pairs can start now."""
        self._place_unplaced()
        self._update_token_limit(now)
        ready: list[_RequestInFlight] = []
        for flight in list(self._prefill_queue.values()):
            engine = choose_prefill(
                self.prefill.values(), self.limits.short_queue_s, self.most_prefill_tokens, now
            )
            if engine is None:
                break
            del self._prefill_queue[flight.request.request_id]
            flight.prefill = engine
            engine.tokens += flight.request.tokens
            if self._speed is not None:
                self._speed.begin(engine.number, now)
            if flight.decode is not None:
                ready.append(flight)
        ready += (flight for flight in self._assign_decode() if flight.prefill is not None)
        return [self._pair(flight, now) for flight in ready]

    def _assign_decode(self) -> Iterator[_RequestInFlight]:
        """Assign queued requests to decode engines, and yield them. The requests of a group come in the order
        of its queue."""
        for group in self._groups.values():
            if not group.queue:
                continue
            queued = list(group.queue.values())
            most = high_token_threshold(
                group.engines, (flight.request for flight in queued), self._high_tokens_ratio
            )
            for flight in queued:
                engine = choose_decode(group.engines, flight.request, most)
                if engine is None:
                    break
                group.dequeue(flight)
                flight.decode = engine
                engine.assign(flight.request)
                yield flight

    def _leave_prefill(self, flight: _RequestInFlight, computed_tokens: int) -> None:
        """Stop counting a request on its prefill engine, if it has one. ``computed_tokens``: length of its
        prompt; 0 if not computed."""
        if flight.prefill is not None:
            flight.prefill.tokens -= flight.request.tokens
            if self._speed is not None:
                self._speed.end(flight.prefill.number, computed_tokens)

    def _update_token_limit(self, now: float) -> None:
        """Set the token limit of prefill engines (the paper's β): the tokens that an engine computes in
        ``limits.most_tokens_s`` seconds at the measured speed, but at most ``limits.most_tokens``."""
        if self._speed is None:
            return
        self._speed.advance(now)
        tokens_per_s = self._speed.tokens_per_s
        if tokens_per_s is not None:
            self.most_prefill_tokens = min(self.limits.most_tokens, self.limits.most_tokens_s * tokens_per_s)

    def _place_unplaced(self) -> None:
        """Queue those requests of ``_unplaced`` for which a decode group has a large enough engine and is
        below its request limit."""
        for request_id, flight in list(self._unplaced.items()):
            open_groups = [group for group in self._groups.values() if not group.is_at_limit]
            if not open_groups:
                break
            fitting = [group for group in open_groups if group.largest >= flight.request.kv_tokens]
            if fitting:
                min(fitting, key=lambda group: (group.tokens, group.number)).enqueue(flight)
                self._prefill_queue[request_id] = flight
                del self._unplaced[request_id]

    def _requeue_unpaired(self) -> None:
        """Queue again, in order of arrival, all requests that lack an engine. Called after an engine has
        left.

        Requests that have one of the two engines give it up. So prefill and decode queues keep the same
        order. In different orders there could be a deadlock: request A holds the prefill engine that B needs,
        and waits for memory that B holds.
        """
        self._groups = {number: group for number, group in self._groups.items() if group.engines}
        unpaired = [one for one in self.in_flight.values() if one.prefill is None or one.decode is None]
        for flight in unpaired:
            self._leave_prefill(flight, 0)
            if flight.decode is not None:
                flight.decode.assign(flight.request, -1)
            if flight.group is not None:
                flight.group.dequeue(flight)
            flight.prefill = flight.decode = None
        self._prefill_queue.clear()
        self._unplaced = {one.request.request_id: one for one in unpaired}
        self._place_unplaced()

    def _pair(self, flight: _RequestInFlight, now: float) -> EnginePair:
        """Return the pair of a request with both engines, and add its storage read to its node's queue."""
        request, prefill, decode = flight.request, flight.prefill, flight.decode
        assert prefill is not None
        assert decode is not None
        decode_reads = False
        if request.hit_blocks:
            one, other = prefill.nic, decode.nic
            view = StorageReadView(one.busy_until_s - now, other.busy_until_s - now, one is other)
            decode_reads = self._side.decode_reads(view)
            (other if decode_reads else one).add_read(request.hit_blocks, now)
        return EnginePair(request, prefill.number, decode.number, decode_reads)
