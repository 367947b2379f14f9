"""Which frameworks can be patched, which are now, and the one place that turns it on and off."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any, NamedTuple

from . import runtime
from ._import_hook import forget, when_imported
from .errors import ArgumentError

logger = logging.getLogger("sojourn")


class Framework(NamedTuple):
    """Where one framework is patched."""

    package: str
    """Top-level package to wait for."""
    module: str
    """Ours, with ``patch() -> bool | None``, ``unpatch()`` and ``wrap(object) -> object | None``. Imported
    once the package is there. ``patch`` says ``None`` of a package that merely bears the framework's name."""
    kin: tuple[str, ...] = ()
    """Further top-level packages whose objects ``wrap()`` takes."""


FRAMEWORKS: dict[str, Framework] = {
    "openai": Framework("openai", "sojourn.openai"),
    "litellm": Framework("litellm", "sojourn_integrations.litellm"),
    "mini_swe_agent": Framework("minisweagent", "sojourn_integrations.mini_swe_agent"),
    "autogen": Framework(
        "autogen_agentchat", "sojourn_integrations.autogen", kin=("autogen_core", "autogen_ext")
    ),
    "openai_agents": Framework("agents", "sojourn_integrations.openai_agents"),
    # ``langgraph`` is a namespace without code of its own: nothing to wait for. All its parts load this one.
    "langgraph": Framework("langgraph.pregel", "sojourn_integrations.langgraph", kin=("langgraph",)),
    "langchain": Framework("langchain_core", "sojourn_integrations.langchain", kin=("langchain",)),
}
"""By the name that ``instrument()`` and ``stats().instrumented`` use."""
_active: set[str] = set()


def register(name: str, package: str, module: str, *, kin: tuple[str, ...] = ()) -> None:
    """Offer a further framework to ``instrument()`` and ``wrap()``; see ``Framework``."""
    FRAMEWORKS[name] = Framework(package, module, kin)


def instrument(*names: str) -> None:
    """Patch the named frameworks (all known ones without a name), now or when they get imported. Repeatable.

    Raises ``ArgumentError`` for an unknown name. A framework whose inside looks unfamiliar is left untouched;
    ``stats().instrumented`` says what is patched.
    """
    for name in _checked(names):
        package, module, _ = FRAMEWORKS[name]
        if not runtime.session().disabled and name not in _active:
            when_imported(package, lambda name=name, module=module: _patch(name, module))  # type: ignore[misc]


def uninstrument(*names: str) -> None:
    """Undo ``instrument``: the framework's own functions are back, the very same objects."""
    for name in _checked(names):
        package, module, _ = FRAMEWORKS[name]
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
    """Tell the server about this one client, graph, team or agent, without patching its class for others.

    Use what it returns: the same object where that is possible, else one that stands for it. An ``OpenAI``
    or ``AsyncOpenAI`` client is returned itself, and clients derived from it by ``with_options()`` or
    ``copy()`` stay wrapped. Raises ``ArgumentError`` for a kind of object that no framework here knows.
    """
    if runtime.session().disabled:
        return target
    packages = {kind.__module__.partition(".")[0] for kind in type(target).__mro__}
    for framework in FRAMEWORKS.values():
        if packages.isdisjoint((framework.package, *framework.kin)):
            continue
        wrapped = import_module(framework.module).wrap(target)
        if wrapped is not None:
            return wrapped
    known = ", ".join(sorted(FRAMEWORKS))
    raise ArgumentError(f"cannot wrap a {type(target).__name__}; expected an object of one of: {known}")


def _checked(names: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(name.replace("-", "_") for name in names)
    for name in names:
        if name not in FRAMEWORKS:
            raise ArgumentError(f"{name!r} is unknown; expected one of {sorted(FRAMEWORKS)}")
    return names or tuple(FRAMEWORKS)


def _patch(name: str, module: str) -> None:
    # Runs inside somebody's import statement: nothing may get out.
    try:
        patched = import_module(module).patch()
        if patched is None:
            return
        if patched:
            _active.add(name)
            return
        logger.warning("this version of %s looks unfamiliar; it is left as it is", name)
    except Exception as error:
        logger.warning("could not attach to %s, it is left as it is: %s", name, error)
    runtime.session().counters.add("attach_error")
