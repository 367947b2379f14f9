"""``Middleware``: wraps the tool calls of one agent and reports them."""

from __future__ import annotations

import functools
from typing import Any

import sojourn

from sojourn_integrations.safe_scope import entered, set_status

from .run_tree import result_status


@functools.cache
def middleware_class() -> Any:
    """Return the class ``Middleware``. It is made at first use, since making it imports LangChain."""
    from langchain.agents.middleware import AgentMiddleware

    class Middleware(AgentMiddleware):
        """Reports an agent's tool calls: ``create_agent(model, tools, middleware=[Middleware()])``.

        Placed first in the list, it reports a call and its retries as one call. Placed last, it reports every
        attempt.
        """

        tools = ()

        @property
        def name(self) -> str:
            """The name by which ``create_agent`` distinguishes middleware objects."""
            return "SojournMiddleware"

        def wrap_tool_call(self, request: Any, handler: Any) -> Any:
            with entered(lambda: _tool_call(request)) as call:
                result = handler(request)
                set_status(call, result_status, result)
            return result

        async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
            with entered(lambda: _tool_call(request)) as call:
                result = await handler(request)
                set_status(call, result_status, result)
            return result

    Middleware.__module__, Middleware.__qualname__ = __name__.rpartition(".")[0], "Middleware"
    return Middleware


def _tool_call(request: Any) -> Any:
    call = request.tool_call
    return sojourn.tool_call(call["name"], call.get("id"))
