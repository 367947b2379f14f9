"""Table of the unfinished loads of blocks from host memory to the device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from .host_block_pool import HostBlockPool, HostEntry
from .offload_jobs import BlockCopy, BlockKey


class DeviceLoad(NamedTuple):
    """Blocks that are being loaded for a request."""

    entries: list[HostEntry]
    """The blocks' entries in host memory, pinned until the worker has copied them."""
    block_ids: Sequence[int]


class DeviceLoads:
    """The loads of one engine. The blocks' entries in host memory stay pinned until their load ends."""

    def __init__(self, host: HostBlockPool) -> None:
        self._host = host
        self.by_request: dict[str, DeviceLoad] = {}
        self.keys: set[BlockKey] = set()
        """Keys of the blocks of all loads. Another request that needs one of these blocks waits for the
        running load instead of loading the block again."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.by_request

    def __len__(self) -> int:
        return len(self.by_request)

    def begin(self, request_id: str, entries: list[HostEntry], block_ids: Sequence[int]) -> list[BlockCopy]:
        """Add a load of ``entries``, which must be pinned, into the first ``len(entries)`` of ``block_ids``.
        Returns the copies to make."""
        load = self.by_request[request_id] = DeviceLoad(entries, block_ids[: len(entries)])
        self.keys.update(entry.key for entry in entries)
        return [
            BlockCopy(block_id, entry.slot) for entry, block_id in zip(entries, load.block_ids, strict=True)
        ]

    def end(self, request_id: str) -> DeviceLoad | None:
        """Remove a request's load, unpin its entries and return the load; ``None`` if there is none."""
        load = self.by_request.pop(request_id, None)
        if load is not None:
            self.keys.difference_update(entry.key for entry in load.entries)
            self._host.release(load.entries)
        return load

    def blocks(self, without: Collection[str] = ()) -> set[int]:
        """Return the ids of the device blocks of all unfinished loads, except of requests in ``without``."""
        return {
            block_id
            for request_id, load in self.by_request.items()
            if request_id not in without
            for block_id in load.block_ids
        }

    def block_count(self) -> int:
        """Return the number of device blocks of all unfinished loads. Cheap: it is called in every step."""
        return sum(len(load.block_ids) for load in self.by_request.values())
