"""What a traffic manager tells those who ask how it goes: numbers, as JSON has them.

Nothing is collected beforehand: the sums are made when somebody asks, under the lock that whoever asks for a
load takes as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .kv_handshake import identity_digest

if TYPE_CHECKING:
    from .transfer_manager import TransferManager

UNKNOWN_BLOCK_S = 0.0
"""What a Full Block takes where that is not known: a link that was given no rate has a speed once it has
moved something."""


def transfer_manager_stats(traffic: TransferManager, counts: Mapping[str, int]) -> dict[str, Any]:
    """How an engine's traffic goes; ``counts`` are its worker's, beside the manager's own.

    ``addresses`` and ``epoch`` are what peers need; ``links`` by name, each with ``queued_bytes``,
    ``queued_s`` and ``moved_bytes``; ``received_bytes`` came from peers; ``block_s`` is what the link from
    storage takes for a Full Block. ``queued_s`` is ``None`` where there is a queue and no speed is known: 0
    would say that nothing waits. ``kv`` is equal for engines that take each other's KV.
    """
    told: dict[str, Any] = traffic.do(lambda now: _numbers(traffic, now))
    told["counts"] = dict(sorted({**told["counts"], **counts}.items()))
    return told


def _numbers(traffic: TransferManager, now: float) -> dict[str, Any]:
    transfer_context = traffic.core.transfer_context
    stats = traffic.core.stats(now)
    return {
        **stats,
        "addresses": list(traffic.addresses),
        "epoch": traffic.epoch,
        "kv": identity_digest(transfer_context.identity),
        "received_bytes": transfer_context.counts["bytes_fetched"] + transfer_context.counts["bytes_taken"],
        "block_s": transfer_context.reads.seconds_for(transfer_context.memory.block_bytes) or UNKNOWN_BLOCK_S,
    }
