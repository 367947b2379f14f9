"""Listeners: objects that the SDK calls at the events of programs, tool calls and LLM requests.

Listeners run on the agent's thread, so they must be quick. Their exceptions are counted (``listener_error``)
and not passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from . import runtime

if TYPE_CHECKING:
    from .outgoing_request import LogicalRequest
    from .program import Program
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


EVENTS: Final = tuple(name for name in vars(ProgramListener) if name[0] != "_" and name != "wants_usage")
"""Names of the methods of ``ProgramListener``."""
_OF_TURNS: Final = EVENTS[2:7]
_listeners: tuple[ProgramListener, ...] = ()


def add_listener(listener: ProgramListener) -> None:
    """Register ``listener``. Adding it again is harmless."""
    if listener not in _listeners:
        _set((*_listeners, listener))


def remove_listener(listener: ProgramListener) -> None:
    """Remove ``listener``. Does nothing if it is not registered."""
    _set(tuple(each for each in _listeners if each is not listener))


def _set(listeners: tuple[ProgramListener, ...]) -> None:
    global _listeners
    _listeners = listeners
    runtime.listener_methods = {event: tuple(_overridden(listeners, event)) for event in EVENTS}
    runtime.hears_turns = any(runtime.listener_methods[event] for event in _OF_TURNS)
    runtime.usage_wanted = any(each.wants_usage for each in listeners)


def _overridden(listeners: tuple[ProgramListener, ...], event: str) -> Iterator[Callable[..., object]]:
    for listener in listeners:
        method: Callable[..., object] = getattr(listener, event)
        if getattr(method, "__func__", None) is not vars(ProgramListener)[event]:  # the base's does nothing
            yield method
