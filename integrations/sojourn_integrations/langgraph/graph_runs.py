"""Wraps the methods that run a graph, and reports each run: its start, its interrupts and its end.

``patch`` wraps the methods of all graphs, ``wrap`` those of one graph.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from typing import Any

from sojourn.monkey_patches import Around, Patches, first_anext
from sojourn.user_hints import step_limit

from ..instance_method_wrapper import overlay_method
from ..langchain import callback_handler
from ..langchain.run_tree import GraphStart, batch_context, starting_graph
from ..safe_scope import guarded, inside
from .graph_reader import graph_of

_INTERRUPT = "__interrupt__"
_END = object()
_patches = Patches()


def patch() -> bool:
    """Wrap ``stream``, ``astream``, ``batch`` and ``abatch`` of all graphs. ``sojourn.instrumentation`` calls
    this. Returns False, without changes, if one of these methods or LangChain's hook for handlers is
    missing."""
    from langgraph.pregel import Pregel

    if not all(callable(vars(Pregel).get(name)) for name in ("stream", "astream")):
        return False
    if not all(callable(getattr(Pregel, name, None)) for name in _AROUND):
        return False
    if not callback_handler.install("langgraph"):
        return False
    for name, around in _AROUND.items():
        _patches.wrap_method(Pregel, name, around)
    return True


def unpatch() -> None:
    """Restore LangGraph's own methods. If another library patched a method after us, its patch stays, and our
    function beneath that patch only calls LangGraph's."""
    _patches.undo()
    callback_handler.remove("langgraph")


def wrap(graph: Any) -> Any | None:
    """Return an instrumented copy of this compiled graph, with the same checkpointer and store. Graphs that
    the copy runs are reported as part of it. Returns ``None`` for other objects."""
    from langgraph.pregel import Pregel

    if not isinstance(graph, Pregel):
        return None
    copy = graph.with_config({"callbacks": [callback_handler.handler_class()()]})
    for name, around in _AROUND.items():
        overlay_method(copy, name, around)
    return copy


# ---- a run


def _stream(graph: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    start = _start(graph, args, kwargs)
    inner = original(*args, **kwargs)
    if start is None or not hasattr(inner, "__next__"):  # a subclass may return anything
        return inner
    return _iterate_chunks(start, inner, _may_hit_breakpoint(graph, kwargs))


def _astream(graph: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    start = _start(graph, args, kwargs)
    theirs = _patches.original_of(getattr(original, "__func__", None))
    if theirs is not None:
        original = functools.partial(theirs, graph)  # a wrapped graph: one generator of ours, not two
    inner = original(*args, **kwargs)
    if start is None or not hasattr(inner, "__anext__"):
        return inner
    return _AsyncChunks(start, inner, _may_hit_breakpoint(graph, kwargs))


def _iterate_chunks(start: GraphStart, inner: Iterator[Any], watch: bool) -> Iterator[Any]:
    """Yield the chunks of ``inner``. The run begins when the first chunk is read. With ``watch``, looks for
    interrupts in the chunks."""
    token = starting_graph.set(start)
    try:
        chunk = next(inner, _END)
    finally:
        _reset(starting_graph, token)
    try:
        while chunk is not _END:
            if watch:
                _mark_interrupt(start, chunk)
            yield chunk
            chunk = next(inner, _END)
    finally:
        if hasattr(inner, "close"):
            inner.close()


class _AsyncChunks:
    """Async iterator over the chunks of ``inner``. The run begins when the first chunk is read. With
    ``watch``, looks for interrupts in the chunks.

    This is not a generator, since ``wrap_like`` already makes a generator around LangGraph's. With a third
    generator, Python 3.11 prints "async generator ignored GeneratorExit" if the event loop ends before the
    stream does."""

    __slots__ = ("_begun", "_inner", "_start", "_watch")

    def __init__(self, start: GraphStart, inner: AsyncIterator[Any], watch: bool) -> None:
        self._start = start
        self._inner = inner
        self._watch = watch
        self._begun = False

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if self._begun:
            chunk = await anext(self._inner)
        else:
            self._begun = True
            token = starting_graph.set(self._start)
            try:
                chunk = await first_anext(self._inner)
            finally:
                _reset(starting_graph, token)
        if self._watch:
            _mark_interrupt(self._start, chunk)
        return chunk

    async def aclose(self) -> None:
        if hasattr(self._inner, "aclose"):
            await self._inner.aclose()

    @guarded
    def __del__(self) -> None:
        # Without an event loop, Python destroys an async generator without closing it. So the run ends here.
        if self._start.run is not None:
            callback_handler.tree.give_up(self._start.run)


@contextmanager
def _in_batch(_: Any) -> Iterator[None]:
    token = batch_context.set((callback_handler.current_run_id(),))
    try:
        yield
    finally:
        _reset(batch_context, token)


_batch = inside(_in_batch)
_AROUND: dict[str, Around] = {"stream": _stream, "astream": _astream, "batch": _batch, "abatch": _batch}


def _reset(variable: ContextVar[Any], token: Token[Any]) -> None:
    # A generator that is finalised after its event loop ended runs in another context.
    with suppress(ValueError):
        variable.reset(token)


@guarded
def _start(graph: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GraphStart | None:
    """Return the ``GraphStart`` of a run that begins. If a graph's class and the graph itself are both
    wrapped, both wrappers call this function for one run. The second call returns ``None``."""
    around = starting_graph.get()
    if around is not None and around.run is None and around.graph is graph:
        return None
    config = kwargs.get("config") or (args[1] if len(args) > 1 else None) or {}
    # ``True`` and ``None`` mean the checkpointer of the graph around this one. LangGraph's server passes a
    # checkpointer with each run.
    saver = graph.checkpointer or (config.get("configurable") or {}).get("__pregel_checkpointer")
    saver = None if isinstance(saver, bool) else saver
    most = functools.partial(_most_turns, graph, config.get("recursion_limit"))
    return GraphStart(graph, graph.get_name(), functools.partial(graph_of, graph), most, saver)


@guarded
def _most_turns(graph: Any, steps: Any) -> int | None:
    """Return how many turns fit into the limit of steps that the user gave this run, if any. Known of a loop
    of one model and its tools, where every other step is a turn. Other graphs may have nodes without a
    request, or with many."""
    most, aeg = step_limit(steps), graph_of(graph)
    if most is None or aeg is None or len(aeg.nodes) != 2 or sum(map(bool, aeg.nodes.values())) != 1:
        return None
    return (most + 1) // 2


def _may_hit_breakpoint(graph: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether the graph may stop at a breakpoint. LangGraph calls no callback for a breakpoint, so the
    run's chunks must then be watched for interrupts."""
    return bool(
        kwargs.get("interrupt_before")
        or kwargs.get("interrupt_after")
        or getattr(graph, "interrupt_before_nodes", None)
        or getattr(graph, "interrupt_after_nodes", None)
    )


@guarded
def _mark_interrupt(start: GraphStart, chunk: Any) -> None:
    """Mark the run as waiting for a person if ``chunk`` reports an interrupt."""
    payload = chunk[-1] if isinstance(chunk, tuple) and chunk else chunk
    if isinstance(payload, dict) and payload.get("type") == "updates":
        payload = payload.get("data")
    if isinstance(payload, dict) and _INTERRUPT in payload and start.run is not None:
        start.run.interrupts = start.run.interrupts or ()
