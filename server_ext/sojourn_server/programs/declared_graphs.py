"""Stores the graphs that agents declare (Agent Execution Graphs, SAGA §3.2) by hash, in bounded memory.

A client sends a graph in full once, and afterwards only its hash. A full graph is accepted only if its hash
is the given one, so no client can replace a known graph by another. A full graph with a known hash is not
read again. Every process of an agent sends the same graph, and building it may take ten milliseconds of an
engine's step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from sojourn.aeg import END, Aeg
from sojourn.errors import ArgumentError, InputError
from sojourn.wire_events import AegGraph

from .windowed_history import recent_entry

MAX_STEPS_AFTER = 64
"""Maximum number of steps that ``KnownGraph.steps_after`` looks ahead."""


class GraphError(InputError):
    """A graph cannot be accepted. The message says what was found and what was expected."""


@dataclass(frozen=True, slots=True)
class KnownGraph:
    """One stored graph."""

    aeg: Aeg
    _after: dict[str, float] = field(default_factory=dict, repr=False)

    def following(self, node: str) -> tuple[tuple[str, float], ...]:
        """Return the successors of ``node``, with probabilities that sum to one; empty if it has none."""
        return tuple(self.aeg.following(node).items())

    def steps_after(self, node: str) -> float:
        """Return the expected number of nodes that follow ``node`` (SAGA §6.1, the pending nodes). A cycle
        counts for at most ``MAX_STEPS_AFTER`` nodes. Cached."""
        if node in self._after:
            return self._after[node]
        successors = cache(self.following)
        at, steps = {node: 1.0}, 0.0
        for _ in range(MAX_STEPS_AFTER):
            following: dict[str, float] = {}
            for one, probability in at.items():
                for name, share in successors(one):
                    if name != END:
                        following[name] = following.get(name, 0.0) + probability * share
            steps += sum(following.values())
            at = {name: probability for name, probability in following.items() if probability > 1e-3}
            if not at:
                break
        if node in self.aeg.nodes:
            self._after[node] = steps
        return steps


class GraphStore:
    """Stores at most ``max_graphs`` graphs of agents. The least recently used is removed first. A graph
    takes about seven times its JSON (at most ``MAX_GRAPH_BYTES``) in memory."""

    def __init__(self, max_graphs: int = 64) -> None:
        self._max_graphs = max_graphs
        self._graphs: dict[str, KnownGraph] = {}

    def get(self, graph_hash: str) -> KnownGraph | None:
        """Return the graph with this hash; ``None`` if it is not stored."""
        known = self._graphs.get(graph_hash)
        return known and recent_entry(self._graphs, graph_hash, lambda: known, self._max_graphs)

    def follow(self, graph_hash: str, graph: AegGraph | None) -> bool:
        """Record that a program follows the graph with this hash.

        A graph that is not stored yet is stored. ``graph`` is ``None`` if the client sent only the hash.
        Returns whether the graph is stored now: false if the client sent only an unknown hash. Raises
        ``GraphError`` for a graph that cannot be accepted, and changes nothing in this case.
        """
        known = self._graphs.get(graph_hash)
        if known is None and graph is not None:
            known = _checked(graph_hash, graph)
        if known is not None:
            recent_entry(self._graphs, graph_hash, lambda: known, self._max_graphs)
        return known is not None


def _checked(graph_hash: str, graph: AegGraph) -> KnownGraph:
    """Build the graph that a client sent. Raises ``GraphError`` if it is invalid or has another hash: the
    client's hash is of the checked graph, whose names have their allowed length."""
    edges = [(edge.source, edge.target, edge.probability) for edge in graph.edges]
    try:
        aeg = Aeg({node.id: node.tools for node in graph.nodes}, edges, complete=graph.complete)
    except (ArgumentError, ValueError) as error:  # ValueError: names that UTF-8 cannot encode
        raise GraphError(f"not a graph: {error}") from None
    if aeg.hash != graph_hash:
        raise GraphError(f"the hash of this graph is {aeg.hash}, not the one given")
    return KnownGraph(aeg)
