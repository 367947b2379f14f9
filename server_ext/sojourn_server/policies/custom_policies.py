"""Loads the operator's own policy classes from Python files next to the preset file that names them.

Only a preset file on the operator's machine may name such a class. A preset from another source, such as a
recording, imports nothing. A module from another folder is imported only if the operator allows it by name. A
preset file that names no such class runs no code. A class is instantiated only if it defines the methods of
its protocol.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

CustomClassLoader = Callable[[str], type]
"""A function that returns the class for a name ``module:Class``, or raises ``CustomPolicyError``."""


class CustomPolicyError(ValueError):
    """A policy class was not found or is unsuitable. The message names the class and the reason."""


def custom_class_loader(folder: Path, allowed: str = "") -> CustomClassLoader:
    """Return a loader of ``module:Class`` from ``folder/module.py``, or else from an allowed package.

    ``allowed`` names installed packages or modules, separated by commas; a package includes its modules.
    Modules of the standard library are refused. A refused module is never imported.
    """
    packages = tuple(name.strip() for name in allowed.split(",") if name.strip())

    def find(place: str) -> type:
        module_name, _, class_name = place.partition(":")
        module = _import_policy_module(module_name, folder, place, packages)
        found = getattr(module, class_name, None)
        if not isinstance(found, type):
            known = [name for name, value in vars(module).items() if isinstance(value, type)]
            raise CustomPolicyError(
                f"{place}: {module.__file__} has no class {class_name!r}{did_you_mean(class_name, known)}"
            )
        return found

    return find


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message, ``; did you mean 'NAME'?``, or "" if no known name is similar."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_defines_methods(policy_class: type, protocol: type, question: str, place: str) -> None:
    """Raise ``CustomPolicyError`` if a class lacks a method of its protocol. Creates no instance.

    The error message names ``question`` (a key of a preset) and ``place`` (``module:Class``). Data attributes
    may be set in ``__init__``, so ``check_implements_protocol`` checks them on the instance.
    """
    methods = [name for name, value in vars(protocol).items() if name[0] != "_" and callable(value)]
    if any(not callable(getattr(policy_class, name, None)) for name in methods):
        check_implements_protocol(policy_class, protocol, question, place)
        wrong = [name for name in methods if not callable(getattr(policy_class, name))]
        raise CustomPolicyError(f"{place}: {' and '.join(wrong)} cannot be called; {question} needs methods")


def check_implements_protocol(policy: Any, protocol: type, question: str, place: str) -> None:
    """Raise ``CustomPolicyError`` if ``policy``, an instance, lacks an attribute of its protocol.

    The error message names ``question`` (a key of a preset) and ``place`` (``module:Class``).
    """
    wanted = [
        name for name in (*vars(protocol).get("__annotations__", ()), *vars(protocol)) if name[0] != "_"
    ]
    missing = [name for name in wanted if not hasattr(policy, name)]
    if missing:
        raise CustomPolicyError(
            f"{place} has no {' and no '.join(missing)}; {question} needs what {protocol.__name__} in "
            f"{protocol.__module__} declares"
        )


def _import_policy_module(name: str, folder: Path, place: str, allowed: Collection[str]) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        # A path would lead out of the folder.
        raise CustomPolicyError(f"{place}: {name!r} is not the name of a module; expected module:Class")
    path = folder / f"{name}.py"
    is_beside = path.is_file()
    if not is_beside:
        _check_allowed(name, path, place, allowed)
    try:
        return _import_file(path) if is_beside else import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise CustomPolicyError(f"{place} cannot be imported: {error}") from error
        raise CustomPolicyError(f"{place}: there is neither {path} nor an installed {name}") from error
    except Exception as error:
        raise CustomPolicyError(f"{place} cannot be imported: {type(error).__name__}: {error}") from error


def _check_allowed(name: str, path: Path, place: str, allowed: Collection[str]) -> None:
    if name.partition(".")[0] in sys.stdlib_module_names:
        raise CustomPolicyError(
            f"{place}: {name} is a module of Python's standard library, which has no policies; expected a "
            f"class in a file such as {path}"
        )
    if not any(name == package or name.startswith(f"{package}.") for package in allowed):
        raise CustomPolicyError(
            f"{place}: there is no {path}, and installed modules are imported only where the operator allows "
            f"it (--allow-policy-modules {name}); or write a file {path} that imports the class"
        )


def _import_file(path: Path) -> ModuleType:
    # A unique module name, so that a file called random.py does not replace the standard module.
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    name = f"sojourn_own_{digest}_{path.stem}"
    known = sys.modules.get(name)
    if known is not None:
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module while they are created.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
