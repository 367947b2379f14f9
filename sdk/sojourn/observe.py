"""Listeners: parts of this package, and integrations, that follow what an agent does as it happens.

They run on the agent's own thread, so they must be quick; what they raise is counted
(``listener_error``) and goes no further. The agent's histories and the OpenTelemetry
exporter are listeners; the events to the server are not, they are the thing itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import runtime

if TYPE_CHECKING:
    from .program import Program
    from .streams import LogicalRequest
    from .tools import ToolCall


class Listener:
    """Override what you want to hear. Every method is called once per fact, in order within a program."""

    wants_usage: bool = False
    """Read the token counts of answers, for ``LogicalRequest.usage``. Nobody else pays for it."""

    def program_started(self, program: Program) -> None:
        """Before its first request."""

    def node_entered(self, program: Program, node: str) -> None:
        """An adapter or a ``step()`` says that the program now is at this node of its graph."""

    def tool_started(self, call: ToolCall) -> None:
        """``call.program`` is settled."""

    def tool_stopped(self, call: ToolCall, duration_s: float, status: str) -> None:
        """``status`` is one of ``sojourn.tools.STATUSES``."""

    def request_started(self, request: LogicalRequest) -> None:
        """One logical LLM request, however many HTTP attempts it takes."""

    def request_first_byte(self, request: LogicalRequest) -> None:
        """The first byte of a streamed answer."""

    def request_ended(self, request: LogicalRequest, how: str) -> None:
        """``ended``, ``failed``, ``cancelled``, ``closed_early`` or ``abandoned``."""

    def program_ended(self, program: Program, status: str) -> None:
        """``ok``, ``error`` or ``cancelled``."""


_listeners: tuple[Listener, ...] = ()
"""Replaced as a whole, so that telling needs no lock."""
usage_wanted = False
"""Some listener ``wants_usage``."""


def add_listener(listener: Listener) -> None:
    """Tell it too. Adding it again is harmless."""
    if listener not in _listeners:
        _set((*_listeners, listener))


def remove_listener(listener: Listener) -> None:
    """Tell it no more."""
    _set(tuple(each for each in _listeners if each is not listener))


def _set(listeners: tuple[Listener, ...]) -> None:
    global _listeners, usage_wanted
    _listeners = listeners
    usage_wanted = any(each.wants_usage for each in listeners)


def tell(fact: str, *args: object) -> None:
    """Call ``fact`` on every listener. Never raises."""
    for listener in _listeners:
        try:
            getattr(listener, fact)(*args)
        except Exception:
            runtime.session().counters.add("listener_error")
