"""Read queues: seconds of reads that are queued at each node's storage NIC (DualPath §6.1, ``read_q``)."""

from __future__ import annotations

import math


class StorageReadQueues:
    """Estimated read queue of each node, in seconds of reading.

    The scheduler adds each read that it assigns (``add_read``). The NIC does one read after the other, so the
    queue shrinks by one second per second. A node's report of its real queue replaces the estimate."""

    __slots__ = ("_block_s", "busy_until_s")

    def __init__(self) -> None:
        self.busy_until_s: dict[int, float] = {}
        """Time at which each node finishes its assigned reads; in the past: it is idle."""
        self._block_s: dict[int, float] = {}

    def add(self, node: int, block_s: float) -> None:
        """Add a node whose NIC takes ``block_s`` seconds per Full Block, or change a known node's speed.

        Raises ``ValueError`` unless ``block_s`` is finite and above 0.
        """
        if not 0 < block_s < math.inf:
            raise ValueError(f"node {node}: block_s is {block_s}; expected seconds, finite and above 0")
        self._block_s[node] = block_s
        self.busy_until_s.setdefault(node, -math.inf)

    def remove(self, node: int) -> None:
        """Remove a node. Raises ``KeyError`` for an unknown node."""
        del self._block_s[node], self.busy_until_s[node]

    def block_s(self, node: int) -> float:
        """Return the seconds that the node's NIC takes per Full Block. Raises ``KeyError`` for an unknown
        node."""
        return self._block_s[node]

    def queue_s(self, node: int, now: float) -> float:
        """Return the seconds until the node finishes all assigned reads; negative: seconds since its NIC
        became idle."""
        return self.busy_until_s[node] - now

    def add_read(self, node: int, blocks: int, now: float) -> float:
        """Add a read of ``blocks`` Full Blocks to a node's queue. Returns the time at which the read ends, on
        the clock of ``now``."""
        done_s = max(self.busy_until_s[node], now) + blocks * self._block_s[node]
        self.busy_until_s[node] = done_s
        return done_s

    def report(self, node: int, queue_s: float, now: float) -> None:
        """Replace the estimate of a node's queue by the reported ``queue_s``, in seconds of reading.

        0 means that the NIC is idle. Raises ``ValueError`` unless ``queue_s`` is finite and ≥ 0, and
        ``KeyError`` for an unknown node."""
        if not 0 <= queue_s < math.inf:
            raise ValueError(f"node {node}: queue_s is {queue_s}; expected seconds, finite and ≥ 0")
        busy_until_s = self.busy_until_s[node]
        # An idle NIC keeps the time at which it became idle.
        self.busy_until_s[node] = now + queue_s if queue_s else min(busy_until_s, now)
