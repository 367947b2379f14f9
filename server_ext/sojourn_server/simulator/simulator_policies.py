"""Policies of the simulator by name: baselines, presets, bounds, and cluster policies.

Baselines with a preset receive the same client events as sojourn's policies. They free a program's blocks at
the program's end, because the systems in their papers also know when a program ends. Baselines without a
preset keep blocks cached until the memory is reused, as ``stock`` does. The preset ``known-ends`` is
``stock`` plus program ends. Compare a policy with it to see what the policy gains beyond knowing ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from sojourn_server.policies.cluster_preset import (
    ClusterPreset,
    cluster_preset_names,
    load_cluster_preset,
    read_cluster_preset,
)
from sojourn_server.policies.preset import load_preset, preset_names, read_preset
from sojourn_server.policies.preset_store import PresetError
from sojourn_server.policies.toml_document import did_you_mean

from .request_router import UNLIMITED_S, PassThroughRouter, RequestRouter
from .thunderagent_router import ThunderAgentRouter


class Bound(str, Enum):
    """Lower bounds on the number of recomputed tokens, which limit what policies can gain: none is
    recomputed. Their latencies are no bounds: they serve requests in order of arrival, and another order may
    have a shorter mean TTFT or completion time."""

    FREE_IO = "free-io"
    """Unlimited host memory, with transfers that take no time."""
    UNLIMITED = "unlimited"
    """vLLM's own scheduler with an unlimited KV pool."""


class PolicyError(ValueError):
    """Unknown policy; the message names the nearest one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorPolicy:
    """How to build the engine of one policy."""

    name: str
    preset: str | None = None
    """Name of a preset of sojourn, or the path of a preset file. ``None``: the engine uses vLLM's own
    scheduler class."""
    request_router: Callable[[], RequestRouter] = PassThroughRouter
    """Router in front of a single engine."""
    host_cache: bool = False
    """Whether the engine has host memory, through vLLM's connector or sojourn's."""
    own_tiers: bool = False
    """Whether the engine uses sojourn's connector for host memory and disk, instead of vLLM's.
    ``RunSpec.disk_ratio`` has an effect only then."""
    bound: Bound | None = None
    """The bound, if ``name`` is the name of a bound; ``None`` for a policy."""
    paper: str = ""
    """Paper or source, with sections."""
    leaves_out: str = ""
    """What the paper's system has and this policy lacks."""

    @property
    def engine(self) -> SimulatorPolicy:
        """The policy itself, as the counterpart of ``ClusterPolicy.engine``."""
        return self

    def front(self) -> RequestRouter:
        """A new router."""
        return self.request_router()

    @property
    def settings(self) -> dict[str, Any] | None:
        """Settings of sojourn's adapter in the engine; ``None`` for vLLM's own scheduler class."""
        # Simulated clients wait for ever, so placement must not release their requests.
        more = {"hold_timeout_s": UNLIMITED_S} if self.own_tiers else {}
        if self.preset is None:
            return None
        return {"policy_file" if self.preset.endswith(".toml") else "policy": self.preset, **more}

    @property
    def uses_cpu_ratio(self) -> bool:
        """Whether the policy has host memory of a limited size. ``RunSpec.cpu_ratio`` has an effect only
        then."""
        return self.host_cache and self.bound is not Bound.FREE_IO

    @property
    def needs_host_memory(self) -> bool:
        """Whether the policy's engine needs host memory to start."""
        if self.preset is None:
            return False
        is_file = self.preset.endswith(".toml")
        preset = read_preset(Path(self.preset)) if is_file else load_preset(self.preset)
        return preset.placement.needs_tiers


