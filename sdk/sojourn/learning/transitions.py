"""Transitions between workflow nodes, turns left and tools of each node, learned from earlier runs
(SAGA §3.3). Each agent type has its own statistics.

The transitions are interpolated n-grams over the nodes of a run. They count which node followed each sequence
of one, two and three nodes. ``START`` and ``END`` count as nodes. With three nodes of history the first
failing check can be told from the third; a first-order chain cannot do this.

Each run weighs 2^(1/20) times as much as the run before it, so 20 later runs halve the weight of a run.

One thread writes. Other threads may read at the same time without a lock. Before they iterate over a dict
that the writer changes in place, they copy it. It replaces the tools of a node, so these need no copy.
``snapshot`` copies nothing: only the writing thread may call it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

from sojourn.aeg import END, START

from .run_trace import ProgramRun

ORDER: Final = 3
"""Maximum number of latest nodes that a prediction uses."""
HALF_LIFE_RUNS: Final = 20
"""Number of later runs that halve the weight of a run."""
ENOUGH_RUNS: Final = 5
"""Minimum number of finished programs for an estimate of remaining turns."""
MAX_KINDS: Final = 64
MAX_ENTRIES: Final = 4096
"""Maximum number of pairs (context, next node) per agent type. The least recently seen contexts are dropped
first."""
MAX_SUCCESSORS: Final = 128
"""Maximum number of successors per context. The rarest is dropped first."""
MAX_LEFT: Final = 1024
"""Maximum number of (node, turn) keys with statistics of remaining turns, per agent type. The same limit
holds for nodes with known tools. The least recently updated are dropped first."""
MAX_TURN: Final = 64
"""Highest turn number that has statistics of its own. Later turns count as this turn."""
MAX_NODE_TOOLS: Final = 16
SNAPSHOT_VERSION: Final = 1
_GROWTH = 2.0 ** (1 / HALF_LIFE_RUNS)
_RESCALE_ABOVE = 2.0**40
_FORGOTTEN = 0.01
"""Decayed counts up to this value, in runs, are ignored by ``edges`` and removed at the next ``_rescale``."""
_CONFIDENT_WEIGHT = ENOUGH_RUNS * 0.9 / _GROWTH ** (ENOUGH_RUNS / 2)
"""Minimum weight of statistics that give an estimate, in units of the next run's weight. It is less than
``ENOUGH_RUNS``, since earlier runs weigh less than the next one."""

Context = tuple[str, ...]


class _TurnsLeft:
    """Decayed statistics of the remaining turns at one node or turn: ``mean`` and variance (``spread``).
    ``x`` and ``xx`` are the weighted sums of the samples and of their squares. The object never changes;
    ``plus`` makes a new one."""

    __slots__ = ("mean", "spread", "weight", "x", "xx")

    def __init__(self, weight: float, x: float, xx: float) -> None:
        self.weight, self.x, self.xx = weight, x, xx
        self.mean = x / weight
        self.spread = max(0.0, xx / weight - self.mean**2)

    def plus(self, weight: float, left: float) -> _TurnsLeft:
        return _TurnsLeft(self.weight + weight, self.x + weight * left, self.xx + weight * left * left)


class _AgentTypeStats:
    """Everything learned about one agent type."""

    __slots__ = ("contexts", "entries", "finished", "left", "runs", "tools", "weight")

    def __init__(self) -> None:
        self.contexts: OrderedDict[Context, dict[str, float]] = OrderedDict()
        self.entries = 0
        self.left: OrderedDict[tuple[str | None, int | None], _TurnsLeft] = OrderedDict()
        """(node, turn) → remaining turns. ``None`` in place of a node or turn stands for all of them."""
        self.tools: OrderedDict[str, dict[str, None]] = OrderedDict()
        self.weight = 1.0
        """Weight that the next run will have."""
        self.runs = 0
        self.finished = 0


class Transitions:
    """Transitions and remaining turns, learned for each agent type (``kind``). Memory is bounded, and old
    runs weigh less than new ones. One thread may write while others read."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[str, _AgentTypeStats] = OrderedDict()

    def learn(self, kind: str, run: ProgramRun) -> None:
        """Learn a run, or a piece of a long run, of the agent type ``kind``."""
        known = self._kinds.get(kind)
        if known is None:
            known = self._kinds[kind] = _AgentTypeStats()
            if len(self._kinds) > MAX_KINDS:
                self._kinds.popitem(last=False)
        self._kinds.move_to_end(kind)
        _learn_path(known, run)
        _learn_turns(known, run)
        for node, tool in run.tools:
            _learn_tool(known, node, tool)
        known.runs += run.begins
        known.finished += run.ends
        known.weight *= _GROWTH
        if known.weight > _RESCALE_ABOVE:
            _rescale(known)

    def runs(self, kind: str) -> int:
        """Return the number of learned runs of the agent type ``kind``, including unfinished ones; 0 for an
        unknown type. Unlike the statistics, this number does not decay."""
        known = self._kinds.get(kind)
        return 0 if known is None else known.runs

    def finished(self, kind: str) -> int:
        """Return the number of runs of the agent type ``kind`` that were learned to their end; 0 for an
        unknown type. Unlike the statistics, this number does not decay."""
        known = self._kinds.get(kind)
        return 0 if known is None else known.finished

    def predict(self, kind: str, history: Sequence[str]) -> list[tuple[str, float]]:
        """Return ``[(next node, probability), …]``, likeliest first; ``END`` may be among them.

        ``history`` holds the nodes visited so far, the latest last. Only the last three count. If there are
        fewer, ``START`` is put before them. The result is empty if nothing is known. Longer and shorter
        contexts are blended by how often they were seen (Witten and Bell 1991, method C).
        """
        known = self._kinds.get(kind)
        if known is None:
            return []
        past = (START, *history[-ORDER:])[-ORDER:] if len(history) < ORDER else tuple(history[-ORDER:])
        blend: dict[str, float] = {}
        for order in range(1, len(past) + 1):
            counts = known.contexts.get(past[-order:])
            if not counts:
                continue
            counts = counts.copy()
            seen = sum(counts.values()) / known.weight
            novel = sum(count / known.weight > _FORGOTTEN for count in counts.values()) or 1
            trust = seen / (seen + novel) if blend else 1.0
            scale = trust / (seen * known.weight)
            shorter = blend
            blend = {node: count * scale for node, count in counts.items()}
            for node, p in shorter.items():
                blend[node] = blend.get(node, 0.0) + (1 - trust) * p
        return sorted(blend.items(), key=lambda item: (-item[1], item[0]))

    def edges(self, kind: str) -> dict[tuple[str, str], float]:
        """Return how often programs of the type ``kind`` took each edge (source, target). The newest run
        counts as 1, older runs as less."""
        known = self._kinds.get(kind)
        if known is None:
            return {}
        weight = known.weight / _GROWTH  # weight of the newest run
        return {
            (context[0], target): count / weight
            for context, counts in known.contexts.copy().items()
            if len(context) == 1
            for target, count in counts.copy().items()
            if count / weight > _FORGOTTEN
        }

    def tools(self, kind: str) -> dict[str, tuple[str, ...]]:
        """Return the tools that programs of the type ``kind`` called at each node (SAGA's φ)."""
        known = self._kinds.get(kind)
        return {} if known is None else {node: tuple(tools) for node, tools in known.tools.copy().items()}

    def turns_left(self, kind: str, *, turns: int, node: str | None = None) -> float | None:
        """Return the expected number of further LLM requests of a program. ``turns`` is its number of
        requests so far, including the current one. ``node`` is the current request's node, if any. Returns
        ``None`` if too little is known.

        Uses the statistics of the pair (node, turn) if the pair was seen often enough. Otherwise takes the
        node's or the turn's statistics, whichever has the smaller variance.
        """
        known = self._kinds.get(kind)
        if known is None or known.finished < ENOUGH_RUNS:
            return None
        # Inlined, since every request asks, and calls of small functions would take most of the time.
        clear = _CONFIDENT_WEIGHT * known.weight
        left = known.left
        turn = turns if 1 <= turns <= MAX_TURN else 1 if turns < 1 else MAX_TURN
        best = left.get((None, turn))
        if best is not None and best.weight < clear:
            best = None
        if node is not None:
            exact = left.get((node, turn))
            if exact is not None and exact.weight >= clear:
                return exact.mean
            here = left.get((node, None))
            if here is not None and here.weight >= clear and (best is None or here.spread <= best.spread):
                best = here
        return None if best is None else best.mean

    def snapshot(self) -> dict[str, Any]:
        """Return all counts as a JSON document. Agent types and contexts are ordered oldest first."""
        return {
            "version": SNAPSHOT_VERSION,
            "kinds": [
                {
                    "kind": name,
                    "runs": kind.runs,
                    "finished": kind.finished,
                    "weight": kind.weight,
                    "contexts": [[list(context), dict(counts)] for context, counts in kind.contexts.items()],
                    "left": [[*key, left.weight, left.x, left.xx] for key, left in kind.left.items()],
                    "tools": [[node, list(tools)] for node, tools in kind.tools.items()],
                }
                for name, kind in self._kinds.items()
            ],
        }

    @classmethod
    def restore(cls, document: Any) -> Transitions:
        """Return the transitions of a ``snapshot``. Raises ``ValueError`` for any other document."""
        if not isinstance(document, dict) or document.get("version") != SNAPSHOT_VERSION:
            raise ValueError(f"not transitions of version {SNAPSHOT_VERSION}")
        made = cls()
        try:
            for entry in document["kinds"][-MAX_KINDS:]:
                made._kinds[str(entry["kind"])] = _restored(entry)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"transitions: {type(error).__name__} {error}") from None
        return made


