"""Runs a callback after another package is imported, without importing that package itself.

The hook waits for a *package*, never for one of its modules. A package often imports its modules before its
own code has run to the end, which would be too early for the callback.

Once in ``sys.meta_path``, the finder stays there. It finds nothing while no callback waits. Python walks
through the live list. If a thread is in the middle of a search, a removal would make the search skip the next
finder and raise ``ModuleNotFoundError``. Replacing the list would not help: other code may hold the old one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    # At run time importlib.abc costs 8 ms of import.
    from importlib.abc import Loader

_waiting: dict[str, Callable[[], None]] = {}


def when_imported(package: str, then: Callable[[], None]) -> None:
    """Call ``then`` now if ``package`` is loaded, else right after the package is imported. ``then`` must not
    raise. It replaces an earlier callback that still waits for ``package``."""
    module = sys.modules.get(package)
    spec = getattr(module, "__spec__", None)
    if module is not None and not getattr(spec, "_initializing", False):
        then()
        return
    _waiting[package] = then
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def run_import_callback(package: str) -> None:
    """Run the callback of ``package`` now, if it has not run yet. Another import hook calls this right after
    the package's code has run. At that time the import system does not yet mark the package as loaded."""
    then = _waiting.get(package)
    forget(package)
    if then is not None:
        then()


def forget(package: str) -> None:
    """Drop the callback of ``package``, if there is one."""
    _waiting.pop(package, None)


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
            spec = find_spec(fullname)  # asks the other finders; this one returns None meanwhile
        finally:
            self._looking.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = cast("Loader", _Loader(spec.loader, fullname))
        return spec


class _Loader:
    """Delegates to the package's own loader, then runs the callback."""

    def __init__(self, inner: Loader, package: str) -> None:
        self._inner = inner
        self._package = package

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Restored first, since packages read their own __loader__ and __spec__.loader.
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        run_import_callback(self._package)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


_finder = _Finder()
