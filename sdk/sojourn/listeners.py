"""The base class of listeners. The SDK calls them at the events of programs, tool calls and LLM requests.

Listeners run on the agent's thread, so they must be quick. Their exceptions are counted (``listener_error``)
and not passed on.
"""

from __future__ import annotations

from .listener_registry import EVENTS, add_listener, empty_methods, remove_listener
from .program import Program
from .request_tracker import LogicalRequest
from .tools import ToolCall


class ProgramListener:
    """Base class of listeners. Each method is called once per event, in order within a program."""

    wants_usage: bool = False
    """Whether to read the token counts of answers into ``LogicalRequest.usage``, which takes time."""

    def program_started(self, program: Program) -> None:
        """Called when a program starts, before its first request."""

    def node_entered(self, program: Program, node: str) -> None:
        """Called when an adapter or a ``step()`` moves the program to this node of its graph."""

    def tool_started(self, call: ToolCall) -> None:
        """Called when a tool call starts. ``call.program`` is set."""

    def tool_stopped(self, call: ToolCall, duration_s: float, status: str) -> None:
        """Called when a tool call ends. ``status`` is one of ``sojourn.tools.STATUSES``."""

    def request_started(self, request: LogicalRequest) -> None:
        """Called once per logical LLM request, however many HTTP attempts it takes."""

    def request_first_byte(self, request: LogicalRequest) -> None:
        """Called at the first byte of a streamed answer."""

    def request_ended(self, request: LogicalRequest, how: str) -> None:
        """Called when a request ends. ``how`` is ``ended``, ``failed``, ``cancelled``, ``closed_early`` or
        ``abandoned``; see ``LogicalRequest.end``."""

    def program_ended(self, program: Program, status: str) -> None:
        """Called when a program ends. ``status``: ``ok``, ``error`` or ``cancelled``."""


empty_methods.update(vars(ProgramListener)[event] for event in EVENTS)

__all__ = ["ProgramListener", "add_listener", "remove_listener"]
