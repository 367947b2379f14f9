"""Policies of the simulator by name: baselines, presets, bounds, and cluster policies.

Baselines with a preset receive the same client events as sojourn's policies. They free a program's blocks at
the program's end, because the systems in their papers also know when a program ends. Baselines without a
preset keep blocks cached until the memory is reused, as ``stock`` does. The preset ``known-ends`` is
``stock`` plus program ends. Compare a policy with it to see what the policy gains beyond knowing ends.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from sojourn_server.policies.cluster_preset import (
    ClusterPreset,
    cluster_preset_names,
    load_cluster_preset,
    read_cluster_preset,
)
from sojourn_server.policies.preset import Preset, load_preset, preset_names, read_preset
from sojourn_server.policies.preset_store import PresetError
from sojourn_server.policies.toml_document import did_you_mean, load_toml

from .simulated_gateway import RequestRouter, SimulatedGateway
from .thunderagent_router import ThunderAgentRouter


class PolicyError(ValueError):
    """Unknown policy; the message names the nearest one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorPolicy:
    """How to build the engine of one policy."""

    name: str
    preset: str | None = None
    """Name of a preset of sojourn, or the path of a preset file. ``None``: the engine uses vLLM's own
    scheduler class."""
    request_router: Callable[[], RequestRouter] = RequestRouter
    """Makes the router or gateway in front of the engine or engines."""
    host_cache: bool = False
    """Whether the engine has host memory, through vLLM's connector or sojourn's."""
    own_tiers: bool = False
    """Whether the engine uses sojourn's connector for host memory and disk, instead of vLLM's.
    ``RunSpec.disk_ratio`` has an effect only then."""
    needs_host_memory: bool = False
    """Whether the policy's engine needs host memory to start."""
    bound: Literal["", "host", "device"] = ""
    """The memory that never fills up, if this is a bound; empty for a policy."""
    paper: str = ""
    """Paper or source, with sections."""
    leaves_out: str = ""
    """What the paper's system has and this policy lacks."""

    @property
    def settings(self) -> dict[str, Any] | None:
        """Settings of sojourn's adapter in the engine; ``None`` for vLLM's own scheduler class."""
        key = "policy_file" if (self.preset or "").endswith(".toml") else "policy"
        return None if self.preset is None else {key: self.preset}

    @property
    def uses_cpu_ratio(self) -> bool:
        """Whether the policy has host memory of a limited size. ``RunSpec.cpu_ratio`` has an effect only
        then."""
        return self.host_cache and not self.bound


@cache
def baselines() -> dict[str, SimulatorPolicy]:
    """Baselines and bounds, read from ``baselines.toml``, by name."""
    document = load_toml((Path(__file__).parent / "baselines.toml").read_text(encoding="utf-8"))
    found = {}
    for name, fields in document.items():
        router = ThunderAgentRouter if fields.pop("thunderagent", False) else RequestRouter
        found[name] = SimulatorPolicy(name=name, request_router=router, **fields)
    return found


HOST_SUFFIX = "+host"
"""Suffix that adds sojourn's host and disk tiers to a preset. Presets with a placement policy have these
tiers without the suffix."""


def policy_names() -> list[str]:
    """Return the names of baselines, presets and bounds, in this order. ``find_policy`` also accepts
    ``+host`` and files."""
    named = [name for name, policy in baselines().items() if not policy.bound]
    return list(dict.fromkeys([*named, *preset_names(), *baselines()]))


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
        path = Path(name)
        try:
            preset = read_preset(path)
        except PresetError as error:
            raise PolicyError(f"policy file {error}") from error
        if path.stem in policy_names():
            raise PolicyError(
                f"policy file {name}: {path.stem!r} is the name of a shipped policy; rename the file"
            )
        return _of_preset(path.stem, str(path.resolve()), preset)
    if name in baselines():
        return baselines()[name]
    if name in preset_names():
        return _of_preset(name, name, load_preset(name))
    routing, _, engine = name.partition("/")
    if routing in routing_names() or engine in policy_names():
        raise PolicyError(
            f"{name} is a cluster's policy: it routes requests to several engines; expected --replicas with "
            f"it, or an engine's policy, such as {engine if engine in policy_names() else 'stock'}"
        )
    hint = did_you_mean(name, policy_names())
    raise PolicyError(f"unknown policy {name!r}; expected one of {', '.join(policy_names())}{hint}")


def _of_preset(name: str, source: str, preset: Preset) -> SimulatorPolicy:
    below, needed = preset.placement.is_used, preset.placement.needs_tiers
    return SimulatorPolicy(
        name=name,
        preset=source,
        host_cache=below,
        own_tiers=below,
        needs_host_memory=needed,
        paper=preset.paper,
    )


DEFAULT_ROUTING = "prefix-affinity"
"""Routing of a cluster policy that names only an engine policy. It routes by cached prefix, like the routers
of vLLM and SGLang."""

THUNDERAGENT = "thunderagent"
"""Name of the router that replaces the gateway."""


def routing_names() -> list[str]:
    """Valid routings: the names of cluster presets, then that of ThunderAgent's router."""
    return [*cluster_preset_names(), THUNDERAGENT]


def find_cluster_policy(name: str) -> SimulatorPolicy:
    """Return the policy ``name`` of a cluster, which is ``ROUTING/ENGINE`` or one of the two parts alone, or
    the path of a cluster preset file (TOML). Its name is always ``ROUTING/ENGINE``.

    A routing alone gets the engine policy that its preset names. An engine policy alone (a name or a TOML
    file) gets its own router, or ``DEFAULT_ROUTING`` if it has none. A name that is both counts as a routing.
    Raises ``PolicyError`` for an unknown name; the message suggests the nearest known name.
    """
    routing, slash, engine = name.partition("/")
    preset = _cluster_preset_from_file(name) if name.endswith(".toml") else None
    if preset is not None:
        routing, engine = preset.name, preset.engine
    elif routing not in routing_names():
        if slash and not name.endswith(".toml"):
            expected = _expected_text(routing, routing_names())
            raise PolicyError(f"{name}: unknown routing {routing!r}; {expected}")
        routing, engine = "", name
    elif not slash:
        engine = THUNDERAGENT if routing == THUNDERAGENT else load_cluster_preset(routing).engine
    try:
        policy = find_policy(engine)
    except PolicyError:
        if routing or name.endswith(".toml"):
            raise
        known = [*routing_names(), *policy_names()]
        raise PolicyError(f"unknown policy {name!r}; {_expected_text(name, known)}") from None
    routes = policy.request_router is ThunderAgentRouter
    routing = routing or (THUNDERAGENT if routes else DEFAULT_ROUTING)
    if routes and routing != THUNDERAGENT:
        raise PolicyError(
            f"{policy.name} has its own router; expected no other routing with it, or an engine policy "
            f"without a router behind {routing}, such as stock or lru-offload"
        )
    front: Callable[[], RequestRouter] = ThunderAgentRouter
    if routing != THUNDERAGENT:
        front = partial(SimulatedGateway, preset or load_cluster_preset(routing))
    return replace(policy, name=f"{routing}/{policy.name}", request_router=front)


def _cluster_preset_from_file(name: str) -> ClusterPreset | None:
    """The cluster preset in a file; ``None`` if the file is that of an engine's preset, or of neither."""
    with suppress(PresetError):
        read_preset(Path(name))
        return None
    with suppress(PresetError):
        return read_cluster_preset(Path(name))
    return None


def _expected_text(name: str, known: list[str]) -> str:
    return f"expected ROUTING/ENGINE or one of {', '.join(dict.fromkeys(known))}{did_you_mean(name, known)}"
