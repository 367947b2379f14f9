"""Functions run inside a scope, call by call. Generators are inside only while they run, not their
consumers."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar, cast

from .context import Place, leave, place
from .runtime import session

P = ParamSpec("P")
R = TypeVar("R")

Fresh = Callable[[], AbstractContextManager[Any]]


def scoped(function: Callable[P, R], fresh: Fresh) -> Callable[P, R]:
    """``function`` with every call inside a scope from ``fresh()``; kind and signature stay."""
    if inspect.isasyncgenfunction(function):
        wrapper: Any = _async_generator(function, fresh)
    elif inspect.iscoroutinefunction(function):
        wrapper = _coroutine(function, fresh)
    elif inspect.isgeneratorfunction(function):
        wrapper = _generator(function, fresh)
    else:
        wrapper = _plain(function, fresh)
    return cast("Callable[P, R]", functools.wraps(function)(wrapper))


def _plain(function: Callable[..., Any], fresh: Fresh) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with fresh():
            return function(*args, **kwargs)

    return wrapper


def _coroutine(function: Callable[..., Any], fresh: Fresh) -> Callable[..., Any]:
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        with fresh():
            return await function(*args, **kwargs)

    return wrapper


class _Between:
    """The place inside a generator's scope, taken up for each of its steps and laid down again."""

    def __init__(self, fresh: Fresh) -> None:
        self._scope = fresh()
        self._inside: Place = place.get()

    def __enter__(self) -> None:
        self._token = place.set(self._inside)

    def __exit__(self, *_: object) -> None:
        self._inside = place.get()
        leave(self._token, session().counters)

    def open(self) -> None:
        outside = place.get()
        self._scope.__enter__()
        self._inside = place.get()
        place.set(outside)

    def close(self, error: BaseException | None) -> None:
        # The scope's own reset would be counted as failed where another context finalises the generator.
        outside = place.get()
        self._scope.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        place.set(outside)


def _generator(function: Callable[..., Any], fresh: Fresh) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        between = _Between(fresh)
        between.open()
        failure: BaseException | None = None
        try:
            inner = function(*args, **kwargs)
            return (yield from _driven(inner, between))
        except BaseException as error:
            failure = error
            raise
        finally:
            between.close(failure)

    return wrapper


def _driven(
    inner: Generator[Any, Any, Any], between: AbstractContextManager[Any]
) -> Generator[Any, Any, Any]:
    step: Callable[[], Any] = functools.partial(next, inner)
    while True:
        with between:
            try:
                item = step()
            except StopIteration as stop:
                return stop.value
        try:
            sent = yield item
        except GeneratorExit:
            with between:
                inner.close()
            raise
        except BaseException as error:
            step = functools.partial(inner.throw, error)
        else:
            step = functools.partial(inner.send, sent)


@types.coroutine
def closed(inner: AsyncGenerator[Any, Any], between: AbstractContextManager[Any]) -> Generator[Any, Any, Any]:
    """``await closed(inner, between)`` is ``await inner.aclose()``, with ``between`` entered only while that
    runs, never while it waits: one that Python destroys, having no event loop to close it by, waits for ever,
    in the context of whatever code ran just then."""
    return (yield from _driven(cast("Generator[Any, Any, Any]", inner.aclose().__await__()), between))


def _async_generator(function: Callable[..., Any], fresh: Fresh) -> Callable[..., Any]:
    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        between = _Between(fresh)
        between.open()
        failure: BaseException | None = None
        try:
            inner = function(*args, **kwargs)
            step: Callable[[], Any] = inner.__anext__
            while True:
                with between:
                    try:
                        item = await step()
                    except StopAsyncIteration:
                        return
                try:
                    sent = yield item
                except GeneratorExit:
                    await closed(inner, between)
                    raise
                except BaseException as error:
                    step = functools.partial(inner.athrow, error)
                else:
                    step = functools.partial(inner.asend, sent)
        except BaseException as error:
            failure = error
            raise
        finally:
            between.close(failure)

    return wrapper
