"""Shipped cluster presets load, an ablation differs in one line, errors name what is wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import pytest
from sojourn_server.policies.cluster_preset import (
    CLUSTER_PRESETS,
    POLICY_CLASSES,
    ClusterPreset,
    PresetError,
    cluster_preset_names,
    load_cluster_preset,
    parse_cluster_preset,
    read_cluster_preset,
)
from sojourn_server.policies.preset import preset_names
from sojourn_server.policies.routing_policies import (
    CapacityRouting,
    RoundRobinRouting,
    StealingPolicy,
)

ABLATIONS = Path(__file__).parents[2] / "benchmarks" / "cluster_ablations"


@pytest.mark.parametrize("name", cluster_preset_names())
def test_each_loads_under_its_own_name_for_an_engine_that_there_is(name: str) -> None:
    preset = load_cluster_preset(name)
    assert preset.name == name
    assert preset.paper
    assert preset.engine in {"stock", *preset_names()}


def test_every_policy_can_be_chosen_and_every_question_says_what_it_needs() -> None:
    hints = get_type_hints(ClusterPreset)
    for question, known in POLICY_CLASSES.items():
        assert [name for name in vars(hints[question]) if name[0] != "_"], "what a class of one's own needs"
        for name, policy_class in known.items():
            assert type(CLUSTER_PRESETS.policy(question, name)) is policy_class


def test_an_ablation_differs_from_its_whole_in_what_it_names() -> None:
    whole, part = load_cluster_preset("saga"), read_cluster_preset(ABLATIONS / "saga-no-stealing.toml")
    assert whole.stealing.is_used
    assert part == replace(whole, name=part.name, paper=part.paper, stealing=StealingPolicy())
    assert load_cluster_preset("mori-paper").routing == CapacityRouting(size_by="context")


def test_a_preset_that_says_little_gets_what_is_harmless() -> None:
    preset = parse_cluster_preset('routing = "round-robin"', source="mine.toml")
    assert preset.name == "mine.toml"
    assert preset.engine == "stock"
    assert preset.routing == RoundRobinRouting()
    assert not preset.stealing.is_used
    assert not preset.sharing.divides_capacity
    assert not preset.tenant_preemption.is_used
    assert preset.send_below_load == math.inf


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "routing: None"),
        ('routing = { policy = "session-affinity", most_load = 0 }', "most_load"),
        ('routing = "random"\nsend_below_load = 0', "send_below_load: "),
        ('routing = "random"\nsend_below_load = true', "send_below_load: Expected `float`"),
        ('routing = "random"\nsize_quantile = 1', "size_quantile: "),
    ],
)
def test_bad_presets_say_what_was_wrong(text: str, told: str) -> None:
    with pytest.raises(PresetError, match=r"mine\.toml") as caught:
        parse_cluster_preset(text, source="mine.toml")
    assert told in str(caught.value)
