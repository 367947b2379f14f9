"""Stores the graphs that agents declare (Agent Execution Graphs, SAGA §3.2) by hash, in bounded memory.

A client sends a graph in full once, and afterwards only its hash. A full graph is accepted only if its hash
is the given one, so no client can replace a known graph by another. A full graph with a known hash is not
read again. Every process of an agent sends the same graph, and building it may take ten milliseconds of an
engine's step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from sojourn.aeg import END, Aeg
from sojourn.errors import ArgumentError, InputError
from sojourn.wire_codec import encode
from sojourn.wire_events import AegGraph

MAX_STEPS_AFTER = 64
"""Maximum number of steps that ``KnownGraph.steps_after`` looks ahead."""


class GraphError(InputError):
    """A graph cannot be accepted. The message says what was found and what was expected."""


@dataclass(frozen=True, slots=True)
class KnownGraph:
    """One stored graph."""

    aeg: Aeg
    size_bytes: int
    """Size of the graph as JSON, in bytes."""
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
    """Stores graphs of agents: at most ``max_graphs``, and at most ``max_bytes`` of JSON together, which is
    enough for one graph.

    The least recently used graph is removed first; ``get`` and ``follow`` count as uses. As Python objects,
    graphs take about seven times the memory of their JSON.
    """

    def __init__(self, max_graphs: int = 256, max_bytes: int = 4 * 1024 * 1024) -> None:
        self.max_graphs = max_graphs
        self.max_bytes = max_bytes
        self.bytes = 0
        """Size of all stored graphs as JSON, in bytes."""
        self._graphs: OrderedDict[str, KnownGraph] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graphs)

    def __iter__(self) -> Iterator[KnownGraph]:
        """Iterate over all stored graphs, the least recently used first."""
        return iter(self._graphs.values())

    def get(self, graph_hash: str) -> KnownGraph | None:
        """Return the graph with this hash; ``None`` if it is not stored. Counts as a use."""
        if graph_hash in self._graphs:
            self._graphs.move_to_end(graph_hash)
        return self._graphs.get(graph_hash)

    def follow(self, graph_hash: str, graph: AegGraph | None) -> bool:
        """Record that a program follows the graph with this hash.

        A graph that is not stored yet is stored. ``graph`` is ``None`` if the client sent only the hash.
        Returns whether the graph is stored now: false if the client sent only an unknown hash. Raises
        ``GraphError`` for a graph that cannot be accepted, and changes nothing in this case.
        """
        if graph_hash not in self._graphs:
            if graph is None:
                return False
            known = _checked(graph_hash, graph)
            self._graphs[graph_hash] = known
            self.bytes += known.size_bytes
        self._graphs.move_to_end(graph_hash)
        # The newest graph is last. It always fits alone, so it stays.
        while len(self._graphs) > self.max_graphs or self.bytes > self.max_bytes:
            _, oldest = self._graphs.popitem(last=False)
            self.bytes -= oldest.size_bytes
        return True


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
    return KnownGraph(aeg, len(encode(aeg.wire())))