def _restored(entry: dict[str, Any]) -> _AgentTypeStats:
    stats = _AgentTypeStats()
    stats.runs, stats.finished = _whole(entry["runs"]), _whole(entry["finished"])
    stats.weight = _positive(entry["weight"])
    for context, counts in entry["contexts"]:
        key = tuple(str(node) for node in context)
        if not 0 < len(key) <= ORDER:
            raise ValueError(f"transitions: a context of {len(key)} nodes; expected 1 to {ORDER}")
        stats.contexts[key] = {str(node): _positive(n) for node, n in list(counts.items())[:MAX_SUCCESSORS]}
        stats.entries += len(stats.contexts[key])
    while stats.entries > MAX_ENTRIES:
        stats.entries -= len(stats.contexts.popitem(last=False)[1])
    for node, turn, weight, x, xx in entry["left"][-MAX_LEFT:]:
        at = None if node is None else str(node), None if turn is None else _whole(turn)
        stats.left[at] = _TurnsLeft(_positive(weight), _number(x), _number(xx))
    for node, tools in entry["tools"][-MAX_LEFT:]:
        stats.tools[str(node)] = dict.fromkeys(str(tool) for tool in tools[:MAX_NODE_TOOLS])
    return stats


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"transitions: {value!r} is not a finite number")
    return float(value)


