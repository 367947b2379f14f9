"""Wraps functions so that each call runs inside a scope, such as a program or a tool call. A generator is
inside its scope only while its own code runs; the code that consumes it is outside."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractContextManager, suppress
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from .monkey_patches import first_anext
from .program import ExecutionContext, current_context, reset_context

P = ParamSpec("P")
R = TypeVar("R")

ScopeFactory = Callable[[], AbstractContextManager[Any]]


class Scope(Protocol):
    """A program or a tool call, entered and ended like a ``with`` block. It can stay open after the wrapped
    function has returned, for example until the returned coroutine ends."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> Any: ...

    def _leave_context(self) -> None:
        """Restore the context that was current before the block. ``__exit__`` then only ends the program or
        tool call."""


def scoped(function: Callable[P, R], fresh: Callable[[], Scope]) -> Callable[P, R]:
    """Return a wrapper of ``function`` that runs each call inside a scope from ``fresh()``. The wrapper has
    the same kind (sync, async, generator) and signature. A plain function may return a coroutine, a
    generator or a future, as a retrying decorator does. The scope then lasts until the returned object ends
    or is garbage-collected."""
    if isinstance(function, (staticmethod, classmethod)):
        return cast("Callable[P, R]", type(function)(scoped(function.__func__, fresh)))
    if inspect.isasyncgenfunction(function):
        wrapper: Any = _async_generator(function, fresh)
    elif inspect.iscoroutinefunction(function):
        wrapper = _coroutine(function, fresh)
    elif inspect.isgeneratorfunction(function):
        wrapper = _generator(function, fresh)
    else:
        wrapper = _plain(function, fresh)
    return cast("Callable[P, R]", functools.wraps(function)(_with_globals_of(function, wrapper)))


def _with_globals_of(function: Callable[..., Any], wrapper: Any) -> Any:
    """Return ``wrapper`` with the globals of ``function``, if it has any. Some frameworks, such as AutoGen,
    look up the names of text annotations in a function's globals.

    So the wrappers below read no global, not even a builtin, since the user's module may hide it. Everything
    that they need is in their closures.
    """
    theirs = getattr(function, "__globals__", None)
    if type(theirs) is not dict:
        return wrapper
    return types.FunctionType(wrapper.__code__, theirs, wrapper.__name__, None, wrapper.__closure__)


def _plain(function: Callable[..., Any], fresh: Callable[[], Scope]) -> Callable[..., Any]:
    anything, returned = BaseException, _returned

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        scope = fresh()
        scope.__enter__()
        try:
            result = function(*args, **kwargs)
        except anything as error:
            scope.__exit__(error.__class__, error, error.__traceback__)
            raise
        return returned(result, scope)

    return wrapper


def _returned(result: Any, scope: Scope) -> Any:
    """End ``scope``, whose function returned ``result``. If ``result`` is a coroutine, generator or future,
    ``scope`` ends with ``result`` instead. Returns ``result``, or a wrapper of ``result``."""
    wrap = _wrappers.get(type(result))
    if wrap is None and hasattr(type(result), "add_done_callback"):  # of the class, since mocks have all
        _end_with_future(result, scope)
        return result
    if wrap is None or (wrap is _generator and inspect.isawaitable(result)):
        scope.__exit__(None, None, None)
        return result
    return _wrap_in_open_scope(result, wrap, scope)


def _end_with_future(future: Any, scope: Scope) -> None:
    """Leave the scope's context now. End the scope when ``future`` (of asyncio or of an executor) is done or
    garbage-collected."""
    dropped: weakref.finalize[..., Any] | None = None

    def done(future: Any) -> None:
        if dropped is not None:
            dropped.detach()
        cancelled = getattr(future, "cancelled", None)
        # A call of ``exception()`` marks the exception as read, and asyncio logs only unread ones.
        error = getattr(future, "_exception", None)
        if callable(cancelled) and cancelled():
            error = GeneratorExit()  # counts as cancelled, without an import of asyncio
        scope.__exit__(None if error is None else type(error), error, None)

    scope._leave_context()
    with suppress(TypeError):  # a kind of future that cannot be referenced weakly
        dropped = weakref.finalize(future, scope.__exit__, GeneratorExit, GeneratorExit(), None)
        dropped.atexit = False
    try:
        future.add_done_callback(done)
    except Exception:  # no future after all
        if dropped is not None:
            dropped.detach()
        scope.__exit__(None, None, None)


