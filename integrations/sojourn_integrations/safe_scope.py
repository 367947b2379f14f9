"""Keeps exceptions of integrations away from agents. Enters and leaves the SDK's scopes without raising."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from inspect import iscoroutinefunction
from typing import Any, NamedTuple, ParamSpec, TypeVar

from sojourn.monkey_patches import Around
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


@guarded
def leave(scope: Scope | None, error: BaseException | None = None) -> None:
    """Leave the scope. ``error``: the exception of the code inside, if any. The caller re-raises it."""
    if scope is not None:
        scope.manager.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


@contextmanager
def entered(make: Callable[[], Any]) -> Iterator[Any]:
    """Run the block inside the context manager that ``make`` returns. The value is that of its ``__enter__``;
    ``None`` if entering failed. Raises the block's exceptions only."""
    scope = enter(make)
    try:
        yield None if scope is None else scope.handle
    except BaseException as error:
        leave(scope, error)
        raise
    leave(scope)


@guarded
def set_status(call: Any, status_of: Callable[[Any], str], result: Any) -> None:
    """Set the status of a tool call that raised nothing. ``call``: ``None`` if entering it failed."""
    if call is not None:
        call.status = status_of(result)


def inside(scope: Callable[[Any], AbstractContextManager[Any]]) -> Around:
    """Return a wrapper for methods, sync or async, that runs a call inside the block ``scope(object)``."""

    async def awaited(owner: Any, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with entered(lambda: scope(owner)):
            return await original(*args, **kwargs)

    def around(owner: Any, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if iscoroutinefunction(original):
            return awaited(owner, original, args, kwargs)
        with entered(lambda: scope(owner)):
            return original(*args, **kwargs)

    return around


def count_error(name: str) -> None:
    """Count an internal error under ``name``; see ``sojourn.stats()``."""
    session().counters.add(name)
