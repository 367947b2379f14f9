"""One program's way through its nodes, put together from what is heard of it while it runs."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, NamedTuple

from sojourn.aeg import END, START
from sojourn.naming import name_of

if TYPE_CHECKING:
    from sojourn.aeg import Aeg

MAX_PATH = 256
"""Visits kept of one run; a longer run is learned from in pieces."""
MAX_TURNS = 512
"""Turns whose node is kept; later ones are only counted."""
MAX_SIBLINGS = 16
MAX_RUN_TOOLS = 64


class Run(NamedTuple):
    """What one finished program did, or a piece of a long one. Names and counts only."""

    path: tuple[tuple[str, ...], ...] = ()
    """The nodes visited, in order. Those that ran side by side stand together, sorted."""
    turn_nodes: tuple[str | None, ...] = ()
    """The node of each LLM request, in order; ``None`` where there was none."""
    turns: int = 0
    """LLM requests of the whole program; more than ``turn_nodes`` names, where they were very many."""
    tools: tuple[tuple[str, str], ...] = ()
    """(node, tool): the tool was called while the program was at the node."""
    begins: bool = True
    """``path`` begins where the program began."""
    ends: bool = True
    """``path`` ends where the program ended, and ``turns`` is final. False for one broken off."""


class Trail:
    """Folds what is heard of one program into a ``Run``. Not for several threads at once.

    A *visit* begins when a node is entered, or when a request names a node that the program is not known to
    be at. A second request in the same visit, after the first, is a step from the node to itself: what the
    server wants to know is where the next turn will be. Entered nodes count as side by side, not as one after
    the other, where a request of the one before is still under way, or where the graph knows no edge between
    the two but one from the node before both, and nothing came of the first yet.
    """

    __slots__ = (
        "_begins", "_group", "_open", "_path", "_requests", "_tools", "_turn_nodes", "_turns", "graph",
        "kind", "lossy", "turns",
    )  # fmt: skip

    def __init__(self, kind: str) -> None:
        self.kind = kind
        """The agent's type."""
        self.turns = 0
        """LLM requests so far, as counted at once by those who hear of them. The rest is folded later."""
        self.graph: Aeg | None = None
        """As declared, so far as heard: it tells what may follow what."""
        self.lossy = False
        """Something was not heard: nothing can be learned from this program any more."""
        self._begins = True
        self._path: list[list[str]] = []
        self._group: list[str] = []
        """The last of ``_path``: where the program is."""
        self._open: dict[str, int] = {}
        self._requests: dict[str, int] = {}
        self._turn_nodes: list[str | None] = []
        self._turns = 0
        self._tools: dict[tuple[str, str], None] = {}

    def entered(self, node: str) -> Run | None:
        """A node began. A ``Run`` where the path got so long that a piece of it is to be learned now."""
        node = name_of(node)
        if node in (START, END):
            return None
        if self._group and self._beside(node):
            if node not in self._group and len(self._group) < MAX_SIBLINGS:
                self._group.append(node)
            return None
        return self._visit(node)

    def requested(self, node: str | None) -> Run | None:
        """An LLM request began at ``node``."""
        self._turns += 1
        piece: Run | None = None
        if node is None:
            node = self._group[-1] if self._group else None
        else:
            node = name_of(node)
            if node not in self._group:
                piece = self.entered(node)
            elif self._requests.get(node) and not self._open.get(node) and len(self._group) == 1:
                piece = self._visit(node)
        if len(self._turn_nodes) < MAX_TURNS:
            self._turn_nodes.append(node)
        if node is not None:
            self._requests[node] = self._requests.get(node, 0) + 1
            self._open[node] = self._open.get(node, 0) + 1
        return piece

    def answered(self, node: str | None) -> None:
        """The request ended, whichever way."""
        if node is None:
            node = self._group[-1] if self._group else None
        else:
            node = name_of(node)
        if node is not None and self._open.get(node):
            self._open[node] -= 1

    def called(self, tool: str) -> None:
        """A tool call began."""
        if len(self._group) == 1 and len(self._tools) < MAX_RUN_TOOLS:
            self._tools[self._group[0], tool] = None

    def ended(self, *, broken_off: bool) -> Run:
        """The program is over; ``broken_off`` says nothing about where it would have ended."""
        return self._run(ends=not broken_off)

    def _beside(self, node: str) -> bool:
        graph, group = self.graph, self._group
        declared: Container[tuple[str, str]] = graph.edges if graph is not None else ()
        if any((each, node) in declared for each in group):
            return False
        if any(self._open.get(each) for each in group):
            return True
        if self._requests:
            return False
        before = self._path[-2] if len(self._path) > 1 else [START] if self._begins else []
        return any((each, node) in declared for each in before)

    def _visit(self, node: str) -> Run | None:
        piece: Run | None = None
        if len(self._path) >= MAX_PATH:
            piece = self._run(ends=False)
            # The last visits go on in the next piece, as what precedes it.
            self._path = self._path[-1:]
            self._begins = False
            self._tools = {}
        self._group = [node]
        self._path.append(self._group)
        self._open = {}
        self._requests = {}
        return piece

    def _run(self, *, ends: bool) -> Run:
        return Run(
            path=tuple(tuple(sorted(group)) for group in self._path),
            turn_nodes=tuple(self._turn_nodes) if ends else (),
            turns=self._turns if ends else 0,
            tools=tuple(self._tools),
            begins=self._begins,
            ends=ends,
        )


__all__ = ["MAX_PATH", "Run", "Trail"]
