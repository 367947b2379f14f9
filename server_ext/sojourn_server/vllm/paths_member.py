"""What an engine of a pair tells a gateway of itself: role, where peers reach it, and how its links do.

The traffic manager is in the worker's process and HTTP is answered beside the scheduler. So the worker is
asked when somebody asks us, between two steps, when it has nothing else to do: it answers from memory, and
nothing is collected while nobody looks. A worker in a process of its own is asked in vLLM's way only once;
after that at its own socket (``paths.teller``). Messages that ride on steps would not do: an engine that
reads for others has none of its own.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from ..paths import teller
from .paths_settings import PathsSettings

if TYPE_CHECKING:
    from collections import Counter

    from ..engine.member_alone import MemberAlone

logger = init_logger("vllm.sojourn")

ASKED_FOR = frozenset({"capabilities", "stats", "drain_metrics"})
"""Operations whose answers have something of the worker's."""

NOT_NUMBERS = ("addresses", "epoch", "teller")
"""Of what the worker tells, that is for peers and for us alone."""

WILDCARDS = ("0.0.0.0", "[::]", "::")
"""Hosts at which an engine listens and nobody dials."""


class PathsMember:
    """Of the connector's half beside the scheduler. ``Paths``, as the service for HTTP asks for it."""

    def __init__(self, settings: PathsSettings, requests: Counter[str]) -> None:
        """``requests`` is what became of this engine's requests so far, counted by its planner."""
        self._settings = settings
        self._requests = requests
        self._told: dict[str, Any] | None = None
        self._teller: str | None = None
        """Address at which the worker tells of itself; ``None``: it has not said one."""
        self._failed = False
        self.is_over = False
        """It is in no pair any more."""
        self.alone: MemberAlone | None = None
        """Answers where the scheduler is vLLM's own, once it was asked."""

    def ask(self, executor: Any) -> None:
        """Hear how the worker's traffic goes. Where it cannot be asked, what it said last stays."""
        if self._teller is not None:
            try:
                self._told = teller.ask(self._teller)
                return
            except teller.NotTold:
                self._teller = None
        try:
            (told,) = executor.collective_rpc(told_by_worker, args=(os.getpid(),))
        except Exception as error:
            if not self._failed:
                logger.warning("sojourn: the worker does not tell of its paths", exc_info=error)
            self._failed = True
        else:
            self._told, self._failed = told, False
            self._teller = told.get("teller") if told is not None else None

    def capabilities(self) -> dict[str, Any] | None:
        """``None``: nothing has been heard of the worker, or the engine has no role in a pair, or not now."""
        settings, told = self._settings, self._told
        if told is None or settings.role is None or self.is_over:
            return None
        return {
            "role": settings.role,
            "peer": told["addresses"][0],
            "node": settings.node,
            "epoch": told["epoch"],
            "block_s": told["block_s"],
            "kv": told["kv"],
            "block_bytes": settings.identity.block_bytes,
            "block_tokens": settings.identity.block_tokens,
        }

    def stats(self) -> dict[str, Any] | None:
        """``None``: nothing has been heard of the worker."""
        if self._told is None:
            return None
        numbers = {name: told for name, told in self._told.items() if name not in NOT_NUMBERS}
        return {**numbers, "requests": dict(sorted(self._requests.items()))}


def told_by_worker(worker: Any, asked_by: int) -> dict[str, Any] | None:
    """Runs in the worker's process, on its thread for steps. ``asked_by`` is the process that asks: from
    another one it may go on asking at the ``teller`` that it is told."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    from .paths_connector import PathsConnector

    connector = get_kv_transfer_group() if has_kv_transfer_group() else None
    if not isinstance(connector, PathsConnector):
        return None
    told = connector.told()
    if told is None or asked_by == os.getpid():
        return told
    return {**told, "teller": connector.teller()}


def reachable(address: str) -> str:
    """An address of this engine as others may dial it: for a wildcard the machine's own is put in."""
    scheme, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or host not in WILDCARDS:
        return address
    from vllm.utils.network_utils import get_ip

    found = get_ip()  # VLLM_HOST_IP, where that is set
    if found in WILDCARDS:  # it has no network to tell it by
        found = socket.gethostname()
    return f"tcp:[{found}]:{port}" if ":" in found else f"tcp:{found}:{port}"
