"""What an engine of a prefill/decode pair reports to a gateway: role, address for peers, and link status.

The transfer manager runs in the worker's process; HTTP is answered beside the scheduler. So the worker is
asked on demand, between two steps, and answers from memory: nothing is collected while no client asks. A
worker in a process of its own is asked through vLLM once, then at its own socket (``transfer_stats``).
Messages that travel with steps would not do: an engine that only reads for others takes no steps.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ..kv_transfer import transfer_stats
from .kv_connector_settings import KVTransferSettings

if TYPE_CHECKING:
    from collections import Counter

    from ..core.engine_service import StockEngineService

logger = logging.getLogger("vllm.sojourn")

STATUS_OPERATIONS = frozenset({"capabilities", "stats", "drain_metrics"})
"""Operations whose answers contain the worker's status."""

NON_NUMERIC_KEYS = ("addresses", "epoch", "teller")
"""Keys of the worker's status that are not statistics."""

WILDCARDS = ("0.0.0.0", "[::]", "::")
"""Hosts that an engine can listen at and that peers cannot dial."""


class KVTransferMember:
    """The connector's status on the planner side: the ``KVTransferStatus`` of the HTTP service."""

    def __init__(self, settings: KVTransferSettings, requests: Counter[str]) -> None:
        """``requests``: the planner's counts of this engine's requests."""
        self._settings = settings
        self._requests = requests
        self._status: dict[str, Any] | None = None
        self._stats_address: str | None = None
        """Address of the worker's stats server; ``None``: not known yet."""
        self._failed = False
        self.is_over = False
        """The engine belongs to no pair any more."""
        self.alone: StockEngineService | None = None
        """The service that answers if the scheduler is vLLM's own, from the first request on."""

    def ask(self, executor: Any) -> None:
        """Refresh the worker's status. If the worker does not answer, the last status stays."""
        if self._stats_address is not None:
            try:
                self._status = transfer_stats.fetch_stats(self._stats_address)
                return
            except transfer_stats.StatsUnavailable:
                self._stats_address = None
        try:
            (status,) = executor.collective_rpc(worker_status, args=(os.getpid(),))
        except Exception as error:
            if not self._failed:
                logger.warning(
                    "sojourn: the worker does not report the status of its KV transfers", exc_info=error
                )
            self._failed = True
        else:
            self._status, self._failed = status, False
            self._stats_address = status.get("teller") if status is not None else None

    def capabilities(self) -> dict[str, Any] | None:
        """The engine's offer to a pair; ``None``: no report of the worker yet, or no role in a pair."""
        settings, status = self._settings, self._status
        if status is None or settings.role is None or self.is_over:
            return None
        return {
            "role": settings.role,
            "peer": status["addresses"][0],
            "node": settings.node,
            "epoch": status["epoch"],
            "block_s": status["block_s"],
            "kv": status["kv"],
            "block_bytes": settings.identity.block_bytes,
            "block_tokens": settings.identity.block_tokens,
        }

    def stats(self) -> dict[str, Any] | None:
        """The worker's numbers; ``None``: it has not reported yet."""
        if self._status is None:
            return None
        numbers = {name: status for name, status in self._status.items() if name not in NON_NUMERIC_KEYS}
        return {**numbers, "requests": dict(sorted(self._requests.items()))}


@runtime_checkable
class StatusSource(Protocol):
    """A connector's worker side that reports its KV transfers."""

    def status(self) -> dict[str, Any] | None: ...
    def stats_address(self) -> str | None: ...


def worker_status(worker: Any, requesting_process: int) -> dict[str, Any] | None:
    """The worker's status. Runs in the worker's process, on the thread of its steps.

    A ``requesting_process`` other than this one also gets the address where it can ask next time.
    """
    from .compat import get_kv_transfer_group, has_kv_transfer_group

    connector = get_kv_transfer_group() if has_kv_transfer_group() else None
    if not isinstance(connector, StatusSource):
        return None
    status = connector.status()
    if status is None or requesting_process == os.getpid():
        return status
    return {**status, "teller": connector.stats_address()}


def reachable_address(address: str) -> str:
    """An address of this engine that peers can dial: a wildcard is replaced by the machine's own host."""
    scheme, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or host not in WILDCARDS:
        return address
    from .compat import get_ip

    found = get_ip()  # VLLM_HOST_IP, where that is set
    if found in WILDCARDS:  # no network
        found = socket.gethostname()
    return f"tcp:[{found}]:{port}" if ":" in found else f"tcp:{found}:{port}"
