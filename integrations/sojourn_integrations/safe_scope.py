"""Keeps exceptions of integrations away from agents. Enters and leaves the SDK's scopes without raising."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

from sojourn.runtime import session

P = ParamSpec("P")
R = TypeVar("R")


def guarded(function: Callable[P, R]) -> Callable[P, R | None]:
    """Decorate a function of ours so that it never raises. An exception is counted as ``internal_error``, and
    the function then returns ``None``."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return function(*args, **kwargs)
        except Exception:
            count_error("internal_error")
            return None

    return call


class Scope(NamedTuple):
    """An entered program or tool call: its context manager and the value of ``__enter__``."""

    manager: Any
    handle: Any


def enter(make: Callable[[], Any]) -> Scope | None:
    """Call ``make`` and enter the context manager that it returns. Returns the manager and the value of its
    ``__enter__``. If ``make`` or ``__enter__`` raises, counts an ``internal_error`` and returns ``None``."""
    try:
        manager = make()
        return Scope(manager, manager.__enter__())
    except Exception:
        count_error("internal_error")
        return None


def leave(
    scope: Scope | None, error: BaseException | None = None, *, status: str | Callable[[], str] | None = None
) -> None:
    """Leave the scope. ``error``: the exception of the code inside, if any. The caller re-raises it.

    ``status`` is the tool call's status, or a function that returns it. Without ``status``, ``error``
    decides.
    """
    if scope is None:
        return
    try:
        if status is not None:
            scope.handle.status = status() if callable(status) else status
    except Exception:
        count_error("internal_error")
    try:
        scope.manager.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
    except Exception:
        count_error("internal_error")


@contextmanager
def entered(make: Callable[[], Any]) -> Iterator[None]:
    """Run the block inside the context manager that ``make`` returns. Raises the block's exceptions only."""
    scope = enter(make)
    try:
        yield
    except BaseException as error:
        leave(scope, error)
        raise
    leave(scope)


def count_error(name: str) -> None:
    """Count an internal error under ``name``; see ``sojourn.stats()``."""
    session().counters.add(name)
