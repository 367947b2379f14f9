"""Reads the preset files of engines and clusters, and builds the policies that they name.

This is the only place that checks the settings of a policy: names, types and ranges, as the fields of its
class declare them. A policy that code creates is not checked again.

Only a preset file on the operator's machine may name classes of the operator (``module:Class``), in Python
files beside it. A module from another folder is imported only if the operator allows it by name. A preset
from another source, such as a recording, imports nothing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec
from sojourn.errors import InputError

from .toml_document import TomlError, did_you_mean, load_toml

DEFAULT_PRESET = "sojourn"
"""Name of the preset that an engine runs if the user chooses none."""

CustomClassLoader = Callable[[str], type]
"""A function that returns the class for a name ``module:Class``, or raises ``PresetError``."""

PresetT = TypeVar("PresetT")


class PresetError(InputError):
    """A preset is invalid. The message names the wrong value and the expected one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetStore(Generic[PresetT]):
    """One kind of preset, for engines or for clusters: shipped presets, and policies that a preset names."""

    folder: str
    """Folder of the shipped presets, as TOML files, next to this module."""
    what: str
    """Name of this kind of preset in error messages."""
    preset_class: type[PresetT]
    """Dataclass of this kind of preset. Its fields are the keys that a preset may have. A field for policies
    has the type of their protocol. Its default is the policy of presets without the key."""
    classes: Mapping[str, Mapping[str, type]]
    """Question (a key of a preset, such as ``routing``) → policy name → class."""

    def names(self) -> list[str]:
        """Return the names of the shipped presets, sorted. ``stock``, plain vLLM, is not a preset."""
        names = (entry.name for entry in (files(__package__) / self.folder).iterdir())
        return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))

    def text(self, name: str) -> str:
        """Return the TOML of a shipped preset. Raises ``PresetError`` with the nearest name for an unknown
        name."""
        names = self.names()
        if name not in names:
            raise PresetError(
                f"unknown {self.what} {name!r}; expected one of {', '.join(names)}{did_you_mean(name, names)}"
            )
        return (files(__package__) / self.folder / f"{name}.toml").read_text(encoding="utf-8")

    def load(self, name: str) -> PresetT:
        """Load a shipped preset. Raises ``PresetError`` with the nearest name for an unknown name."""
        return self.parse(self.text(name), source=f"{name}.toml")

    def read(self, path: Path, *, allowed_modules: str = "") -> PresetT:
        """Read a preset file, which may name policy classes in Python files beside it.

        ``allowed_modules``: installed packages, separated by commas, whose classes the file may name too.
        Raises ``PresetError``.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PresetError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
        return self.parse(text, source=str(path), own=custom_class_loader(path.parent, allowed_modules))

    def parse(self, text: str, *, source: str, own: CustomClassLoader | None = None) -> PresetT:
        """Build a preset from TOML. ``extends = "NAME"`` starts from a shipped preset.

        ``source`` is the name of the text in error messages. ``own`` loads classes named as ``module:Class``;
        without it, only shipped classes are allowed. Raises ``PresetError``.
        """
        document = {"name": source, "paper": "", **self._document(text, source)}
        hints = get_type_hints(self.preset_class, include_extras=True)
        chosen: dict[str, Any] = {}
        for field in fields(self.preset_class):  # type: ignore[arg-type]
            key = field.name
            try:
                required = field.default is field.default_factory is MISSING
                if key in self.classes and (required or key in document):
                    chosen[key] = self.policy(key, document.get(key), own, hints[key])
                elif key in document:
                    chosen[key] = msgspec.convert(document[key], hints[key])
            except (TypeError, ValueError, OverflowError) as error:
                raise PresetError(f"{source}: {key}: {error}") from error
        return self.preset_class(**chosen)

    def _document(self, text: str, source: str) -> dict[str, Any]:
        try:
            document = load_toml(text)
        except TomlError as error:
            raise PresetError(f"{source}: {error}") from error
        base = document.pop("extends", None)
        if base is not None and base not in self.names():
            raise PresetError(
                f"{source}: extends unknown preset {base!r}; expected {', '.join(self.names())}"
            )
        known = sorted(field.name for field in fields(self.preset_class))  # type: ignore[arg-type]
        for key in document:
            if key not in known:
                raise PresetError(f"{source}: unknown key {key!r}; expected {', '.join(known)}")
        return document if base is None else {**self._document(self.text(base), f"{base}.toml"), **document}

    def policy(
        self, question: str, chosen: Any, own: CustomClassLoader | None = None, protocol: type = object
    ) -> Any:
        """Build the policy that a preset names for a question: ``chosen``, a name, or a table with a name as
        ``policy`` and the policy's settings. Raises ``ValueError`` or ``TypeError`` for a wrong choice."""
        table = {"policy": chosen} if isinstance(chosen, str) else chosen
        if not isinstance(table, dict) or not isinstance(table.get("policy"), str):
            raise ValueError(f'{chosen!r}; expected a policy name or a table with a "policy"')
        name, settings = table["policy"], {key: value for key, value in table.items() if key != "policy"}
        if ":" in name:
            if own is None:
                raise ValueError(
                    f"{name!r} is a class outside sojourn; it is allowed only in a file named by "
                    "--policy-file, or in the simulator by --policy"
                )
            return _instantiate(own(name), settings, protocol, question, name)
        known = self.classes[question]
        if name not in known:
            raise ValueError(
                f"unknown {question} policy {name!r}; expected {', '.join(sorted(known))}, or "
                f"module:Class in a file of your own{did_you_mean(name, known)}"
            )
        settable = [field.name for field in fields(known[name])]
        for key in settings.keys() - settable:
            raise ValueError(f"unknown setting {key!r} of {name}; expected {', '.join(settable) or 'none'}")
        return msgspec.convert(settings, known[name])


