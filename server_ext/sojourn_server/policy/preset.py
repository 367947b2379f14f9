"""A preset names one policy for each question. Presets are data: TOML files beside this module."""

from __future__ import annotations

import difflib
import sys
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.resources import files
from typing import Any

from .base import EntryPolicy, EvictionOrder, QueueOrder, RetentionPolicy, RoomPolicy, VictimPolicy

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REGISTRY: dict[str, dict[str, str]] = {
    "retention": {
        "none": "retention:NoRetention",
        "fixed": "retention:FixedRetention",
        "continuum": "retention:ContinuumRetention",
    },
    "entry": {"everyone": "entry:EveryoneEnters", "room-to-grow": "entry:RoomToGrow"},
    "order": {"request-fcfs": "order:RequestFcfs", "program-fcfs": "order:ProgramFcfs"},
    "room": {"latest-program-first": "room:LatestProgramFirst", "any-lease": "room:AnyLease"},
    "victim": {"engine": "victim:EnginesChoice", "latest-program": "victim:LatestProgram"},
    "eviction": {"lru": "eviction:BlockLru", "latest-program": "eviction:LatestProgramsBlocks"},
}
"""Question → policy name → ``module:class`` in this package; imported only when chosen."""


class PresetError(ValueError):
    """A preset cannot be built; the text names what was wrong and what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One policy for each question."""

    name: str
    paper: str
    """The paper and sections it follows, or why it exists."""
    retention: RetentionPolicy
    entry: EntryPolicy
    order: QueueOrder
    room: RoomPolicy
    victim: VictimPolicy
    eviction: EvictionOrder


def preset_names() -> list[str]:
    """Names of the presets that ship with sojourn. ``stock`` is the untouched engine and not among them."""
    folder = files(__package__) / "presets"
    return sorted(entry.name[: -len(".toml")] for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_preset(name: str) -> Preset:
    """Load a shipped preset. Raises ``PresetError`` with the nearest name for an unknown one."""
    entry = files(__package__) / "presets" / f"{name}.toml"
    if name not in preset_names():
        near = difflib.get_close_matches(name, preset_names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise PresetError(f"unknown policy {name!r}; expected one of {', '.join(preset_names())}{hint}")
    return parse_preset(entry.read_text(encoding="utf-8"), source=f"{name}.toml")


def parse_preset(text: str, *, source: str) -> Preset:
    """Build a preset from TOML; ``extends = "NAME"`` starts from a shipped one: an ablation is one line.

    Raises ``PresetError``.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PresetError(f"{source}: not TOML: {error}") from error
    document = _with_base(document, source)
    known = {field.name for field in fields(Preset)}
    for key in document:
        if key not in known:
            raise PresetError(f"{source}: unknown key {key!r}; expected {', '.join(sorted(known))}")
    policies = {question: _build(question, document, source) for question in REGISTRY}
    return Preset(name=str(document.get("name", source)), paper=str(document.get("paper", "")), **policies)


def _with_base(document: dict[str, Any], source: str) -> dict[str, Any]:
    document = dict(document)
    base = document.pop("extends", None)
    if base is None:
        return document
    if base not in preset_names():
        raise PresetError(f"{source}: extends unknown preset {base!r}; expected {', '.join(preset_names())}")
    text = (files(__package__) / "presets" / f"{base}.toml").read_text(encoding="utf-8")
    return {**_with_base(tomllib.loads(text), f"{base}.toml"), **document}


def _build(question: str, document: dict[str, Any], source: str) -> Any:
    chosen = document.get(question)
    if isinstance(chosen, str):
        chosen = {"policy": chosen}
    if not isinstance(chosen, dict) or not isinstance(chosen.get("policy"), str):
        raise PresetError(
            f'{source}: {question} is {chosen!r}; expected a policy name or a table with a "policy"'
        )
    options = {key: value for key, value in chosen.items() if key != "policy"}
    known = REGISTRY[question]
    if chosen["policy"] not in known:
        raise PresetError(
            f"{source}: unknown {question} policy {chosen['policy']!r}; expected {', '.join(sorted(known))}"
        )
    module, _, name = known[chosen["policy"]].partition(":")
    policy = getattr(import_module(f".{module}", __package__), name)
    try:
        return policy(**options)
    except (TypeError, ValueError) as error:
        raise PresetError(f"{source}: {question}: {error}") from error
