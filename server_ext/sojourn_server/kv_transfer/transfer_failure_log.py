"""Logs why the KV transfers of one engine fail."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from ..metrics.rate_limited_log import RateLimitedLog
from .transfer_actions import GIVEN_UP, LoadEnded, PushEnded, TransferEnd

logger = logging.getLogger(__name__)


class TransferFailureLog:
    """Logs failed transfers at a limited rate, and each refused peer once."""

    def __init__(self, engine: str, refusals: Mapping[str, str]) -> None:
        """``engine``: name of the engine, for the messages. ``refusals``: peer → reason of its refusal;
        ``PeerTable`` adds peers to it."""
        self._engine = engine
        self._refusals = refusals
        self._logged_peers: set[str] = set()
        self._rate_limited_log = RateLimitedLog(logger)

    def take_new_refusals(self) -> list[tuple[str, str]]:
        """Return (peer, reason) of the peers that were refused since the last call."""
        if len(self._refusals) == len(self._logged_peers):
            return []
        new = [(peer, why) for peer, why in self._refusals.items() if peer not in self._logged_peers]
        self._logged_peers.update(peer for peer, _ in new)
        return new

    def log_refusals(self, refusals: Iterable[tuple[str, str]]) -> None:
        """Log what ``take_new_refusals`` returned."""
        for peer, why in refusals:
            logger.warning("%s: no KV goes to or from %s: %s", self._engine, peer, why)

    def takes(self, why: str) -> bool:
        """Return whether to log a transfer that ended for the reason ``why``. False if it was successful
        (``why`` is empty), if an engine cancelled it, or if it ended because of a logged refusal."""
        # A peer's abort contains the peer's reason.
        return bool(why) and GIVEN_UP not in why and why not in self._refusals.values()

    def log_failure(self, event: TransferEnd) -> None:
        """Log why a transfer ended before all of its blocks arrived."""
        if isinstance(event, LoadEnded):
            what, name = "a load of KV", event.load
        elif isinstance(event, PushEnded):
            what, name = "the push of a prompt's KV", event.transfer
        else:
            what, name = "the arrival of a prompt's KV", event.transfer
        message = "%s: %s (%s) failed, so missing blocks are computed: %s"
        self._rate_limited_log.log(logging.WARNING, message, self._engine, what, name, event.why)
