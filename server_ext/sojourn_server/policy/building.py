"""From a preset's TOML to policies: what presets of an engine and of a gateway have in common."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from .own_policies import OwnClass, check_answers

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class PresetError(ValueError):
    """A preset cannot be built; the text names what was wrong and what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What a kind of preset answers, and who can."""

    registry: Mapping[str, Mapping[str, str]]
    """Question → policy name → ``module:class`` in this package; imported only when chosen."""
    protocols: Mapping[str, type]
    """Question → what a policy for it must have."""
    unasked: Mapping[str, str] = field(default_factory=dict)
    """What a preset answers that names no policy for a question."""

    def build(self, question: str, document: Mapping[str, Any], source: str, own: OwnClass | None) -> Any:
        """The policy that a document chose for a question. ``own`` finds classes named as
        ``module:Class``. Raises ``PresetError``."""
        chosen = document.get(question, self.unasked.get(question))
        if isinstance(chosen, str):
            chosen = {"policy": chosen}
        if not isinstance(chosen, dict) or not isinstance(chosen.get("policy"), str):
            raise PresetError(
                f'{source}: {question} is {chosen!r}; expected a policy name or a table with a "policy"'
            )
        options = {key: value for key, value in chosen.items() if key != "policy"}
        name = chosen["policy"]
        try:
            policy = self._class(question, name, source, own)(**options)
            if ":" in name:
                check_answers(policy, self.protocols[question], question, name)
            return policy
        except (TypeError, ValueError) as error:
            if isinstance(error, PresetError):
                raise
            raise PresetError(f"{source}: {question}: {error}") from error

    def _class(self, question: str, name: str, source: str, own: OwnClass | None) -> Any:
        if ":" in name:
            if own is None:
                raise PresetError(
                    f"{source}: {question} policy {name!r} is a class of somebody's own; expected that only "
                    "in a file named by --policy-file, or in the lab by --policy"
                )
            return own(name)
        known = self.registry[question]
        if name not in known:
            raise PresetError(
                f"{source}: unknown {question} policy {name!r}; expected {', '.join(sorted(known))}, or in a "
                f"file of your own module:Class{nearest(name, known)}"
            )
        module, _, class_name = known[name].partition(":")
        return getattr(import_module(f".{module}", __package__), class_name)


@dataclass(frozen=True, slots=True)
class Shelf:
    """The presets of one kind that ship with sojourn: a folder of TOML files beside this module."""

    folder: str
    what: str
    """One of them, in messages."""

    def names(self) -> list[str]:
        """Sorted."""
        folder = files(__package__) / self.folder
        return sorted(
            entry.name[: -len(".toml")] for entry in folder.iterdir() if entry.name.endswith(".toml")
        )

    def text(self, name: str) -> str:
        """The TOML of one. Raises ``PresetError`` with the nearest name for an unknown one."""
        names = self.names()
        if name not in names:
            raise PresetError(
                f"unknown {self.what} {name!r}; expected one of {', '.join(names)}{nearest(name, names)}"
            )
        return (files(__package__) / self.folder / f"{name}.toml").read_text(encoding="utf-8")

    def document(self, text: str, source: str, known: Iterable[str]) -> dict[str, Any]:
        """A TOML text as a table of ``known`` keys; ``extends = "NAME"`` starts from a shipped one.

        Raises ``PresetError``.
        """
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise PresetError(f"{source}: not TOML: {error}") from error
        document = self._with_base(document, source)
        known = sorted(known)
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
        return {**self._with_base(tomllib.loads(self.text(base)), f"{base}.toml"), **document}


def read_text(path: Path) -> str:
    """A preset file's. Raises ``PresetError``."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PresetError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'NAME'?`` or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def number(document: Mapping[str, Any], key: str, default: float, source: str) -> float:
    """A number of a document. Raises ``PresetError`` for anything else."""
    value = document.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise PresetError(f"{source}: {key} is {value!r}; expected a number")
    return float(value)
