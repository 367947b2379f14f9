"""Environment variables for Ray, to be set before it is imported and started."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from .ray_config import RayConfig

LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Set to 0, Ray uses 127.0.0.1 as this machine's address on every system, and its servers listen there. Its
argument ``_node_ip_address`` does not do that: Ray replaces 127.0.0.1 by an address that others reach."""


def set_ray_environment(config: RayConfig, environment: MutableMapping[str, str] = os.environ) -> None:
    """Keeps an operator's values, except those that would open ports to other machines."""
    if not config.usage_statistics:
        environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if config.on_loopback:
        environment[LOOPBACK_VARIABLE] = "0"
        # HAProxy would open its metrics and statistics on all interfaces.
        environment["RAY_SERVE_ENABLE_HA_PROXY"] = "0"
