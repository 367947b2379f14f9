"""Wraps methods of one object by giving it a subclass of its own class.

A wrapper stored as an attribute would stay bound to its object. A copy of the object would then call the
method of the original. A subclass, called overlay here, works for copies too. A pickle names the original
class, so loading it needs neither the overlay nor this package.
"""

from __future__ import annotations

import copyreg
import operator
from contextlib import suppress
from types import MethodType
from typing import Any
from weakref import WeakValueDictionary

from sojourn.monkey_patches import Around, wrap_like

_BASE = "__sojourn_base__"
"""Name of the attribute in which an overlay keeps the object's own class."""

_classes: dict[tuple[type, tuple[tuple[str, Around], ...]], type] = {}
_metaclasses: dict[type, type] = {}
_owners: WeakValueDictionary[int, Any] = WeakValueDictionary()


class _Method:
    """A wrapped method. It is a data descriptor, so that a function set on the object later is wrapped
    too."""

    def __init__(self, base: type, name: str, around: Around) -> None:
        self.name = name
        self.around = around
        self.active = True
        self._base = base
        self._overlay: type = base

        def call(owner: Any, /, *args: Any, **kwargs: Any) -> Any:
            # The class's method, never a function set on the object, since such a function may call this one.
            original = getattr(super(self._overlay, owner), name)
            return around(owner, original, args, kwargs) if self.active else original(*args, **kwargs)

        call.__name__ = name
        self._call = wrap_like(getattr(base, name), call) if hasattr(base, name) else call

    def __set_name__(self, overlay: type, name: str) -> None:
        self._overlay = overlay

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        if owner is None:
            return getattr(self._base, self.name)
        own = getattr(owner, "__dict__", {})
        if self.name not in own:
            # A regular bound method, since two of these are equal and each can be pickled with its owner.
            return MethodType(self._call, owner)
        original = own[self.name]
        if not self.active:
            return original

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.around(owner, original, args, kwargs)

        return wrap_like(original, call)

    def __set__(self, owner: Any, value: Any) -> None:
        vars(owner)[self.name] = value

    def __delete__(self, owner: Any) -> None:
        try:
            del vars(owner)[self.name]
        except KeyError:
            raise AttributeError(self.name) from None


def overlay_method(owner: Any, name: str, around: Around) -> None:
    """Make all calls of the method ``name`` of ``owner`` go through ``around``, a module-level function of
    the type ``Around``. A repeated call changes nothing. Raises ``TypeError`` if the class of the object
    cannot be replaced."""
    kind = type(owner)
    base = vars(kind).get(_BASE)
    methods = {method.name: method.around for method in _methods(kind) if method.active}
    if methods.get(name) is around:
        return
    object.__setattr__(owner, "__class__", _overlay(base or kind, {**methods, name: around}))
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
    for overlay in _classes.values():
        for method in _methods(overlay):
            method.active = False
    _classes.clear()
    for owner in list(_owners.values()):
        remove_overlay(owner)
    _owners.clear()


def _methods(kind: type) -> list[_Method]:
    return [method for method in vars(kind).values() if isinstance(method, _Method)]


def _overlay(base: type, arounds: dict[str, Around]) -> type:
    key = (base, tuple(sorted(arounds.items(), key=lambda item: item[0])))
    if key not in _classes:
        body: dict[str, Any] = {name: _Method(base, name, around) for name, around in arounds.items()}
        # Same layout and names, so that code which reads them, as ``serialize()`` does, sees no change.
        body |= {"__slots__": (), "__module__": base.__module__, "__qualname__": base.__qualname__}
        body |= {"__doc__": base.__doc__, _BASE: base}
        _classes[key] = _metaclass(type(base))(base.__name__, (base,), body)
    return _classes[key]


def _metaclass(of: type) -> type:
    """Return a metaclass that makes pickle write the object's original class."""
    if of not in _metaclasses:
        made = type(of.__name__, (of,), {})
        copyreg.pickle(made, _as_base)
        _metaclasses[of] = made
    return _metaclasses[of]


def _as_base(overlay: type) -> tuple[Any, ...]:
    return operator.getitem, ((vars(overlay)[_BASE],), 0)
