"""Histories of output lengths, in bounded memory, from which later lengths are predicted (Tetris §2.2).

The classes are plain containers without a clock or I/O. A key is the agent type and the tool that ran before
the output.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .tool_and_turn_history import SlidingMean, SortedWindow, non_negative, recent_entry

LENGTHS_VERSION = 1
"""Version of the documents that ``snapshot`` writes and ``restore`` reads."""

MAX_OUTPUT_TOKENS = 2**53
"""Maximum output length in tokens that ``observe`` accepts; floats are exact up to this number."""

LengthKey = tuple[str | None, str | None]
"""Agent type, and the tool that was called before the output; ``None``: unknown."""

ALL_OUTPUTS: LengthKey = (None, None)


class OutputLengthHistory:
    """Lengths of finished outputs in tokens, by agent type and by the tool that ran before the output.

    Each output is added to up to three groups: outputs of its agent type after its tool, all outputs of its
    agent type, and all outputs. A group keeps its newest ``max_samples`` lengths. Only the ``max_keys`` most
    recently observed groups are kept, so invented names cost bounded memory.
    """

    def __init__(self, max_samples: int = 500, max_keys: int = 512) -> None:
        self._max_samples = max_samples
        self._max_keys = max_keys
        self._windows: OrderedDict[LengthKey, SortedWindow] = OrderedDict()
        self._all = SortedWindow(max_samples)

    def observe(self, agent_type: str | None, tool: str | None, tokens: int) -> None:
        """Add an output of ``tokens`` tokens. Raises ``ValueError`` unless ``tokens`` is an integer from 1 to
        ``MAX_OUTPUT_TOKENS``."""
        _whole(tokens)
        self._all.add(tokens)
        if tool is not None:
            self._window((agent_type, tool)).add(tokens)
        # The type's group is updated after the pair's group, so that the pair's group is dropped first.
        if agent_type is not None:
            self._window((agent_type, None)).add(tokens)

    def sorted_lengths(self, agent_type: str | None, tool: str | None, least: int) -> Sequence[int]:
        """Return the output lengths in tokens, ascending, of the first group with at least ``least`` outputs.

        The groups are tried in this order: outputs of this agent type after this tool, all outputs of this
        agent type, all outputs. Empty if no group has enough. The result is a live view, not a copy. Read it
        at once, and do not keep or change it.
        """
        for key in ((agent_type, tool), (agent_type, None)):
            window = self._windows.get(key)
            if window is not None and len(window.ordered) >= least:
                return window.ordered
        return self._all.ordered if len(self._all.ordered) >= least else ()

    def count(self) -> int:
        """Number of outputs kept in the group of all outputs, at most ``max_samples``."""
        return len(self._all.ordered)

    def snapshot(self) -> dict[str, Any]:
        """Return the history as a JSON-able document, keys and lengths oldest first."""
        return {
            "version": LENGTHS_VERSION,
            "keys": [[*key, list(window.arrivals)] for key, window in self._windows.items()],
            "newest": list(self._all.arrivals),
        }

    @classmethod
    def restore(cls, document: Any, max_samples: int = 500, max_keys: int = 512) -> OutputLengthHistory:
        """Restore a history from a ``snapshot``. The oldest entries beyond these limits are dropped. Raises
        ``ValueError`` for other documents."""
        lengths = cls(max_samples, max_keys)
        if not isinstance(document, Mapping) or document.get("version") != LENGTHS_VERSION:
            raise ValueError(f"output lengths: expected a document of version {LENGTHS_VERSION}")
        lengths._all = SortedWindow(max_samples, _samples(document.get("newest")))
        keys = document.get("keys")
        if not isinstance(keys, list):
            raise ValueError("output lengths: field 'keys' is missing or not a list")
        for entry in keys[-max_keys:]:
            match entry:
                case [str() | None as agent_type, str() | None as tool, samples] if (
                    agent_type,
                    tool,
                ) != ALL_OUTPUTS:
                    window = lengths._window((agent_type, tool))
                    for tokens in _samples(samples):
                        window.add(tokens)
                case _:
                    raise ValueError(f"output lengths: {entry!r} is not an agent type, a tool and lengths")
        return lengths

    def _window(self, key: LengthKey) -> SortedWindow:
        return recent_entry(self._windows, key, lambda: SortedWindow(self._max_samples), self._max_keys)


class HintErrors:
    """Errors of the output lengths that clients hint, by agent type. Keeps the newest ``window`` errors of
    each of the ``max_types`` most recently observed types."""

    def __init__(self, window: int = 64, max_types: int = 512) -> None:
        self._window = window
        self._max_types = max_types
        self._types: OrderedDict[str, SlidingMean] = OrderedDict()

    def observe(self, agent_type: str, off: float) -> None:
        """Add an error ``off`` = |ln(actual ÷ hinted)|. Raises ``ValueError`` unless finite and ≥ 0."""
        off = non_negative(off, "a hint's error")
        recent_entry(self._types, agent_type, lambda: SlidingMean(self._window), self._max_types).observe(off)

    def mean(self, agent_type: str, least: int) -> float | None:
        """Mean error of an agent type; ``None`` with fewer than ``least`` errors."""
        errors = self._types.get(agent_type)
        return errors.mean() if errors is not None and errors.count() >= least else None

    def snapshot(self) -> dict[str, list[float]]:
        """Return the errors as a JSON-able document, types and errors oldest first."""
        return {agent_type: errors.snapshot() for agent_type, errors in self._types.items()}

    @classmethod
    def restore(cls, document: Any, window: int = 64, max_types: int = 512) -> HintErrors:
        """Restore the errors from a ``snapshot``. The oldest entries beyond these limits are dropped. Raises
        ``ValueError`` for other documents."""
        restored = cls(window, max_types)
        if not isinstance(document, Mapping):
            raise ValueError(f"hint errors: a {type(document).__name__}; expected an object")
        for agent_type, errors in document.items():
            if not isinstance(agent_type, str) or not isinstance(errors, list):
                raise ValueError(f"hint errors: entry {agent_type!r} is not a list of errors")
            for off in errors:
                restored.observe(agent_type, off)
        return restored


def _samples(values: Any) -> Iterable[int]:
    if not isinstance(values, list):
        raise ValueError(f"output lengths: {values!r} is not a list of tokens")
    return map(_whole, values)


def _whole(tokens: Any) -> int:
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 1 <= tokens <= MAX_OUTPUT_TOKENS:
        raise ValueError(
            f"an output of {tokens!r} tokens; expected a whole number from 1 to {MAX_OUTPUT_TOKENS}"
        )
    return tokens
