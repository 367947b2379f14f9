"""A preset names one policy for each question. Presets are data: TOML files, ours beside this module."""

from __future__ import annotations

import difflib
import sys
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from .base import (
    Ended,
    EntryPolicy,
    EvictionOrder,
    ForesightPolicy,
    PrefetchPolicy,
    QueueOrder,
    RetentionPolicy,
    RoomPolicy,
    VictimPolicy,
)
from .forecast import ForecastPolicy
from .own_policies import OwnClass, check_answers, classes_beside
from .placement import PlacementPolicy
from .recovery import RecoveryPolicy
from .remaining import RemainingPolicy

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REGISTRY: dict[str, dict[str, str]] = {
    "retention": {
        "none": "retention:NoRetention",
        "fixed": "retention:FixedRetention",
        "continuum": "retention:ContinuumRetention",
        "until-the-end": "retention:UntilTheEnd",
        "least-waste": "retention_waste:LeastWaste",
        "tool-type": "retention_tool_type:ToolTypeTtl",
    },
    "entry": {
        "everyone": "entry:EveryoneEnters",
        "forecast-fits": "entry_forecast:ForecastFits",
        "room-to-grow": "entry:RoomToGrow",
        "whole-program": "entry:WholeProgram",
    },
    "order": {
        "request-fcfs": "order:RequestFcfs",
        "program-fcfs": "order:ProgramFcfs",
        "programs-in-line": "order:ProgramsInLine",
        "least-attained": "order_attained:LeastAttainedService",
    },
    "room": {
        "latest-program-first": "room:LatestProgramFirst",
        "later-programs-first": "room:LaterProgramsFirst",
        "any-lease": "room:AnyLease",
        "least-wanted-first": "room:LeastWantedFirst",
    },
    "victim": {
        "best-fit": "victim_best_fit:BestFit",
        "engine": "victim:EnginesChoice",
        "latest-program": "victim:LatestProgram",
        "most-attained": "victim:MostAttained",
    },
    "eviction": {
        "lru": "eviction:BlockLru",
        "latest-program": "eviction:LatestProgramsBlocks",
        "workflow-aware-lru": "eviction:WorkflowAwareLru",
        "typed-labels": "eviction:TypedLabels",
    },
    "foresight": {"none": "foresight:NoForesight", "three-tiers": "foresight:ThreeTiers"},
    "placement": {"stay": "placement:Stay", "relative-idleness": "placement_idleness:RelativeIdleness"},
    "prefetch": {"none": "prefetch:NoPrefetch", "likeliest-successor": "prefetch:LikeliestSuccessor"},
    "remaining": {
        "none": "remaining:NoPrediction",
        "mean": "remaining:MeanLength",
        "survival": "remaining:Survival",
        "hidden-states": "remaining_learned:HiddenStates",
    },
    "forecast": {"none": "forecast:NoForecast", "expected-need": "forecast:ExpectedNeed"},
    "recovery": {
        "recompute": "recovery:AlwaysRecompute",
        "offload": "recovery:AlwaysOffload",
        "cheaper": "recovery:Cheaper",
    },
}
"""Question → policy name → ``module:class`` in this package; imported only when chosen."""


UNASKED = {
    "foresight": "none",
    "placement": "stay",
    "prefetch": "none",
    "remaining": "none",
    "forecast": "none",
    "recovery": "offload",
}
"""What a preset answers that does not name a policy for these questions."""


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
    foresight: ForesightPolicy
    prefetch: PrefetchPolicy
    placement: PlacementPolicy
    remaining: RemainingPolicy
    forecast: ForecastPolicy
    recovery: RecoveryPolicy
    ended: Ended = Ended.REUSED_FIRST


def preset_names() -> list[str]:
    """Names of the presets that ship with sojourn. ``stock`` is the untouched engine and not among them."""
    folder = files(__package__) / "presets"
    return sorted(entry.name[: -len(".toml")] for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_preset(name: str) -> Preset:
    """Load a shipped preset. Raises ``PresetError`` with the nearest name for an unknown one."""
    return parse_preset(preset_text(name), source=f"{name}.toml")


def preset_text(name: str) -> str:
    """The TOML of a shipped preset. Raises ``PresetError`` with the nearest name for an unknown one."""
    if name not in preset_names():
        near = difflib.get_close_matches(name, preset_names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise PresetError(f"unknown policy {name!r}; expected one of {', '.join(preset_names())}{hint}")
    return (files(__package__) / "presets" / f"{name}.toml").read_text(encoding="utf-8")


def read_preset(path: Path) -> Preset:
    """The preset of the operator's own file, which may name classes of its own as ``module:Class``.

    Raises ``PresetError``.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PresetError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    return parse_preset(text, source=str(path), own=classes_beside(path.parent))


def parse_preset(text: str, *, source: str, own: OwnClass | None = None) -> Preset:
    """Build a preset from TOML; ``extends = "NAME"`` starts from a shipped one: an ablation is one line.

    ``own`` finds classes named as ``module:Class``; without it nothing but what ships is imported.
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
    policies = {question: _build(question, document, source, own) for question in REGISTRY}
    return Preset(
        name=str(document.get("name", source)),
        paper=str(document.get("paper", "")),
        ended=_ended(document, source),
        **policies,
    )


def _ended(document: dict[str, Any], source: str) -> Ended:
    chosen = document.get("ended", Ended.REUSED_FIRST.value)
    if chosen not in [ended.value for ended in Ended]:
        raise PresetError(
            f"{source}: ended is {chosen!r}; expected {', '.join(repr(ended.value) for ended in Ended)}"
        )
    return Ended(chosen)


def _with_base(document: dict[str, Any], source: str) -> dict[str, Any]:
    document = dict(document)
    base = document.pop("extends", None)
    if base is None:
        return document
    if base not in preset_names():
        raise PresetError(f"{source}: extends unknown preset {base!r}; expected {', '.join(preset_names())}")
    text = (files(__package__) / "presets" / f"{base}.toml").read_text(encoding="utf-8")
    return {**_with_base(tomllib.loads(text), f"{base}.toml"), **document}


def _build(question: str, document: dict[str, Any], source: str, own: OwnClass | None) -> Any:
    chosen = document.get(question, UNASKED.get(question))
    if isinstance(chosen, str):
        chosen = {"policy": chosen}
    if not isinstance(chosen, dict) or not isinstance(chosen.get("policy"), str):
        raise PresetError(
            f'{source}: {question} is {chosen!r}; expected a policy name or a table with a "policy"'
        )
    options = {key: value for key, value in chosen.items() if key != "policy"}
    name = chosen["policy"]
    try:
        policy = _class(question, name, source, own)(**options)
        if ":" in name:
            check_answers(policy, question, name)
        return policy
    except (TypeError, ValueError) as error:
        if isinstance(error, PresetError):
            raise
        raise PresetError(f"{source}: {question}: {error}") from error


def _class(question: str, name: str, source: str, own: OwnClass | None) -> Any:
    if ":" in name:
        if own is None:
            raise PresetError(
                f"{source}: {question} policy {name!r} is a class of somebody's own; expected that only in a "
                "file named by --policy-file, or in the lab by --policy"
            )
        return own(name)
    known = REGISTRY[question]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise PresetError(
            f"{source}: unknown {question} policy {name!r}; expected {', '.join(sorted(known))}, or in a "
            f"file of your own module:Class{hint}"
        )
    module, _, class_name = known[name].partition(":")
    return getattr(import_module(f".{module}", __package__), class_name)
