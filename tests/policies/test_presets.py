"""Presets load, an ablation is one line, and errors name what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from sojourn_server.policies.admission_policies import AdmissionPolicy
from sojourn_server.policies.eviction_policies import WorkflowAwareLruEviction
from sojourn_server.policies.lease_reclaim_policies import EvictionOrderReclaim, LatestProgramReclaim
from sojourn_server.policies.preemption_policies import VictimPolicy
from sojourn_server.policies.preset import (
    POLICY_CLASSES,
    PresetError,
    load_preset,
    parse_preset,
    preset_names,
)
from sojourn_server.policies.queue_order_policies import QueueOrderPolicy
from sojourn_server.policies.retention_policies import (
    ContinuumRetention,
    FixedRetention,
    RetentionPolicy,
    ToolTypeRetention,
)
from sojourn_server.policies.workflow_prediction import ThreeTierPrediction

BASE = 'extends = "continuum"\n'


def test_the_shipped_presets() -> None:
    assert preset_names() == [
        "admit", "autellix", "continuum", "continuum-paper", "fixed-ttl", "infercept", "known-ends", "mori",
        "mori-paper", "observe", "program-fcfs", "saga", "saga-paper", "sojourn", "static-ttl", "tetris",
        "tetris-learned",
    ]  # fmt: skip
    for name in preset_names():
        preset = load_preset(name)
        assert preset.name == name
        assert preset.paper


@pytest.mark.parametrize(
    ("name", "base", "differs"),
    [
        ("fixed-ttl", "continuum", {"retention": FixedRetention(ttl_s=10.0), "admission": AdmissionPolicy()}),
        ("program-fcfs", "continuum-paper", {"retention": RetentionPolicy()}),
        ("static-ttl", "continuum-paper", {"retention": ContinuumRetention(min_samples=10**9)}),
        (
            "continuum-paper",
            "continuum",
            {"admission": AdmissionPolicy(), "lease_reclaim": LatestProgramReclaim(spares_earlier=False)},
        ),
        (
            "saga-paper",
            "saga",
            {
                "workflow_prediction": ThreeTierPrediction(),
                "retention": ToolTypeRetention(evicts=True),
                "eviction": WorkflowAwareLruEviction(),
                "admission": AdmissionPolicy(),
                "order": QueueOrderPolicy(),
                "lease_reclaim": EvictionOrderReclaim(),
                "victim": VictimPolicy(),
            },
        ),
    ],
)
def test_how_an_ablation_differs_from_continuum(name: str, base: str, differs: dict[str, Any]) -> None:
    ablation, whole = load_preset(name), load_preset(base)
    assert differs == {
        question: getattr(ablation, question)
        for question in POLICY_CLASSES
        if getattr(ablation, question) != getattr(whole, question)
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("retention = ", "bad.toml: not TOML"),
        ('extends = "contiuum"', "extends unknown preset 'contiuum'"),
        ("extends = 5", "extends unknown preset 5"),
        (BASE + 'retenton = "none"', "unknown key 'retenton'; expected"),
        (BASE + 'retention = "keep"', "unknown retention policy 'keep'; expected continuum"),
        (BASE + 'retention = 5', "retention: 5; expected a policy name"),
        (BASE + 'retention = { ttl_s = 5 }', "expected a policy name"),
        (BASE + 'retention = { policy = "fixed", ttl = 5 }', "unknown setting 'ttl' of fixed; .* ttl_s"),
        (BASE + 'retention = { policy = "fixed", ttl_s = -1.0 }', r"Expected `float` >= 0.* - at .*ttl_s"),
        (BASE + 'retention = { policy = "fixed", ttl_s = inf }', r"retention: .*ttl_s"),
        (BASE + 'retention = { policy = "fixed", ttl_s = nan }', r"retention: .*ttl_s"),
        (BASE + 'retention = { policy = "fixed", ttl_s = "5" }', "retention: Expected `float`, got `str`"),
        (BASE + 'retention = { policy = "continuum", min_samples = -1 }', "retention: .*min_samples"),
        (BASE + 'retention = { policy = "continuum", _rule = 1 }', "retention: unknown setting '_rule'"),
        (BASE + 'placement = { policy = "relative-idleness", tick_s = 0.0 }', "placement: .*tick_s"),
        (BASE + 'ended = "gone"', "ended: Invalid enum value 'gone'"),
        (BASE + 'ended = ["left"]', "bad.toml: ended: "),
        ('name = "empty"', "bad.toml: retention: None; expected"),
        ("", "bad.toml: retention: None; expected"),
    ],
)  # fmt: skip
def test_a_wrong_preset_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(PresetError, match=message):
        parse_preset(text, source="bad.toml")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(PresetError, match="did you mean 'continuum'"):
        load_preset("continum")
    with pytest.raises(PresetError, match=r"unknown policy '\.\./secret'; expected one of"):
        load_preset("../secret")
