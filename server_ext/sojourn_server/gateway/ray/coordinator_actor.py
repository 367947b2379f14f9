"""The coordinator as a named Ray actor, and its client."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from ...policies.cluster_preset import ClusterPreset, load_cluster_preset, read_cluster_preset
from ...routing.routing_from_preset import PrefillDecodeRules, RoutingRules
from ...routing.routing_limits import RoutingLimits
from . import coordinator_messages as m
from .coordinator import Coordinator
from .coordinator_checkpoint import CoordinatorOptions
from .coordinator_messages import CoordinatorClient, CoordinatorUnavailable
from .coordinator_settings import ACTOR_NAME, CoordinatorSettings, checkpoint_digest, settings_digest
from .ray_config import RayConfig

logger = logging.getLogger(__name__)


def load_policy_preset(config: RayConfig) -> ClusterPreset:
    """Load the cluster preset that the configuration names. Raises ``PresetError``."""
    if config.policy_file is not None:
        return read_cluster_preset(Path(config.policy_file), allowed_modules=config.allow_policy_modules)
    return load_cluster_preset(config.policy)


def routing_rules(config: RayConfig) -> RoutingRules:
    """Return the rules from which the coordinator's core is built. They are the cluster preset, or the
    settings for pairs. Raises ``PresetError``."""
    if not config.in_pairs:
        return load_policy_preset(config)
    pairs = config.pairs
    return PrefillDecodeRules(
        pairs.read_side, pairs.short_queue_s, pairs.most_prefill_s, pairs.high_tokens_ratio
    )


class CoordinatorActor:
    """Ray actor that runs the coordinator. All messages in and out are encoded.

    If the coordinator is deposed, the actor exits, so that clients find the newer coordinator. It also exits
    once all clients have other settings than the coordinator, with the same checkpoint
    (``CoordinatorSettings``). Clients then start a coordinator with their settings.
    """

    def __init__(self, config: RayConfig) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        limits = RoutingLimits(
            most_waiting=config.max_waiting, wait_s=config.wait_s, silent_program_s=config.silent_program_s
        )
        options = CoordinatorOptions(
            checkpoint=Path(config.checkpoint) if config.checkpoint is not None else None,
            autoscale=config.autoscale,
        )
        self._coordinator = Coordinator(routing_rules(config), limits, options)
        self._settings = CoordinatorSettings(config)
        self._running: asyncio.Task[None] | None = None

    async def call(self, method: str, data: bytes) -> bytes:
        """Call ``method``, a key of ``REQUESTS``, with its encoded message. Return the encoded answer."""
        if self._running is None:  # the first call starts the task, in the actor's event loop
            self._running = self._coordinator.begin()
        kind = m.REQUESTS[method]
        messages = () if kind is None else (m.decode_message(data, kind),)
        for message in messages:
            # Messages that engines and gateways send regularly.
            if isinstance(message, (m.EngineRegistration, m.PollRequest)) and self._settings.is_outdated(
                message.settings, message.checkpoint
            ):
                ray.actor.exit_actor()  # type: ignore[no-untyped-call]
        answer = await getattr(self._coordinator, method)(*messages)
        if self._coordinator.deposed:
            ray.actor.exit_actor()  # type: ignore[no-untyped-call]
        return m.encode_message(answer)


def get_coordinator_handle(config: RayConfig) -> Any:
    """Return the handle of the coordinator's actor. Start the actor if there is none."""
    options = {
        "name": ACTOR_NAME,
        "namespace": config.namespace,
        "get_if_exists": True,
        "lifetime": "detached",
        "num_cpus": 0,
        "max_restarts": -1,
        # A retried call would reach a new coordinator with a message for the old one, so clients decide about
        # retries.
        "max_task_retries": 0,
        "max_concurrency": 10_000,
    }
    return ray.remote(CoordinatorActor).options(**options).remote(config)


class CoordinatorActorClient(CoordinatorClient):
    """Client that calls the coordinator's actor. After an error, the next call looks up the actor again."""

    def __init__(self, config: RayConfig) -> None:
        self._config = config
        self._digests = {"settings": settings_digest(config), "checkpoint": checkpoint_digest(config)}
        self._handle: Any = None

    async def register(self, registration: m.EngineRegistration) -> m.RegistrationResponse:
        return await super().register(msgspec.structs.replace(registration, **self._digests))

    async def poll(self, poll: m.PollRequest) -> m.CoordinatorResponse:
        return await super().poll(msgspec.structs.replace(poll, **self._digests))

    async def _call(self, method: str, message: Any, kind: type[m.Message]) -> m.Message:
        data = m.encode_message(message)  # an invalid message fails here, not in the coordinator
        try:
            if self._handle is None:
                # Asks Ray's own store, which may be slow.
                self._handle = await asyncio.to_thread(get_coordinator_handle, self._config)
            return m.decode_message(await self._handle.call.remote(method, data), kind)
        except (RayError, ValueError, msgspec.MsgspecError) as error:
            self._handle = None
            raise CoordinatorUnavailable(f"{type(error).__name__}: {str(error)[:200]}") from None
