"""Splits an engine's transfer jobs among its workers (ranks), and combines the workers' results.

Each worker of a tensor-parallel or pipeline-parallel engine has a part of every block: some of the heads, or
some of the layers. Each worker has its own transfer manager and its own store, and exchanges its part with
the worker of the same rank in the peer. Both engines therefore need equal parallel sizes.

Requests and the gateway see one address and one epoch per engine. Each is a comma-separated list with one
value per worker, in the order of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .transfer_jobs import TransferJobs


def check_peer_ranks(peer: str, ranks: int) -> None:
    """Raise ``ValueError`` unless ``peer``, an engine's address, lists ``ranks`` workers."""
    theirs = len(peer.split(","))
    if theirs != ranks:
        raise ValueError(
            f"the decode engine has {theirs} worker{'s' * (theirs > 1)} and this engine {ranks}; expected "
            "the same --tensor-parallel-size and --pipeline-parallel-size for both"
        )


def rank_address(address: str, rank: int, ranks: int) -> str:
    """Return the address at which worker ``rank`` of an engine with ``ranks`` workers listens.

    Worker 0 listens at ``address``, the others at the next TCP ports, or at Unix sockets beside the first.
    Port 0 (any free port) stays 0 for all workers. Raises ``ValueError`` if there are too few ports."""
    if not rank or ranks == 1:
        return address
    scheme, _, rest = address.partition(":")
    if scheme != "tcp":
        return f"{address}.rank{rank}"
    host, _, port = rest.rpartition(":")
    if not int(port):
        return address
    if int(port) + rank > 65535:
        raise ValueError(
            f"{address}: the engine's {ranks} workers listen on ports from {port} on; expected at most "
            f"{65536 - ranks}"
        )
    return f"{scheme}:{host}:{int(port) + rank}"


def jobs_of_rank(jobs: TransferJobs, rank: int, ranks: int) -> TransferJobs:
    """Return an engine's jobs for its worker ``rank``, with the address of the peer's worker of this rank.
    The peer must have as many workers; ``TransferPlanner.arrived`` checks this."""
    if ranks == 1:
        return jobs

    def address(text: str) -> str:
        return text.split(",")[rank] if text else ""

    return replace(
        jobs,
        fetches=[job._replace(peer=address(job.peer)) for job in jobs.fetches],
        pushes=[job._replace(address=address(job.address)) for job in jobs.pushes],
        aborts=[job._replace(address=address(job.address)) for job in jobs.aborts],
    )


def combined_status(workers: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Return an engine's status; ``None`` if one of its workers has no status. ``workers``: the statuses of
    its workers (``TransferManager.stats``), in the order of ranks.

    ``peer`` in the result is the address for peers. Byte counts are summed. Other numbers are the maximum
    over the workers: all workers do the same transfers, and the maximum shows a failure of any worker.
    """
    present = [worker for worker in workers if worker is not None]
    if not present or len(present) < len(workers):
        return None
    kv = ",".join(worker["kv"] for worker in present)
    if len(present) > 1:
        kv = hashlib.blake2b(kv.encode(), digest_size=16).hexdigest()
    return {
        **_combined(present),
        "peer": ",".join(worker["addresses"][0] for worker in present),
        "epoch": ",".join(worker["epoch"] for worker in present),
        "kv": kv,
    }


def _combined(workers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for worker in workers for name in worker):
        values = [worker[name] for worker in workers if name in worker]
        if isinstance(values[0], Mapping):
            found[name] = _combined(values)
        elif None in values or not isinstance(values[0], int | float):
            found[name] = None if None in values else values[0]
        else:
            found[name] = sum(values) if "bytes" in name else max(values)
    return found
