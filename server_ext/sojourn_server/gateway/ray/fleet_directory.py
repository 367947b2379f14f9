"""The list of engines and gateways that run: one Serve replica that remembers the last seconds'
announcements.

The list is no state that matters. A restarted directory is complete after ``ANNOUNCE_S``, and its readers
keep the engines and gateways that still answer them, listed or not."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

from ray import serve

DIRECTORY = "Directory"
"""Name of the directory's deployment."""
ANNOUNCE_S = 2.0
"""Seconds between two announcements of an engine or gateway."""
SILENT_S = 10.0
"""Seconds without an announcement after which an engine or gateway is no longer listed."""
CALL_TIMEOUT_S = 10.0
"""Seconds that a caller waits for the directory."""


class Announcement(NamedTuple):
    """An engine or a gateway that runs."""

    url: str
    kind: str
    """Name of its deployment."""
    is_draining: bool = False
    """Whether the engine is about to stop, and takes no new programs."""


class FleetDirectory:
    """The directory's deployment."""

    def __init__(self, *, on_loopback: bool) -> None:
        if on_loopback:
            restrict_to_loopback()
        self._heard: dict[str, tuple[float, Announcement]] = {}
        """(time of the last announcement, announcement), by URL."""

    def announce(self, one: Announcement) -> list[Announcement]:
        """Add an announcement to the list, and return the list."""
        now_s = time.monotonic()
        self._heard[one.url] = (now_s, one)
        self._heard = {url: heard for url, heard in self._heard.items() if now_s - heard[0] < SILENT_S}
        return [listed for _, listed in self._heard.values()]


async def announce(one: Announcement) -> list[Announcement]:
    """Announce an engine or gateway from its own Serve replica. Return all that run. Raises what Ray raises,
    and ``TimeoutError``."""
    directory = serve.get_deployment_handle(DIRECTORY, serve.get_replica_context().app_name)
    async with asyncio.timeout(CALL_TIMEOUT_S):
        listed: list[Announcement] = await directory.announce.remote(one)
    return listed


def restrict_to_loopback() -> None:
    """Restrict the server of a Serve replica to the loopback interface. Serve opens this server on all
    interfaces, for calls between deployments, and has no setting to change this.

    Call this in the replica's process before the replica is ready. Raises ``RuntimeError`` if this release of
    Ray works differently.
    """
    from ray.serve._private import replica

    opens: Any = getattr(replica, "add_port_to_grpc_server", None)
    if opens is None:
        raise RuntimeError(
            "this release of Ray opens its replicas' ports differently from 2.60; expected 2.60, or "
            "loopback_only: false"
        )
    if getattr(opens, "keeps_to_loopback", False):
        return

    def on_loopback(server: Any, address: str) -> Any:
        return opens(server, address.replace("[::]:", "127.0.0.1:").replace("0.0.0.0:", "127.0.0.1:"))

    on_loopback.keeps_to_loopback = True  # type: ignore[attr-defined]
    replica.add_port_to_grpc_server = on_loopback  # type: ignore[attr-defined,unused-ignore]
