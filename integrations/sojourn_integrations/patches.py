"""Attributes of somebody else's classes and modules, replaced and put back.

Whoever patches on top of us keeps their patch: ours stays beneath it, and is told to be idle.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Any, NamedTuple


def in_place_of(original: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` as a function of the kind that ``original`` is, with its name and signature: callers ask
    ``inspect`` whether to await what they call."""
    kind = next((kind for asks, kind in _KINDS if asks(original)), _function)
    return functools.wraps(original)(kind(call))


def _generator(call: Callable[..., Any]) -> Callable[..., Any]:
    def ours(*args: Any, **kwargs: Any) -> Iterator[Any]:
        return (yield from call(*args, **kwargs))

    return ours


def _async_generator(call: Callable[..., Any]) -> Callable[..., Any]:
    async def ours(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async with aclosing(call(*args, **kwargs)) as inner:
            async for each in inner:
                yield each

    return ours


def _coroutine(call: Callable[..., Any]) -> Callable[..., Any]:
    async def ours(*args: Any, **kwargs: Any) -> Any:
        return await call(*args, **kwargs)

    return ours


def _function(call: Callable[..., Any]) -> Callable[..., Any]:
    def ours(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return ours


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


class Patches:
    """All that one integration has replaced."""

    def __init__(self) -> None:
        self.active = False
        """What we put there asks this: after ``undo`` it may still be called by a patch above it."""
        self._made: dict[tuple[int, str], _Patch] = {}

    def put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace ``owner.name`` by ``make(what was there)``. Repeating it is harmless."""
        self.active = True
        current = vars(owner)[name]
        before = self._made.get((id(owner), name))
        if before is not None and _is_beneath(before.ours, current):
            return
        ours = make(current)
        setattr(owner, name, ours)
        self._made[id(owner), name] = _Patch(owner, name, ours, current)

    def undo(self) -> None:
        """Put back the very same objects, but for those that somebody else patched on top of."""
        self.active = False
        for key, (owner, name, ours, theirs) in list(self._made.items()):
            if vars(owner).get(name) is ours:
                setattr(owner, name, theirs)
                del self._made[key]


def _is_beneath(ours: Any, current: Any) -> bool:
    """Whether ``current`` is ours, or wraps it as ``functools.wraps`` records. Marks on a function would not
    tell: that copies them to the wrapper."""
    for _ in range(100):
        if current is None or current is ours:
            break
        current = getattr(current, "__wrapped__", None)
    return current is ours
