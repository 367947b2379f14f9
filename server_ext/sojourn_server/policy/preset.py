"""A preset names one policy for each question. Presets are data: TOML files, ours beside this module."""

from __future__ import annotations

from dataclasses import dataclass, fields
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
from .building import PresetError, Questions, Shelf, read_text
from .forecast import ForecastPolicy
from .own_policies import OwnClass, classes_beside
from .placement import PlacementPolicy
from .recovery import RecoveryPolicy
from .remaining import RemainingPolicy

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

QUESTIONS: dict[str, type] = {
    "retention": RetentionPolicy,
    "entry": EntryPolicy,
    "order": QueueOrder,
    "room": RoomPolicy,
    "victim": VictimPolicy,
    "eviction": EvictionOrder,
    "foresight": ForesightPolicy,
    "prefetch": PrefetchPolicy,
    "placement": PlacementPolicy,
    "remaining": RemainingPolicy,
    "forecast": ForecastPolicy,
    "recovery": RecoveryPolicy,
}
"""Question → what a policy for it must have."""

UNASKED = {
    "foresight": "none",
    "placement": "stay",
    "prefetch": "none",
    "remaining": "none",
    "forecast": "none",
    "recovery": "offload",
}
"""What a preset answers that does not name a policy for these questions."""

_QUESTIONS = Questions(registry=REGISTRY, protocols=QUESTIONS, unasked=UNASKED)
_SHELF = Shelf("presets", "policy")


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
    return _SHELF.names()


def load_preset(name: str) -> Preset:
    """Load a shipped preset. Raises ``PresetError`` with the nearest name for an unknown one."""
    return parse_preset(preset_text(name), source=f"{name}.toml")


def preset_text(name: str) -> str:
    """The TOML of a shipped preset. Raises ``PresetError`` with the nearest name for an unknown one."""
    return _SHELF.text(name)


def read_preset(path: Path) -> Preset:
    """The preset of the operator's own file, which may name classes of its own as ``module:Class``.

    Raises ``PresetError``.
    """
    return parse_preset(read_text(path), source=str(path), own=classes_beside(path.parent))


def parse_preset(text: str, *, source: str, own: OwnClass | None = None) -> Preset:
    """Build a preset from TOML; ``extends = "NAME"`` starts from a shipped one: an ablation is one line.

    ``own`` finds classes named as ``module:Class``; without it nothing but what ships is imported.
    Raises ``PresetError``.
    """
    document = _SHELF.document(text, source, (field.name for field in fields(Preset)))
    policies = {question: _QUESTIONS.build(question, document, source, own) for question in REGISTRY}
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
