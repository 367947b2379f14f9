"""Reads the graph of an AutoGen 0.7 team: its agents, their tools, and the order of turns.

A node is one agent's turn, with any number of requests. Sources of the edges:

- ``GraphFlow``: its edges as they are. An edge has probability 1 if it is the only edge from its agent, has
  no condition, and nothing else can stop the team.
- ``RoundRobinGroupChat``: a ring. ``Swarm``: an edge per handoff, and one from each agent to itself.
- ``SelectorGroupChat`` and ``MagenticOneGroupChat``: every agent may follow every agent, itself
  included. The graph is complete, without probabilities.
- Any other team class: the same edges as for ``SelectorGroupChat``, but the graph is not complete.

A team inside a team appears as its agents, with names like ``inner/alice``. A ``SocietyOfMindAgent`` appears
as its team's agents, followed by a node of its own. Names of tools come from the agent's handoffs and static
workbenches. Tools of an MCP server are left out, since only the server knows them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from sojourn.aeg import END, START, Aeg, Edge
from sojourn.errors import ArgumentError


class _Subgraph(NamedTuple):
    """A team or an agent as part of a larger graph."""

    nodes: dict[str, tuple[str, ...]]
    """Node → names of its tools."""
    edges: dict[tuple[str, str], float | None]
    """(source, target) → probability, ``None`` if unknown."""
    first: tuple[str, ...]
    """Possible first nodes."""
    last: tuple[str, ...]
    """Possible last nodes."""
    complete: bool = True


def graph_of(runner: Any) -> Aeg | None:
    """Return the graph of a team or agent; ``None`` if it is too large to be sent."""
    part = _subgraph_of(runner, "")
    edges: list[Edge] = [(START, node) for node in part.first]
    edges += [(source, target, p) for (source, target), p in part.edges.items()]
    edges += [(node, END) for node in part.last]
    try:
        return Aeg(part.nodes, edges, complete=part.complete)
    except ArgumentError:
        return None


def node_name(prefix: str, runner: Any) -> str:
    """Return the node name of ``runner``, an agent or an inner team. ``prefix`` is the path of the team that
    contains ``runner``, with a slash at the end. It is empty for the outermost team and without a team."""
    return prefix + str(runner.name)


def _subgraph_of(runner: Any, prefix: str, *, within: bool = False) -> _Subgraph:
    if hasattr(runner, "_participants"):
        return _team(runner, f"{node_name(prefix, runner)}/" if within else prefix, within=within)
    return _agent(runner, prefix)


def _agent(agent: Any, prefix: str) -> _Subgraph:
    node = node_name(prefix, agent)
    agent = _unfiltered(agent)
    nodes = {node: tuple(_tools(agent))}
    team = getattr(agent, "_team", None)
    if not hasattr(team, "_participants"):
        return _Subgraph(nodes, {}, (node,), (node,))
    inner = _team(team, f"{node}/", within=True)
    edges: dict[tuple[str, str], float | None] = {
        **inner.edges,
        **{(last, node): None for last in inner.last},
    }
    return _Subgraph({**inner.nodes, **nodes}, edges, inner.first, (node,), inner.complete)


def _unfiltered(agent: Any) -> Any:
    """Return the agent that a ``MessageFilterAgent`` wraps, or ``agent`` itself if it wraps none."""
    while hasattr(agent, "_wrapped_agent"):
        agent = agent._wrapped_agent
    return agent


def _tools(agent: Any) -> Iterator[str]:
    for workbench in getattr(agent, "_workbench", None) or ():
        overrides = getattr(workbench, "_tool_overrides", None) or {}
        for tool in getattr(workbench, "_tools", None) or ():
            yield getattr(overrides.get(tool.name), "name", None) or tool.name
    for tool in getattr(agent, "_handoff_tools", None) or ():
        yield tool.name
    if hasattr(agent, "_code_executor"):
        yield "code"


def _team(team: Any, prefix: str, *, within: bool) -> _Subgraph:
    parts = {str(each.name): _subgraph_of(each, prefix, within=True) for each in team._participants}
    nodes = {node: tools for part in parts.values() for node, tools in part.nodes.items()}
    edges = {edge: p for part in parts.values() for edge, p in part.edges.items()}
    everyone = tuple(parts)
    kinds = {kind.__name__ for kind in type(team).__mro__ if kind.__module__.startswith("autogen_")}
    complete = all(part.complete for part in parts.values())
    start: tuple[str, ...] = everyone[:1]
    stop = everyone
    links: dict[tuple[str, str], float | None]
    if "GraphFlow" in kinds:
        links, start, stop = _graph_flow(team)
    elif "RoundRobinGroupChat" in kinds:
        links = {(name, everyone[(i + 1) % len(everyone)]): None for i, name in enumerate(everyone)}
    elif "Swarm" in kinds:
        links = {(name, name): None for name in everyone}
        for agent in team._participants:
            for handoff in (getattr(_unfiltered(agent), "_handoffs", None) or {}).values():
                if handoff.target in parts:
                    links[agent.name, handoff.target] = None
    else:
        links = {(a, b): None for a in everyone for b in everyone}
        start = everyone
        complete = complete and bool(kinds & {"SelectorGroupChat", "MagenticOneGroupChat"})
    if within or getattr(team, "_initialized", False):
        start = everyone  # a team that ran before continues where it stopped
    for (source, target), p in links.items():
        exits, entries = parts[source].last, parts[target].first
        for edge in ((a, b) for a in exits for b in entries):
            edges[edge] = p if len(exits) == len(entries) == 1 else None
    first = tuple(dict.fromkeys(node for name in start for node in parts[name].first))
    last = tuple(dict.fromkeys(node for name in stop for node in parts[name].last))
    return _Subgraph(nodes, edges, first, last, complete)


def _graph_flow(
    team: Any,
) -> tuple[dict[tuple[str, str], float | None], tuple[str, ...], tuple[str, ...]]:
    """Return the edges of a ``GraphFlow`` team, its first nodes and its possible last nodes."""
    graph = team._graph
    stoppable = team._termination_condition is not None or team._max_turns is not None
    edges: dict[tuple[str, str], float | None] = {}
    last: list[str] = []
    for name, node in graph.nodes.items():
        conditional = [
            edge.condition is not None or getattr(edge, "condition_function", None) is not None
            for edge in node.edges
        ]
        certain = conditional == [False] and not stoppable
        for edge in node.edges:
            edges[name, edge.target] = 1.0 if certain else None
        if stoppable or all(conditional):  # also true for an agent without edges
            last.append(name)
    return edges, tuple(sorted(graph.get_start_nodes())), tuple(last)
