"""Registers listeners and calls them. Their base class is in ``listeners``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Protocol

from . import runtime

EVENTS: Final = (
    "program_started", "node_entered", "tool_started", "tool_stopped", "request_started",
    "request_first_byte", "request_ended", "program_ended",
)  # fmt: skip
"""Names of the methods of ``listeners.ProgramListener``."""


class Listener(Protocol):
    """A listener as the registry sees it. Each one also has the methods named in ``EVENTS``."""

    wants_usage: bool


empty_methods: set[object] = set()
"""The methods of ``listeners.ProgramListener``. They do nothing, so they are not called."""
_listeners: tuple[Listener, ...] = ()
_methods: dict[str, tuple[Callable[..., object], ...]] = dict.fromkeys(EVENTS, ())
"""Methods to call at each event. A change replaces the whole dict, so that ``notify_listeners`` needs no
lock."""
_OF_TURNS: Final = EVENTS[2:7]
hears_turns = False
"""True while at least one listener has a method for tool calls or requests. While it is False, the code of
tool calls and requests calls no function of this module, since each call costs the agent microseconds."""
usage_wanted = False
"""True while at least one registered listener wants token counts (``wants_usage``)."""


def add_listener(listener: Listener) -> None:
    """Register ``listener``. Adding it again is harmless."""
    if listener not in _listeners:
        _set((*_listeners, listener))


def remove_listener(listener: Listener) -> None:
    """Remove ``listener``. Does nothing if it is not registered."""
    _set(tuple(each for each in _listeners if each is not listener))


def _set(listeners: tuple[Listener, ...]) -> None:
    global _listeners, _methods, hears_turns, usage_wanted
    _listeners = listeners
    _methods = {event: tuple(_overridden(listeners, event)) for event in EVENTS}
    hears_turns = any(_methods[event] for event in _OF_TURNS)
    usage_wanted = any(each.wants_usage for each in listeners)


def _overridden(listeners: tuple[Listener, ...], event: str) -> Iterator[Callable[..., object]]:
    for listener in listeners:
        method: Callable[..., object] = getattr(listener, event)
        if getattr(method, "__func__", None) not in empty_methods:
            yield method


def notify_listeners(event: str, *args: object) -> None:
    """Call the method named ``event`` of every listener with ``args``. Exceptions of listeners are counted
    (``listener_error``), not raised."""
    for method in _methods[event]:
        try:
            method(*args)
        except Exception:
            runtime.session().counters.add("listener_error")
