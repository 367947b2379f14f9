"""Selection of the prefill engine that computes a prompt (DualPath §6.1; mechanism D4)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from .storage_read_queues import StorageReadQueues


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


SPEED_WINDOW_S = 60.0
"""Seconds of engines' work over which their speed is averaged, with exponential weights."""
MIN_SPEED_S = 1.0
"""The speed counts as known after this many seconds of engines' work."""


class PrefillSpeed:
    """The mean number of prompt tokens that a prefill engine finishes per second while it has requests.

    Tokens that are read from storage count like computed tokens, both here and in an engine's unfinished
    tokens. The end of a request takes effect at the next call to ``advance``. So measured times may be too
    long by the time between two calls.
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
class PrefillEngine:
    """A prefill engine and its load."""

    number: int
    node: _PrefillNode
    tokens: int = 0
    """Prompt tokens of the requests that are assigned to the engine and not prefilled yet."""
    is_suspended: bool = False


@dataclass(slots=True, eq=False)
class _PrefillNode:
    """A node and its available prefill engines."""

    number: int
    engines: list[PrefillEngine] = field(default_factory=list)
    best: tuple[int, int] = (-1, -1)
    """(tokens, number) of the node's engine with the fewest tokens; (-1, -1): not computed yet."""
    long: bool = False
    """Whether the node is in the heap of nodes with long queues."""


_HeapEntry = tuple[int, int, int]
"""(tokens, engine, node). An entry is outdated if (tokens, engine) is no longer the ``best`` of its node."""


