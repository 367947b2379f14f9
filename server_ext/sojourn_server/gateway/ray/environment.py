"""What Ray reads of the environment when it is imported and started: to be set before either."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from .config import RayConfig

ONLY_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Set to 0, Ray takes 127.0.0.1 for this machine's address on every system, and its servers listen there. Its
argument ``_node_ip_address`` does not do that: 127.0.0.1 is replaced by an address that others reach."""


def set_environment(config: RayConfig, environment: MutableMapping[str, str] = os.environ) -> None:
    """What an operator has set stays, but for what would listen where others reach it."""
    if not config.usage_statistics:
        environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if config.on_loopback:
        environment[ONLY_LOOPBACK] = "0"
        # HAProxy opens its metrics and its statistics to all interfaces.
        environment["RAY_SERVE_ENABLE_HA_PROXY"] = "0"