def _wrap_in_open_scope(result: Any, wrap: Callable[..., Any], scope: Scope) -> Any:
    """Return a wrapper of ``result``, a coroutine or generator. The wrapper is of the same kind, runs
    ``result`` inside the open ``scope``, and ends the scope afterwards."""
    opened = _OpenScope(scope)
    running = wrap(lambda: result, lambda: opened)()
    running.__name__, running.__qualname__ = result.__name__, result.__qualname__
    weakref.finalize(running, opened.drop, result).atexit = False
    return running


class _OpenScope:
    """A ``with`` block that enters the context of ``scope``, which is already open. The block's exit ends
    ``scope``."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._inside = current_context.get()
        self._begun = False
        scope._leave_context()

    def __enter__(self) -> None:
        self._begun = True
        self._token = current_context.set(self._inside)

    def _leave_context(self) -> None:
        reset_context(self.__dict__.pop("_token"))

    def __exit__(self, *error: Any) -> None:
        if hasattr(self, "_token"):
            self._leave_context()
        self._scope.__exit__(*error)

    def drop(self, result: Any) -> None:
        """Called when the wrapper of ``result`` is garbage-collected. Ends the scope if the wrapper never
        ran."""
        if not self._begun:
            if isinstance(result, types.CoroutineType):
                result.close()  # else Python warns about this inner coroutine too
            self._scope.__exit__(GeneratorExit, GeneratorExit(), None)


def _coroutine(function: Callable[..., Any], fresh: ScopeFactory) -> Callable[..., Any]:
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        with fresh():
            return await function(*args, **kwargs)

    return wrapper


class GeneratorScope:
    """The scope of one generator, entered by the constructor and left by ``close``. As a ``with`` block it
    surrounds each step of the generator: the step runs inside the scope, and the block's exit restores the
    consumer's context."""

    def __init__(self, fresh: ScopeFactory) -> None:
        self._scope = fresh()
        self._scope.__enter__()
        self._inside: ExecutionContext = current_context.get()
        if hasattr(self._scope, "_leave_context"):  # another context may finalise the generator
            self._scope._leave_context()

    def __enter__(self) -> None:
        self._token = current_context.set(self._inside)

    def __exit__(self, *_: object) -> None:
        self._inside = current_context.get()
        reset_context(self._token)

    def yields(self, item: Any) -> None:
        """Called before the consumer gets ``item``."""

    def close(self, error: BaseException | None) -> None:
        self._scope.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


def _generator(function: Callable[..., Any], fresh: ScopeFactory) -> Callable[..., Any]:
    anything, scope_of, driven = BaseException, GeneratorScope, _driven

    def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        between = scope_of(fresh)
        failure: BaseException | None = None
        try:
            inner = function(*args, **kwargs)
            return (yield from driven(inner, between))
        except anything as error:
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
    runs. While the generator waits, the block is left, so that unrelated code is outside of the block. The
    wait never ends if Python destroys the generator without an event loop."""
    return (yield from _driven(cast("Generator[Any, Any, Any]", inner.aclose().__await__()), between))


def stepped(function: Callable[..., Any], begin: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of the async generator function ``function``. ``begin`` gets the arguments of each
    call and returns a ``GeneratorScope``, or an object with its methods."""
    anything, exhausted, closed = BaseException, StopAsyncIteration, GeneratorExit
    first, close = first_anext, close_generator

    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        between = begin(*args, **kwargs)
        failure: BaseException | None = None
        try:
            inner = function(*args, **kwargs)
            step: Awaitable[Any] = first(inner)
            while True:
                with between:
                    try:
                        item = await step
                    except exhausted:
                        return
                between.yields(item)
                try:
                    sent = yield item
                except closed:
                    await close(inner, between)
                    raise
                except anything as error:
                    step = inner.athrow(error)
                else:
                    step = inner.asend(sent)
        except anything as error:
            failure = error
            raise
        finally:
            between.close(failure)

    return wrapper


def _async_generator(function: Callable[..., Any], fresh: ScopeFactory) -> Callable[..., Any]:
    return stepped(function, lambda *_, **__: GeneratorScope(fresh))


_wrappers: dict[type, Callable[..., Any]] = {
    types.CoroutineType: _coroutine,
    types.GeneratorType: _generator,
    types.AsyncGeneratorType: _async_generator,
}
"""Type of a plain function's result → function that wraps the result. A generator that can also be awaited
(``types.coroutine``) is not wrapped, since the wrapper could not be awaited."""
