"""LangChain 1.x: reports agent runs as programs, with their tool calls.

There are three ways to use this package; none of them changes an agent:

- ``sojourn.init(url)`` adds one callback handler to every run of this process (``patch``);
- ``agent.with_config({"callbacks": [Handler()]})`` adds the handler to one agent, without patching anything;
- ``create_agent(..., middleware=[Middleware()])`` reports the tool calls of one agent. It also reports calls
  of unknown tools and calls with invalid arguments, for which LangChain calls no callback. The program comes
  from one of the other ways, or from ``with sojourn.program()``.

If several ways are combined, each call is still reported once. ``run_tree`` decides which run is a program.
The patched ``openai`` client reports the requests. It gets their program and node from a resolver
(``sojourn.program.add_resolver``). No exception of ours reaches an agent. Checked with langchain-core 1.1.3
and 1.7.2. Start reading at ``callback_handler``.
"""

from __future__ import annotations

from typing import Any

from .callback_handler import handler_class, install, remove
from .tool_call_middleware import middleware_class

__all__ = ["Handler", "Middleware", "patch", "unpatch", "wrap"]


def patch() -> bool:
    """Add the handler to every later run. ``sojourn.instrumentation`` calls this. Returns False, without
    changes, if this LangChain lacks the configure hooks or the context variable of the running config."""
    return install("langchain")


def unpatch() -> None:
    """Undo ``patch``. Runs in progress are reported to their end."""
    remove("langchain")


def wrap(target: Any) -> Any | None:
    """Return a copy of a runnable (an agent, a chain) with a handler of its own.

    Returns ``None`` for an object that is not a runnable, and for a part of an agent (a model, tool or
    prompt). Also returns ``None`` for a LangGraph graph, which the integration ``langgraph`` wraps.
    """
    from langchain_core.language_models import BaseLanguageModel
    from langchain_core.prompts import BasePromptTemplate
    from langchain_core.runnables import Runnable
    from langchain_core.tools import BaseTool

    if not isinstance(target, Runnable) or isinstance(
        target, (BaseLanguageModel, BasePromptTemplate, BaseTool)
    ):
        return None
    if any(kind.__module__.startswith("langgraph.pregel") for kind in type(target).__mro__):
        return None
    return target.with_config({"callbacks": [handler_class()()]})


def __getattr__(name: str) -> Any:
    """Create ``Handler`` and ``Middleware`` at first use, since that imports LangChain."""
    if name == "Handler":
        return handler_class()
    if name == "Middleware":
        return middleware_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
