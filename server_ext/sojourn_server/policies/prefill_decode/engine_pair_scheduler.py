"""Assigns a prefill engine, a decode engine and a read side to requests (DualPath §6.1; mechanisms D4–D6).

An engine is one device; a node is one machine, whose engines share its storage NIC. The caller names the
engines and nodes. Of equally good engines, the one with the lowest name is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

FULL_BLOCK_TOKENS = 64
"""Tokens of a Full Block, with all layers: the unit of storage (DualPath §4.1, A.5)."""
Name = int | str
"""Of an engine or a node; all of one kind."""
SPEED_WINDOW_S = 60.0
"""Seconds of engines' work over which their speed is averaged, with exponential weights."""
MIN_SPEED_S = 1.0
"""The speed counts as known after this many seconds of engines' work."""


class PdRequest(NamedTuple):
    """A request to prefill on one engine and decode on another."""

    request_id: int | str
    tokens: int
    """Prompt length in tokens: the paper's estimate of the request's cost for devices, NICs and memory."""
    hit_blocks: int = 0
    """Number of the prompt's first Full Blocks whose KV is in storage."""
    kv_tokens: int = 0
    """KV tokens that the request needs on the decode engine: the prompt and, if known, the output."""
    home: Name | None = None
    """The prefill engine that has KV of the prompt's beginning; ``None``: no engine is known."""
    home_tokens: int = 0
    """Prompt tokens whose KV that engine has."""

    def prefill_tokens(self, engine: Name) -> int:
        """Return the tokens that a prefill engine would read or compute."""
        return self.tokens - (self.home_tokens if engine == self.home else 0)

    def read_blocks(self, engine: Name) -> int:
        """Return the Full Blocks to read from storage if a prefill engine gets the request."""
        held = self.home_tokens // FULL_BLOCK_TOKENS if engine == self.home else 0
        return max(0, self.hit_blocks - held)


class EnginePair(NamedTuple):
    """A request's engines, and the side of its storage read."""

    request: PdRequest
    prefill: Any
    decode: Any
    """Names of the engines."""
    decode_reads: bool
    """Whether the decode engine's node reads the stored blocks. If not, the prefill engine's node does."""


# -- an operator's settings --------------------------------------------------------------


def shorter_queue_reads(prefill_queue_s: float, decode_queue_s: float) -> bool:
    """Return whether the decode engine's node reads: the one with the shorter read queue reads everything
    (DualPath §6.1; mechanism D6).

    The queues are in seconds; negative: seconds since the NIC became idle. If neither side has queued reads,
    the side that has been idle longer reads, since a fixed choice would give one side all reads of a lightly
    loaded fleet; the paper does not say which. If both are equal, the prefill engine's node reads."""
    return decode_queue_s < prefill_queue_s


READ_SIDE_POLICIES: dict[str, Callable[[float, float], bool]] = {
    "shorter": shorter_queue_reads,
    "prefill": lambda prefill_queue_s, decode_queue_s: False,
}
"""Policies that choose which side of a pair reads KV from storage, by their names in the configuration. With
``prefill`` there is one path, as in systems before DualPath."""


@dataclass(frozen=True, slots=True)
class PrefillDecodeRules:
    """An operator's settings for prefill and decode engines, used instead of a cluster preset.

    In the paper, α and β are token counts: what a node reads, and an engine computes, within fixed times,
    which are illegible in the text available to us; router and simulator use 3 s and 5 s. Here both are the
    times, since nodes and engines may differ in speed.
    """

    read_side: str = "shorter"
    """A key of ``READ_SIDE_POLICIES``."""
    short_queue_s: float = 3.0
    """α: engines on nodes whose storage NIC has a longer read queue are chosen last."""
    most_tokens_s: float = 5.0
    """β: a prefill engine with more unfinished tokens than it computes in this many seconds gets no new
    request; ``inf``: no limit. It does not apply until the engines' speed is known."""
    high_tokens_ratio: float = 1.05
    """Z, as a ratio: a decode engine's token count is high if it exceeds this multiple of the group's mean
    (``high_token_threshold``). It is our reading of the paper, whose formula is illegible in our copy."""


