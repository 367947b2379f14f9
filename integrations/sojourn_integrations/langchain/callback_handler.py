"""``Handler``: the callbacks by which LangChain and LangGraph report runs, nodes and tool calls.

The callbacks set no context variable of the SDK. There are two reasons. If a step has only one node,
LangGraph runs the node in the caller's context, where a variable's value would outlive the node. And
LangGraph ends an async run in a separate task, where a variable could not be reset. ``_named_run`` is made
for that: a value that outlived its run has no effect.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from sojourn.errors import tool_status_of
from sojourn.program import ResolvedContext, add_resolver, remove_resolver

from sojourn_integrations.safe_scope import guarded

from .run_tree import RunTree, result_status

tree = RunTree()
_users: set[str] = set()
"""The integrations that need the handler in every run: ``install`` adds a name, ``remove`` removes it."""
_hook: ContextVar[Any] | None = None
_running_config: ContextVar[Any] | None = None
"""LangChain's context variable with the config of the current run; ``None`` until its first use here."""
_named_run: ContextVar[tuple[Any, Any] | None] = ContextVar("sojourn_langchain_named_run", default=None)
"""Set where a model or a retriever begins whose parent run is not the run around the code: the parent's key,
and that of the run around the code. A sequence starts its steps so in ``batch``, and a thread with a bare
context that was given a ``config``. While the run around the code is still the same, and the parent is open,
requests belong to the parent."""
_by_hand = False
"""True once the user's code has made a ``Handler``. Then ``remove`` keeps the resolver, which that handler
needs."""


def install(user: str) -> bool:
    """Add the handler to every run. ``user`` is the name of the integration that needs the handler. The
    handler stays until every such integration has called ``remove``. A repeated call changes nothing. Returns
    False, without changes, if this LangChain lacks the configure hooks or the context variable of the running
    config."""
    global _hook
    if _hook is None:
        from langchain_core.runnables.config import var_child_runnable_config
        from langchain_core.tracers import context

        if not isinstance(getattr(context, "_configure_hooks", None), list):
            return False
        if not isinstance(var_child_runnable_config, ContextVar):
            return False
        kind = handler_class()
        handler = kind.__new__(kind)  # without ``__init__``, which would set ``_by_hand``
        # As the variable's default, the handler applies in every thread and task, even with an empty context.
        hook: ContextVar[Any] = ContextVar("sojourn_langchain", default=handler)
        context.register_configure_hook(hook, inheritable=True, handle_class=kind)
        add_resolver(_resolve)
        _hook = hook
    _users.add(user)
    return True


def remove(user: str) -> None:
    """Undo ``install`` for the integration ``user``. The handler is removed once no integration needs it."""
    global _hook
    _users.discard(user)
    if _users or _hook is None:
        return
    from langchain_core.tracers import context

    hook, _hook = _hook, None
    context._configure_hooks[:] = [each for each in context._configure_hooks if each[0] is not hook]
    if not _by_hand:
        remove_resolver(_resolve)


def current_run_id() -> Any:
    """Return the key of the LangChain run around the code: its UUID as an integer. ``None`` outside of
    any run."""
    around, named = _run_around(), _named_run.get()
    return named[0] if named and named[1] == around and tree.get(named[0]) is not None else around


def _run_around() -> Any:
    global _running_config
    if _running_config is None:
        from langchain_core.runnables.config import var_child_runnable_config

        _running_config = var_child_runnable_config
    config = _running_config.get()
    if not config:
        return None
    return _key(getattr(config.get("callbacks"), "parent_run_id", None))


def _key(run_id: Any) -> Any:
    """Return a run's key in the tree: its UUID as an integer, which is faster to hash."""
    return getattr(run_id, "int", run_id)


