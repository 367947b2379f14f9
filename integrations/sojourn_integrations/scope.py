"""What every integration needs of the SDK, in a form that can never raise into an agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sojourn.runtime import session


class Scope(NamedTuple):
    """An entered program or tool call: its context manager, and what entering it gave."""

    manager: Any
    handle: Any


def enter(make: Callable[[], Any]) -> Scope | None:
    """Make and enter a context manager; ``None`` and a count where that fails."""
    try:
        manager = make()
        return Scope(manager, manager.__enter__())
    except Exception:
        fault("internal_error")
        return None


def leave(
    scope: Scope | None, error: BaseException | None = None, *, status: str | Callable[[], str] | None = None
) -> None:
    """Leave it, as after ``error`` where there was one. The caller raises its own errors itself.

    ``status`` is a function where it is read from a result, which may be anything.
    """
    if scope is None:
        return
    try:
        if status is not None:
            scope.handle.status = status() if callable(status) else status
    except Exception:
        fault("internal_error")
    try:
        scope.manager.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
    except Exception:
        fault("internal_error")


def fault(name: str) -> None:
    """Count something we had to leave undone; see ``sojourn.stats()``."""
    session().counters.add(name)
