"""Which frameworks can be patched, which are now, and the one place that turns it on and off."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

from . import runtime
from ._import_hook import forget, when_imported
from .errors import ArgumentError

logger = logging.getLogger("sojourn")

_PATCHES: dict[str, tuple[str, str]] = {"openai": ("openai", "sojourn.openai")}
"""Name → (package to wait for, our module with ``patch() -> bool`` and ``unpatch()``)."""
_wrappers: list[Callable[[Any], Any | None]] = []
_active: set[str] = set()


def register(name: str, package: str, module: str) -> None:
    """Offer a further framework to ``instrument()``: ``module`` has ``patch() -> bool`` and ``unpatch()``."""
    _PATCHES[name] = (package, module)


def register_wrapper(wrapper: Callable[[Any], Any | None]) -> None:
    """Offer a further kind of object to ``wrap()``: the wrapped object, or ``None`` where it is another
    kind."""
    if wrapper not in _wrappers:
        _wrappers.append(wrapper)


def instrument(*names: str) -> None:
    """Patch the named frameworks (all known ones without a name), now or when they get imported. Repeatable.

    Raises ``ArgumentError`` for an unknown name. A framework whose inside looks unfamiliar is left untouched;
    ``stats().instrumented`` says what is patched.
    """
    for name in _checked(names):
        package, module = _PATCHES[name]
        if not runtime.session().disabled and name not in _active:
            when_imported(package, lambda name=name, module=module: _patch(name, module))  # type: ignore[misc]


def uninstrument(*names: str) -> None:
    """Undo ``instrument``: the framework's own functions are back, the very same objects."""
    for name in _checked(names):
        package, module = _PATCHES[name]
        forget(package)
        if name in _active:
            _active.discard(name)
            try:
                import_module(module).unpatch()
            except Exception:
                runtime.session().counters.add("attach_error")


def active() -> tuple[str, ...]:
    """Frameworks patched now."""
    return tuple(sorted(_active))


def wrap(target: Any) -> Any:
    """Tell the server about requests of this one client, without patching its class for others.

    Takes an ``OpenAI`` or ``AsyncOpenAI`` client (or a kind that an integration registered) and returns it.
    Clients derived from it by ``with_options()`` or ``copy()`` stay wrapped. Raises ``ArgumentError`` for
    anything else.
    """
    if runtime.session().disabled:
        return target
    for wrapper in _wrappers:
        wrapped = wrapper(target)
        if wrapped is not None:
            return wrapped
    if any(kind.__module__.partition(".")[0] == "openai" for kind in type(target).__mro__):
        from . import openai

        if openai.wrap(target):
            return target
    raise ArgumentError(f"cannot wrap a {type(target).__name__}; expected an OpenAI or AsyncOpenAI client")


def _checked(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name not in _PATCHES:
            raise ArgumentError(f"{name!r} is unknown; expected one of {sorted(_PATCHES)}")
    return names or tuple(_PATCHES)


def _patch(name: str, module: str) -> None:
    # Runs inside somebody's import statement: nothing may get out.
    try:
        if import_module(module).patch():
            _active.add(name)
            return
        logger.warning("this version of %s looks unfamiliar; it is left as it is", name)
    except Exception as error:
        logger.warning("could not attach to %s, it is left as it is: %s", name, error)
    runtime.session().counters.add("attach_error")
