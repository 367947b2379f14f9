"""The graph of an OpenAI Agents run, read from its starting agent."""

from __future__ import annotations

from typing import Any

from sojourn import Aeg
from sojourn.aeg import END, START

_HOSTED = frozenset(
    {"CodeInterpreterTool", "FileSearchTool", "HostedMCPTool", "ImageGenerationTool", "WebSearchTool"}
    | {"ProgrammaticToolCallingTool", "ToolSearchTool"}
)
"""Tools that run at the model's provider, without hooks."""
_MAX_GRAPHS = 256

_graphs: dict[tuple[Any, ...], Aeg | None] = {}


def graph_of(agent: Any) -> Aeg | None:
    """Return the graph of a run that starts at ``agent``: agents, their tools, and an edge per handoff.

    An agent with tools may follow itself. The graph is incomplete if it lacks tools of MCP servers or of the
    model's provider, or targets of handoffs that the user's code builds. Returns ``None`` if the graph is too
    large to be sent. An agent used as a tool has a program and a graph of its own.
    """
    nodes: dict[str, list[str]] = {}
    edges: dict[tuple[str, str], None] = {(START, str(agent.name)): None}
    complete = True
    todo, seen = [agent], {id(agent)}
    while todo:
        each = todo.pop(0)
        name = str(each.name)
        given = getattr(each, "tools", None) or ()
        tools = [str(tool.name) for tool in given if type(tool).__name__ not in _HOSTED]
        remote = bool(getattr(each, "mcp_servers", None))
        complete &= len(tools) == len(given) and not remote
        # Two agents with one name are one node, since their requests look alike too.
        nodes.setdefault(name, []).extend(tools)
        for handoff in getattr(each, "handoffs", None) or ():
            target = _target(handoff)
            complete &= target is not None
            to = str(handoff.agent_name if target is None else target.name)
            nodes.setdefault(to, [])
            edges[name, to] = None
            if target is not None and id(target) not in seen:
                seen.add(id(target))
                todo.append(target)
        if tools or remote:
            edges[name, name] = None
        edges[name, END] = None
    # Cached by content, since an agent may change between two runs, or another agent may get its id().
    key = tuple((name, *tools) for name, tools in nodes.items()), tuple(edges), complete
    if key not in _graphs:
        if len(_graphs) >= _MAX_GRAPHS:
            _graphs.clear()
        try:
            _graphs[key] = Aeg(nodes, list(edges), complete=complete)
        except ValueError:
            _graphs[key] = None
    return _graphs[key]


def _target(handoff: Any) -> Any:
    """Return the target agent of a handoff, if known."""
    if not hasattr(handoff, "on_invoke_handoff"):
        return handoff
    reference = getattr(handoff, "_agent_ref", None)
    return reference() if reference is not None else None