BASELINES = {
    baseline.name: baseline
    for baseline in (
        SimulatorPolicy(
            name="stock",
            paper="vLLM 0.32: requests first come, first served; prefix caching; blocks LRU",
            leaves_out="nothing: it is the engine's own class",
        ),
        SimulatorPolicy(
            name="lru-offload",
            host_cache=True,
            paper="vLLM 0.32 with its OffloadingConnector to host memory (LRU), outputs offloaded as well as "
            "prompts (offload_prompt_only: false)",
            leaves_out="nothing but the copies themselves, which are modelled",
        ),
        SimulatorPolicy(
            name="infercept",
            preset="infercept",
            host_cache=True,
            paper="InferCept (arXiv 2402.01869) §3.2, §4.1–4.4: preserve, swap or discard by least waste, "
            "with T̂ = time since the call",
            leaves_out="the swap budget of a step and swapping in parts: vLLM's connector writes through, so "
            "a context that is no longer preserved is both discarded and swapped",
        ),
        SimulatorPolicy(
            name="thunderagent",
            request_router=ThunderAgentRouter,
            paper="ThunderAgent's public router (a7eef77; arXiv 2602.13692): pauses and resumes, 5 s tick",
            leaves_out="tokens guessed from characters, and what programs share; output counted while "
            "generated",
        ),
        SimulatorPolicy(
            name="thunderagent-offload",
            request_router=ThunderAgentRouter,
            host_cache=True,
            paper="MORI §5, TA+O: ThunderAgent's router before an engine with a host cache of its own, "
            "neither aware of the other",
            leaves_out="as thunderagent; vLLM's connector stands in for HiCache",
        ),
    )
}
"""Baselines that are no presets, or need more than a preset says, by name, in the order of tables."""


BOUNDS = {
    Bound.FREE_IO: "DualPath §7 'Oracle': as lru-offload with endless host memory and free copies",
    Bound.UNLIMITED: "stock with a KV pool that is never full: nothing is ever computed again",
}


HOST_SUFFIX = "+host"
"""Suffix that adds sojourn's host and disk tiers to a preset. Presets with a placement policy have these
tiers without the suffix."""


def policy_names() -> list[str]:
    """Return the names of baselines, presets and bounds, in this order. ``find_policy`` also accepts
    ``+host`` and files."""
    return list(dict.fromkeys([*BASELINES, *preset_names(), *(bound.value for bound in Bound)]))


def find_policy(name: str) -> SimulatorPolicy:
    """Return the policy ``name``. Raises ``PolicyError`` for an unknown name.

    ``name`` is a baseline, a bound, a preset, or the path of a preset file (TOML). Presets may end in
    ``+host``.
    """
    above = name.removesuffix(HOST_SUFFIX)
    if above != name and (above in preset_names() or above.endswith(".toml")):
        policy = find_policy(above)
        return replace(policy, name=policy.name + HOST_SUFFIX, host_cache=True, own_tiers=True)
    if name.endswith(".toml"):
        return _policy_from_file(name)
    if name in BASELINES:
        return BASELINES[name]
    if name in preset_names():
        below = load_preset(name).placement.is_used
        return SimulatorPolicy(name=name, preset=name, host_cache=below, own_tiers=below)
    for bound in Bound:
        if name == bound.value:
            return SimulatorPolicy(
                name=name, bound=bound, host_cache=bound is Bound.FREE_IO, paper=BOUNDS[bound]
            )
    routing, _, engine = name.partition("/")
    if routing in routing_names() or engine in policy_names():
        raise PolicyError(
            f"{name} is a cluster's policy: it routes requests to several engines; expected --replicas with "
            f"it, or an engine's policy, such as {engine if engine in policy_names() else 'stock'}"
        )
    hint = did_you_mean(name, policy_names())
    raise PolicyError(f"unknown policy {name!r}; expected one of {', '.join(policy_names())}{hint}")


def _policy_from_file(name: str) -> SimulatorPolicy:
    path = Path(name)
    try:
        preset = read_preset(path)
    except PresetError as error:
        raise PolicyError(f"policy file {error}") from error
    if path.stem in policy_names():
        raise PolicyError(
            f"policy file {name}: {path.stem!r} is the name of a shipped policy; rename the file"
        )
    below = preset.placement.is_used
    return SimulatorPolicy(
        name=path.stem,
        preset=str(path.resolve()),
        host_cache=below,
        own_tiers=below,
        paper=preset.paper,
    )


