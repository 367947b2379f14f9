"""Registers listeners and calls them. Their base class is in ``listeners``."""

from __future__ import annotations

from typing import Protocol

from . import runtime


class Listener(Protocol):
    """A listener as the registry sees it. Each one also has the methods of ``listeners.ProgramListener``."""

    wants_usage: bool


_listeners: tuple[Listener, ...] = ()
"""Registered listeners. A change replaces the whole tuple, so that ``notify_listeners`` needs no lock."""
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
    global _listeners, usage_wanted
    _listeners = listeners
    usage_wanted = any(each.wants_usage for each in listeners)


def notify_listeners(method: str, *args: object) -> None:
    """Call the method named ``method`` of every listener with ``args``. Exceptions of listeners are counted
    (``listener_error``), not raised."""
    for listener in _listeners:
        try:
            getattr(listener, method)(*args)
        except Exception:
            runtime.session().counters.add("listener_error")