class PrefillEngineSelector:
    """Chooses the prefill engine for each request.

    Of the engines with at most β unfinished tokens, those on nodes with a read queue of at most α seconds are
    preferred. Of these, the engine with the fewest tokens is chosen. Ties go to the lowest number. If no
    engine has at most β tokens, the request waits. ``PrefillSelectionLimits`` defines α and β.

    There are thousands of requests per second, so the selector does not compare all engines. One heap holds
    the nodes with short read queues (at most α), another the nodes with long read queues. Both are sorted by
    the tokens of each node's least loaded engine. If the number of these tokens changes, a new entry is
    pushed, and the outdated entry is dropped when it reaches the top. Queues shrink as time passes, so a
    third heap holds the times at which long queues become short.
    """

    def __init__(self, limits: PrefillSelectionLimits, queues: StorageReadQueues) -> None:
        self._limits = limits
        self.most_tokens = limits.most_tokens
        """β in tokens, at present."""
        self._queues = queues
        self._engines: dict[int, PrefillEngine] = {}
        self._given: set[int] = set()
        self._nodes: dict[int, _PrefillNode] = {}
        self._short: list[_HeapEntry] = []
        self._long: list[_HeapEntry] = []
        self._wakes: list[tuple[float, int]] = []
        """Heap of (time, node): when the read queue of a node in ``_long`` becomes short."""

    def add(self, number: int, node: int) -> None:
        """Add an engine without requests on a known node.

        Raises ``KeyError`` for an unknown node, and ``ValueError`` for a number used before, because requests
        of a removed engine with that number may still be unfinished."""
        if number in self._given:
            raise ValueError(f"prefill engine {number} was used before; expected a new number")
        self._queues.block_s(node)
        self._given.add(number)
        place = self._nodes.setdefault(node, _PrefillNode(node))
        engine = self._engines[number] = PrefillEngine(number, place)
        place.engines.append(engine)
        self._update_best(place)

    def remove(self, number: int) -> None:
        """Remove an engine. Raises ``KeyError`` for an unknown engine."""
        self.suspend(number)
        del self._engines[number]

    def suspend(self, number: int) -> None:
        """Make an engine unavailable until ``resume``. The requests on the engine still count as its load. No
        effect on a suspended engine. Raises ``KeyError`` for an unknown engine."""
        engine = self._engines[number]
        if engine.is_suspended:
            return
        engine.is_suspended = True
        node = engine.node
        node.engines.remove(engine)
        if node.engines:
            self._update_best(node)
        else:
            del self._nodes[node.number]

    def resume(self, number: int) -> None:
        """Make a suspended engine available again, with the requests that it still has. No effect on an
        available engine. Raises ``KeyError`` for an unknown engine."""
        engine = self._engines[number]
        if not engine.is_suspended:
            return
        engine.is_suspended = False
        engine.node = self._nodes.setdefault(engine.node.number, _PrefillNode(engine.node.number))
        engine.node.engines.append(engine)
        self._update_best(engine.node)

    def choose(self, now: float) -> int | None:
        """Return the number of the engine for the next request; ``None``: the request must wait. The caller
        records the choice with ``assign``."""
        self._wake(now)
        short_s, most = self._limits.short_queue_s, self.most_tokens
        heap, nodes = self._short, self._nodes
        while heap:
            tokens, number, place = heap[0]
            node = nodes.get(place)
            if node is None or node.long or node.best != (tokens, number):
                heappop(heap)
                continue
            wake_s = self._queues.short_queue_from_s(place, short_s)
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
        """Count a new request of ``tokens`` prompt tokens on an engine. Raises ``KeyError`` for an unknown
        engine."""
        engine = self._engines[number]
        engine.tokens += tokens
        if engine.node.best[1] == number:  # else the node's best engine stays the same
            self._update_best(engine.node)

    def finish(self, number: int, tokens: int) -> None:
        """Stop counting a request on the engine ``number``: it was prefilled or cancelled. ``tokens``: length
        of its prompt. No effect if the engine was removed."""
        engine = self._engines.get(number)
        if engine is not None:
            engine.tokens -= tokens
            if engine.is_suspended:
                return
            node = engine.node
            mine = (engine.tokens, number)
            if node.best[1] == number or mine < node.best:  # the node's other engines have not changed
                self._set_best(node, mine)

    def refresh_node_queue(self, node: int) -> None:
        """Make the next ``choose`` check a node's read queue again. Call this method after the node has
        reported its queue, because the reported queue may be shorter than the estimated one."""
        if node in self._nodes and self._nodes[node].long:
            heappush(self._wakes, (-math.inf, node))

    def node_of(self, number: int) -> int:
        """Return the number of the engine's node. Raises ``KeyError`` for an unknown engine."""
        return self._engines[number].node.number

    def available(self) -> list[PrefillEngine]:
        """Return all engines that are not suspended."""
        return [engine for engine in self._engines.values() if not engine.is_suspended]

    def _wake(self, now: float) -> None:
        """Move nodes whose read queue has become short by ``now`` from the heap ``_long`` to ``_short``."""
        again = []
        while self._wakes and self._wakes[0][0] <= now:
            _, place = heappop(self._wakes)
            node = self._nodes.get(place)
            if node is None or not node.long:
                continue
            wake_s = self._queues.short_queue_from_s(place, self._limits.short_queue_s)
            if wake_s > now:
                again.append((wake_s, place))
            else:
                node.long = False
                heappush(self._short, (*node.best, place))
        for entry in again:
            heappush(self._wakes, entry)

    def _update_best(self, node: _PrefillNode) -> None:
        """Find the least loaded of the node's engines, and set it as the node's best engine."""
        engines = iter(node.engines)
        first = next(engines)
        tokens, number = first.tokens, first.number
        for engine in engines:
            if engine.tokens < tokens or (engine.tokens == tokens and engine.number < number):
                tokens, number = engine.tokens, engine.number
        self._set_best(node, (tokens, number))

    def _set_best(self, node: _PrefillNode, best: tuple[int, int]) -> None:
        """Set (tokens, number) of the node's best engine, and push a new heap entry if the value changes."""
        if best == node.best:
            return  # its entry is still in the heap
        node.best = best
        heap = self._long if node.long else self._short
        heappush(heap, (*best, node.number))
        if len(heap) > 64 + 8 * len(self._nodes):
            # Drop all outdated entries together.
            fresh = [(*n.best, n.number) for n in self._nodes.values() if n.long is node.long]
            heap[:] = fresh
            heapify(heap)
