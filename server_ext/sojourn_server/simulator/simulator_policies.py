"""Every policy the lab can judge, by name: what runs in the engine, before it and behind it."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from sojourn_server.policies.cluster_preset import cluster_preset_names
from sojourn_server.policies.eviction.eviction_policies import LatestProgramEviction
from sojourn_server.policies.preset import Preset, load_preset, preset_names, read_preset
from sojourn_server.policies.preset_store import PresetError

from .baselines.baseline_catalog import BASELINES
from .request_router import PassThroughRouter, RequestRouter


class UpperBound(str, Enum):
    """Not a policy: what memory could buy. ``belady`` bounds the tokens that any order of eviction computes
    again on the stock run's accesses; under the others none are. Their times are no bounds: they serve in
    order of arrival, and another order may give a shorter mean time to the first token, or to completion."""

    BELADY = "belady"
    """Offline: the fewest tokens that must be computed again on the stock run's accesses."""
    FREE_IO = "free-io"
    """Everything is found again in a host memory without end, over a link that takes no time."""
    UNLIMITED = "unlimited"
    """The untouched engine with a KV pool that is never full."""


class PolicyError(ValueError):
    """There is no such policy; the text names the nearest."""


UNLIMITED_S = 1e9
"""Clients of the lab are as patient with us as with the baselines, which refuse nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorPolicy:
    """How to build one policy's engine."""

    name: str
    preset: str | None = None
    """Sojourn's preset; ``None``: the untouched scheduler class, and nothing of ours in the process."""
    preset_file: str | None = None
    """A TOML file in its place."""
    request_router: type[RequestRouter] = PassThroughRouter
    host_cache: bool = False
    """The engine has host memory below the device, by its own offloading connector or by ours."""
    own_tiers: bool = False
    """Ours."""
    oracle: bool = False
    """It knows how long each output will be."""
    prediction_error: float | None = None
    """It knows how long each output that runs will be, but for so much: mean |ln(actual ÷ predicted)|."""
    limit: UpperBound | None = None
    paper: str = ""
    leaves_out: str = ""

    @property
    def settings(self) -> dict[str, Any] | None:
        """The adapter's settings; ``None``: no adapter."""
        more = {"gate_timeout_s": UNLIMITED_S} if self.own_tiers else {}
        if self.preset_file is not None:
            return {"policy_file": self.preset_file, **more}
        return None if self.preset is None else {"policy": self.preset, **more}

    @property
    def eviction_order(self) -> str | None:
        """The name under which ``lab.limits`` replays the order in which it reuses blocks; ``None``: it has
        none there, or what it loses is not a matter of that order alone: it holds requests back, keeps
        contexts for a time, or finds them again in host memory."""
        if self.limit is not None or self.host_cache or not self.request_router.is_open:
            return None
        preset = self._preset()
        if preset is None:
            return "lru"
        return "latest-program" if isinstance(preset.eviction, LatestProgramEviction) else None

    def _preset(self) -> Preset | None:
        if self.preset_file is not None:
            return read_preset(Path(self.preset_file))
        return None if self.preset is None else load_preset(self.preset)


UPPER_BOUNDS = {
    UpperBound.BELADY: "Bélády 1966; SAGA §7: the offline optimum, on the accesses of the stock run",
    UpperBound.FREE_IO: "DualPath §7 'Oracle': as lru-offload with endless host memory and free copies",
    UpperBound.UNLIMITED: "stock with a KV pool that is never full: nothing is ever computed again",
}


HOST_SUFFIX = "+host"
"""After a preset's name: with our tiers below the device. Presets that place programs in them have them."""
ORACLE_SUFFIX = "+oracle"
"""After a preset's name: it is told how long each output will be, in place of its own predictor's answers."""


ERROR_SUFFIX_PATTERN = re.compile(r"\+erring=(\d*\.?\d+)$")
"""After a preset's name: of requests that run it is told so too, but is off by as much on average."""


def policy_names() -> list[str]:
    """All names that ``find_policy`` knows, baselines first."""
    return list(dict.fromkeys([*BASELINES, *preset_names(), *(limit.value for limit in UpperBound)]))


def find_policy(name: str) -> SimulatorPolicy:
    """Raises ``PolicyError`` for an unknown name. A preset's name with ``+host``, ``+oracle`` or
    ``+erring=0.5`` behind it is one too, and so is the path of a preset, a TOML file."""
    prediction_error = ERROR_SUFFIX_PATTERN.search(name)
    if prediction_error is not None and _is_preset(name[: prediction_error.start()]):
        policy = find_policy(name[: prediction_error.start()])
        return replace(
            policy,
            name=policy.name + prediction_error.group(),
            prediction_error=float(prediction_error.group(1)),
        )
    for end, changed in (
        (HOST_SUFFIX, {"host_cache": True, "own_tiers": True}),
        (ORACLE_SUFFIX, {"oracle": True}),
    ):
        if name.endswith(end) and _is_preset(name.removesuffix(end)):
            policy = find_policy(name.removesuffix(end))
            return replace(policy, name=policy.name + end, **changed)
    if name.endswith(".toml"):
        return _policy_from_file(name)
    if name in BASELINES:
        known = BASELINES[name]
        return SimulatorPolicy(
            name=name,
            preset=known.preset,
            request_router=known.request_router or PassThroughRouter,
            host_cache=known.host_cache,
            paper=known.paper,
            leaves_out=known.leaves_out,
        )
    if name in preset_names():
        below = load_preset(name).placement.places
        return SimulatorPolicy(name=name, preset=name, host_cache=below, own_tiers=below)
    for limit in UpperBound:
        if name == limit.value:
            return SimulatorPolicy(
                name=name, limit=limit, host_cache=limit is UpperBound.FREE_IO, paper=UPPER_BOUNDS[limit]
            )
    if "/" in name:
        raise PolicyError(
            f"{name}: ROUTING/ENGINE is for several replicas; expected --replicas with it, or an engine's "
            f"policy alone, such as {name.rpartition('/')[2] or 'stock'}"
        )
    if name in cluster_preset_names():
        raise PolicyError(
            f"{name} is a cluster's policy: it routes requests to several engines; expected --replicas with "
            "it, or an engine's policy, such as stock"
        )
    near = difflib.get_close_matches(name, policy_names(), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise PolicyError(f"unknown policy {name!r}; expected one of {', '.join(policy_names())}{hint}")


def _is_preset(name: str) -> bool:
    """Whether it is one of ours or somebody's own, whatever stands behind its name."""
    plain = name.replace(HOST_SUFFIX, "").replace(ORACLE_SUFFIX, "")
    return plain in preset_names() or plain.endswith(".toml")


def _policy_from_file(name: str) -> SimulatorPolicy:
    path = Path(name)
    try:
        preset = read_preset(path)
    except PresetError as error:
        raise PolicyError(f"policy file {error}") from error
    if path.stem in policy_names():
        raise PolicyError(f"policy file {name}: {path.stem!r} is the name of a policy; give the file another")
    below = preset.placement.places
    return SimulatorPolicy(
        name=path.stem,
        preset_file=str(path.resolve()),
        host_cache=below,
        own_tiers=below,
        paper=preset.paper,
    )
