"""The path of one program through the nodes of its graph, built from the program's events."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, NamedTuple

from sojourn.aeg import END, START
from sojourn.valid_ids_and_names import name_of

if TYPE_CHECKING:
    from sojourn.aeg import Aeg

MAX_PATH = 256
"""Maximum length of ``ProgramRun.path``. A run with a longer path is learned in pieces."""
MAX_TURNS = 512
"""Maximum number of turns whose node is kept; later turns are only counted."""
MAX_SIBLINGS = 16
MAX_RUN_TOOLS = 64


class ProgramRun(NamedTuple):
    """Path, turns and tools of one finished program, or of a piece of a long one. Names and counts only."""

    path: tuple[tuple[str, ...], ...] = ()
    """The nodes visited, in order. Nodes that ran in parallel form one sorted group."""
    turn_nodes: tuple[str | None, ...] = ()
    """The node of each LLM request, in order; ``None`` for a request without a node. Has at most
    ``MAX_TURNS`` entries. Empty if ``ends`` is False."""
    turns: int = 0
    """Number of LLM requests of the whole program, which may exceed ``MAX_TURNS``; 0 if ``ends`` is False."""
    tools: tuple[tuple[str, str], ...] = ()
    """Pairs (node, tool): the tool was called at the node."""
    begins: bool = True
    """True if ``path`` begins at the program's start."""
    ends: bool = True
    """True if ``path`` reaches the program's end. False for a cancelled run, and for a piece that continues
    in the next piece."""


class RunTrace:
    """Builds a ``ProgramRun`` from the events of one program. Not thread-safe.

    A *visit* begins when the program enters a node, or when a request names a node that is not current. A
    request may also name the current node after an earlier request there has ended. This begins a visit from
    the node to itself. The server needs these visits to know the node of the next turn.

    A new node either follows the current node or runs in parallel to it. The first rule that applies decides:

    1. The graph has an edge from the current to the new node: the new node follows.
    2. The current node has a request in progress: the new node is parallel.
    3. The current node has made no request, and the graph has an edge from the previous to the new node: the
       new node is parallel.
    4. In all other cases the new node follows.
    """

    __slots__ = (
        "_begins", "_group", "_open", "_path", "_requests", "_tools", "_turn_nodes", "_turns", "graph",
        "has_nodes", "kind", "lossy", "turns",
    )  # fmt: skip

    def __init__(self, kind: str) -> None:
        self.kind = kind
        """The program's agent type."""
        self.turns = 0
        """Number of LLM requests so far. The agent's thread sets ``turns``, ``has_nodes``, ``graph`` and
        ``lossy``; the advisor's thread sets all other attributes."""
        self.has_nodes = False
        """True once the program entered a node or sent a request that names a node. Before that, ``answered``
        and ``called`` change nothing."""
        self.graph: Aeg | None = None
        """The graph that the program declared, if any. Its edges say which node may follow which."""
        self.lossy = False
        """True once an event of this program was dropped. Then nothing more is learned from the program."""
        self._begins = True
        self._path: list[list[str]] = []
        self._group: list[str] = []
        """The current node or parallel nodes: the last group of ``_path``."""
        self._open: dict[str, int] = {}
        self._requests: dict[str, int] = {}
        self._turn_nodes: list[str | None] = []
        self._turns = 0
        self._tools: dict[tuple[str, str], None] = {}

    def entered(self, node: str) -> ProgramRun | None:
        """Record that the program entered ``node``. If the path is full and a new visit begins, return the
        full path as a piece of the run, and start the next piece. Otherwise return ``None``."""
        node = name_of(node)
        if node in (START, END):
            return None
        if self._group and self._beside(node):
            if node not in self._group and len(self._group) < MAX_SIBLINGS:
                self._group.append(node)
            return None
        return self._visit(node)

    def requested(self, node: str | None) -> ProgramRun | None:
        """Record an LLM request at ``node``; ``None`` means the current node. If the path is full and a new
        visit begins, return the full path as a piece of the run. Otherwise return ``None``."""
        self._turns += 1
        piece: ProgramRun | None = None
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
        """Record that a request at ``node`` ended, with or without success. ``None`` means the current
        node."""
        if node is None:
            node = self._group[-1] if self._group else None
        else:
            node = name_of(node)
        if node is not None and self._open.get(node):
            self._open[node] -= 1

    def called(self, tool: str) -> None:
        """Record a call of ``tool`` at the current node. Ignored while several nodes run in parallel."""
        if len(self._group) == 1 and len(self._tools) < MAX_RUN_TOOLS:
            self._tools[self._group[0], tool] = None

    def ended(self, *, broken_off: bool) -> ProgramRun:
        """Return the finished run. ``broken_off``: True for a cancelled program, whose last node is not
        learned as an end node."""
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

    def _visit(self, node: str) -> ProgramRun | None:
        piece: ProgramRun | None = None
        if len(self._path) >= MAX_PATH:
            piece = self._run(ends=False)
            # The last visit starts the next piece, as its context.
            self._path = self._path[-1:]
            self._begins = False
            self._tools = {}
        self._group = [node]
        self._path.append(self._group)
        self._open = {}
        self._requests = {}
        return piece

    def _run(self, *, ends: bool) -> ProgramRun:
        return ProgramRun(
            path=tuple(tuple(sorted(group)) for group in self._path),
            turn_nodes=tuple(self._turn_nodes) if ends else (),
            turns=self._turns if ends else 0,
            tools=tuple(self._tools),
            begins=self._begins,
            ends=ends,
        )
