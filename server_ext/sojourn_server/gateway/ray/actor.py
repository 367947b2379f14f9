"""The coordinator as an actor, by one name in the cluster, and how it is reached."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from ...policy.cluster_preset import ClusterPreset, load_cluster_preset, read_cluster_preset
from ..core.limits import CoreLimits
from . import messages as m
from .calls import CoordinatorAway, CoordinatorCalls
from .config import RayConfig
from .coordinator import Coordinator, CoordinatorOptions
from .deciding_pairs import PairRules

logger = logging.getLogger(__name__)

ACTOR_NAME = "coordinator"


def preset_of(config: RayConfig) -> ClusterPreset:
    """The policies. Raises ``PresetError``."""
    if config.policy_file is not None:
        return read_cluster_preset(Path(config.policy_file))
    return load_cluster_preset(config.policy)


def rules_of(config: RayConfig) -> ClusterPreset | PairRules:
    """What decides. Raises ``PresetError``."""
    return PairRules(config.pairs.read_side) if config.in_pairs else preset_of(config)


class CoordinatorActor:
    """Bytes in, bytes out. One that finds a later one ends itself; whoever needs one then finds that."""

    def __init__(self, config: RayConfig) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        limits = CoreLimits(most_waiting=config.max_waiting, wait_s=config.wait_s)
        options = CoordinatorOptions(
            checkpoint=Path(config.checkpoint) if config.checkpoint is not None else None,
            autoscale=config.autoscale,
        )
        self._coordinator = Coordinator(rules_of(config), limits, options)
        self._running: asyncio.Task[None] | None = None

    async def join(self, data: bytes) -> bytes:
        return self._said(await self._began().join(m.read(data, m.Join)))

    async def tell(self, data: bytes) -> bytes:
        return self._said(await self._began().tell(m.read(data, m.Tell)))

    async def listen(self, data: bytes) -> bytes:
        return self._said(await self._began().listen(m.read(data, m.Listen)))

    async def register(self, data: bytes) -> bytes:
        return self._said(await self._began().register(m.read(data, m.Registration)))

    async def gone(self, data: bytes) -> bytes:
        return self._said(await self._began().gone(m.read(data, m.EngineGone)))

    async def drain(self, data: bytes) -> bytes:
        return self._said(await self._began().drain(m.read(data, m.Drain)))

    async def state(self, data: bytes) -> bytes:
        return self._said(await self._began().state())

    def _began(self) -> Coordinator:
        if self._running is None:
            self._running = self._coordinator.begin()
        return self._coordinator

    def _said(self, answer: Any) -> bytes:
        if self._coordinator.deposed:
            ray.actor.exit_actor()  # type: ignore[no-untyped-call]
        return m.write(answer)


def coordinator_handle(config: RayConfig) -> Any:
    """Of the one that there is, which is made where there is none."""
    options = {
        "name": ACTOR_NAME,
        "namespace": config.namespace,
        "get_if_exists": True,
        "lifetime": "detached",
        "num_cpus": 0,
        "max_restarts": -1,
        # A repeated call would say to a new life what was meant for the old one; callers decide that.
        "max_task_retries": 0,
        "max_concurrency": 10_000,
    }
    return ray.remote(CoordinatorActor).options(**options).remote(config)


class ActorCalls(CoordinatorCalls):
    """A coordinator's methods, as calls of an actor."""

    def __init__(self, config: RayConfig) -> None:
        self._config = config
        self._handle: Any = None

    async def _call(self, method: str, message: Any, kind: type[m.Message]) -> m.Message:
        data = m.write(message)  # what is wrong with it is no reason to take the coordinator for away
        try:
            if self._handle is None:
                # A question to Ray's own store, which may take its time.
                self._handle = await asyncio.to_thread(coordinator_handle, self._config)
            return m.read(await getattr(self._handle, method).remote(data), kind)
        except (RayError, ValueError, msgspec.MsgspecError) as error:
            self._handle = None
            raise CoordinatorAway(f"{type(error).__name__}: {str(error)[:200]}") from None
