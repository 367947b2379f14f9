"""Stores the graphs that agents declare (Agent Execution Graphs, SAGA §3.2) by hash, in bounded memory.

A client sends a graph in full once, and afterwards only its hash. A full graph is accepted only if its hash
is the given one, so no client can replace a known graph by another. A full graph with a known hash is not
read again. Every process of an agent sends the same graph, and building it may take ten milliseconds of an
engine's step.
"""

from __future__ import annotations

from functools import lru_cache
from math import fsum, isclose, sqrt

from sojourn.aeg import START, Aeg
from sojourn.errors import ArgumentError, InputError
from sojourn.wire_events import AegGraph

from .statements import SURE_SPREAD
from .windowed_history import recent_entry


class GraphError(InputError):
    """A graph cannot be accepted. The message says what was found and what was expected."""


class GraphStore:
    """Stores at most ``max_graphs`` graphs of agents. The least recently used is removed first. A graph
    takes about seven times its JSON (at most ``MAX_GRAPH_BYTES``) in memory."""

    def __init__(self, max_graphs: int = 64) -> None:
        self._max_graphs = max_graphs
        self._graphs: dict[str, Aeg] = {}

    def get(self, graph_hash: str) -> Aeg | None:
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


def _checked(graph_hash: str, graph: AegGraph) -> Aeg:
    """Build the graph that a client sent. Raises ``GraphError`` if it is invalid or has another hash: the
    client's hash is of the checked graph, whose names have their allowed length."""
    edges = [(edge.source, edge.target, edge.probability) for edge in graph.edges]
    try:
        aeg = Aeg({node.id: node.tools for node in graph.nodes}, edges, complete=graph.complete)
    except (ArgumentError, ValueError) as error:  # ValueError: names that UTF-8 cannot encode
        raise GraphError(f"not a graph: {error}") from None
    if aeg.hash != graph_hash:
        raise GraphError(f"the hash of this graph is {aeg.hash}, not the one given")
    return aeg


@lru_cache(maxsize=64)
def steps_after(graph: Aeg) -> dict[str, float]:
    """Return the mean number of steps that follow each node where it is sure: where its standard deviation is
    below ``SURE_SPREAD`` of the mean, which counts the node too. Empty for a graph that may lack edges.

    The graph is a Markov chain. Means and means of squares follow from those of a node's successors, the last
    nodes first. Loops take several rounds; what still changes after 32 is not sure either."""
    order, edges = [START], dict[str, list[tuple[float, str]]]()
    for node in order:
        edges[node] = [(p, after) for after, p in graph.following(node).items() if after in graph.nodes]
        order += [after for _, after in edges[node] if after not in edges]
    order = [*dict.fromkeys(reversed(order))]
    steps, squares, changes = dict.fromkeys(order, 0.0), dict.fromkeys(order, 0.0), {*order}
    for _ in range(32 if graph.complete else 0):
        for node in order:
            steps[node] = fsum(p * (1.0 + steps[after]) for p, after in edges[node])
            square = fsum(p * (1.0 + 2.0 * steps[after] + squares[after]) for p, after in edges[node])
            (changes.discard if isclose(square, squares[node], rel_tol=0.001) else changes.add)(node)
            squares[node] = square
        if not changes:
            break
    spread = {node: sqrt(max(0.0, squares[node] - steps[node] ** 2)) for node in edges.keys() - changes}
    return {node: steps[node] for node in spread if spread[node] < SURE_SPREAD * (1.0 + steps[node])}
