"""Finds out whether the clients of a running coordinator (engines and gateways) have other settings than the
coordinator."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable

from ...metrics.rate_limited_log import RateLimitedLog
from .ray_config import RayConfig

logger = logging.getLogger(__name__)

ACTOR_NAME = "coordinator"
"""Name of the coordinator's actor."""
OWN_CLIENT_TIMEOUT_S = 30.0
"""Seconds without a message after which clients with the coordinator's settings count as gone. Engines
register twice a second, and gateways poll at least every 20 s."""
REPEAT_LOG_S = 3600.0
"""Minimum seconds until the same line is logged again."""


def settings_digest(config: RayConfig) -> str:
    """Return a short digest of the settings that a coordinator reads when it starts. It does not cover the
    contents of a policy file."""
    settings = (
        config.policy,
        config.policy_file,
        config.allow_policy_modules,
        config.max_waiting,
        config.wait_s,
        config.silent_program_s,
        config.checkpoint,
        dataclasses.asdict(config.autoscale),
        dataclasses.asdict(config.pairs) if config.in_pairs else None,
    )
    return _digest(settings)


def checkpoint_digest(config: RayConfig) -> str:
    """Return a short digest of the checkpoint's path. A coordinator finds its predecessor's state only at the
    same path."""
    return _digest(config.checkpoint)


def _digest(plain: object) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:12]


class CoordinatorSettings:
    """The settings of a running coordinator, compared with those of its clients.

    ``serve deploy`` replaces gateways and engines one by one. So for a while, clients with old and with new
    settings send messages. If the coordinator ended then, a client with the old settings could start it
    again. So it ends only when no client has its settings any more.

    The coordinator keeps running if its successor would start without its state. That is so without a
    checkpoint, with pairs, or if a client has another checkpoint path.
    """

    def __init__(self, config: RayConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._own = settings_digest(config)
        self._own_checkpoint = checkpoint_digest(config)
        # With pairs a checkpoint has only the epoch.
        self._may_end = config.checkpoint is not None and not config.in_pairs
        self._namespace = config.namespace
        self._clock = clock
        self._own_client_s = clock()
        """Time of the last message of a client with the coordinator's settings."""
        self._other_checkpoint_s = -math.inf
        """Time of the last message of a client with other settings and another checkpoint."""
        self._log = RateLimitedLog(logger, clock, REPEAT_LOG_S)

    def is_outdated(self, digest: str, checkpoint: str) -> bool:
        """Record a message of a client. Return whether the coordinator has to end, so that its successor gets
        the client's settings.

        ``digest``: digest of the client's settings. If it is empty, the client is of an earlier version, and
        counts as having the coordinator's settings. ``checkpoint``: digest of the path of the client's
        checkpoint.
        """
        now = self._clock()
        if digest in ("", self._own):
            self._own_client_s = now
            return False
        changed = "engines or gateways have other settings (%s) than this coordinator (%s)"
        if checkpoint != self._own_checkpoint:
            self._other_checkpoint_s = now
        if not self._may_end or now - self._other_checkpoint_s < OWN_CLIENT_TIMEOUT_S:
            self._log.log(
                logging.WARNING,
                f"{changed}, which keeps its own until it ends. To end it, run "
                "ray.kill(ray.get_actor(%r, namespace=%r)): the next one starts with the new settings, and "
                "learns from gateways where programs are",
                *(digest, self._own, ACTOR_NAME, self._namespace),
            )
            return False
        if now - self._own_client_s < OWN_CLIENT_TIMEOUT_S:
            self._log.log(
                logging.WARNING,
                f"{changed}; it ends once no client with its settings has sent a message for %.0f s, and the "
                "next one uses the new settings",
                *(digest, self._own, OWN_CLIENT_TIMEOUT_S),
            )
            return False
        logger.warning(
            "this coordinator ends: its settings are %s, those of all clients %s", self._own, digest
        )
        return True
