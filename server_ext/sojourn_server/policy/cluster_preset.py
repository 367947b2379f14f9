"""A cluster preset names one policy for each question of a gateway, and the preset of its engines."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

from .building import PresetError, Questions, Shelf, number, read_text
from .fair_share import SharePolicy
from .own_policies import OwnClass, classes_beside
from .routing import RoutingPolicy
from .stealing import StealingPolicy
from .yielding import YieldPolicy

REGISTRY: dict[str, dict[str, str]] = {
    "routing": {
        "random": "routing:AnyReplica",
        "round-robin": "routing:RoundRobin",
        "prefix-affinity": "routing_prefix:PrefixAffinity",
        "session-affinity": "routing:SessionAffinity",
        "room-for-all": "routing_room:RoomForAll",
        "least-delay": "routing_delay:LeastDelay",
    },
    "stealing": {"none": "stealing:NoStealing", "work-stealing": "stealing:WorkStealing"},
    "sharing": {"in-order": "fair_share:InOrder", "agent-fair-share": "fair_share:AgentFairShare"},
    "yielding": {"none": "yielding:NoYielding", "to-urgent": "yielding:YieldToUrgent"},
}
"""Question → policy name → ``module:class`` in this package; imported only when chosen."""

UNASKED = {"stealing": "none", "sharing": "in-order", "yielding": "none"}
"""What a preset answers that names no policy for these questions."""

QUESTIONS: dict[str, type] = {
    "routing": RoutingPolicy,
    "stealing": StealingPolicy,
    "sharing": SharePolicy,
    "yielding": YieldPolicy,
}
"""Question → what a policy for it must have."""

_QUESTIONS = Questions(registry=REGISTRY, protocols=QUESTIONS, unasked=UNASKED)
_SHELF = Shelf("cluster_presets", "cluster policy")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPreset:
    """One policy for each question, and two numbers that they share."""

    name: str
    paper: str
    """The paper and sections it follows, or why it exists."""
    engine: str
    """The preset that replicas are to run with, ``stock`` for plain vLLM: what it was made for."""
    routing: RoutingPolicy
    stealing: StealingPolicy
    sharing: SharePolicy
    yielding: YieldPolicy
    send_below_load: float = math.inf
    """A request waits at the gateway while its replica's load is at least this; ``inf``: engines queue."""
    size_quantile: float = 0.5
    """How sure it is to be that a program does not outgrow the size that it counts for, between 0 and 1."""


def cluster_preset_names() -> list[str]:
    """Names of the cluster presets that ship with sojourn."""
    return _SHELF.names()


def load_cluster_preset(name: str) -> ClusterPreset:
    """Load a shipped one. Raises ``PresetError`` with the nearest name for an unknown one."""
    return parse_cluster_preset(_SHELF.text(name), source=f"{name}.toml")


def read_cluster_preset(path: Path) -> ClusterPreset:
    """The cluster preset of the operator's own file, which may name classes of its own as ``module:Class``.

    Raises ``PresetError``.
    """
    return parse_cluster_preset(read_text(path), source=str(path), own=classes_beside(path.parent))


def parse_cluster_preset(text: str, *, source: str, own: OwnClass | None = None) -> ClusterPreset:
    """Build a cluster preset from TOML; ``extends = "NAME"`` starts from a shipped one.

    Raises ``PresetError``.
    """
    document = _SHELF.document(text, source, (field.name for field in fields(ClusterPreset)))
    send_below_load = number(document, "send_below_load", math.inf, source)
    if not send_below_load > 0:
        raise PresetError(f"{source}: send_below_load is {send_below_load}; expected > 0")
    size_quantile = number(document, "size_quantile", 0.5, source)
    if not 0 < size_quantile < 1:
        raise PresetError(f"{source}: size_quantile is {size_quantile}; expected between 0 and 1")
    return ClusterPreset(
        name=str(document.get("name", source)),
        paper=str(document.get("paper", "")),
        engine=str(document.get("engine", "stock")),
        send_below_load=send_below_load,
        size_quantile=size_quantile,
        **{question: _QUESTIONS.build(question, document, source, own) for question in REGISTRY},
    )