def _positive(value: Any) -> float:
    if _number(value) <= 0:
        raise ValueError(f"transitions: {value!r} is not above 0")
    return float(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"transitions: {value!r} is not a whole number from 0 on")
    return value


def _learn_path(stats: _AgentTypeStats, run: ProgramRun) -> None:
    groups = [(START,), *run.path] if run.begins else list(run.path)
    if run.ends and run.path:
        groups.append((END,))
    past: Context = ()
    for here, following in pairwise(groups):
        for node in here:
            # All branches share the context before a fork; the first branch stands for them afterwards.
            context = (*past, node)
            for target in following:
                for order in range(1, len(context) + 1):
                    _count(stats, context[-order:], target)
        past = (*past, here[0])[1 - ORDER :]


def _count(stats: _AgentTypeStats, context: Context, target: str) -> None:
    counts = stats.contexts.get(context)
    if counts is None:
        counts = stats.contexts[context] = {}
    else:
        stats.contexts.move_to_end(context)
    if target not in counts:
        if len(counts) >= MAX_SUCCESSORS:
            del counts[min(counts, key=lambda each: counts[each])]
            stats.entries -= 1
        stats.entries += 1
    counts[target] = counts.get(target, 0.0) + stats.weight
    while stats.entries > MAX_ENTRIES:
        stats.entries -= len(stats.contexts.popitem(last=False)[1])


def _learn_turns(stats: _AgentTypeStats, run: ProgramRun) -> None:
    if not run.ends:
        return
    for number, node in enumerate(run.turn_nodes, start=1):
        left = float(run.turns - number)
        turn = min(number, MAX_TURN)
        keys: tuple[tuple[str | None, int | None], ...] = ((None, turn),)
        if node is not None:
            keys = ((node, turn), (node, None), (None, turn))
        for key in keys:
            seen = stats.left.get(key)
            if seen is None:
                stats.left[key] = _TurnsLeft(stats.weight, stats.weight * left, stats.weight * left * left)
            else:
                stats.left[key] = seen.plus(stats.weight, left)
                stats.left.move_to_end(key)
    while len(stats.left) > MAX_LEFT:
        stats.left.popitem(last=False)


def _learn_tool(stats: _AgentTypeStats, node: str, tool: str) -> None:
    tools = stats.tools.setdefault(node, {})
    stats.tools.move_to_end(node)
    if tool not in tools and len(tools) < MAX_NODE_TOOLS:
        stats.tools[node] = {**tools, tool: None}
    while len(stats.tools) > MAX_LEFT:
        stats.tools.popitem(last=False)


def _rescale(stats: _AgentTypeStats) -> None:
    """Scale an agent type's weights so that the next run weighs 1, and drop decayed counts. Needed about
    every 800 runs, since the weights of new runs grow without bound."""
    scale, stats.weight = 1 / stats.weight, 1.0
    contexts: OrderedDict[Context, dict[str, float]] = OrderedDict()
    for context, counts in stats.contexts.items():
        alive = {node: count * scale for node, count in counts.items() if count * scale > _FORGOTTEN}
        if alive:
            contexts[context] = alive
    stats.contexts = contexts
    stats.entries = sum(map(len, contexts.values()))
    stats.left = OrderedDict(
        (key, _TurnsLeft(each.weight * scale, each.x * scale, each.xx * scale))
        for key, each in stats.left.items()
        if each.weight * scale > _FORGOTTEN
    )
