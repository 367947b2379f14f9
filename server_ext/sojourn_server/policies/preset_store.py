"""Loads the operator's own policy classes from Python files next to the preset file that names them.

Only a preset file on the operator's machine may name such a class. A preset from another source, such as a
recording, imports nothing. A module from another folder is imported only if the operator allows it by name. A
preset file that names no such class runs no code. A class is instantiated only if it defines the methods of
its protocol.

Finds and parses preset files of engines and clusters, and builds the policies that they name.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from sojourn.errors import InputError

from .toml_document import TomlError, load_toml

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


DEFAULT_PRESET = "sojourn"
"""Name of the preset that an engine runs if the user chooses none."""


class PresetError(InputError):
    """A preset is invalid. The message names the wrong value and the expected one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetStore:
    """One kind of preset, for engines or for clusters: the presets that ship with sojourn, and the policies
    that a preset may name."""

    folder: str
    """Folder of the shipped presets, as TOML files, next to this module."""
    what: str
    """Name of this kind of preset in error messages."""
    preset_class: type
    """Dataclass of this kind of preset. Its fields are the keys that a preset may have, such as ``routing``.
    The type of a field for policies is the protocol that these policies implement."""
    classes: Mapping[str, Mapping[str, str]]
    """Question (a key of a preset) → policy name → ``module:class`` in this package, imported when chosen."""
    default_policies: Mapping[str, str]
    """Question (a key of a preset) → name of the policy that applies if a preset lacks the key."""

    def names(self) -> list[str]:
        """Return the names of the shipped presets, sorted."""
        folder = files(__package__) / self.folder
        return sorted(
            entry.name[: -len(".toml")] for entry in folder.iterdir() if entry.name.endswith(".toml")
        )

    def text(self, name: str) -> str:
        """Return the TOML of a shipped preset. Raises ``PresetError`` with the nearest name for an unknown
        name."""
        names = self.names()
        if name not in names:
            raise PresetError(
                f"unknown {self.what} {name!r}; expected one of {', '.join(names)}{did_you_mean(name, names)}"
            )
        return (files(__package__) / self.folder / f"{name}.toml").read_text(encoding="utf-8")

    def document(self, text: str, source: str) -> dict[str, Any]:
        """Parse the TOML text of a preset. ``extends = "NAME"`` starts from a shipped preset.

        Raises ``PresetError`` for invalid TOML or an unknown key.
        """
        try:
            document = load_toml(text)
        except TomlError as error:
            raise PresetError(f"{source}: {error}") from error
        document = self._with_base(document, source)
        known = sorted(field.name for field in fields(self.preset_class))
        for key in document:
            if key not in known:
                raise PresetError(f"{source}: unknown key {key!r}; expected {', '.join(known)}")
        return document

    def _with_base(self, document: dict[str, Any], source: str) -> dict[str, Any]:
        document = dict(document)
        base = document.pop("extends", None)
        if base is None:
            return document
        if base not in self.names():
            raise PresetError(
                f"{source}: extends unknown preset {base!r}; expected {', '.join(self.names())}"
            )
        return {**self._with_base(load_toml(self.text(base)), f"{base}.toml"), **document}

    def policies(
        self, document: Mapping[str, Any], source: str, own: CustomClassLoader | None
    ) -> dict[str, Any]:
        """Build the policies that a parsed preset names for all questions. Returns question → policy. The
        arguments are those of ``build``. Raises ``PresetError``."""
        return {question: self.build(question, document, source, own) for question in self.classes}

    def build(
        self, question: str, document: Mapping[str, Any], source: str, own: CustomClassLoader | None
    ) -> Any:
        """Build the policy that a parsed preset, ``document``, names for a question.

        ``source`` is the name of the document in error messages. ``own`` loads classes named as
        ``module:Class``; ``None``: only shipped classes are allowed. Raises ``PresetError``, also for invalid
        options of the policy.
        """
        chosen = document.get(question, self.default_policies.get(question))
        if isinstance(chosen, str):
            chosen = {"policy": chosen}
        if not isinstance(chosen, dict) or not isinstance(chosen.get("policy"), str):
            raise PresetError(
                f'{source}: {question} is {chosen!r}; expected a policy name or a table with a "policy"'
            )
        options = {key: value for key, value in chosen.items() if key != "policy"}
        name = chosen["policy"]
        try:
            policy_class = self._class(question, name, source, own)
            if ":" not in name:
                return policy_class(**options)
            protocol = get_type_hints(self.preset_class)[question]
            check_defines_methods(policy_class, protocol, question, name)
            policy = policy_class(**options)
            check_implements_protocol(policy, protocol, question, name)
            return policy
        except (TypeError, ValueError, OverflowError) as error:
            if isinstance(error, PresetError):
                raise
            raise PresetError(f"{source}: {question}: {error}") from error

    def _class(self, question: str, name: str, source: str, own: CustomClassLoader | None) -> Any:
        if ":" in name:
            if own is None:
                raise PresetError(
                    f"{source}: {question} policy {name!r} is a class outside sojourn; it is allowed only "
                    "in a file named by --policy-file, or in the simulator by --policy"
                )
            return own(name)
        known = self.classes[question]
        if name not in known:
            raise PresetError(
                f"{source}: unknown {question} policy {name!r}; expected {', '.join(sorted(known))}, or "
                f"module:Class in a file of your own{did_you_mean(name, known)}"
            )
        module, _, class_name = known[name].partition(":")
        return getattr(import_module(f".{module}", __package__), class_name)


def read_preset_text(path: Path) -> str:
    """Read a preset file as text. Raises ``PresetError`` if that fails."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PresetError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def number_option(document: Mapping[str, Any], key: str, default: float, source: str) -> float:
    """Return the number at ``key``, or ``default`` without one. Raises ``PresetError`` for other types."""
    value = document.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise PresetError(f"{source}: {key} is {value!r}; expected a number")
    return float(value)
