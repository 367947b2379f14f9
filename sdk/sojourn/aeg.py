"""The Agent Execution Graph: the steps of an agent, their order, and the tools of each step.

It is G = (V, E, P, φ) of SAGA §3.2: nodes, edges, probabilities, and the tools of each node. A graph is
declared once per agent type, by hand or by an adapter that reads it from the framework. Requests then name
only their node.

The flag ``complete`` says whether a graph declares all edges. Frameworks do not always know all edges: for
example, a routing function without a declared return type looks like an edge to the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from hashlib import sha256
from types import MappingProxyType

from .errors import ArgumentError
from .valid_ids_and_names import name_of
from .wire_codec import MAX_GRAPH_BYTES, MAX_GRAPH_EDGES, MAX_GRAPH_NODES, MAX_GRAPH_TOOLS, encode
from .wire_events import AegEdge, AegGraph, AegNode

START = "__start__"
END = "__end__"

Edge = tuple[str, str] | tuple[str, str, float | None]
"""Source, target and, if known, the probability that ``target`` follows ``source``."""


class Aeg:
    """An immutable graph. Graphs with the same content are equal and have the same ``hash``.

        Aeg({"plan": (), "act": ("bash", "edit")}, [(START, "plan"), ("plan", "act"), ("act", "plan", 0.9),
            ("act", END, 0.1)])

    ``nodes`` names each step and the tools it may call. An edge may name ``START`` and ``END``, which need no
    declaration. Cycles are allowed. ``complete=False`` means that edges may be missing. A graph that uses
    ``START`` and has a node without a path from ``START`` counts as not complete.

    Raises ``ArgumentError`` for an edge from or to an unknown node, for a probability outside 0..1, for edges
    from one node whose probabilities sum to more than 1, and for a graph beyond the wire format's limits.
    """

    __slots__ = ("_next", "complete", "edges", "hash", "nodes")

    def __init__(
        self,
        nodes: Mapping[str, Iterable[str]] | Iterable[str],
        edges: Iterable[Edge] = (),
        *,
        complete: bool = True,
    ) -> None:
        given = nodes.items() if isinstance(nodes, Mapping) else ((name, ()) for name in nodes)
        known: dict[str, tuple[str, ...]] = {}
        for node, tools in given:
            if isinstance(tools, str):
                raise ArgumentError(f"the tools of node {node!r} are the string {tools!r}; expected a list")
            known[_name(node)] = tuple(sorted({name_of(tool) for tool in tools}))[:MAX_GRAPH_TOOLS]
        for end in (START, END):
            known.pop(end, None)
        self.nodes: Mapping[str, tuple[str, ...]] = MappingProxyType(known)
        """Node → its tools."""
        self.edges: Mapping[tuple[str, str], float | None] = MappingProxyType(dict(_checked(edges, known)))
        """(source, target) → probability; ``None`` if no probability was given."""
        _check_size(self)
        _check_sums(self.edges)
        following: dict[str, list[str]] = {}
        for source, target in self.edges:
            following.setdefault(source, []).append(target)
        self._next: dict[str, tuple[str, ...]] = {node: tuple(targets) for node, targets in following.items()}
        self.complete = complete and not self.unreachable()
        content = encode(self.wire())
        if len(content) > MAX_GRAPH_BYTES:
            raise ArgumentError(
                f"the graph takes {len(content)} bytes; at most {MAX_GRAPH_BYTES} can be sent"
            )
        self.hash = sha256(content).hexdigest()[:32]
        """Hash of the content, 32 hexadecimal digits; the order of declaration does not matter."""

    def successors(self, node: str) -> tuple[str, ...]:
        """Return the nodes that may follow ``node``, in the order declared; empty for an unknown node."""
        return self._next.get(node, ())

    def following(self, node: str) -> dict[str, float]:
        """Return the nodes that may follow ``node`` with their probabilities, which sum to one.

        Edges without a probability share the remaining probability evenly. The result is empty for a node
        without successors, or if all its successors have probability 0.
        """
        return _shares({target: self.edges[node, target] for target in self.successors(node)})

    def unreachable(self) -> frozenset[str]:
        """Return the nodes without a path from ``START``; empty if the graph does not use ``START``."""
        if START not in self._next:
            return frozenset()
        seen = {START}
        todo = [START]
        while todo:
            for following in self.successors(todo.pop()):
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
        return frozenset(self.nodes) - seen

    def wire(self) -> AegGraph:
        """Return the graph as a wire message, sorted so that equal graphs have equal bytes."""
        return AegGraph(
            nodes=[AegNode(id=node, tools=list(tools)) for node, tools in sorted(self.nodes.items())],
            edges=[
                AegEdge(source=source, target=target, probability=p)
                for (source, target), p in sorted(self.edges.items(), key=lambda item: item[0])
            ],
            complete=self.complete,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Aeg) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)

    def __repr__(self) -> str:
        flag = "" if self.complete else ", incomplete"
        return f"<Aeg {self.hash[:8]}: {len(self.nodes)} nodes, {len(self.edges)} edges{flag}>"


def _shares(declared: Mapping[str, float | None]) -> dict[str, float]:
    """Return the probabilities of a node's edges, scaled to a sum of one. Edges without a probability share
    the remaining probability evenly."""
    open_ones = sum(p is None for p in declared.values())
    given = sum(p for p in declared.values() if p is not None)
    each = max(0.0, 1.0 - given) / open_ones if open_ones else 0.0
    shares = {target: each if p is None else p for target, p in declared.items()}
    total = sum(shares.values())
    return {target: p / total for target, p in shares.items()} if total > 0 else {}


def _name(node: object) -> str:
    if not isinstance(node, str) or not node:
        raise ArgumentError(f"node {node!r} is not a name; expected a string that is not empty")
    return name_of(node)


def _checked(
    edges: Iterable[Edge], known: Mapping[str, object]
) -> Iterable[tuple[tuple[str, str], float | None]]:
    for edge in edges:
        try:
            source, target, probability = (*edge, None) if len(edge) == 2 else edge
        except (TypeError, ValueError):
            raise ArgumentError(f"edge {edge!r}; expected (source, target) or (source, target, p)") from None
        source, target = _name(source), _name(target)
        for node, allowed in ((source, START), (target, END)):
            if node not in known and node != allowed:
                raise ArgumentError(f"edge {source!r} → {target!r}: {node!r} is not a node of this graph")
        if probability is not None:
            sayable = isinstance(probability, (int, float)) and math.isfinite(probability)
            if not sayable or not 0 <= probability <= 1:
                raise ArgumentError(f"edge {source!r} → {target!r}: p is {probability!r}; expected 0 to 1")
            probability = float(probability)
        yield (source, target), probability


def _check_sums(edges: Mapping[tuple[str, str], float | None]) -> None:
    sums: dict[str, float] = {}
    for (source, _), probability in edges.items():
        sums[source] = sums.get(source, 0.0) + (probability or 0.0)
    for source, total in sums.items():
        if total > 1 + 1e-6:
            raise ArgumentError(f"the probabilities from {source!r} sum to {total:.4f}; expected at most 1")


def _check_size(graph: Aeg) -> None:
    for what, count, most in (
        ("nodes", len(graph.nodes), MAX_GRAPH_NODES),
        ("edges", len(graph.edges), MAX_GRAPH_EDGES),
    ):
        if count > most:
            raise ArgumentError(f"the graph has {count} {what}; at most {most} can be declared")