DEFAULT_ROUTING = "prefix-affinity"
"""Routing of a cluster policy that names only an engine policy. It routes by cached prefix, like the routers
of vLLM and SGLang."""

ROUTERS: dict[str, Callable[[], RequestRouter]] = {"thunderagent": ThunderAgentRouter}
"""Routers that replace the gateway, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPolicy:
    """How to build the engines of one cluster policy, and the router or gateway in front of them."""

    routing: str
    """Name of a cluster preset, or one of ``ROUTERS``."""
    preset: ClusterPreset | None = None
    """The cluster preset, if it comes from a file."""
    engine: SimulatorPolicy

    @property
    def name(self) -> str:
        """The policy's name in logs and tables: ``ROUTING/ENGINE``, even if it was chosen by one part
        alone."""
        return f"{self.routing}/{self.engine.name}"

    def front(self) -> RequestRouter:
        """A new router or gateway."""
        router = ROUTERS.get(self.routing)
        if router is not None:
            return router()
        from .simulated_gateway import SimulatedGateway  # loads the routing core, which names do not need

        return SimulatedGateway(self.preset or load_cluster_preset(self.routing))


def routing_names() -> list[str]:
    """Valid routings: the names of cluster presets, then those of ``ROUTERS``."""
    return [*cluster_preset_names(), *ROUTERS]


def find_cluster_policy(name: str) -> ClusterPolicy:
    """Return the cluster policy ``name``, which is ``ROUTING/ENGINE`` or one of the two parts alone, or the
    path of a cluster preset file (TOML).

    A routing alone gets the engine policy that its preset names. An engine policy alone (a name or a TOML
    file) gets its own router, or ``DEFAULT_ROUTING`` if it has none. A name that is both counts as a routing.
    Raises ``PolicyError`` for an unknown name; the message suggests the nearest known name.
    """
    routing, slash, engine = name.partition("/")
    if routing in routing_names():
        if not slash:
            engine = routing if routing in ROUTERS else load_cluster_preset(routing).engine
        return _cluster_policy(routing, find_policy(engine))
    if name.endswith(".toml") and (preset := _cluster_preset_from_file(name)) is not None:
        return replace(_cluster_policy(preset.name, find_policy(preset.engine)), preset=preset)
    if slash and not name.endswith(".toml"):
        raise PolicyError(f"{name}: unknown routing {routing!r}; {_expected_text(routing, routing_names())}")
    try:
        alone = find_policy(name)
    except PolicyError:
        if name.endswith(".toml"):
            raise
        known = [*routing_names(), *policy_names()]
        raise PolicyError(f"unknown policy {name!r}; {_expected_text(name, known)}") from None
    own_router = (known for known, router in ROUTERS.items() if router is alone.request_router)
    return _cluster_policy(next(own_router, DEFAULT_ROUTING), alone)


def _cluster_preset_from_file(name: str) -> ClusterPreset | None:
    """The cluster preset in a file; ``None`` if the file is that of an engine's preset."""
    try:
        read_preset(Path(name))
    except PresetError:
        try:
            return read_cluster_preset(Path(name))
        except PresetError:
            pass
    return None


def _cluster_policy(routing: str, engine: SimulatorPolicy) -> ClusterPolicy:
    if engine.request_router not in (PassThroughRouter, ROUTERS.get(routing)):
        raise PolicyError(
            f"{engine.name} has its own router; expected no other routing with it, or an engine policy "
            f"without a router behind {routing}, such as stock or lru-offload"
        )
    return ClusterPolicy(routing=routing, engine=engine)


def _expected_text(name: str, known: list[str]) -> str:
    return f"expected ROUTING/ENGINE or one of {', '.join(dict.fromkeys(known))}{did_you_mean(name, known)}"
