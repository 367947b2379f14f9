"""What every integration needs of the SDK, in a form that can never raise into an agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sojourn.config import host_key
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


def leave(scope: Scope | None, error: BaseException | None = None, *, status: str | None = None) -> None:
    """Leave it, as after ``error`` where there was one. The caller raises its own errors itself."""
    if scope is None:
        return
    try:
        if status is not None:
            scope.handle.status = status
        scope.manager.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
    except Exception:
        fault("internal_error")


def may_tell(url: str) -> bool:
    """Whether requests for ``url`` may carry ids: only the servers named to ``sojourn.init`` get them."""
    config = session().config
    return config is not None and host_key(url) in config.hosts


def takes_events(url: str) -> bool:
    """Whether events may ride on requests for ``url``: only the one server they are sent to knows them."""
    config = session().config
    return config is not None and host_key(url) == config.host


def fault(name: str) -> None:
    """Count something we had to leave undone; see ``sojourn.stats()``."""
    session().counters.add(name)