def custom_class_loader(folder: Path, allowed: str = "") -> CustomClassLoader:
    """Return a loader of ``module:Class`` from ``folder/module.py``, or else from a package in ``allowed``.

    Modules of the standard library are refused. A refused module is never imported.
    """
    packages = tuple(name.strip() for name in allowed.split(",") if name.strip())

    def find(place: str) -> type:
        module_name, _, class_name = place.partition(":")
        module = _import_policy_module(module_name, folder, place, packages)
        found = getattr(module, class_name, None)
        if not isinstance(found, type):
            known = [name for name, value in vars(module).items() if isinstance(value, type)]
            raise PresetError(
                f"{place}: {module.__file__} has no class {class_name!r}{did_you_mean(class_name, known)}"
            )
        return found

    return find


def _instantiate(
    policy_class: type, settings: dict[str, Any], protocol: type, question: str, place: str
) -> Any:
    """Create an operator's policy. A class without the methods of its protocol is not instantiated: it may be
    any class. Other attributes may be set in ``__init__``, so they are checked afterwards."""
    declared = {**vars(protocol), **vars(protocol).get("__annotations__", {})}
    public = [name for name in declared if name[0] != "_"]
    methods = [name for name in public if callable(declared[name])]
    missing = [name for name in methods if not callable(getattr(policy_class, name, None))]
    policy = policy_class(**settings) if not missing else policy_class
    missing += [name for name in public if name not in methods and not hasattr(policy, name)]
    if missing:
        raise PresetError(
            f"{place} has no {' and no '.join(missing)}; {question} needs what {protocol.__name__} in "
            f"{protocol.__module__} declares"
        )
    return policy


def _import_policy_module(name: str, folder: Path, place: str, allowed: tuple[str, ...]) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        # A path would lead out of the folder.
        raise PresetError(f"{place}: {name!r} is not the name of a module; expected module:Class")
    path = folder / f"{name}.py"
    is_beside = path.is_file()
    if not is_beside and name.partition(".")[0] in sys.stdlib_module_names:
        raise PresetError(
            f"{place}: {name} is a module of Python's standard library, which has no policies; expected a "
            f"class in a file such as {path}"
        )
    if not is_beside and not any(name == one or name.startswith(f"{one}.") for one in allowed):
        raise PresetError(
            f"{place}: there is no {path}, and installed modules are imported only where the operator allows "
            f"it (--allow-policy-modules {name}); or write a file {path} that imports the class"
        )
    try:
        return _import_file(path) if is_beside else import_module(name)
    except Exception as error:
        text = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise PresetError(f"{place} cannot be imported: {text}") from error


def _import_file(path: Path) -> ModuleType:
    # A unique module name, so that a file called random.py does not replace the standard module.
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    name = f"sojourn_own_{digest}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
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
