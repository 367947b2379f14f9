"""What contexts do: how much the answers of tools add (n̂_obs of SAGA §4.1), how often branches come back."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

OBSERVATIONS_VERSION = 1
NEWEST_WEIGHT = 0.2
"""Of the newest answer in the moving average."""


class ToolOutputTokens:
    """Tokens that a tool's answer adds to the next prompt: a moving average for each tool and one for all."""

    def __init__(self, max_tools: int = 512) -> None:
        if max_tools < 1:
            raise ValueError(f"max_tools is {max_tools}; expected ≥ 1")
        self._max_tools = max_tools
        self._tools: OrderedDict[str, float] = OrderedDict()
        self._all: float | None = None

    def observe(self, tool: str, tokens: float) -> None:
        """One call of ``tool`` added so many tokens. Raises ``ValueError`` unless finite and ≥ 0."""
        tokens = _tokens(tokens)
        self._all = _updated_average(self._all, tokens)
        self._tools[tool] = _updated_average(self._tools.get(tool), tokens)
        self._tools.move_to_end(tool)
        if len(self._tools) > self._max_tools:
            self._tools.popitem(last=False)

    def expected(self, tool: str) -> float:
        """What a call of ``tool`` adds; of one never seen what any call adds, 0.0 where none was."""
        return self._tools.get(tool, self._all if self._all is not None else 0.0)

    def snapshot(self) -> dict[str, Any]:
        """All of it as a JSON-able document, the tool not seen for longest first."""
        return {"version": OBSERVATIONS_VERSION, "tools": dict(self._tools), "all": self._all}

    @classmethod
    def restore(cls, document: Any, max_tools: int = 512) -> ToolOutputTokens:
        """What a ``snapshot`` was taken of. Raises ``ValueError`` for anything else."""
        if not isinstance(document, dict) or document.get("version") != OBSERVATIONS_VERSION:
            raise ValueError(f"tokens per tool: not a document of version {OBSERVATIONS_VERSION}")
        tools = document.get("tools")
        if not isinstance(tools, dict):
            raise ValueError("tokens per tool: field 'tools' is missing or not an object")
        made = cls(max_tools)
        for tool, tokens in list(tools.items())[-max_tools:]:
            made._tools[str(tool)] = _tokens(tokens)
        if document.get("all") is not None:
            made._all = _tokens(document["all"])
        return made


class BranchReuseRate:
    """Of blocks that were put aside, the share that was used again rather than evicted; the past fades.

    Blocks that are evicted before they could be used count as not used, so a low share keeps itself low
    until memory is ample for a while. ``share`` moves in strides of ``stride``, so that what was computed
    with it holds for a while; ``changes`` counts the moves.
    """

    def __init__(
        self, *, at_first: float = 0.5, weight: float = 4096.0, window: float = 65536.0, stride: float = 0.05
    ) -> None:
        """``at_first`` counts like ``weight`` outcomes seen; of more than ``window``, half are forgotten."""
        if not (0 <= at_first <= 1 and weight > 0 and window > weight and 0 < stride < 1):
            raise ValueError(
                f"at_first {at_first}, weight {weight}, window {window}, stride {stride}; "
                "expected at_first and stride within 0 to 1, and 0 < weight < window"
            )
        self._again = at_first * weight
        self._outcomes = weight
        self._window = window
        self._stride = stride
        self._told = (0, 0)
        self.share = at_first
        self.changes = 0

    def observe(self, again: int, evicted: int) -> None:
        """Blocks used again and blocks evicted, both counted since the start."""
        if (again, evicted) == self._told:
            return
        self._again += again - self._told[0]
        self._outcomes += again - self._told[0] + evicted - self._told[1]
        self._told = (again, evicted)
        while self._outcomes > self._window:
            self._again *= 0.5
            self._outcomes *= 0.5
        share = self._again / self._outcomes
        if abs(share - self.share) >= self._stride:
            self.share = share
            self.changes += 1


def _updated_average(mean: float | None, value: float) -> float:
    return value if mean is None else mean + NEWEST_WEIGHT * (value - mean)


def _tokens(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} is not a number of tokens")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{value} tokens; expected a finite number ≥ 0")
    return float(value)
