"""What ``--replicas`` runs is named by a routing and an engine; ThunderAgent's router has some backends."""

from __future__ import annotations

from pathlib import Path

import pytest
from sojourn_server.simulator.request_router import RequestRouterView, RoutableRequest, RoutedProgramView
from sojourn_server.simulator.simulator_policies import PolicyError, find_cluster_policy, routing_names
from sojourn_server.simulator.thunderagent_router import (
    CHECK_EVERY_S,
    FORCE_RESUME_AFTER_S,
    ThunderAgentRouter,
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_policy" / "break_even.toml"

# -- names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("prefix-affinity/stock", "prefix-affinity/stock"),
        ("mori/mori+host", "mori/mori+host"),
        ("thunderagent/thunderagent-offload", "thunderagent/thunderagent-offload"),
        ("thunderagent/stock", "thunderagent/stock"),
        ("random/continuum+host", "random/continuum+host"),
        # A routing alone takes its own engines; what is both is a routing.
        ("saga", "saga/saga"),
        ("mori", "mori/mori"),
        ("mori-paper", "mori-paper/mori-paper"),
        ("random", "random/stock"),
        ("thunderagent", "thunderagent/thunderagent"),
        # An engine alone stands behind prefix affinity, or the router that it brings.
        ("stock", "prefix-affinity/stock"),
        ("continuum", "prefix-affinity/continuum"),
        ("lru-offload", "prefix-affinity/lru-offload"),
        ("saga-paper", "prefix-affinity/saga-paper"),
        ("thunderagent-offload", "thunderagent/thunderagent-offload"),
        ("unlimited", "prefix-affinity/unlimited"),
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
    assert find_cluster_policy(name).routing == name


# -- ThunderAgent's router ----------------------------------------------------------------------------


class Street:
    """What is before a router and behind it."""

    def __init__(self, capacity_tokens: int, backends: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.request_router = ThunderAgentRouter(backends)
        self.now = 0.0
        self.programs: dict[str, RoutedProgramView] = {}
        self.waiting: dict[str, RoutableRequest] = {}

    def ask(self, over: str | None = None) -> dict[str, int]:
        """Ask; returns the backend of every program that was let in."""
        programs = list(self.programs.values())
        if over is not None:
            programs.append(self.programs.pop(over)._replace(state="over"))
        view = RequestRouterView(
            waiting=tuple(self.waiting.values()),
            programs=tuple(programs),
            capacity_tokens=self.capacity_tokens,
        )
        gone = {}
        for request_id in self.request_router.select_requests(view, self.now):
            name = self.waiting.pop(request_id).program_id
            self.programs[name] = self.programs[name]._replace(state="reasoning")
            gone[name] = self.request_router.replica_of(name)
        return gone

    def arrive(self, name: str, tokens: int) -> dict[str, int]:
        before = self.programs.get(name)
        turns = before.turns if before is not None else 0
        context = before.context_tokens if before is not None else 0
        self.programs[name] = RoutedProgramView(name, "waiting", context, self.now, turns, 0.0)
        self.waiting[f"{name}/{turns}"] = RoutableRequest(f"{name}/{turns}", name, tokens, self.now, turns)
        return self.ask()

    def finish(self, name: str, tokens: int) -> dict[str, int]:
        """A turn is over, and a tool runs."""
        self.programs[name] = RoutedProgramView(
            name, "acting", tokens, self.now, self.programs[name].turns + 1, 0.0
        )
        return self.ask()

    def check(self) -> dict[str, int]:
        """The next of the router's ticks."""
        self.now += CHECK_EVERY_S
        return self.ask()


def test_a_new_program_goes_where_it_fits_and_the_fewest_tokens_are() -> None:
    street = Street(10_000, 3)
    assert street.arrive("a", 5_000) == {"a": 0}
    assert street.arrive("b", 3_000) == {"b": 1}
    assert street.arrive("c", 4_000) == {"c": 2}
    # The fewest tokens are on 1, and it fits there too.
    assert street.arrive("d", 5_000) == {"d": 1}
    # Now on 2; then 5,000 on 0 are fewer than 7,000 there.
    assert street.arrive("e", 3_000) == {"e": 2}
    assert street.arrive("f", 4_500) == {"f": 0}
    # Nowhere is room for it, and then everybody new waits.
    assert street.arrive("g", 5_000) == {}
    assert street.arrive("h", 10) == {}


def test_who_is_paused_may_go_on_elsewhere_and_who_is_not_stays() -> None:
    street = Street(10_000, 2)
    street.ask()  # its clock begins
    assert street.arrive("a", 6_000) == {"a": 0}
    assert street.arrive("b", 5_000) == {"b": 1}
    assert street.arrive("c", 2_000) == {"c": 1}
    street.finish("a", 9_800)
    street.finish("b", 8_500)
    street.finish("c", 2_500)
    # On 1 two programs need 11,200: the smaller acting one is paused. On 0 all is well.
    assert street.check() == {}
    assert street.arrive("b", 8_600) == {"b": 1}
    assert street.arrive("c", 2_600) == {}
    # a ends: 0 is empty, and c goes there.
    street.ask(over="a")
    assert street.check() == {"c": 0}


def test_who_has_waited_for_half_an_hour_goes_on_where_it_was_or_where_few_are() -> None:
    street = Street(10_000, 2)
    street.ask()
    assert street.arrive("x", 9_000) == {"x": 0}
    assert street.arrive("y", 9_000) == {"y": 1}
    street.finish("y", 9_950)
    assert street.check() == {}  # paused: it and its buffer are more than the pool
    assert street.arrive("y", 9_960) == {}
    assert street.arrive("new", 9_950) == {}
    assert street.arrive("last", 9_960) == {}
    street.ask(over="x")
    street.now += FORCE_RESUME_AFTER_S + CHECK_EVERY_S
    # Nobody's room is enough for any of them. y was on 1, so that fewer are on 0, and then as many.
    assert street.ask() == {"y": 1, "new": 0, "last": 0}
