"""The frameworks that can be patched, and the functions that patch and restore them."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from . import runtime
from ._import_hook import forget, when_imported
from .errors import ArgumentError
from .sdk_logger import logger


class Framework(NamedTuple):
    """One framework and the module that patches it."""

    package: str
    """Package whose import triggers the patch."""
    module: str
    """Our module, imported after the package. It has ``patch() -> bool | None``, ``unpatch()`` and
    ``wrap(object) -> object | None``. ``patch`` returns False if this version of the package cannot be
    patched, and ``None`` if the imported package is a different package with the same name."""
    related_packages: tuple[str, ...] = ()
    """Further top-level packages whose objects ``wrap()`` accepts."""


FRAMEWORKS: dict[str, Framework] = {
    "openai": Framework("openai", "sojourn.openai"),
    "anthropic": Framework("anthropic", "sojourn.anthropic"),
    "litellm": Framework("litellm", "sojourn_integrations.litellm"),
    "crewai": Framework("crewai", "sojourn_integrations.crewai"),
    "mini_swe_agent": Framework("minisweagent", "sojourn_integrations.mini_swe_agent"),
    "autogen": Framework(
        "autogen_agentchat", "sojourn_integrations.autogen", related_packages=("autogen_core", "autogen_ext")
    ),
    "openai_agents": Framework("agents", "sojourn_integrations.openai_agents"),
    # ``langgraph`` is a namespace package, which has no import to wait for. All its parts load pregel.
    "langgraph": Framework(
        "langgraph.pregel", "sojourn_integrations.langgraph", related_packages=("langgraph",)
    ),
    "langchain": Framework(
        "langchain_core", "sojourn_integrations.langchain", related_packages=("langchain",)
    ),
}
"""Frameworks by the name that ``instrument()`` and ``stats().instrumented`` use."""
_active: set[str] = set()


def register(name: str, package: str, module: str, *, related_packages: tuple[str, ...] = ()) -> None:
    """Add a framework for ``instrument()`` and ``wrap()``; see ``Framework``."""
    FRAMEWORKS[name] = Framework(package, module, related_packages)


def instrument(*names: str) -> None:
    """Patch the named frameworks; without names, all known ones. A framework that is not imported yet is
    patched at its import.

    Repeating it is harmless. Raises ``ArgumentError`` for an unknown name. A framework of an unknown version
    stays unchanged; ``stats().instrumented`` lists the patched ones.
    """
    for name in _checked(names):
        package, module, _ = FRAMEWORKS[name]
        if not runtime.session().disabled and name not in _active:
            when_imported(package, lambda name=name, module=module: _patch(name, module))  # type: ignore[misc]


def uninstrument(*names: str) -> None:
    """Undo ``instrument`` for the named frameworks; without names, for all. Restores the frameworks' own
    functions."""
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
    """Return the names of the frameworks that are patched now, sorted."""
    return tuple(sorted(_active))


def wrap(target: Any) -> Any:
    """Instrument this one client, graph, team or agent, without patching its class for other objects.

    Use the returned object, which is ``target`` itself if possible, else a wrapper. A client of ``openai`` or
    ``anthropic`` is returned itself, and clients made from it by ``with_options()`` or ``copy()``
    stay instrumented. Raises ``ArgumentError`` for an object of no known framework.
    """
    if runtime.session().disabled:
        return target
    packages = {kind.__module__.partition(".")[0] for kind in type(target).__mro__}
    for framework in FRAMEWORKS.values():
        if packages.isdisjoint((framework.package, *framework.related_packages)):
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
    # Runs inside an import statement of the user, so it must not raise.
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
