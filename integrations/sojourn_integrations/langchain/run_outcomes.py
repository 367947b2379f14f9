"""Results of LangChain's and LangGraph's runs, by the names of their exceptions; imports neither
framework."""

from __future__ import annotations

from typing import Any

from sojourn.program import status_of


def tool_status(error: BaseException) -> str:
    """Return the status of a tool call that raised ``error``: ``cancelled`` for an interrupt, ``ok`` for a
    command to the parent graph, which is an ordinary result."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GraphInterrupt" in kinds:
        return "cancelled"
    if "ParentCommand" in kinds:
        return "ok"
    if kinds & {"TimeoutError", "TimeoutExpired"}:
        return "timeout"
    return status_of(error)


def result_status(output: Any) -> str:
    """Return the status of a tool call that raised nothing: ``error`` also if ``handle_tool_error`` turned an
    exception into a message."""
    return "error" if getattr(output, "status", None) == "error" else "ok"


def interrupts_of(error: BaseException | None) -> tuple[Any, ...] | None:
    """Return the interrupts at which a graph stopped (empty for a breakpoint); ``None`` for other errors."""
    if error is None or all(kind.__name__ != "GraphInterrupt" for kind in type(error).__mro__):
        return None
    given = error.args[0] if error.args else ()
    return tuple(given) if isinstance(given, (list, tuple)) else ()
