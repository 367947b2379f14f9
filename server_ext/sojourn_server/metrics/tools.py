"""Which tool names may become label values: the first few at sight, later ones by frequency."""

from __future__ import annotations

from .catalog import MAX_TEXT_CHARS, MAX_TOOLS, OTHER_TOOL


class ToolNames:
    """At most ``max_names`` names, learnt once and never exchanged, so that no series changes its meaning.

    Half of the places go to the first names seen, so that a small deployment is
    fully labelled from its first call on. The other half must be earned by
    ``EARNED_AFTER`` sightings, so that a client which invents names cannot take
    them all. Memory is bounded by ``MAX_CANDIDATES`` names of at most 64 characters.
    """

    EARNED_AFTER = 8
    MAX_CANDIDATES = 256

    def __init__(self, max_names: int = MAX_TOOLS) -> None:
        self._max_names = max_names
        self._at_sight = max_names // 2
        self._learnt: set[str] = set()
        self._candidates: dict[str, int] = {}

    def label(self, tool: str) -> str:
        """The label value for ``tool``: its name, made safe to print, or ``other``."""
        name = printable(tool)
        if name in self._learnt or name == OTHER_TOOL:
            return name
        if len(self._learnt) >= self._max_names:
            return OTHER_TOOL
        if len(self._learnt) < self._at_sight or self._earned(name):
            self._learnt.add(name)
            return name
        return OTHER_TOOL

    def _earned(self, name: str) -> bool:
        seen = self._candidates.get(name, 0) + 1
        if seen >= self.EARNED_AFTER:
            self._candidates.pop(name, None)
            return True
        if name not in self._candidates and len(self._candidates) >= self.MAX_CANDIDATES:
            # Misra–Gries: everyone loses a sighting, so that only frequent names survive a flood.
            self._candidates = {other: n - 1 for other, n in self._candidates.items() if n > 1}
            return False
        self._candidates[name] = seen
        return False


def printable(text: str) -> str:
    """``text`` as an open label may carry it: encodable, and cut to ``MAX_TEXT_CHARS``."""
    # A lone surrogate would make the whole exposition unencodable, and with it every other metric.
    return text[:MAX_TEXT_CHARS].encode("utf-8", "replace").decode("utf-8")
