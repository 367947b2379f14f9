"""Assigns a prefill engine, a decode engine and a read side to requests (DualPath §6.1; mechanisms D4–D6)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from .decode_engine_selection import HIGH_TOKENS_RATIO, DecodeEngineSelector
from .prefill_decode_views import EnginePair, PdRequest, StorageReadView
from .prefill_engine_selection import PrefillEngineSelector, PrefillSelectionLimits, PrefillSpeed
from .read_side_policies import ReadSidePolicy, ShorterQueueRead
from .storage_read_queues import StorageReadQueues


@dataclass(slots=True, eq=False)
class _RequestInFlight:
    """A submitted request that has not ended."""

    request: PdRequest
    prefill: int | None = None
    """Number of the request's prefill engine; ``None``: not chosen yet."""
    decode: int | None = None
    """Number of the request's decode engine; ``None``: not chosen yet."""
    prefilled: bool = False
    """Whether the prompt is computed."""


class PairScheduler:
    """Assigns a prefill and a decode engine to each request. It has no clock and does no I/O.

    A request waits at the same time in the queue for prefill engines, first come first served, and in the
    queue of a decode group. When both engines are chosen, ``side`` decides which of their nodes reads the
    request's KV from storage. In the paper, engines fetch requests periodically. Here any event may free
    capacity, so call ``dispatch`` after each event. ``dispatch`` returns the requests that can start.

    A router and a simulator that report the same events get the same pairs. This holds while no request waits
    and the nodes report their read queues correctly.
    """

    def __init__(
        self,
        limits: PrefillSelectionLimits | None = None,
        side: ReadSidePolicy | None = None,
        high_tokens_ratio: float = HIGH_TOKENS_RATIO,
    ) -> None:
        self.queues = StorageReadQueues()
        """The read queues of the nodes' storage NICs."""
        self.limits = limits or PrefillSelectionLimits()
        self.prefill = PrefillEngineSelector(self.limits, self.queues)
        self._speed = PrefillSpeed() if self.limits.most_tokens_s < math.inf else None
        """Measured speed of prefill engines; ``None`` if ``limits.most_tokens_s`` is ``inf``."""
        self.decode = DecodeEngineSelector(high_tokens_ratio)
        self._side = side or ShorterQueueRead()
        self._unplaced_queue: deque[_RequestInFlight] = deque()
        """Requests that wait for a prefill engine."""
        self._unplaced: dict[int | str, _RequestInFlight] = {}
        """Requests in no queue. Either no available decode engine is large enough for them, or all groups
        with such an engine are at their request limit. They are queued as soon as a group with such an engine
        is below its limit."""
        self.in_flight: dict[int | str, _RequestInFlight] = {}
        """Requests that were submitted and have not ended, in order of arrival."""

    # -- the fleet ---------------------------------------------------------------------

    def add_node(self, node: int, block_s: float) -> None:
        """Add a node whose storage NIC reads a Full Block in ``block_s`` seconds, or change its speed. Raises
        ``ValueError`` unless ``block_s`` is finite and above 0."""
        self.queues.add(node, block_s)

    def remove_node(self, node: int) -> None:
        """Remove a node without engines."""
        self.queues.remove(node)

    def add_prefill(self, number: int, node: int) -> None:
        """Add a prefill engine, whose number no earlier one had. Raises ``KeyError`` for an unknown node."""
        self.prefill.add(number, node)

    def add_decode(self, number: int, node: int, group: int, kv_tokens: int) -> None:
        """Add a decode engine with KV memory for ``kv_tokens`` tokens, whose number no earlier engine had.
        Raises ``ValueError`` for ``kv_tokens`` below 1, and ``KeyError`` for an unknown node."""
        self.queues.block_s(node)
        if kv_tokens < 1:
            raise ValueError(f"decode engine {number}: kv_tokens is {kv_tokens}; expected at least 1")
        self.decode.add(number, node, group, kv_tokens)

    def set_decode_request_limit(self, number: int, most_requests: float) -> None:
        """Set a decode engine's request limit. ``inf``, the initial value, means unknown. Raises
        ``ValueError`` for a limit below 1."""
        self.decode.set_request_limit(number, most_requests)

    # A removed or suspended engine keeps the requests that have both engines; a suspended one still counts
    # them as load. All others are queued again. Unknown numbers raise ``KeyError``.

    def remove_prefill(self, number: int) -> None:
        """Remove a prefill engine."""
        del self.prefill.engines[number]
        self._requeue_unpaired(())

    def remove_decode(self, number: int) -> None:
        """Remove a decode engine."""
        self._requeue_unpaired(self.decode.remove(number))

    def suspend_prefill(self, number: int) -> None:
        """Make a prefill engine unavailable until ``resume_prefill``."""
        self.prefill.engines[number].is_suspended = True
        self._requeue_unpaired(())

    def suspend_decode(self, number: int) -> None:
        """Make a decode engine unavailable until ``resume_decode``."""
        self._requeue_unpaired(self.decode.suspend(number))

    def resume_prefill(self, number: int) -> None:
        """Make a suspended prefill engine available again."""
        self.prefill.engines[number].is_suspended = False

    def resume_decode(self, number: int) -> None:
        """Make a suspended decode engine available again."""
        self.decode.resume(number)

    # -- events ------------------------------------------------------------------------

    def submit(self, request: PdRequest) -> None:
        """Add a request. Raises ``ValueError`` if the request's id is in flight already, if the request has
        no tokens, or if all decode engines are too small."""
        if request.request_id in self.in_flight:
            raise ValueError(f"request {request.request_id!r} is already in flight; expected a new id")
        if request.tokens < 1 or request.hit_blocks < 0 or request.kv_tokens < 0:
            raise ValueError(f"{request}; expected at least one token, and nothing below 0")
        self._place_unplaced()  # earlier requests first
        flight = _RequestInFlight(request)
        if self.decode.enqueue(request):
            self._unplaced_queue.append(flight)
        else:
            self._unplaced[request.request_id] = flight
        self.in_flight[request.request_id] = flight

    def prefilled(self, request_id: int | str) -> None:
        """Record that a request's prompt is computed. The request no longer counts as load of its prefill
        engine. Raises ``KeyError`` for an unknown request."""
        flight = self.in_flight[request_id]
        if flight.prefill is not None and not flight.prefilled:
            flight.prefilled = True
            self.prefill.finish(flight.prefill, flight.request.tokens)
            self._left_prefill(flight.prefill, flight.request.tokens)

    def end(self, request_id: int | str) -> None:
        """Remove a request that was answered or cancelled, at any stage. Raises ``KeyError`` for an unknown
        request."""
        flight = self.in_flight.pop(request_id)
        if self._unplaced.pop(request_id, None) is not None:
            return
        if flight.prefill is None:
            self._unplaced_queue.remove(flight)
        elif not flight.prefilled:
            self.prefill.finish(flight.prefill, flight.request.tokens)
            self._left_prefill(flight.prefill, 0)
        if flight.decode is not None:
            self.decode.finish(flight.decode, flight.request)
        else:
            self.decode.withdraw(flight.request)

    def report(self, node: int, queue_s: float, now: float) -> None:
        """Record a node's report that ``queue_s`` seconds of reads are queued at its storage NIC.

        Raises ``ValueError`` unless ``queue_s`` is finite and ≥ 0."""
        self.queues.report(node, queue_s, now)

    # -- decisions ---------------------------------------------------------------------

    def dispatch(self, now: float) -> list[EnginePair]:
        """Assign engines to waiting requests. Returns the pairs that became complete, in order of completion.
        The requests of these pairs can start now."""
        self._place_unplaced()
        self._update_token_limit(now)
        ready: list[_RequestInFlight] = []
        queue = self._unplaced_queue
        while queue:
            number = self.prefill.choose(now)
            if number is None:
                break
            flight = queue.popleft()
            self.prefill.assign(number, flight.request.tokens)
            if self._speed is not None:
                self._speed.begin(number, now)
            flight.prefill = number
            if flight.decode is not None:
                ready.append(flight)
        for request, chosen in self.decode.assign_queued():
            flight = self.in_flight[request.request_id]
            flight.decode = chosen
            if flight.prefill is not None:
                ready.append(flight)
        return [self._pair(flight, now) for flight in ready]

    def _left_prefill(self, engine: int, tokens: int) -> None:
        """Record that a request left a prefill engine. ``tokens``: length of its prompt; 0 if not
        computed."""
        if self._speed is not None:
            self._speed.end(engine, tokens)

    def _update_token_limit(self, now: float) -> None:
        """Set the token limit of prefill engines (the paper's β): the tokens that an engine computes in
        ``limits.most_tokens_s`` seconds at the measured speed, but at most ``limits.most_tokens``."""
        if self._speed is None:
            return
        self._speed.advance(now)
        tokens_per_s = self._speed.tokens_per_s
        if tokens_per_s is not None:
            self.prefill.most_tokens = min(self.limits.most_tokens, self.limits.most_tokens_s * tokens_per_s)

    def _place_unplaced(self) -> None:
        """Queue those requests of ``_unplaced`` for which a decode group has a large enough engine and is
        below its request limit."""
        decode = self.decode
        if not self._unplaced or not decode.has_room():
            return
        largest = decode.largest_kv_tokens()
        housed = []
        for request_id, flight in self._unplaced.items():
            if not decode.has_room():
                break
            if flight.request.kv_tokens <= largest and decode.enqueue(flight.request):
                self._unplaced_queue.append(flight)
                housed.append(request_id)
        for request_id in housed:
            del self._unplaced[request_id]

    def _requeue_unpaired(self, left: Iterable[PdRequest]) -> None:
        """Queue again, in order of arrival, all requests that lack an engine. Called after an engine has
        left.

        ``left`` are the requests that the engine's group has already dropped from its queue. Requests that
        have one of the two engines give it up. So prefill and decode queues keep the same order. In different
        orders there could be a deadlock: request A holds the prefill engine that B needs, and waits for
        memory that B holds.
        """
        unqueued_ids = {request.request_id for request in left}
        unpaired = [one for one in self.in_flight.values() if one.prefill is None or one.decode is None]
        for flight in unpaired:
            request_id = flight.request.request_id
            if flight.prefill is not None:
                self.prefill.finish(flight.prefill, flight.request.tokens)
                self._left_prefill(flight.prefill, 0)
            if flight.decode is not None:
                self.decode.finish(flight.decode, flight.request)
            elif request_id not in unqueued_ids and request_id not in self._unplaced:
                self.decode.withdraw(flight.request)
            flight.prefill = flight.decode = None
        self._unplaced_queue.clear()
        self._unplaced = {one.request.request_id: one for one in unpaired}
        self._place_unplaced()

    def _pair(self, flight: _RequestInFlight, now: float) -> EnginePair:
        """Return the pair of a request with both engines, and add its storage read to its node's queue."""
        request, prefill, decode = flight.request, flight.prefill, flight.decode
        assert prefill is not None
        assert decode is not None
        blocks = request.hit_blocks
        if not blocks:
            return EnginePair(request, prefill, decode, decode_reads=False)
        queues = self.queues
        one, other = self.prefill.engines[prefill].node, self.decode.engines[decode].node
        view = StorageReadView(queues.queue_s(one, now), queues.queue_s(other, now), one == other)
        decode_reads = self._side.decode_reads(view)
        queues.add_read(other if decode_reads else one, blocks, now)
        return EnginePair(request, prefill, decode, decode_reads)
