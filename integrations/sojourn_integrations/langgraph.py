"""LangGraph 1.x: what ``langchain``'s callbacks do not report about a running graph.

Programs, nodes and tool calls come from the callbacks. This module adds the graph itself (``graph_of``),
its threads, and the breakpoints at which it stops. ``patch`` wraps ``stream`` and ``astream``, which every
other way to run a graph ends in, and ``batch`` and ``abatch``; ``wrap(graph)`` does it for one graph.

Interrupts. A run that stops at an ``interrupt()`` or a breakpoint is not over: its program stays open, the
wait is a tool call of class ``human`` without heartbeats (see ``langchain.interrupted_programs``), and the
next run of the same thread continues it. A run that reaches its end ends the program; a later run of the same
thread has the same id again.

``langchain.thread_program_ids`` derives the program id of a thread. Without a checkpointer a thread id has no
meaning, as in LangGraph.

Known limits: a breakpoint is noticed only where the stream carries ``updates`` (``invoke`` does). A second
run of a thread while one is in progress has an id of its own.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar, Token
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from sojourn.aeg import END, START, Aeg

from .langchain import callback_handler
from .langchain.run_tree import GraphStart, batch_context, starting_graph
from .method_overlay import Around, overlay_method
from .monkey_patches import wrap_like
from .safe_scope import fault

__all__ = ["graph_of", "patch", "unpatch", "wrap"]

_active = False
_INTERRUPT = "__interrupt__"
_ABSENT = object()
_patched: dict[str, tuple[type, Any, Any]] = {}
"""Method → class, our function, and the class's own or ``_ABSENT``."""
_graphs: WeakKeyDictionary[Any, dict[frozenset[str], Aeg | None]] = WeakKeyDictionary()
"""Graphs by builder, which all copies of a compiled graph share, and by the nodes at compilation."""


def patch() -> bool:
    """Wrap ``stream``, ``astream``, ``batch`` and ``abatch`` of all graphs; for ``sojourn.instrumentation``.
    Returns False, without changes, where they are missing."""
    global _active
    from langgraph.pregel import Pregel

    if not all(callable(vars(Pregel).get(name)) for name in ("stream", "astream")):
        return False
    if not all(callable(getattr(Pregel, name, None)) for name in _AROUND):
        return False
    if not callback_handler.install("langgraph"):
        return False
    for name, around in _AROUND.items():
        if name not in _patched:
            ours = _method(getattr(Pregel, name), around)
            _patched[name] = (Pregel, ours, vars(Pregel).get(name, _ABSENT))
            setattr(Pregel, name, ours)
    _active = True
    return True


def unpatch() -> None:
    """Restore LangGraph's own functions, except where another patch covers ours."""
    global _active
    _active = False
    for name, (owner, ours, theirs) in list(_patched.items()):
        if vars(owner).get(name) is not ours:
            continue
        if theirs is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, theirs)
        del _patched[name]
    callback_handler.remove("langgraph")


def wrap(graph: Any) -> Any | None:
    """Return an instrumented copy of this compiled graph, with the same checkpointer and store; ``None`` for
    other objects. Graphs that it runs are reported as part of it."""
    from langgraph.pregel import Pregel

    if not isinstance(graph, Pregel):
        return None
    copy = graph.with_config({"callbacks": [callback_handler.handler_class()()]})
    for name, around in _AROUND.items():
        overlay_method(copy, name, around)
    return copy


# ---- a run


def _method(original: Callable[..., Any], around: Around) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _active:  # another patch covers ours and still calls it
            return original(self, *args, **kwargs)
        return around(self, functools.partial(original, self), args, kwargs)

    return wrap_like(original, method)


