"""Reads the Agent Execution Graph of a compiled LangGraph: its nodes, their tools and the edges between
them."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from sojourn.aeg import END, START, Aeg

_graphs: WeakKeyDictionary[Any, dict[frozenset[str], Aeg | None]] = WeakKeyDictionary()
"""Cached graphs, by builder (which all copies of a compiled graph share) and by the set of nodes."""


def graph_of(graph: Any) -> Aeg | None:
    """Return the Agent Execution Graph of a compiled LangGraph, with sub-graphs expanded. Returns ``None`` if
    the graph cannot be read. Results are cached.

    The edges are read from the graph's builder. The result is complete only if the builder declares every
    edge. Edges are missing in two cases. A routing function may have targets that are neither listed nor in
    its return type. And a node without an edge may return a ``Command``. In both cases LangGraph's
    ``get_graph()`` would draw an edge to the end and drop nodes that become unreachable, so it is not used.
    A graph without a builder, of the functional API, has no graph that can be read.
    """
    builder = getattr(graph, "builder", None)
    key = frozenset(graph.nodes)
    try:
        known = _graphs.setdefault(graph if builder is None else builder, {})
    except TypeError:
        known = {}
    if key not in known:
        try:
            known[key] = _read(graph)
        except Exception:
            known[key] = None  # it cannot be drawn, or is too large to be sent
    return known[key]


def _read(graph: Any) -> Aeg | None:
    declared = _declared(graph, frozenset())
    return declared and Aeg(declared.nodes, declared.edges, complete=declared.complete)


def _tools(runnable: Any) -> list[str]:
    return list(getattr(runnable, "tools_by_name", None) or ())


class _Declared(NamedTuple):
    nodes: dict[str, list[str]]
    edges: dict[tuple[str, str], None]
    complete: bool


def _declared(graph: Any, above: frozenset[int]) -> _Declared | None:
    """Return the nodes and edges that the graph's builder declares, with sub-graphs expanded. Returns
    ``None`` for a graph without a builder, as in the functional API, and for a graph inside itself. ``above``
    holds the ``id()`` of each builder around this graph."""
    builder = getattr(graph, "builder", None)
    if builder is None or id(builder) in above:
        return None
    inside = {name: _declared(each, above | {id(builder)}) for name, each in graph.get_subgraphs()}
    ways = dict.fromkeys(builder.edges)
    ways |= {(source, target): None for sources, target in builder.waiting_edges for source in sources}
    ways |= {(name, target): None for name, node in builder.nodes.items() for target in node.ends}
    complete = all(inside.values())
    untyped = set()
    for source, branches in builder.branches.items():
        for branch in branches.values():
            ways |= {(source, target): None for target in (branch.ends or {}).values()}
            if branch.ends is None:
                untyped.add(source)
    complete = complete and not untyped
    for name in builder.nodes.keys() - untyped - {source for source, _ in ways}:
        ways[name, END] = None
        complete = False
    nodes: dict[str, list[str]] = {}
    edges: dict[tuple[str, str], None] = {}
    first: dict[str, list[str]] = {}
    last: dict[str, list[str]] = {}
    for name, node in builder.nodes.items():
        below = inside.get(name)
        if below is None:
            nodes[name] = _tools(node.runnable)
            continue
        complete = complete and below.complete
        nodes |= {f"{name}:{each}": found for each, found in below.nodes.items()}
        first[name] = [f"{name}:{target}" for source, target in below.edges if source == START]
        last[name] = [f"{name}:{source}" for source, target in below.edges if target == END]
        edges |= {
            (f"{name}:{source}", f"{name}:{target}"): None
            for source, target in below.edges
            if source != START and target != END
        }
    edges |= {
        (source, target): None
        for before, after in ways
        for source in last.get(before, [before])
        for target in first.get(after, [after])
    }
    return _Declared(nodes, edges, complete)
