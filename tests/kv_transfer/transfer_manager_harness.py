"""Transfer managers with real threads and sockets, over a store in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from kv_blocks import identity, payload
from sojourn_server.kv_offload.shared_store import Buffer, KvIdentity, PutOutcome
from sojourn_server.kv_transfer.staging_buffers import TransferLimits
from sojourn_server.kv_transfer.transfer import Transfer
from sojourn_server.kv_transfer.transfer_manager import TransferManager
from waiting import wait_until

PATIENCE_S = 60.0
"""Seconds after which a test counts as hung, even on a busy machine."""


class MemoryStore:
    """A ``SharedStore`` in a dictionary. It calls ``before`` before each read or write, which may wait and
    raise."""

    def __init__(self, of: KvIdentity | None = None) -> None:
        self.identity = of or identity()
        self.blocks: dict[bytes, bytes] = {}
        self.parents: dict[bytes, bytes] = {}
        self.broken: set[bytes] = set()
        """Blocks that are stored and cannot be read."""
        self.before: Callable[[str, bytes], None] = lambda what, key: None

    def fill(self, *keys: bytes) -> None:
        self.blocks.update({key: payload(key) for key in keys})

    def leading(self, keys: Sequence[bytes]) -> int:
        found = 0
        while found < len(keys) and keys[found] in self.blocks:
            found += 1
        return found

    def get_into(self, key: bytes, buffers: Sequence[bytearray | memoryview]) -> None:
        self.before("get", key)
        if key not in self.blocks or key in self.broken:
            raise FileNotFoundError(key.hex())
        found = self.blocks[key]
        for view in buffers:
            view[:], found = found[: len(view)], found[len(view) :]

    def put(self, key: bytes, buffers: Sequence[Buffer], *, parent: bytes = b"") -> PutOutcome:
        self.before("put", key)
        if key in self.blocks:
            return PutOutcome.ALREADY
        self.blocks[key] = b"".join(buffers)
        self.parents[key] = parent
        return PutOutcome.STORED

    def close(self) -> None:
        pass


def manager(store: MemoryStore, name: str, listen: Sequence[str] = (), **options: Any) -> TransferManager:
    limits = TransferLimits(**{"slots": 64, **options.pop("limits", {})})
    return TransferManager(store, limits, name=name, listen=listen, **options)  # type: ignore[arg-type]


def ended(transfer: Transfer) -> Any:
    """The outcome of a transfer; ``None`` if it has not ended within ``PATIENCE_S``."""
    with transfer.node.changed:
        transfer.node.changed.wait_for(lambda: transfer.outcome is not None, PATIENCE_S)
    return transfer.outcome


def assert_clean(*managers: TransferManager) -> None:
    """Check that no buffer, lease, place in a queue or transfer leaks."""
    for each in managers:
        wait_until(lambda each=each: each.is_clean)  # type: ignore[misc]


def threads_of(name: str) -> list[str]:
    """Names of a manager's running threads."""
    return [thread.name for thread in threading.enumerate() if thread.name == f"sojourn-paths-{name}"]
