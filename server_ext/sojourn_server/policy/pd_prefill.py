"""Which prefill engine computes a prompt (DualPath §6.1, PE scheduling; D4)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from .pd_read_queues import ReadQueues
from .pd_views import PrefillView


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLimits:
    """The paper's α and β. Its seconds are lost in the text that we have; 3 and 5 are our choice.

    The paper states both in tokens: what a node reads in so many seconds, and what an engine computes in
    so many. α is left in seconds here, since nodes may differ. Raises ``ValueError``.
    """

    short_queue_s: float = 3.0
    """α: a node whose storage NIC has reads for longer comes after all others."""
    most_tokens: float = math.inf
    """β: an engine with more unfinished tokens gets nothing new. 5 s of what it computes is a good value."""

    def __post_init__(self) -> None:
        if not (self.short_queue_s >= 0 and self.most_tokens >= 0):
            raise ValueError(
                f"short_queue_s {self.short_queue_s}, most_tokens {self.most_tokens}; expected both ≥ 0"
            )


def choose_prefill(
    engines: Iterable[PrefillView], queues: ReadQueues, limits: PrefillLimits, now: float
) -> int | None:
    """The rule itself, over all engines one by one. ``None``: all have more than β, and the request waits.

    Of engines with at most β tokens: those on nodes with at most α to read before all others, then fewest
    tokens, then the lowest number.
    """
    best: tuple[bool, int, int] | None = None
    for engine in engines:
        if engine.tokens > limits.most_tokens:
            continue
        long = queues.short_from_s(engine.node, limits.short_queue_s) > now
        key = (long, engine.tokens, engine.number)
        if best is None or key < best:
            best = key
    return None if best is None else best[2]


class _Engine:
    __slots__ = ("is_suspended", "node", "number", "tokens")

    def __init__(self, number: int, node: _Node) -> None:
        self.number = number
        self.node = node
        self.tokens = 0
        self.is_suspended = False


@dataclass(slots=True, eq=False)
class _Node:
    number: int
    engines: list[_Engine] = field(default_factory=list)
    best: tuple[int, int] = (-1, -1)
    """(tokens, number) of the engine with the fewest."""
    long: bool = False
    """In the heap of nodes with long queues."""


_Entry = tuple[int, int, int]
"""(tokens, engine, node): true while it is the node's ``best``."""


