"""From requests to the pairs of engines that serve them: D4, D5 and D6 as one object (DualPath §6.1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from .pd_decode import HIGH_TOKENS_RATIO, DecodeEngines
from .pd_prefill import PrefillEngines, PrefillLimits
from .pd_read_queues import ReadQueues
from .pd_read_side import ReadSidePolicy, ShorterQueue
from .pd_views import Pair, PdRequest, ReadSplit, ReadView

_NOTHING = ReadSplit(0, 0)


class _Flight:
    """What is known of a request on its way; ``None``: not chosen yet."""

    __slots__ = ("decode", "decode_node", "prefill", "prefill_node", "prefilled", "request")

    def __init__(self, request: PdRequest) -> None:
        self.request = request
        self.prefill: int | None = None
        self.decode: int | None = None
        self.prefilled = False
        self.prefill_node = self.decode_node = -1


class Fleet(NamedTuple):
    """How many wait for what."""

    for_prefill: int
    for_decode: int
    in_flight: int
    """Requests that were submitted and have not ended, waiting ones included."""


class PairScheduler:
    """The books of a fleet of prefill and decode engines: facts in, pairs out; no clock and no I/O.

    A request waits in one line for a prefill engine, first come first served, and in its group's line for a
    decode engine; when it has both, its read is given out. The paper's engines fetch from time to time, here
    every fact may make room: ``dispatch`` is to be called after facts and says who may start. It costs a few
    microseconds a request however many engines there are.

    Where nothing is waited for, and the nodes tell the truth, a router and a simulator that report the same
    facts get the same pairs.
    """

    def __init__(
        self,
        limits: PrefillLimits | None = None,
        side: ReadSidePolicy | None = None,
        high_tokens_ratio: float = HIGH_TOKENS_RATIO,
    ) -> None:
        self._queues = ReadQueues()
        self._prefill = PrefillEngines(limits or PrefillLimits(), self._queues)
        self._decode = DecodeEngines(high_tokens_ratio)
        self._side = side or ShorterQueue()
        self._line: deque[_Flight] = deque()
        """Who waits for a prefill engine."""
        self._homeless: dict[int | str, _Flight] = {}
        """Whom no decode engine that is there could hold, or for whom all that could have as many as they run
        at once. They are in no line, so they load no prefill engine, and go where there is room first."""
        self._flights: dict[int | str, _Flight] = {}
        """As they came."""

    # -- the fleet ---------------------------------------------------------------------

    def add_node(self, node: int, block_s: float) -> None:
        """A node, whose storage NIC takes ``block_s`` seconds for a Full Block. Raises ``ValueError``."""
        self._queues.add(node, block_s)

    def add_prefill(self, number: int, node: int) -> None:
        """A prefill engine. Raises ``ValueError`` for a number taken, ``KeyError`` for an unknown node."""
        self._prefill.add(number, node)

    def add_decode(self, number: int, node: int, group: int, kv_tokens: int) -> None:
        """A decode engine that holds ``kv_tokens``. Raises as ``add_prefill``."""
        self._queues.block_s(node)
        self._decode.add(number, node, group, kv_tokens)

    def limit_decode(self, number: int, most_requests: float) -> None:
        """A decode engine runs so many requests at once, and gets no more; ``inf``, as at first: not known.
        Raises ``ValueError`` for less than one, ``KeyError`` for an engine that is not there."""
        self._decode.limit(number, most_requests)

    def remove_prefill(self, number: int) -> None:
        """Nothing more goes there; what is there ends by itself, or is given up by ``end``.

        Costs time for each request that waits. Raises ``KeyError`` for an engine that is not there.
        """
        self._prefill.remove(number)
        self._line_up(())

    def remove_decode(self, number: int) -> None:
        """As ``remove_prefill``. Who waited for its group goes to another one, and whom none could hold waits
        until one comes that can."""
        self._line_up(self._decode.remove(number))

    def suspend_prefill(self, number: int) -> None:
        """As ``remove_prefill``, until ``resume_prefill``: what is there still counts."""
        self._prefill.suspend(number)
        self._line_up(())

    def suspend_decode(self, number: int) -> None:
        """As ``remove_decode``, until ``resume_decode``: what is there still counts."""
        self._line_up(self._decode.suspend(number))

    def resume_prefill(self, number: int) -> None:
        """Requests go there again. Raises ``KeyError`` for an engine that is not there."""
        self._prefill.resume(number)

    def resume_decode(self, number: int) -> None:
        """As ``resume_prefill``."""
        self._decode.resume(number)

    # -- facts -------------------------------------------------------------------------

    def submit(self, request: PdRequest) -> None:
        """A request has arrived. Raises ``ValueError`` for one that is here already, that has no tokens, or
        that no decode engine could ever hold."""
        if request.request_id in self._flights:
            raise ValueError(f"request {request.request_id!r} is here already")
        if request.tokens < 1 or request.hit_blocks < 0 or request.kv_tokens < 0:
            raise ValueError(f"{request}; expected at least one token, and nothing below 0")
        self._house()  # who came before goes before
        flight = _Flight(request)
        if self._decode.queue(request):
            self._line.append(flight)
        else:
            self._homeless[request.request_id] = flight
        self._flights[request.request_id] = flight

    def prefilled(self, request_id: int | str) -> None:
        """Its prompt is computed: the prefill engine is done with it. Raises ``KeyError`` for a stranger."""
        flight = self._flights[request_id]
        if flight.prefill is not None and not flight.prefilled:
            flight.prefilled = True
            self._prefill.finish(flight.prefill, flight.request.tokens)

    def end(self, request_id: int | str) -> None:
        """It has its answer, or was given up wherever it was. Raises ``KeyError`` for a stranger."""
        flight = self._flights.pop(request_id)
        if self._homeless.pop(request_id, None) is not None:
            return
        if flight.prefill is None:
            self._line.remove(flight)
        elif not flight.prefilled:
            self._prefill.finish(flight.prefill, flight.request.tokens)
        if flight.decode is not None:
            self._decode.finish(flight.decode, flight.request)
        else:
            self._decode.withdraw(request_id)

    def report(self, node: int, queue_s: float, now: float) -> None:
        """A node says how many seconds of reading wait for its storage NIC. Raises ``ValueError``."""
        self._queues.report(node, queue_s, now)
        self._prefill.recheck(node)

    # -- decisions ---------------------------------------------------------------------

    def dispatch(self, now: float) -> list[Pair]:
        """Everybody who may start by now, in the order in which that was found."""
        self._house()
        ready: list[_Flight] = []
        line = self._line
        while line:
            number = self._prefill.choose(now)
            if number is None:
                break
            flight = line.popleft()
            self._prefill.assign(number, flight.request.tokens)
            flight.prefill, flight.prefill_node = number, self._prefill.node_of(number)
            if flight.decode is not None:
                ready.append(flight)
        for request, chosen in self._decode.fetch():
            flight = self._flights[request.request_id]
            flight.decode, flight.decode_node = chosen, self._decode.node_of(chosen)
            if flight.prefill is not None:
                ready.append(flight)
        return [self._pair(flight, now) for flight in ready]

    def _house(self) -> None:
        """Who can be held by an engine that has come, or that has room again, lines up."""
        decode = self._decode
        if not self._homeless or not decode.has_room():
            return
        largest = decode.largest_kv_tokens()
        housed = []
        for request_id, flight in self._homeless.items():
            if not decode.has_room():
                break
            if flight.request.kv_tokens <= largest and decode.queue(flight.request):
                self._line.append(flight)
                housed.append(request_id)
        for request_id in housed:
            del self._homeless[request_id]

    def _line_up(self, left: Iterable[PdRequest]) -> None:
        """An engine has gone, and left these in no queue: all who have no pair line up anew, as they came.

        As long as both lines have one order, whoever holds a prefill engine waits for nobody but those who
        have one as well. Where some change their group that is no longer so: one could hold the engine that
        another waits for, who holds the memory that the first one waits for.
        """
        stranded = {request.request_id for request in left}
        unpaired = [one for one in self._flights.values() if one.prefill is None or one.decode is None]
        for flight in unpaired:
            request_id = flight.request.request_id
            if flight.prefill is not None:
                self._prefill.finish(flight.prefill, flight.request.tokens)
            if flight.decode is not None:
                self._decode.finish(flight.decode, flight.request)
            elif request_id not in stranded and request_id not in self._homeless:
                self._decode.withdraw(request_id)
            flight.prefill = flight.decode = None
        self._line.clear()
        self._homeless = {one.request.request_id: one for one in unpaired}
        self._house()

    def _pair(self, flight: _Flight, now: float) -> Pair:
        request, prefill, decode = flight.request, flight.prefill, flight.decode
        assert prefill is not None
        assert decode is not None
        blocks = request.hit_blocks
        if not blocks:
            return Pair(request, prefill, decode, _NOTHING)
        queues = self._queues
        one, other = flight.prefill_node, flight.decode_node
        split = self._side.split(
            ReadView(
                blocks,
                queues.queue_s(one, now),
                queues.queue_s(other, now),
                queues.block_s(one),
                queues.block_s(other),
                one == other,
            )
        )
        if split.prefill_blocks:
            queues.read(one, split.prefill_blocks, now)
        if split.decode_blocks:
            queues.read(other, split.decode_blocks, now)
        return Pair(request, prefill, decode, split)

    # -- for whoever looks -------------------------------------------------------------

    @property
    def fleet(self) -> Fleet:
        """How many wait."""
        paired = sum(1 for flight in self._flights.values() if flight.decode is not None)
        return Fleet(len(self._line), len(self._flights) - paired, len(self._flights))

    @property
    def prefill(self) -> PrefillEngines:
        """The prefill engines' books."""
        return self._prefill

    @property
    def decode(self) -> DecodeEngines:
        """The decode engines' books."""
        return self._decode

    @property
    def queues(self) -> ReadQueues:
        """The storage NICs' books."""
        return self._queues
