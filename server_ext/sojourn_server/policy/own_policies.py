"""Policies of the operator's own: a preset file may name a class of a Python file beside it.

Only a file on the operator's machine may; a preset that came another way, such as
in a tape, cannot have anything imported.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

OwnClass = Callable[[str], type]
"""From ``module:Class`` to the class; raises ``OwnPolicyError``."""


class OwnPolicyError(ValueError):
    """There is no such class; the text says what was looked for and where."""


def classes_beside(folder: Path) -> OwnClass:
    """Finds ``module:Class`` in ``folder/module.py``, else in what is installed."""

    def find(place: str) -> type:
        module_name, _, class_name = place.partition(":")
        module = _module(module_name, folder, place)
        found = getattr(module, class_name, None)
        if not isinstance(found, type):
            known = [name for name, value in vars(module).items() if isinstance(value, type)]
            near = difflib.get_close_matches(class_name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise OwnPolicyError(f"{place}: {module.__file__} has no class {class_name!r}{hint}")
        return found

    return find


def check_answers(policy: Any, protocol: type, question: str, place: str) -> None:
    """Raise ``OwnPolicyError`` where ``policy`` lacks something that is asked of it."""
    wanted = [
        name for name in (*vars(protocol).get("__annotations__", ()), *vars(protocol)) if name[0] != "_"
    ]
    missing = [name for name in wanted if not hasattr(policy, name)]
    if missing:
        raise OwnPolicyError(
            f"{place} has no {' and no '.join(missing)}; {protocol.__name__} in "
            f"policy/{protocol.__module__.rpartition('.')[2]}.py says what {question} needs"
        )


def _module(name: str, folder: Path, place: str) -> ModuleType:
    path = folder / f"{name}.py"
    try:
        if path.is_file():
            return _from_file(path)
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise OwnPolicyError(f"{place} cannot be imported: {error}") from error
        raise OwnPolicyError(f"{place}: there is neither {path} nor an installed {name}") from error
    except Exception as error:
        raise OwnPolicyError(f"{place} cannot be imported: {type(error).__name__}: {error}") from error


def _from_file(path: Path) -> ModuleType:
    # Under a name that is nobody else's: a file called random.py shall be no standard module to others.
    whose = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    name = f"sojourn_own_{whose}_{path.stem}"
    known = sys.modules.get(name)
    if known is not None:
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look for their module while they are made.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