class PrefillEngines:
    """The same answers as ``choose_prefill`` for thousands of choices a second, and the books behind them.

    Nodes lie in two heaps by their least loaded engine, those with short queues and those with long ones.
    What changes is pushed anew and the old entry dropped when it comes up. Queues shrink by themselves, so a
    third heap says when a long one will be short.
    """

    def __init__(self, limits: PrefillLimits, queues: ReadQueues) -> None:
        self._limits = limits
        self._queues = queues
        self._engines: dict[int, _Engine] = {}
        self._given: set[int] = set()
        self._nodes: dict[int, _Node] = {}
        self._short: list[_Entry] = []
        self._long: list[_Entry] = []
        self._wakes: list[tuple[float, int]] = []

    def add(self, number: int, node: int) -> None:
        """An engine without work, on a node that the queues know.

        Raises ``ValueError`` for a number that was ever given: what is left to do of its work is its own.
        """
        if number in self._given:
            raise ValueError(f"prefill engine {number} was there already; expected a new number")
        self._queues.block_s(node)
        self._given.add(number)
        place = self._nodes.setdefault(node, _Node(node))
        engine = self._engines[number] = _Engine(number, place)
        place.engines.append(engine)
        self._push(place)

    def remove(self, number: int) -> None:
        """Nothing more goes to the engine. Raises ``KeyError`` for one that is not there."""
        self.suspend(number)
        del self._engines[number]

    def suspend(self, number: int) -> None:
        """Nothing more goes to the engine before ``resume``; what is there still counts. Nothing happens
        where it is suspended already. Raises ``KeyError`` for one that is not there."""
        engine = self._engines[number]
        if engine.is_suspended:
            return
        engine.is_suspended = True
        node = engine.node
        node.engines.remove(engine)
        if node.engines:
            self._push(node)
        else:
            del self._nodes[node.number]

    def resume(self, number: int) -> None:
        """It may be chosen again, with what it has by now. Raises ``KeyError``."""
        engine = self._engines[number]
        if not engine.is_suspended:
            return
        engine.is_suspended = False
        engine.node = self._nodes.setdefault(engine.node.number, _Node(engine.node.number))
        engine.node.engines.append(engine)
        self._push(engine.node)

    def choose(self, now: float) -> int | None:
        """The engine for the next request; ``None``: it waits. Changes nothing that others can see."""
        self._wake(now)
        short_s, most = self._limits.short_queue_s, self._limits.most_tokens
        heap, nodes = self._short, self._nodes
        while heap:
            tokens, number, place = heap[0]
            node = nodes.get(place)
            if node is None or node.long or node.best != (tokens, number):
                heappop(heap)
                continue
            wake_s = self._queues.short_from_s(place, short_s)
            if wake_s > now:
                heappop(heap)
                node.long = True
                heappush(self._long, (tokens, number, place))
                heappush(self._wakes, (wake_s, place))
                continue
            if tokens > most:
                break
            return number
        heap = self._long
        while heap:
            tokens, number, place = heap[0]
            node = nodes.get(place)
            if node is None or not node.long or node.best != (tokens, number):
                heappop(heap)
                continue
            return number if tokens <= most else None
        return None

    def assign(self, number: int, tokens: int) -> None:
        """A request of so many tokens went there. Raises ``KeyError`` for an engine that is not there."""
        engine = self._engines[number]
        engine.tokens += tokens
        if engine.node.best[1] == number:  # else it has only become less of a choice
            self._push(engine.node)

    def finish(self, number: int, tokens: int) -> None:
        """One was prefilled, or given up. An engine that was removed is nobody's concern any more."""
        engine = self._engines.get(number)
        if engine is not None:
            engine.tokens -= tokens
            if engine.is_suspended:
                return
            node = engine.node
            mine = (engine.tokens, number)
            if node.best[1] == number or mine < node.best:  # nobody else of its node has become better
                self._set_best(node, mine)

    def recheck(self, node: int) -> None:
        """The node's queue may have become shorter than it was by more than time has passed."""
        if node in self._nodes and self._nodes[node].long:
            heappush(self._wakes, (-math.inf, node))

    def node_of(self, number: int) -> int:
        """Raises ``KeyError`` for an engine that is not there."""
        return self._engines[number].node.number

    def views(self) -> list[PrefillView]:
        """All engines that may be chosen, as they stand."""
        found = (e for e in self._engines.values() if not e.is_suspended)
        return [PrefillView(e.number, e.node.number, e.tokens) for e in found]

    def _wake(self, now: float) -> None:
        """Move the nodes whose queue is short by now."""
        again = []
        while self._wakes and self._wakes[0][0] <= now:
            _, place = heappop(self._wakes)
            node = self._nodes.get(place)
            if node is None or not node.long:
                continue
            wake_s = self._queues.short_from_s(place, self._limits.short_queue_s)
            if wake_s > now:
                again.append((wake_s, place))
            else:
                node.long = False
                heappush(self._short, (*node.best, place))
        for entry in again:
            heappush(self._wakes, entry)

    def _push(self, node: _Node) -> None:
        engines = iter(node.engines)
        first = next(engines)
        tokens, number = first.tokens, first.number
        for engine in engines:
            if engine.tokens < tokens or (engine.tokens == tokens and engine.number < number):
                tokens, number = engine.tokens, engine.number
        self._set_best(node, (tokens, number))

    def _set_best(self, node: _Node, best: tuple[int, int]) -> None:
        if best == node.best:
            return  # its entry is in the heap still
        node.best = best
        heap = self._long if node.long else self._short
        heappush(heap, (*best, node.number))
        if len(heap) > 64 + 8 * len(self._nodes):
            # What nobody came across is dropped together.
            fresh = [(*n.best, n.number) for n in self._nodes.values() if n.long is node.long]
            heap[:] = fresh
            heapify(heap)