# -- engines and nodes ---------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class StorageNic:
    """A node's storage NIC and its read queue, in seconds of reading (DualPath §6.1, ``read_q``).

    The queue is an estimate: each assigned read is added, and it shrinks by one second per second. A node's
    report of its real queue replaces it."""

    block_s: float
    """Seconds per Full Block."""
    busy_until_s: float = -math.inf
    """Time at which all assigned reads are done; in the past: the NIC is idle since then."""


@dataclass(slots=True, eq=False)
class PrefillEngine:
    """A prefill engine, and its load: the assigned requests that are not prefilled yet."""

    name: Name
    nic: StorageNic
    tokens: int = 0
    """Prompt tokens of the assigned requests, without those whose KV the engine has."""
    requests: int = 0
    """Number of these requests that have a decode engine too, so that it computes them. The end of one counts
    from the next ``dispatch`` on."""
    is_suspended: bool = False
    since_s: float = 0.0
    """While it has ``requests``: the time up to which its work is counted."""


@dataclass(slots=True, eq=False)
class DecodeEngine:
    """A decode engine, and its load: the assigned requests that have not ended."""

    name: Name
    nic: StorageNic
    group: Name
    """The engine's group. The engines of a group share a queue. All engines of a node are in one
    group."""
    kv_tokens: int
    """KV memory in tokens."""
    free_kv_tokens: int
    """Free KV memory in tokens. A request's memory counts from its assignment on, before decoding begins, to
    prevent preemptions."""
    tokens: int = 0
    """Prompt tokens of the assigned requests."""
    requests: int = 0
    """Number of the assigned requests."""
    most_requests: float = math.inf
    """Request limit; ``inf``: unknown. The paper has none. Requests on the engine stay there, even above the
    limit."""
    is_suspended: bool = False

    def assign(self, request: PdRequest, sign: int = 1) -> None:
        """Count a request on the engine; with ``sign`` −1, stop counting it."""
        self.free_kv_tokens -= sign * request.kv_tokens
        self.tokens += sign * request.tokens
        self.requests += sign


# -- which engines (D4, D5) ------------------------------------------------------------------


def choose_prefill(
    engines: Iterable[PrefillEngine], request: PdRequest, short_queue_s: float, most_tokens: float, now: float
) -> PrefillEngine | None:
    """Return the engine for a request; ``None``: the request must wait.

    Of the engines with at most ``most_tokens`` (β) unfinished tokens, those on nodes with a read queue of at
    most ``short_queue_s`` (α) are preferred, and one from whose node the request reads nothing. Of these, the
    engine is chosen that would have the fewest tokens with the request. So a program returns to the engine
    that has its context, unless another one is ahead by more tokens than that. In the paper no engine has it.
    """

    def rank(engine: PrefillEngine) -> tuple[bool, int, Any]:
        reads = engine.name != request.home or request.read_blocks(engine.name) > 0
        is_slow = reads and engine.nic.busy_until_s - short_queue_s > now
        return (is_slow, engine.tokens + request.prefill_tokens(engine.name), engine.name)

    return min((e for e in engines if not e.is_suspended and e.tokens <= most_tokens), key=rank, default=None)


