"""Transitions between the steps of agents, learned from earlier programs (SAGA §3.3). Each agent type has its
own statistics.

The transitions are interpolated n-grams over the steps of a program. They count which step followed each
sequence of one, two and three steps. ``START`` and ``END`` count as steps. With three steps of history the
first failing check can be told from the third; a first-order chain cannot do this.

Each program weighs 2^(1/20) times as much as the program before it, so 20 later programs halve its weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from sojourn.aeg import END, START

from .windowed_history import checked, recent_entry

ORDER: Final = 3
"""Maximum number of latest steps that a prediction uses."""
HALF_LIFE_RUNS: Final = 20
"""Number of later programs that halve the weight of a program."""
MAX_TYPES: Final = 64
"""Maximum number of agent types. The least recently learned is dropped first."""
MAX_ENTRIES: Final = 4096
"""Maximum number of pairs (context, next step) per agent type. The least recently seen contexts are dropped
first."""
MAX_SUCCESSORS: Final = 128
"""Maximum number of successors per context. The rarest is dropped first."""
_GROWTH = 2.0 ** (1 / HALF_LIFE_RUNS)
_RESCALE_ABOVE = 2.0**40
_FORGOTTEN = 0.01
"""Decayed counts up to this value, in programs, do not count as novel, and ``_rescale`` removes them."""

_Weight = Annotated[float, msgspec.Meta(gt=0, le=1e300)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class AgentTypeStats(msgspec.Struct):
    """Everything learned about one agent type. Its JSON form is the saved one."""

    contexts: dict[str, dict[str, _Weight]] = {}
    """Context (one to three steps, see ``_context``) → weight of each step that followed it. The least
    recently seen context comes first."""
    weight: _Weight = 1.0
    """Weight that the next program will have."""
    runs: _Count = 0
    """Number of learned programs, including unfinished ones. It does not decay."""
    finished: _Count = 0
    """Number of programs that were learned to their end. It does not decay."""


class Transitions:
    """Transitions of the programs of each agent type, in bounded memory."""

    def __init__(self) -> None:
        self._types: dict[str, AgentTypeStats] = {}

    def learn(self, agent_type: str, steps: Sequence[str], *, begins: bool = True, ends: bool = True) -> None:
        """Learn the steps of a program, or of a piece of a long one. ``begins`` and ``ends``: whether the
        piece has the program's start and end."""
        known = recent_entry(self._types, agent_type, AgentTypeStats, MAX_TYPES)
        path = (*((START,) if begins else ()), *steps, *((END,) if ends and steps else ()))
        for at in range(1, len(path)):
            for order in range(1, min(at, ORDER) + 1):
                _count(known, _context(path[at - order : at]), path[at])
        while sum(map(len, known.contexts.values())) > MAX_ENTRIES:
            del known.contexts[next(iter(known.contexts))]
        known.runs += begins
        known.finished += ends
        known.weight *= _GROWTH
        if known.weight > _RESCALE_ABOVE:
            _rescale(known)

    def stats(self, agent_type: str) -> AgentTypeStats:
        """Return what is learned about this type."""
        return self._types.get(agent_type) or AgentTypeStats()

    def predict(self, agent_type: str, history: Sequence[str]) -> list[tuple[str, float]]:
        """Return ``[(next step, probability), …]``, likeliest first; ``END`` may be among them.

        ``history`` holds the steps so far, the latest last. Only the last three count. If there are fewer,
        ``START`` is put before them. The result is empty if nothing is known. Longer and shorter contexts are
        blended by how often they were seen (Witten and Bell 1991, method C).
        """
        known = self.stats(agent_type)
        past = (START, *history[-ORDER:])[-ORDER:]
        blend: dict[str, float] = {}
        for order in range(1, len(past) + 1):
            counts = known.contexts.get(_context(past[-order:]))
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
        """Return all counts as JSON values. Agent types and contexts are ordered oldest first."""
        snapshot: dict[str, Any] = msgspec.to_builtins(self._types)
        return snapshot

    def restore(self, document: Any) -> None:
        """Replace all counts by those of a ``snapshot``. Raises ``ValueError`` for other documents."""
        self._types = checked(document, dict[str, AgentTypeStats])


def _context(steps: Sequence[str]) -> str:
    return "\n".join(steps)


def _count(stats: AgentTypeStats, context: str, target: str) -> None:
    counts = stats.contexts[context] = stats.contexts.pop(context, {})
    if target not in counts and len(counts) >= MAX_SUCCESSORS:
        del counts[min(counts, key=lambda each: counts[each])]
    counts[target] = counts.get(target, 0.0) + stats.weight


def _rescale(stats: AgentTypeStats) -> None:
    """Scale an agent type's weights so that the next program weighs 1, and drop decayed counts. Needed about
    every 800 programs, since the weights of new programs grow without bound."""
    scale, stats.weight = 1 / stats.weight, 1.0
    decayed = (
        (context, {step: count * scale for step, count in counts.items() if count * scale > _FORGOTTEN})
        for context, counts in stats.contexts.items()
    )
    stats.contexts = {context: counts for context, counts in decayed if counts}
