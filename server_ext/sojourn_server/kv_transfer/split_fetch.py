"""Reads one request's stored blocks in two parts: this engine reads the first part, and its peer reads the
second.

The router chooses how large each part is. (DualPath reads a request on one side only, and names reading on
both sides as future work.) If the peer fails before the first layer of every block of its part has arrived,
this engine reads the missing blocks itself, into the same buffers. If the peer fails later, the blocks that
have arrived are used and the others are computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .load_table import ReadingPeer
from .transfer_jobs import FetchJob

if TYPE_CHECKING:
    from .kv_blocks import KvBlocks
    from .transfer_handles import LoadHandle
    from .transfer_manager import TransferManager
    from .transfer_stats import TransferStepTimes


@dataclass(slots=True, eq=False)
class FetchPart:
    """One part of a fetch: consecutive blocks, and the load that gets them."""

    load: LoadHandle
    first: int
    """Index of the part's first block within the fetch."""
    count: int
    by_peer: bool
    pinned: bool = False

    @property
    def good(self) -> int:
        """Number of leading blocks that have arrived or may still arrive."""
        outcome = self.load.outcome
        return self.count if outcome is None else min(self.count, outcome.good)


class SplitFetch:
    """One fetch of a request's stored blocks, in up to two parts. Not thread-safe."""

    def __init__(self, manager: TransferManager, fetch: FetchJob) -> None:
        self.pieces: list[FetchPart] = []
        self._manager = manager
        self._fetch = fetch
        self._name = f"{fetch.context}#{fetch.ask}"

    def begin(self, stored: int) -> None:
        """Start to read the leading blocks of the fetch that the store has. ``stored``: their number."""
        fetch = self._fetch
        theirs = round(stored * fetch.decode_share) if fetch.peer else 0
        self._begin(0, stored - theirs)
        if self.leading_blocks == stored - theirs:
            self._begin(stored - theirs, stored, by_peer=True)

    @property
    def leading_blocks(self) -> int:
        """Number of leading blocks of the fetch that have arrived or may still arrive."""
        found = 0
        for piece in self.pieces:
            if piece.first > found:
                break
            found = piece.first + piece.good
            if piece.good < piece.count:
                break
        return found

    def ready(self, layerwise: bool = True) -> int | None:
        """Return how many leading blocks the request can use now; ``None`` if the request must wait. Blocks
        can be used once they are complete. With ``layerwise``, blocks from the peer can be used once their
        first layer has arrived."""
        self._pin_loaded()
        for piece in self.pieces:
            streams = layerwise and piece.by_peer and piece.load.layers_loaded
            if piece.load.outcome is None and not streams:
                return None
            if piece.good < piece.count:
                break
        return self.leading_blocks

    @property
    def streamed_s(self) -> float:
        """Seconds between the arrival of the first and the newest layer, summed over the parts."""
        return sum(piece.load.streamed_s for piece in self.pieces)

    def layer(self, layer: int, timeout_s: float) -> list[memoryview]:
        """Wait for one layer, at most ``timeout_s`` seconds for each part. Returns this layer of the leading
        blocks, up to the first block for which it has not arrived."""
        return self._collect(lambda load: load.layer(layer) if load.wait_layer(layer, timeout_s) else [])

    def contents(self) -> list[memoryview]:
        """Return the leading blocks that have arrived, with all their layers. Call it once the loads of all
        parts are over. The blocks are valid until ``end``."""
        return self._collect(lambda load: load.blocks())

    def end(self) -> None:
        """End the loads of all parts, whether or not their blocks have arrived, and release the buffers."""
        pieces, self.pieces = self.pieces, []
        for piece in pieces:
            piece.load.end()

    def _begin(self, first: int, end: int, by_peer: bool = False) -> None:
        fetch = self._fetch
        keys = fetch.keys[first:end]
        if not keys:
            return
        peer = None
        if by_peer:
            peer = ReadingPeer(
                address=fetch.peer,
                transfer=fetch.context,
                total=max(fetch.total, len(keys)),
                epoch=fetch.epoch,
                or_read_locally=True,
            )
        try:
            load = self._manager.load(f"{self._name}.{len(self.pieces)}", keys, peer=peer)
        except ValueError:  # for example, the transfer is being fetched already
            if by_peer:
                self._begin(first, end)
            return
        self.pieces.append(FetchPart(load, first, load.requested_blocks, by_peer))

    def _collect(self, read: Callable[[LoadHandle], list[memoryview]]) -> list[memoryview]:
        """Return what ``read`` returns for each part, up to the first part that lacks a block."""
        found: list[memoryview] = []
        for piece in self.pieces:
            try:
                views = read(piece.load)[: piece.count] if piece.count else []
            except ValueError:  # the load was given up meanwhile
                views = []
            found += views
            if len(views) < piece.count:
                break
        return found

    def _pin_loaded(self) -> None:
        """Pin the blocks of loads that are over, so that their buffers are not reused."""
        for piece in self.pieces:
            if not piece.pinned and piece.load.outcome is not None and piece.good:
                piece.pinned = True
                try:
                    piece.load.blocks()
                except ValueError:
                    piece.count = 0


@dataclass(slots=True, eq=False)
class LayerStream:
    """Blocks of one request that a step fills layer by layer from a fetch."""

    split_fetch: SplitFetch | None
    """The fetch; ``None`` if it has ended, so that no block is filled."""
    skip: int
    """Number of leading engine blocks of the fetched KV to leave out."""
    block_ids: list[int]

    def fill(self, kv: KvBlocks, layer: int, timeout_s: float, times: TransferStepTimes) -> list[int]:
        """Wait for a layer and copy it. Returns the ids of the filled blocks. Adds the time taken to
        ``times``."""
        if self.split_fetch is None:
            return []
        began_s = time.perf_counter()
        blocks = self.split_fetch.layer(layer, timeout_s)
        came_s = time.perf_counter()
        filled = kv.scatter(layer, blocks, self.skip, self.block_ids, after=kv.fence(), hold=True)
        times.waited_s += came_s - began_s
        times.copied_s += time.perf_counter() - came_s
        return filled
