"""How long each node's storage NIC is busy with reads that were given to it (DualPath §6.1, ``read_q``)."""

from __future__ import annotations

import math


class ReadQueues:
    """A queue per node, in seconds of reading, as one who gives out reads knows it.

    Reads are worked off one after the other, so that a queue shrinks by a second each second. ``report``
    puts it right wherever a node tells its own.
    """

    __slots__ = ("_block_s", "_busy_until_s")

    def __init__(self) -> None:
        self._busy_until_s: dict[int, float] = {}
        self._block_s: dict[int, float] = {}

    def add(self, node: int, block_s: float) -> None:
        """A node that nobody reads from yet; its NIC takes ``block_s`` seconds for a Full Block.

        Adding one again changes its speed alone. Raises ``ValueError`` for seconds that are not finite
        and above 0.
        """
        if not 0 < block_s < math.inf:
            raise ValueError(f"node {node}: block_s is {block_s}; expected seconds, finite and above 0")
        self._block_s[node] = block_s
        self._busy_until_s.setdefault(node, -math.inf)

    def block_s(self, node: int) -> float:
        """Seconds that the node's NIC takes for a Full Block."""
        return self._block_s[node]

    def queue_s(self, node: int, now: float) -> float:
        """Seconds until all that was given to the node has been read; below 0: it has been, so long ago."""
        return self._busy_until_s[node] - now

    def short_from_s(self, node: int, short_s: float) -> float:
        """From when on the node's queue is no longer than ``short_s``, if nothing is added."""
        return self._busy_until_s[node] - short_s

    def read(self, node: int, blocks: int, now: float) -> float:
        """The node is given ``blocks`` to read; returns when it will have read them."""
        done_s = max(self._busy_until_s[node], now) + blocks * self._block_s[node]
        self._busy_until_s[node] = done_s
        return done_s

    def report(self, node: int, queue_s: float, now: float) -> None:
        """What the node says itself. Raises ``ValueError`` for a queue that is not finite and ≥ 0."""
        if not 0 <= queue_s < math.inf:
            raise ValueError(f"node {node}: queue_s is {queue_s}; expected seconds, finite and ≥ 0")
        if queue_s:
            self._busy_until_s[node] = now + queue_s
        else:  # since when it has nothing to do is not forgotten
            self._busy_until_s[node] = min(self._busy_until_s[node], now)
