"""Finds and parses preset files of engines and clusters, and builds the policies that they name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, get_type_hints

from sojourn.errors import InputError

from .custom_policies import (
    CustomClassLoader,
    check_defines_methods,
    check_implements_protocol,
    did_you_mean,
)
from .toml_document import TomlError, load_toml

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
