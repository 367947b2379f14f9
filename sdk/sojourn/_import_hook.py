"""Run something once a top-level package is imported, now or later, without importing it ourselves.

The hook waits for the *package*, never for one of its modules: those finish while
the package around them is still half made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    # At run time their home costs 8 ms of import for two empty base classes.
    from importlib.abc import Loader

_waiting: dict[str, Callable[[], None]] = {}


def when_imported(package: str, then: Callable[[], None]) -> None:
    """Call ``then`` now if ``package`` is loaded, else right after its import. Exceptions of ``then`` are
    its own business: it must not raise."""
    module = sys.modules.get(package)
    spec = getattr(module, "__spec__", None)
    if module is not None and not getattr(spec, "_initializing", False):
        then()
        return
    _waiting[package] = then
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def body_has_run(package: str) -> None:
    """Do now what waits for ``package``. For other import hooks, which run when the package's own code is
    through but the import system still calls it half made: no later import of it will come."""
    then = _waiting.get(package)
    forget(package)
    if then is not None:
        then()


def forget(package: str) -> None:
    """Wait for it no more."""
    _waiting.pop(package, None)
    if not _waiting and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


class _Finder:
    def __init__(self) -> None:
        self._looking: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _waiting or fullname in self._looking:
            return None
        self._looking.add(fullname)
        try:
            spec = find_spec(fullname)  # asks the other finders; we answer None meanwhile
        finally:
            self._looking.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = cast("Loader", _Loader(spec.loader, fullname))
        return spec


class _Loader:
    """Delegates, and tells when the package's own code has run."""

    def __init__(self, inner: Loader, package: str) -> None:
        self._inner = inner
        self._package = package

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Restored first: packages look at their own __loader__ and __spec__.loader.
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        body_has_run(self._package)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


_finder = _Finder()