def _stream(graph: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    start = _start(graph, args, kwargs)
    inner = original(*args, **kwargs)
    if start is None or not hasattr(inner, "__next__"):  # a subclass may return anything
        return inner
    return _steps(start, inner, _watches(graph, kwargs))


def _astream(graph: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    start = _start(graph, args, kwargs)
    inner = original(*args, **kwargs)
    if start is None or not hasattr(inner, "__anext__"):
        return inner
    return _async_steps(start, inner, _watches(graph, kwargs))


def _steps(start: GraphStart, inner: Iterator[Any], watch: bool) -> Iterator[Any]:
    """Yield from ``inner``, whose first step begins the run."""
    token = starting_graph.set(start)
    try:
        chunk = next(inner, _ABSENT)
    finally:
        _reset(starting_graph, token)
    try:
        if chunk is _ABSENT:
            return
        if watch:
            _look(start, chunk)
        yield chunk
        if not watch:
            yield from inner
            return
        for chunk in inner:
            _look(start, chunk)
            yield chunk
    finally:
        getattr(inner, "close", _nothing)()


class _Unfinished:
    """Referenced by one generator only. A generator without an event loop is destroyed unclosed; then its run
    ends too."""

    __slots__ = ("_start",)

    def __init__(self, start: GraphStart) -> None:
        self._start = start

    def __del__(self) -> None:
        try:
            if self._start.run is not None:
                callback_handler.tree.give_up(self._start.run)
        except Exception:
            fault("internal_error")


async def _async_steps(start: GraphStart, inner: AsyncIterator[Any], watch: bool) -> AsyncIterator[Any]:
    unfinished = _Unfinished(start)  # noqa: F841
    token = starting_graph.set(start)
    try:
        chunk = await anext(inner, _ABSENT)
    finally:
        _reset(starting_graph, token)
    try:
        if chunk is _ABSENT:
            return
        if watch:
            _look(start, chunk)
        yield chunk
        async for chunk in inner:
            if watch:
                _look(start, chunk)
            yield chunk
    finally:
        aclose = getattr(inner, "aclose", None)
        if aclose is not None:
            await aclose()


def _batch(graph: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    token = batch_context.set(_mark())
    try:
        return original(*args, **kwargs)
    finally:
        _reset(batch_context, token)


async def _abatch(
    graph: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    token = batch_context.set(_mark())
    try:
        return await original(*args, **kwargs)
    finally:
        _reset(batch_context, token)


_AROUND: dict[str, Around] = {"stream": _stream, "astream": _astream, "batch": _batch, "abatch": _abatch}


def _nothing() -> None:
    pass


def _reset(variable: ContextVar[Any], token: Token[Any]) -> None:
    # A generator finalised after its event loop runs in another context.
    with suppress(ValueError):
        variable.reset(token)


def _mark() -> Any:
    try:
        return (callback_handler.running_in(),)
    except Exception:
        fault("internal_error")
        return None


def _start(graph: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GraphStart | None:
    """Return the start of a run; ``None`` where it is announced already (class patched and object
    wrapped)."""
    try:
        around = starting_graph.get()
        if around is not None and around.run is None and around.graph is graph:
            return None
        config = kwargs.get("config") or (args[1] if len(args) > 1 else None) or {}
        # ``True`` and ``None`` mean that of the graph around it; LangGraph's server passes one with each run.
        saver = graph.checkpointer or (config.get("configurable") or {}).get("__pregel_checkpointer")
        saver = None if isinstance(saver, bool) else saver
        return GraphStart(graph, graph.get_name(), functools.partial(graph_of, graph), saver)
    except Exception:
        fault("internal_error")
        return None


def _watches(graph: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether the graph may stop at a breakpoint, for which no callback is called."""
    return bool(
        kwargs.get("interrupt_before")
        or kwargs.get("interrupt_after")
        or getattr(graph, "interrupt_before_nodes", None)
        or getattr(graph, "interrupt_after_nodes", None)
    )


def _look(start: GraphStart, chunk: Any) -> None:
    """Mark the run as waiting where this chunk is an interrupt."""
    try:
        payload = chunk[-1] if isinstance(chunk, tuple) and chunk else chunk
        if isinstance(payload, dict) and payload.get("type") == "updates":
            payload = payload.get("data")
        if isinstance(payload, dict) and _INTERRUPT in payload and start.run is not None:
            start.run.waits = start.run.waits or ()
    except Exception:
        fault("internal_error")


# ---- the graph


def graph_of(graph: Any) -> Aeg | None:
    """Return the Agent Execution Graph of a compiled LangGraph, sub-graphs expanded; ``None`` where it cannot
    be read. Cached by the graph's builder.

    It is complete only where every edge of every node is declared. It is incomplete where a router's targets
    are neither listed nor in its return type, and where a node has no edge and so may return a ``Command``.
    For both ``get_graph()`` makes an edge to the end, and drops nodes that become unreachable. So it is used
    only without a builder. Where all is declared the two agree, except for its nodes at the start and end of
    sub-graphs, which no run enters.
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


def _read(graph: Any) -> Aeg:
    declared = _declared(graph, frozenset())
    if declared is not None:
        return Aeg(declared.nodes, declared.edges, complete=declared.complete)
    drawn = graph.get_graph(xray=True)
    nodes = {name: _tools(node.data) for name, node in drawn.nodes.items() if name not in (START, END)}
    edges = [(edge.source, edge.target) for edge in drawn.edges]
    known = {*nodes, START, END}
    return Aeg(nodes, dict.fromkeys(edge for edge in edges if known.issuperset(edge)), complete=False)


def _tools(runnable: Any) -> list[str]:
    return list(getattr(runnable, "tools_by_name", None) or ())


class _Declared(NamedTuple):
    nodes: dict[str, list[str]]
    edges: dict[tuple[str, str], None]
    complete: bool


def _declared(graph: Any, above: frozenset[int]) -> _Declared | None:
    """Return the builder's declarations, sub-graphs expanded; ``None`` without a builder, as in the
    functional API."""
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