def _tree_parent_id(parent_run_id: Any) -> Any:
    """Return the id of the run in the tree that is the parent of a starting run. Usually this is LangChain's
    ``parent_run_id``. But the tree leaves out retrievers and models. If ``parent_run_id`` names such a run,
    returns the id of the run around it."""
    if parent_run_id is None or tree.get(parent_run_id) is not None:
        return parent_run_id
    around = current_run_id()
    return parent_run_id if tree.get(around) is None else around


@guarded
def _leaf_started(parent_run_id: Any) -> None:
    """Note the run in whose name a model or a retriever begins."""
    parent, around = _tree_parent_id(_key(parent_run_id)), _run_around()
    if parent != around or _named_run.get() is not None:
        _named_run.set(None if parent is None else (parent, around))


def _resolve() -> ResolvedContext | None:
    id = current_run_id()
    return None if id is None else tree.resolve(id)


@functools.cache
def handler_class() -> Any:
    """Return the class ``Handler``. It is made at first use, since making it imports LangChain."""
    from langchain_core.callbacks import BaseCallbackHandler

    class Handler(BaseCallbackHandler):
        """Reports programs, nodes and tool calls: ``config={"callbacks": [Handler()]}``.

        Several handlers, or one beside ``sojourn.init()``, report each run once, since they share their
        state. A handler knows only what callbacks carry. To report a graph, its threads and breakpoints, use
        ``sojourn.wrap(graph)``.
        """

        run_inline = True
        """Makes LangChain call the handler in the run's own thread. Otherwise async runs call it from other
        threads, late and out of order."""
        raise_error = False
        ignore_retry = ignore_custom_event = True

        def __init__(self) -> None:
            global _by_hand
            super().__init__()
            _by_hand = True
            add_resolver(_resolve)

        @guarded
        def on_chain_start(
            self,
            serialized: Any,
            inputs: Any,
            *,
            run_id: Any,
            parent_run_id: Any = None,
            metadata: Any = None,
            name: Any = None,
            run_type: Any = None,
            **kwargs: Any,
        ) -> None:
            tree.chain_started(
                _key(run_id),
                _tree_parent_id(_key(parent_run_id)),
                name=name or _name(serialized),
                kind=run_type,
                metadata=metadata or {},
            )

        def on_chat_model_start(
            self, serialized: Any, messages: Any, *, run_id: Any, parent_run_id: Any = None, **kwargs: Any
        ) -> None:
            _leaf_started(parent_run_id)

        on_llm_start = on_retriever_start = on_chat_model_start

        @guarded
        def on_chain_end(self, outputs: Any, *, run_id: Any, **kwargs: Any) -> None:
            tree.chain_ended(_key(run_id), None)

        @guarded
        def on_chain_error(self, error: BaseException, *, run_id: Any, **kwargs: Any) -> None:
            tree.chain_ended(_key(run_id), error)

        @guarded
        def on_tool_start(
            self, serialized: Any, input_str: str, *, run_id: Any, parent_run_id: Any = None, **kwargs: Any
        ) -> None:
            name = _name(serialized) or kwargs.get("name") or "tool"
            parent = _tree_parent_id(_key(parent_run_id))
            tree.tool_started(_key(run_id), parent, name=name, call_id=kwargs.get("tool_call_id"))

        @guarded
        def on_tool_end(self, output: Any, *, run_id: Any, **kwargs: Any) -> None:
            tree.tool_ended(_key(run_id), result_status(output))

        @guarded
        def on_tool_error(self, error: BaseException, *, run_id: Any, **kwargs: Any) -> None:
            tree.tool_ended(_key(run_id), tool_status_of(error))

    Handler.__module__, Handler.__qualname__ = __name__.rpartition(".")[0], "Handler"  # where users import it
    return Handler


def _name(serialized: Any) -> str | None:
    if not isinstance(serialized, Mapping):
        return None
    name = serialized.get("name")
    if not name and isinstance(serialized.get("id"), list) and serialized["id"]:
        name = serialized["id"][-1]
    return str(name) if name else None
