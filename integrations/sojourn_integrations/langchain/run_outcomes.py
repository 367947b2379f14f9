"""Reads the results of LangChain's and LangGraph's runs. Exception classes are recognised by their names, so
that neither framework is imported."""

from __future__ import annotations

from typing import Any

from sojourn.errors import tool_status_of


def tool_status(error: BaseException) -> str:
    """Return the status of a tool call that raised ``error``: ``timeout``, ``cancelled``, ``error`` or
    ``ok``. LangGraph's interrupts count as ``cancelled``. Its ``ParentCommand`` counts as ``ok``, since it is
    a result, not a failure."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GraphInterrupt" in kinds:
        return "cancelled"
    if "ParentCommand" in kinds:
        return "ok"
    return tool_status_of(error)


def result_status(output: Any) -> str:
    """Return the status of a tool call that raised nothing: ``error`` if the result has the status ``error``,
    else ``ok``. For example, ``handle_tool_error`` turns an exception into a message with the status
    ``error``."""
    return "error" if getattr(output, "status", None) == "error" else "ok"


def interrupts_of(error: BaseException | None) -> tuple[Any, ...] | None:
    """Return the interrupts at which a graph stopped, if ``error`` is LangGraph's ``GraphInterrupt``. The
    result is empty for a breakpoint. It is ``None`` for any other error, and if ``error`` is ``None``."""
    if error is None or all(kind.__name__ != "GraphInterrupt" for kind in type(error).__mro__):
        return None
    given = error.args[0] if error.args else ()
    return tuple(given) if isinstance(given, (list, tuple)) else ()
