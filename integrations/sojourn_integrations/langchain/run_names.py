"""Names of programs and nodes, from the names and namespaces of LangChain's runs."""

from __future__ import annotations

from sojourn.program import Program
from sojourn.valid_ids_and_names import SHORT, agent_type_of, name_of

_INTERNAL_PREFIX = "Runnable"
"""Start of LangChain's default names for compositions, e.g. ``RunnableSequence``."""
_DEFAULT_GRAPH_NAME = "LangGraph"
"""LangGraph's name for a graph compiled without ``name``. LangChain uses it for an agent without a name."""


def node_path(ns: str, prefix: str = "") -> str | None:
    """Return the name of a node from its checkpoint namespace ``ns``: ``sub:UUID|model:UUID`` gives
    ``sub:model``. ``get_graph(xray=True)`` uses the same names. Leaves out the namespace ``prefix`` of an
    outer graph, and the numbers that LangGraph gives to later sub-graphs of a step. Returns ``None`` if
    ``ns`` names no node."""
    if prefix and ns.startswith(prefix + "|"):
        ns = ns[len(prefix) + 1 :]
    if "|" not in ns:
        name, colon, _ = ns.partition(":")
        if not colon:
            return None
        return name if 0 < len(name) <= SHORT and name.isascii() else name_of(name)
    names = [part.partition(":")[0] for part in ns.split("|") if ":" in part]
    return name_of(":".join(names)) if names else None


def program_name(name: str | None, parent: Program | None) -> str | None:
    """Return ``name`` as a program's name or agent type; ``None`` if ``name`` is ``None``. For a program
    without a parent, LangGraph's default name is replaced by the script's name."""
    if name is None:
        return None
    return agent_type_of(name, _DEFAULT_GRAPH_NAME) if parent is None else name_of(name)


def is_named(kind: str | None, name: str | None) -> bool:
    return kind in (None, "chain") and bool(name) and not str(name).startswith(_INTERNAL_PREFIX)
