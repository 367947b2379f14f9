"""Statistics of one tenant's ended programs, from which ``ProgramEstimator`` estimates its later ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from ..programs.output_lengths import OutputLengthHistory
from ..programs.tool_and_turn_history import SlidingMean

MEAN_WINDOW = 256
"""Number of latest programs or turns that a mean covers."""
MAX_AGENT_TYPES = 64
"""Maximum number of agent types of a tenant whose statistics are kept."""

Means = OrderedDict[str | None, SlidingMean]
"""Mean seconds by agent type; ``None``: of all types."""


class TenantStatistics:
    """Sizes, turns and durations of one tenant's programs, by agent type."""

    def __init__(self) -> None:
        self.peaks = OutputLengthHistory(max_keys=MAX_AGENT_TYPES)
        self.turns = OutputLengthHistory(max_keys=MAX_AGENT_TYPES)
        self.turn_s: Means = OrderedDict()
        self.life_s: Means = OrderedDict()

    def snapshot(self) -> dict[str, Any]:
        """All statistics as a JSON-able document."""
        return {
            "peaks": self.peaks.snapshot(),
            "turns": self.turns.snapshot(),
            "turn_s": [[kind, mean.values()] for kind, mean in self.turn_s.items()],
            "life_s": [[kind, mean.values()] for kind, mean in self.life_s.items()],
        }

    @classmethod
    def restore(cls, document: Any) -> TenantStatistics:
        """The statistics of a ``snapshot``. Raises ``ValueError`` for anything else."""
        if not isinstance(document, Mapping):
            raise ValueError(f"estimates: a {type(document).__name__}; expected an object of statistics")
        known = cls()
        known.peaks = OutputLengthHistory.restore(document.get("peaks"), max_keys=MAX_AGENT_TYPES)
        known.turns = OutputLengthHistory.restore(document.get("turns"), max_keys=MAX_AGENT_TYPES)
        known.turn_s = _read_means(document.get("turn_s"))
        known.life_s = _read_means(document.get("life_s"))
        return known


def observe_mean(means: Means, kind: str | None, value: float) -> None:
    """Add a value to the mean of an agent type, and to the mean of all types, whose key is ``None``."""
    # ``None`` is always moved to the end, so another key is the first and is dropped.
    for each in dict.fromkeys((kind, None)):
        mean = means.get(each)
        if mean is None:
            mean = means[each] = SlidingMean(MEAN_WINDOW)
            if len(means) > MAX_AGENT_TYPES:
                means.popitem(last=False)
        means.move_to_end(each)
        mean.observe(max(0.0, value))


def mean_of(means: Means, kind: str | None) -> float | None:
    """The mean of an agent type, or of all types if the type has none; ``None``: there are no values."""
    mean = means.get(kind) or means.get(None)
    return mean.mean() if mean is not None else None


def _read_means(entries: Any) -> Means:
    """Decode the means of a ``ProgramEstimator.snapshot``. Raises ``ValueError`` for anything else."""
    if not isinstance(entries, list):
        raise ValueError(f"estimates: {entries!r}; expected a list of agent types and seconds")
    means: Means = OrderedDict()
    for entry in entries[-MAX_AGENT_TYPES:]:
        match entry:
            case [str() | None as kind, list(values)]:
                mean = means[kind] = SlidingMean(MEAN_WINDOW)
                for value in values:
                    if not isinstance(value, (int, float)) or isinstance(value, bool):
                        raise ValueError(f"estimates: {value!r} of {kind!r}; expected seconds")
                    mean.observe(value)
            case _:
                raise ValueError(f"estimates: {entry!r}; expected an agent type and its seconds")
    return means
