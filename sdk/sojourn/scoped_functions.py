"""Wraps functions so that each call runs inside a scope, such as a program or a tool call. A generator is
inside its scope only while its own code runs; the code that consumes it is outside."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar, cast

from .program import ExecutionContext, current_context, reset_context

P = ParamSpec("P")
R = TypeVar("R")

ScopeFactory = Callable[[], AbstractContextManager[Any]]


def scoped(function: Callable[P, R], fresh: ScopeFactory) -> Callable[P, R]:
    """Return a wrapper of ``function`` that runs each call inside a scope from ``fresh()``. The wrapper has
    the same kind (sync, async, generator) and signature."""
    if inspect.isasyncgenfunction(function):
        wrapper: Any = _async_generator(function, fresh)
    elif inspect.iscoroutinefunction(function):
        wrapper = _coroutine(function, fresh)
    elif inspect.isgeneratorfunction(function):
        wrapper = _generator(function, fresh)
    else:
        wrapper = _plain(function, fresh)
    return cast("Callable[P, R]", functools.wraps(function)(wrapper))


def _plain(function: Callable[..., Any], fresh: ScopeFactory) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with fresh():
            return function(*args, **kwargs)

    return wrapper


def _coroutine(function: Callable[..., Any], fresh: ScopeFactory) -> Callable[..., Any]:
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        with fresh():
            return await function(*args, **kwargs)

    return wrapper


class _GeneratorScope:
    """The scope of one generator. Used as a ``with`` block around each step of the generator. The step runs
    inside the scope, and the block's exit restores the consumer's context. ``open`` and ``close`` enter and
    leave the scope itself."""

    def __init__(self, fresh: ScopeFactory) -> None:
        self._scope = fresh()
        self._inside: ExecutionContext = current_context.get()

    def __enter__(self) -> None:
        self._token = current_context.set(self._inside)

    def __exit__(self, *_: object) -> None:
        self._inside = current_context.get()
        reset_context(self._token)

    def open(self) -> None:
        outside = current_context.get()
        self._scope.__enter__()
        self._inside = current_context.get()
        current_context.set(outside)

    def close(self, error: BaseException | None) -> None:
        # The scope's exit resets the context variable, so the consumer's value is set again afterwards. If
        # another context finalises the generator, the reset fails and is counted.
        outside = current_context.get()
        self._scope.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        current_context.set(outside)


def _generator(function: Callable[..., Any], fresh: ScopeFactory) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        between = _GeneratorScope(fresh)
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
def close_generator(
    inner: AsyncGenerator[Any, Any], between: AbstractContextManager[Any]
) -> Generator[Any, Any, Any]:
    """Await ``inner.aclose()``. The ``with`` block ``between`` is entered only while the generator's own code
    runs, and is left while the generator waits. If Python destroys a generator without an event loop, the
    generator waits for ever. Unrelated code that runs meanwhile is thus outside of ``between``."""
    return (yield from _driven(cast("Generator[Any, Any, Any]", inner.aclose().__await__()), between))


def _async_generator(function: Callable[..., Any], fresh: ScopeFactory) -> Callable[..., Any]:
    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        between = _GeneratorScope(fresh)
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
                    await close_generator(inner, between)
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
