"""Policies of a cluster, by name: what routes requests to its engines, and what runs in each of them."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sojourn_server.policies.cluster_preset import cluster_preset_names, load_cluster_preset

from ..baselines.thunderagent_router import ThunderAgentRouter
from ..request_router import ClusterRouter, PassThroughRouter
from ..simulator_policies import PolicyError, SimulatorPolicy, UpperBound, find_policy, policy_names

if TYPE_CHECKING:
    from .simulated_gateway import SimulatedGateway

DEFAULT_ROUTING = "prefix-affinity"
"""Before engines whose policy is named alone: what vLLM's and SGLang's routers do."""

ROUTERS: dict[str, Callable[[int], ClusterRouter]] = {"thunderagent": ThunderAgentRouter}
"""Routers that do without our gateway, by name; called with the number of engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPolicy:
    """How to build one policy's engines, and what stands before them."""

    routing: str
    """A cluster preset, or one of ``ROUTERS``."""
    engine: SimulatorPolicy

    @property
    def name(self) -> str:
        """``ROUTING/ENGINE``, as tables show it."""
        return f"{self.routing}/{self.engine.name}"

    def front(self, replicas: int) -> SimulatedGateway | ClusterRouter:
        """What stands before so many engines, made anew."""
        router = ROUTERS.get(self.routing)
        if router is not None:
            return router(replicas)
        from .simulated_gateway import SimulatedGateway  # loads the routing core; names do not need it

        return SimulatedGateway(load_cluster_preset(self.routing))


def routing_names() -> list[str]:
    """What may stand before the slash."""
    return [*cluster_preset_names(), *ROUTERS]


def find_cluster_policy(name: str) -> ClusterPolicy:
    """``ROUTING/ENGINE``, or one of them.

    A routing alone takes the engines that its preset is made for; an engine's policy alone, a TOML file
    too, stands behind ``DEFAULT_ROUTING``, or behind the router that it brings. What names both is a routing.
    Raises ``PolicyError`` with the nearest name.
    """
    routing, slash, engine = name.partition("/")
    if routing in routing_names():
        if not slash:
            engine = routing if routing in ROUTERS else load_cluster_preset(routing).engine
        return _cluster_policy(routing, find_policy(engine))
    if slash and not name.endswith(".toml"):
        raise PolicyError(f"{name}: unknown routing {routing!r}; {_expected_text(routing, routing_names())}")
    try:
        alone = find_policy(name)
    except PolicyError:
        if name.endswith(".toml"):
            raise
        known = [*routing_names(), *(one for one in policy_names() if one != UpperBound.BELADY.value)]
        raise PolicyError(f"unknown policy {name!r}; {_expected_text(name, known)}") from None
    brings = next((known for known, made in ROUTERS.items() if made is alone.request_router), DEFAULT_ROUTING)
    return _cluster_policy(brings, alone)


def _cluster_policy(routing: str, engine: SimulatorPolicy) -> ClusterPolicy:
    if engine.limit is UpperBound.BELADY:
        raise PolicyError("belady is found on the accesses of one engine; expected another with --replicas")
    brings = engine.request_router not in (PassThroughRouter, ROUTERS.get(routing))
    if brings:
        raise PolicyError(
            f"{engine.name} brings a router of its own; expected it behind none or that one, and behind "
            f"{routing} an engine without, such as stock or lru-offload"
        )
    return ClusterPolicy(routing=routing, engine=engine)


def _expected_text(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"expected ROUTING/ENGINE or one of {', '.join(dict.fromkeys(known))}{hint}"
