"""What an engine of a prefill/decode pair reports to a gateway: role, address for peers, and link status.

The transfer manager runs in the worker's process, but the engine core's process, which has the scheduler,
answers the API server. When a client asks for the status, the engine core asks the workers, between two
steps. The first time it asks through vLLM. If the workers are other processes, it later asks sockets of
theirs (``transfer_stats``). The status does not come with each step's results, because an engine that only
reads blocks for peers runs no steps.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ..kv_transfer import transfer_stats
from ..kv_transfer.rank_transfers import combined_status
from .kv_connector_settings import KVTransferSettings

if TYPE_CHECKING:
    from collections import Counter

    from ..core.engine_service import StockEngineService

logger = logging.getLogger("vllm.sojourn")

NON_NUMERIC_KEYS = ("addresses", "peer", "epoch", "stats_address")
"""Keys of the worker's status that are not statistics."""

WILDCARDS = ("0.0.0.0", "[::]", "::")
"""Hosts at which an engine can listen but which peers cannot dial."""


class PairStatusReporter:
    """Reports the status of an engine in a pair to the ``EngineService``. Implements ``KVTransferStatus``."""

    def __init__(self, settings: KVTransferSettings, requests: Counter[str]) -> None:
        """``requests``: the planner's counts by name. The planner keeps them up to date."""
        self._settings = settings
        self._requests = requests
        self._status: dict[str, Any] | None = None
        self._stats_addresses: list[str] = []
        """Addresses of the workers' stats servers, by rank; empty until all are known."""
        self._failed = False
        self.has_left_pair = False
        """Whether the engine has left the pair after a reset of its cache. Set by the connector."""
        self.stock_service: StockEngineService | None = None
        """The service that answers calls if the scheduler is vLLM's own; ``None`` before the first call."""

    def refresh_status(self, executor: Any) -> None:
        """Ask the workers of vLLM's ``executor`` for their status and keep it. Without an answer, the last
        status stays."""
        if self._stats_addresses:
            try:
                documents = [transfer_stats.fetch_stats(address) for address in self._stats_addresses]
                self._status = combined_status(documents)
                return
            except transfer_stats.StatsUnavailable:
                self._stats_addresses = []
        try:
            workers = executor.collective_rpc(worker_status, args=(os.getpid(),))
        except Exception as error:
            if not self._failed:
                logger.warning(
                    "sojourn: the worker does not report the status of its KV transfers", exc_info=error
                )
            self._failed = True
        else:
            self._status, self._failed = combined_status(workers), False
            addresses = [worker and worker.get("stats_address") for worker in workers]
            self._stats_addresses = addresses if all(addresses) else []

    def capabilities(self) -> dict[str, Any] | None:
        """Return what a gateway needs to pair this engine: role, address for peers, node and identity of the
        KV. ``None`` if the workers have not reported yet, the engine has no role, or it has left the pair."""
        settings, status = self._settings, self._status
        if status is None or settings.options.role is None or self.has_left_pair:
            return None
        return {
            "role": settings.options.role,
            "peer": status["peer"],
            "node": settings.options.node,
            "epoch": status["epoch"],
            "block_s": status["block_s"],
            "kv": status["kv"],
            "block_bytes": settings.block_bytes,
            "block_tokens": settings.identity.block_tokens,
            "shape": settings.shape,
        }

    def stats(self) -> dict[str, Any] | None:
        """Return the workers' combined statistics and the request counts; ``None`` if the workers have not
        reported yet."""
        if self._status is None:
            return None
        numbers = {name: status for name, status in self._status.items() if name not in NON_NUMERIC_KEYS}
        return {**numbers, "requests": dict(sorted(self._requests.items()))}


@runtime_checkable
class StatusSource(Protocol):
    """The worker side of a connector, which reports the status of its KV transfers."""

    def status(self) -> dict[str, Any] | None: ...
    def stats_address(self) -> str | None: ...


def worker_status(worker: Any, requesting_process: int) -> dict[str, Any] | None:
    """Return the worker's status; ``None`` without transfers. vLLM runs this in the worker's process, between
    two steps.

    ``requesting_process``: process id of the engine core. If the worker runs in another process, the status
    has the address at which the engine core can ask next time (``stats_address``).
    """
    from .compat import get_kv_transfer_group, has_kv_transfer_group

    connector = get_kv_transfer_group() if has_kv_transfer_group() else None
    if not isinstance(connector, StatusSource):
        return None
    status = connector.status()
    if status is None or requesting_process == os.getpid():
        return status
    return {**status, "stats_address": connector.stats_address()}


def reachable_address(address: str) -> str:
    """Return ``address`` (``tcp:HOST:PORT`` or ``unix:PATH``) with a host that peers can dial. This machine's
    address replaces a wildcard."""
    scheme, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or host not in WILDCARDS:
        return address
    from .compat import get_ip

    found = get_ip()  # VLLM_HOST_IP, where that is set
    if found in WILDCARDS:  # no network
        found = socket.gethostname()
    return f"tcp:[{found}]:{port}" if ":" in found else f"tcp:{found}:{port}"