def high_token_threshold(engines: Sequence[DecodeEngine], queue: Iterable[PdRequest], ratio: float) -> float:
    """Return Z, above which an engine's token count is high: ``ratio`` times the mean tokens of an engine.

    The group's tokens include those of the first requests in ``queue``: as many as fit into the free request
    slots and the free memory of all engines.
    """
    free = sum(engine.free_kv_tokens for engine in engines)
    tokens = sum(engine.tokens for engine in engines)
    places = sum(max(0, engine.most_requests - engine.requests) for engine in engines)
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

    Of the engines that would have at most ``most_tokens`` tokens with the request, the one with the fewest
    requests is chosen, then with the fewest tokens. If all would have more, the one with the fewest tokens is
    chosen, then with the fewest requests.
    """

    def rank(engine: DecodeEngine) -> tuple[bool, int, int, Any]:
        is_high = engine.tokens + request.tokens > most_tokens
        load = (engine.tokens, engine.requests) if is_high else (engine.requests, engine.tokens)
        return (is_high, *load, engine.name)

    return min(
        (one for one in engines
         if one.free_kv_tokens >= request.kv_tokens and one.requests < one.most_requests),
        key=rank,
        default=None,
    )  # fmt: skip


@dataclass(slots=True, eq=False)
class _RequestInFlight:
    """A submitted request that has not ended."""

    request: PdRequest
    group: Name | None = None
    """The decode group in whose queue the request waits, or waited; ``None``: in none yet."""
    prefill: PrefillEngine | None = None
    decode: DecodeEngine | None = None
    prefilled: bool = False
    """Whether the prefill engine has nothing left to do for the request."""


class PairScheduler:
    """Assigns a prefill and a decode engine to each request. It has no clock and does no I/O.

    A request waits at the same time in the queue for prefill engines, first come first served, and in the
    queue of a decode group: of the groups with a large enough engine and below their request limit, the one
    with the fewest tokens, queued ones included (DualPath's phase 1). When both engines are chosen,
    ``decode_reads`` decides which of their nodes reads the request's KV from storage; two engines of one node
    share its NIC. Any event may free capacity, so call
    ``dispatch`` after each event; in the paper, engines fetch requests periodically. Unknown numbers and
    requests raise ``KeyError``.
    """

    def __init__(self, rules: PrefillDecodeRules) -> None:
        self.nics: dict[Name, StorageNic] = {}
        """Node → its storage NIC."""
        self.prefill: dict[Name, PrefillEngine] = {}
        self.decode: dict[Name, DecodeEngine] = {}
        self.most_prefill_tokens = math.inf
        """β in tokens, at present."""
        self.decode_reads = READ_SIDE_POLICIES[rules.read_side]
        self.in_flight: dict[int | str, _RequestInFlight] = {}
        """Requests that were submitted and have not ended, in order of arrival."""
        self._rules = rules
        self._queued: dict[int | str, _RequestInFlight] = {}
        """Requests with a decode group that lack an engine, in order: the queue for prefill engines and,
        group by group, those for decode engines."""
        self._unplaced: dict[int | str, _RequestInFlight] = {}
        """Requests that no decode group could take yet, in order."""
        self._left: list[tuple[PrefillEngine, int]] = []
        """(engine, prompt tokens) of each request of a pair that left its prefill engine since ``dispatch``;
        0 tokens if its prompt was not computed."""
        self._work_s = self._worked_tokens = 0.0
        """Recent seconds in which prefill engines had requests, and the prompt tokens that they finished."""

    # -- the fleet ---------------------------------------------------------------------

    def add_node(self, node: Name, block_s: float) -> None:
        """Add a node whose storage NIC reads a Full Block in ``block_s`` seconds, or change its speed."""
        self.nics.setdefault(node, StorageNic(block_s)).block_s = block_s

    def add_prefill(self, name: Name, node: Name) -> None:
        """Add a prefill engine."""
        self.prefill[name] = PrefillEngine(name, self.nics[node])

    def remove(self, engine: PrefillEngine | DecodeEngine) -> None:
        """Remove an engine, and its node if no other engine is there. The requests that have both engines
        stay there; all others are queued again, by arrival.

        Requests that have one of the two engines give it up, so that both queues keep the same order. Else
        there could be a deadlock: request A holds the prefill engine that B needs, and waits for memory that
        B holds.
        """
        self.line_up([n for n, one in self.in_flight.items() if one.prefill is None or one.decode is None])
        self.prefill.pop(engine.name, None)
        self.decode.pop(engine.name, None)
        used = {one.nic for one in self.prefill.values()} | {one.nic for one in self.decode.values()}
        self.nics = {node: nic for node, nic in self.nics.items() if nic in used}

    def add_decode(self, name: Name, node: Name, group: Name, kv_tokens: int) -> None:
        """Add a decode engine with KV memory for ``kv_tokens`` tokens."""
        self.decode[name] = DecodeEngine(name, self.nics[node], group, kv_tokens, kv_tokens)

    def line_up(self, request_ids: Iterable[int | str]) -> None:
        """Queue all waiting requests again, in this order; also after a change of ``is_suspended``."""
        for flight in self._queued.values():
            self._leave_engines(flight)
            flight.group = flight.prefill = flight.decode = None
        self._queued = {}
        self._unplaced = {name: self.in_flight[name] for name in request_ids}

    def largest_kv_tokens(self) -> int:
        """Return the KV capacity, in tokens, of the largest available decode engine; 0 without one."""
        return max((one.kv_tokens for one in self.decode.values() if not one.is_suspended), default=0)

    # -- events ------------------------------------------------------------------------

    def submit(self, request: PdRequest) -> None:
        """Add a request, whose id is not in flight. It waits until an engine is large enough."""
        flight = _RequestInFlight(request)
        self.in_flight[request.request_id] = self._unplaced[request.request_id] = flight

    def prefilled(self, request_id: int | str, *, computed: bool = True) -> None:
        """Record that a request is no longer load of its prefill engine. ``computed``: whether its prompt is
        computed there."""
        flight = self.in_flight[request_id]
        if flight.prefill is not None and not flight.prefilled:
            flight.prefilled = True
            tokens = flight.request.prefill_tokens(flight.prefill.name) if computed else 0
            self._leave_prefill(flight, tokens)

    def end(self, request_id: int | str) -> None:
        """Remove a request that was answered or cancelled, at any stage."""
        self._queued.pop(request_id, None)
        self._unplaced.pop(request_id, None)
        self._leave_engines(self.in_flight.pop(request_id))

    def report(self, node: Name, queue_s: float, now: float) -> None:
        """Record a node's report that ``queue_s`` seconds of reads are queued at its storage NIC."""
        nic = self.nics[node]
        # An idle NIC keeps the time at which it became idle.
        nic.busy_until_s = now + queue_s if queue_s else min(nic.busy_until_s, now)

    # -- decisions ---------------------------------------------------------------------

    def dispatch(self, now: float) -> list[EnginePair]:
        """Assign engines to waiting requests. Returns the pairs that became complete, in order of completion.
        The requests of these pairs can start now."""
        groups: dict[Name, list[DecodeEngine]] = {}
        for one in self.decode.values():
            if not one.is_suspended:
                groups.setdefault(one.group, []).append(one)
        self._place(groups)
        self._update_token_limit(now)
        ready = [*self._assign_prefill(now), *self._assign_decode(groups)]
        for flight in ready:
            del self._queued[flight.request.request_id]
        return [self._pair(flight, now) for flight in ready]

    def _place(self, groups: Mapping[Name, Sequence[DecodeEngine]]) -> None:
        """Queue the requests for which a decode group has a large enough engine and is below its request
        limit. Queued requests count for their group. Otherwise all requests of a burst would go to one."""
        tokens = {group: sum(one.tokens for one in engines) for group, engines in groups.items()}
        free = {
            group: sum(e.most_requests - e.requests for e in engines) for group, engines in groups.items()
        }
        largest = {group: max(one.kv_tokens for one in engines) for group, engines in groups.items()}
        for flight in self._queued.values():
            if flight.group is not None and flight.decode is None:
                tokens[flight.group] += flight.request.tokens
                free[flight.group] -= 1
        placed = []
        for name, flight in self._unplaced.items():
            if max(free.values(), default=0) <= 0:
                break
            needed = flight.request.kv_tokens
            fitting = [(tokens[one], one) for one in groups if free[one] > 0 and largest[one] >= needed]
            if fitting:
                flight.group = min(fitting)[1]
                tokens[flight.group] += flight.request.tokens
                free[flight.group] -= 1
                placed.append(name)
        for name in placed:
            self._queued[name] = self._unplaced.pop(name)

    def _assign_prefill(self, now: float) -> Iterator[_RequestInFlight]:
        """Assign queued requests to prefill engines, and yield those that have both engines."""
        for flight in self._queued.values():
            if flight.prefill is not None:
                continue
            request, most_tokens = flight.request, self.most_prefill_tokens
            engine = choose_prefill(
                self.prefill.values(), request, self._rules.short_queue_s, most_tokens, now
            )
            if engine is None:
                break
            flight.prefill = engine
            engine.tokens += request.prefill_tokens(engine.name)
            if flight.decode is not None:
                yield flight

    def _assign_decode(self, groups: Mapping[Name, Sequence[DecodeEngine]]) -> Iterator[_RequestInFlight]:
        """Assign queued requests to decode engines, and yield those that have both engines. The requests of a
        group come in the order of its queue."""
        queues: dict[Name | None, list[_RequestInFlight]] = {}
        for flight in self._queued.values():
            if flight.decode is None:
                queues.setdefault(flight.group, []).append(flight)
        for group, engines in groups.items() if queues else ():
            queue = queues.get(group, [])
            most = high_token_threshold(
                engines, (one.request for one in queue), self._rules.high_tokens_ratio
            )
            for flight in queue:
                flight.decode = choose_decode(engines, flight.request, most)
                if flight.decode is None:
                    break
                flight.decode.assign(flight.request)
                if flight.prefill is not None:
                    yield flight

    def _leave_prefill(self, flight: _RequestInFlight, computed_tokens: int) -> None:
        """Stop counting a request on its prefill engine, if it has one. ``computed_tokens``: of its prompt, 0
        if not computed."""
        if flight.prefill is not None:
            flight.prefill.tokens -= flight.request.prefill_tokens(flight.prefill.name)
            if flight.decode is not None:
                self._left.append((flight.prefill, computed_tokens))

    def _leave_engines(self, flight: _RequestInFlight) -> None:
        if not flight.prefilled:
            self._leave_prefill(flight, 0)
        if flight.decode is not None:
            flight.decode.assign(flight.request, -1)

    def _update_token_limit(self, now: float) -> None:
        """Measure the prompt tokens that a prefill engine finishes per second while it has requests, and set
        β: the tokens that it computes in ``most_tokens_s``.

        Tokens that are read from storage count like computed ones, here and in an engine's unfinished tokens.
        """
        for engine, tokens in self._left:
            spent_s = max(0.0, now - engine.since_s)
            kept = max(0.0, 1.0 - spent_s / SPEED_WINDOW_S)
            self._work_s = self._work_s * kept + spent_s
            self._worked_tokens = self._worked_tokens * kept + tokens
            engine.since_s = now
            engine.requests -= 1
        self._left.clear()
        limit_s = self._rules.most_tokens_s
        if limit_s < math.inf and self._work_s >= MIN_SPEED_S and self._worked_tokens:
            self.most_prefill_tokens = limit_s * (self._worked_tokens / self._work_s)

    def _pair(self, flight: _RequestInFlight, now: float) -> EnginePair:
        """Return the pair of a request with both engines, and add its storage read to its node's queue."""
        request, prefill, decode = flight.request, flight.prefill, flight.decode
        assert prefill is not None
        assert decode is not None
        if not prefill.requests:
            prefill.since_s = now
        prefill.requests += 1
        decode_reads, blocks = False, request.read_blocks(prefill.name)
        if blocks:
            one, other = prefill.nic, decode.nic
            decode_reads = one is not other and self.decode_reads(
                one.busy_until_s - now, other.busy_until_s - now
            )
            nic = other if decode_reads else one
            nic.busy_until_s = max(nic.busy_until_s, now) + blocks * nic.block_s
        return EnginePair(request, prefill.name, decode.name, decode_reads)
