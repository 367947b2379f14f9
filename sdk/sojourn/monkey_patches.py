"""Replaces attributes of other packages' classes and modules, and restores them.

If another package patches the same attribute later, its patch stays when ours is undone. Our function then
stays beneath the other patch and only calls the original.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import aclosing
from typing import Any, NamedTuple

Around = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Type of a method's wrapper. ``around(owner, original, args, kwargs)`` runs in place of
``original(*args, **kwargs)``. ``original`` is bound to ``owner``."""


def wrap_like(original: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call`` as a function with the kind (sync, async, generator), name and signature of
    ``original``. The kind matters, since frameworks use ``inspect`` to decide whether to await a function.
    For a sync ``original`` the result is ``call`` itself with changed attributes. So ``call`` must not be
    used elsewhere."""
    kind = next((kind for asks, kind in _KINDS if asks(original)), _function)
    return functools.wraps(original)(kind(call))


def first_anext(inner: AsyncIterator[Any], *default: Any) -> Awaitable[Any]:
    """Return ``anext(inner, *default)`` and hide the generator ``inner`` from the event loop. Use it for the
    first step of a generator that one of our generators wraps and closes.

    At its end an event loop closes all generators that it knows, at the same time. If the loop knew ``inner``
    too, ``inner`` or our generator would fail with "asynchronous generator is already running"."""
    firstiter, finalizer = sys.get_asyncgen_hooks()
    try:
        sys.set_asyncgen_hooks(None, None if finalizer is None else _leave_unclosed)
        return anext(inner, *default)  # the hooks count when ``__anext__`` is called, not when it is awaited
    finally:
        sys.set_asyncgen_hooks(firstiter, finalizer)


def _leave_unclosed(inner: Any) -> None:
    """Do nothing. As the finalizer of ``inner``, this keeps Python from closing ``inner`` outside of any
    event loop, which would print an exception if the closing code awaits."""


_END = object()


def _generator(call: Callable[..., Any]) -> Callable[..., Any]:
    def ours(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        return (yield from call(*args, **kwargs))

    return ours


def _async_generator(call: Callable[..., Any]) -> Callable[..., Any]:
    async def ours(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async with aclosing(call(*args, **kwargs)) as inner:
            each = await first_anext(aiter(inner), _END)
            if each is _END:
                return
            yield each
            async for each in inner:
                yield each

    return ours


def _coroutine(call: Callable[..., Any]) -> Callable[..., Any]:
    async def ours(*args: Any, **kwargs: Any) -> Any:
        return await call(*args, **kwargs)

    return ours


def _function(call: Callable[..., Any]) -> Callable[..., Any]:
    return call


_KINDS = (
    (inspect.isgeneratorfunction, _generator),
    (inspect.isasyncgenfunction, _async_generator),
    (inspect.iscoroutinefunction, _coroutine),
)


class _Patch(NamedTuple):
    owner: Any
    name: str
    ours: Any
    theirs: Any
    inherited: bool
    """Whether the owner inherited the attribute from another class or from its metaclass."""


class Patches:
    """The attributes that one integration has replaced. Not thread-safe."""

    def __init__(self) -> None:
        self.active = False
        """False before the first ``put`` and after ``undo``. While it is False, our functions only call the
        originals, since another package's patch may still call ours."""
        self._made: dict[tuple[int, str], _Patch] = {}

    def put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace ``owner.name`` by ``make(current value)``. Repeating it is harmless."""
        self.active = True
        current = _value(owner, name)
        before = self._made.get((id(owner), name))
        if before is not None and _is_beneath(before.ours, current):
            return
        ours = make(current)
        inherited = name not in vars(owner)
        setattr(owner, name, ours)
        self._made[id(owner), name] = _Patch(owner, name, ours, current, inherited)

    def wrap_method(self, owner: Any, name: str, around: Around) -> None:
        """Make all calls of the method ``name`` of the class ``owner`` go through ``around``. Repeating it is
        harmless."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def method(instance: Any, /, *args: Any, **kwargs: Any) -> Any:
                bound = functools.partial(original, instance)
                return around(instance, bound, args, kwargs) if self.active else bound(*args, **kwargs)

            return wrap_like(original, method)

        self.put(owner, name, make)

    def original_of(self, function: Any) -> Any | None:
        """Return the value that our ``function`` has replaced; ``None`` if ``function`` is not ours."""
        return next((patch.theirs for patch in self._made.values() if patch.ours is function), None)

    def undo(self) -> None:
        """Restore the original attributes. If another package patched an attribute after us, its patch
        stays."""
        self.active = False
        for key, (owner, name, ours, theirs, inherited) in list(self._made.items()):
            if _value(owner, name, None) is ours:
                if inherited:
                    delattr(owner, name)
                else:
                    setattr(owner, name, theirs)
                del self._made[key]


def _value(owner: Any, name: str, *default: Any) -> Any:
    """Return the attribute as it is stored, or as the owner inherits it. If it is missing, return
    ``default``, or raise ``AttributeError`` if none is given."""
    own = vars(owner)
    return own[name] if name in own else getattr(owner, name, *default)


def _is_beneath(ours: Any, current: Any) -> bool:
    """Return whether ``current`` is our function ``ours`` or wraps it, by the chain of ``__wrapped__``. An
    attribute on our function would prove nothing, since ``functools.wraps`` copies it to the wrappers."""
    ours = getattr(ours, "__func__", ours)  # a class hands out a static method's function, which others wrap
    for _ in range(100):
        current = getattr(current, "__func__", current)
        if current is None or current is ours:
            break
        current = getattr(current, "__wrapped__", None)
    return current is ours
