"""How LangChain's and LangGraph's runs end, told by the names of what they raise: neither is imported."""

from __future__ import annotations

from typing import Any

from sojourn.program import status_of


def tool_status(error: BaseException) -> str:
    """How a tool call ended that let ``error`` out. An interrupt stops it; a command to the graph above is a
    result like any other."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GraphInterrupt" in kinds:
        return "cancelled"
    if "ParentCommand" in kinds:
        return "ok"
    if kinds & {"TimeoutError", "TimeoutExpired"}:
        return "timeout"
    return status_of(error)


def interrupts_of(error: BaseException | None) -> tuple[Any, ...] | None:
    """At which a graph stopped, empty for a breakpoint; ``None`` where it did not stop for one."""
    if error is None or all(kind.__name__ != "GraphInterrupt" for kind in type(error).__mro__):
        return None
    given = error.args[0] if error.args else ()
    return tuple(given) if isinstance(given, (list, tuple)) else ()
