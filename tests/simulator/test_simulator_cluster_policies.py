"""What ``--replicas`` runs is named by a routing and an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from sojourn_server.simulator.simulator_policies import PolicyError, find_cluster_policy, routing_names

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_policy" / "break_even.toml"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("prefix-affinity/stock", "prefix-affinity/stock"),
        ("thunderagent/thunderagent-offload", "thunderagent/thunderagent-offload"),
        # A routing alone takes its own engines; what is both is a routing.
        ("saga", "saga/saga"),
        ("mori-paper", "mori-paper/mori-paper"),
        ("thunderagent", "thunderagent/thunderagent"),
        # An engine alone stands behind prefix affinity, or the router that it brings.
        ("stock", "prefix-affinity/stock"),
        ("lru-offload", "prefix-affinity/lru-offload"),
        ("thunderagent-offload", "thunderagent/thunderagent-offload"),
        (str(EXAMPLE), "prefix-affinity/break_even"),
        (f"saga/{EXAMPLE}", "saga/break_even"),
    ],
)
def test_a_name_is_a_routing_an_engine_or_both(name: str, found: str) -> None:
    assert find_cluster_policy(name).name == found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sagga/stock", "sagga/stock: unknown routing 'sagga'; expected ROUTING/ENGINE or one of"),
        ("prefix-afinity", "did you mean 'prefix-affinity'?"),
        ("sagga/stock", "did you mean 'saga'?"),
        ("random/stok", "unknown policy 'stok'; expected one of"),
        ("random/stok", "did you mean 'stock'?"),
        ("saga/thunderagent", "thunderagent has its own router"),
        ("nothing.toml", "policy file nothing.toml"),
        ("", "unknown policy ''"),
        ("/stock", "unknown routing ''"),
    ],
)
def test_a_name_that_is_none_is_refused_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(PolicyError) as raised:
        find_cluster_policy(name)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", routing_names())
def test_every_routing_has_engines_of_its_own(name: str) -> None:
    assert find_cluster_policy(name).name.startswith(f"{name}/")
