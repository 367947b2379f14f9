"""Wraps methods of one object by giving it a subclass of its own class.

A wrapper stored as an attribute would stay bound to its object. A copy of the object would then call the
method of the original. A subclass, called overlay here, works for copies too. A pickle names the original
class, so loading it needs neither the overlay nor this package.
"""

from __future__ import annotations

import copyreg
import operator
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

from sojourn.monkey_patches import Around, wrap_like

_BASE = "__sojourn_base__"
"""Name of the attribute in which an overlay keeps the object's own class."""
_AROUNDS = "__sojourn_arounds__"
"""Name of the attribute in which an overlay keeps its wrappers, by the method's name."""

_overlays: dict[tuple[type, tuple[tuple[str, Around], ...]], type] = {}
"""The overlays in use, by the object's own class and the wrappers."""
_metaclasses: dict[type, type] = {}
_owners: WeakValueDictionary[int, Any] = WeakValueDictionary()


def overlay_method(owner: Any, name: str, around: Around) -> None:
    """Make all calls of the method ``name`` of ``owner`` go through ``around``, a module-level function of
    the type ``Around``. A repeated call changes nothing. Raises ``TypeError`` if the class of the object
    cannot be replaced."""
    kind = type(owner)
    arounds = {**vars(kind).get(_AROUNDS, {}), name: around}
    object.__setattr__(owner, "__class__", _overlay(vars(kind).get(_BASE, kind), arounds))
    with suppress(TypeError):  # not weakly referable; ``remove_all_overlays`` still deactivates its class
        _owners[id(owner)] = owner


def remove_overlay(owner: Any) -> None:
    """Restore the class of ``owner``. Does nothing if another class was set after ours."""
    base = vars(type(owner)).get(_BASE)
    if base is not None:
        object.__setattr__(owner, "__class__", base)
        _owners.pop(id(owner), None)


def remove_all_overlays() -> None:
    """Remove the overlays of all objects that ``overlay_method`` has changed. Copies of these objects keep an
    overlay, whose methods then only call the originals."""
    _overlays.clear()
    for owner in list(_owners.values()):
        remove_overlay(owner)
    _owners.clear()


def _overlay(base: type, arounds: dict[str, Around]) -> type:
    key = (base, tuple(sorted(arounds.items(), key=lambda item: item[0])))
    if key not in _overlays:
        # Same layout and names, so that code which reads them, as ``serialize()`` does, sees no change.
        names = ("__module__", "__qualname__", "__doc__")
        body: dict[str, Any] = {name: getattr(base, name) for name in names}
        body |= {"__slots__": (), _BASE: base, _AROUNDS: arounds}
        overlay = _overlays[key] = _metaclass(type(base))(base.__name__, (base,), body)
        for name, around in arounds.items():
            setattr(overlay, name, _method(key, overlay, name, around))
    return _overlays[key]


def _method(key: Any, overlay: Any, name: str, around: Around) -> Callable[..., Any]:
    def call(owner: Any, /, *args: Any, **kwargs: Any) -> Any:
        original = getattr(super(overlay, owner), name)
        in_use = _overlays.get(key) is overlay
        return around(owner, original, args, kwargs) if in_use else original(*args, **kwargs)

    return wrap_like(getattr(vars(overlay)[_BASE], name), call)


def _metaclass(of: type) -> type:
    """Return a metaclass that makes pickle write the object's original class."""
    if of not in _metaclasses:
        made = type(of.__name__, (of,), {})
        copyreg.pickle(made, _as_base)
        _metaclasses[of] = made
    return _metaclasses[of]


def _as_base(overlay: type) -> tuple[Any, ...]:
    return operator.getitem, ((vars(overlay)[_BASE],), 0)
