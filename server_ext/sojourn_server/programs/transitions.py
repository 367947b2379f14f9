"""Transitions between the steps of agents, learned from earlier programs (SAGA §3.3). Each agent type has its
own statistics.

The transitions are interpolated n-grams over the steps of a program. They count which step followed each
sequence of one, two and three steps. ``START`` and ``END`` count as steps. With three steps of history the
first failing check can be told from the third; a first-order chain cannot do this.

Each program weighs 2^(1/20) times as much as the program before it, so 20 later programs halve its weight.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

from sojourn.aeg import END, START

ORDER: Final = 3
"""Maximum number of latest steps that a prediction uses."""
HALF_LIFE_RUNS: Final = 20
"""Number of later programs that halve the weight of a program."""
MAX_KINDS: Final = 64
"""Maximum number of agent types. The least recently learned is dropped first."""
MAX_ENTRIES: Final = 4096
"""Maximum number of pairs (context, next step) per agent type. The least recently seen contexts are dropped
first."""
MAX_SUCCESSORS: Final = 128
"""Maximum number of successors per context. The rarest is dropped first."""
SNAPSHOT_VERSION: Final = 1
_GROWTH = 2.0 ** (1 / HALF_LIFE_RUNS)
_RESCALE_ABOVE = 2.0**40
_FORGOTTEN = 0.01
"""Decayed counts up to this value, in programs, do not count as novel, and ``_rescale`` removes them."""

Context = tuple[str, ...]


class _AgentTypeStats:
    """Everything learned about one agent type."""

    __slots__ = ("contexts", "entries", "finished", "runs", "weight")

    def __init__(self) -> None:
        self.contexts: OrderedDict[Context, dict[str, float]] = OrderedDict()
        self.entries = 0
        self.weight = 1.0
        """Weight that the next program will have."""
        self.runs = 0
        self.finished = 0


class Transitions:
    """Transitions of the programs of each agent type (``kind``), in bounded memory."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[str, _AgentTypeStats] = OrderedDict()

    def learn(self, kind: str, steps: Sequence[str], *, begins: bool = True, ends: bool = True) -> None:
        """Learn the steps of a program, or of a piece of a long one. ``begins`` and ``ends``: whether the
        piece has the program's start and end."""
        known = self._kinds.get(kind)
        if known is None:
            known = self._kinds[kind] = _AgentTypeStats()
            if len(self._kinds) > MAX_KINDS:
                self._kinds.popitem(last=False)
        self._kinds.move_to_end(kind)
        path = (*((START,) if begins else ()), *steps, *((END,) if ends and steps else ()))
        for at, (_, target) in enumerate(pairwise(path), start=1):
            for order in range(1, min(at, ORDER) + 1):
                _count(known, path[at - order : at], target)
        known.runs += begins
        known.finished += ends
        known.weight *= _GROWTH
        if known.weight > _RESCALE_ABOVE:
            _rescale(known)

    def runs(self, kind: str) -> int:
        """Return the number of learned programs of this type, including unfinished ones; 0 for an unknown
        type. Unlike the statistics, this number does not decay."""
        known = self._kinds.get(kind)
        return 0 if known is None else known.runs

    def finished(self, kind: str) -> int:
        """Return the number of programs of this type that were learned to their end; 0 for an unknown type.
        Unlike the statistics, this number does not decay."""
        known = self._kinds.get(kind)
        return 0 if known is None else known.finished

    def predict(self, kind: str, history: Sequence[str]) -> list[tuple[str, float]]:
        """Return ``[(next step, probability), …]``, likeliest first; ``END`` may be among them.

        ``history`` holds the steps so far, the latest last. Only the last three count. If there are fewer,
        ``START`` is put before them. The result is empty if nothing is known. Longer and shorter contexts are
        blended by how often they were seen (Witten and Bell 1991, method C).
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
            seen = sum(counts.values()) / known.weight
            novel = sum(count / known.weight > _FORGOTTEN for count in counts.values()) or 1
            trust = seen / (seen + novel) if blend else 1.0
            scale = trust / (seen * known.weight)
            shorter = blend
            blend = {step: count * scale for step, count in counts.items()}
            for step, p in shorter.items():
                blend[step] = blend.get(step, 0.0) + (1 - trust) * p
        return sorted(blend.items(), key=lambda item: (-item[1], item[0]))

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
        key = tuple(str(step) for step in context)
        if not 0 < len(key) <= ORDER:
            raise ValueError(f"transitions: a context of {len(key)} steps; expected 1 to {ORDER}")
        stats.contexts[key] = {str(step): _positive(n) for step, n in list(counts.items())[:MAX_SUCCESSORS]}
        stats.entries += len(stats.contexts[key])
    _drop_old_contexts(stats)
    return stats


def _positive(value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value <= 0:
        raise ValueError(f"transitions: {value!r} is not a finite number above 0")
    return float(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"transitions: {value!r} is not a whole number from 0 on")
    return value


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
    _drop_old_contexts(stats)


def _drop_old_contexts(stats: _AgentTypeStats) -> None:
    while stats.entries > MAX_ENTRIES:
        stats.entries -= len(stats.contexts.popitem(last=False)[1])


def _rescale(stats: _AgentTypeStats) -> None:
    """Scale an agent type's weights so that the next program weighs 1, and drop decayed counts. Needed about
    every 800 programs, since the weights of new programs grow without bound."""
    scale, stats.weight = 1 / stats.weight, 1.0
    contexts: OrderedDict[Context, dict[str, float]] = OrderedDict()
    for context, counts in stats.contexts.items():
        alive = {step: count * scale for step, count in counts.items() if count * scale > _FORGOTTEN}
        if alive:
            contexts[context] = alive
    stats.contexts = contexts
    stats.entries = sum(map(len, contexts.values()))
