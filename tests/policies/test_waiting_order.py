"""Which of the requests that wait for capacity is served first."""

from __future__ import annotations

import random

from sojourn_server.cli.gateway import _WAITING_ORDERS
from sojourn_server.policies.cluster_preset import (
    POLICY_CLASSES,
    cluster_preset_names,
    load_cluster_preset,
    with_waiting_order,
)
from sojourn_server.policies.routing_policies import (
    IdlenessOrder,
    LargestFirstOrder,
    WaitingOrderPolicy,
    WaitingProgramView,
)

VIEWS = [
    WaitingProgramView(0, False, 0.0, 900, 5000),
    WaitingProgramView(1, True, 0.9, 100, 900),
    WaitingProgramView(2, True, 0.2, 800, 1000),
    WaitingProgramView(3, False, 0.0, 50, 9000),
    WaitingProgramView(4, True, 0.2, 700, 2000),
]


def order(policy: object) -> list[int]:
    mixed = random.Random(1).sample(VIEWS, len(VIEWS))
    return [view.number for view in sorted(mixed, key=policy.key)]  # type: ignore[attr-defined]


def test_returning_programs_go_first_by_idleness_then_size_and_new_ones_by_size() -> None:
    assert order(IdlenessOrder()) == [4, 2, 1, 3, 0]
    assert order(LargestFirstOrder()) == [3, 0, 4, 2, 1]
    assert order(WaitingOrderPolicy()) == [0, 1, 2, 3, 4]


def test_the_flag_names_every_order_and_only_mori_has_its_own() -> None:
    assert tuple(POLICY_CLASSES["waiting_order"]) == _WAITING_ORDERS
    for name in cluster_preset_names():
        preset = load_cluster_preset(name)
        usual = IdlenessOrder if name.startswith("mori") else WaitingOrderPolicy
        assert isinstance(preset.waiting_order, usual)
        assert isinstance(with_waiting_order(preset, "largest-first").waiting_order, LargestFirstOrder)
